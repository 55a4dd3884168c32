"""The table of feature operations, and the type of a config's entry that names one of them.

A new operation is a subclass of `OperationSettings` and a line in `OPERATIONS`, or an entry point of another
package in the group `rayrec.operations`: docs/guides/add-a-feature-operation.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from rayrec.platform.registry import Registry, settings_union
from rayrec.samples.operations.operation import OperationSettings

OPERATIONS: Registry[type[OperationSettings]] = Registry(
    "rayrec.operations",
    "feature operation",
    {
        "hash": "rayrec.samples.operations.hashing:HashConfig",
        "cross": "rayrec.samples.operations.hashing:CrossConfig",
        "bucketize": "rayrec.samples.operations.arithmetic:BucketizeConfig",
        "clip": "rayrec.samples.operations.arithmetic:ClipConfig",
        "log": "rayrec.samples.operations.arithmetic:LogarithmConfig",
        "time_features": "rayrec.samples.operations.times:TimeFeaturesConfig",
        "time_since": "rayrec.samples.operations.times:TimeSinceConfig",
        "truncate": "rayrec.samples.operations.sequences:TruncateConfig",
        "concat": "rayrec.samples.operations.sequences:ConcatConfig",
        "select_events": "rayrec.samples.operations.behaviors:SelectEventsConfig",
        "merge_events": "rayrec.samples.operations.behaviors:MergeEventsConfig",
        "negatives": "rayrec.samples.operations.negatives:NegativesConfig",
        "fill": "rayrec.samples.operations.fill:FillConfig",
        "join_history": "rayrec.samples.operations.join_history:JoinHistoryConfig",
        "join_neighbors": "rayrec.samples.operations.join_neighbors:JoinNeighborsConfig",
        "prompt": "rayrec.samples.operations.prompt:PromptConfig",
        "python": "rayrec.samples.operations.python_function:PythonConfig",
    },
)

RENAMED = {"bucketise": "bucketize", "cut": "truncate", "age": "time_since"}
"""Operations of version 0.1 to what they are called now; runs and configs may still use these names."""


def _renamed(values: Any) -> Any:
    if isinstance(values, dict) and values.get("op") in RENAMED:
        return {**values, "op": RENAMED[values["op"]]}
    return values


if TYPE_CHECKING:
    OperationConfig = OperationSettings
else:
    OperationConfig = Annotated[
        settings_union(OPERATIONS, OperationSettings, "op"), BeforeValidator(_renamed)
    ]
"""By `op`: settings of one operation."""
