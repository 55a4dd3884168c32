"""All operations that a config may name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rayrec.samples.operations.arithmetic import BucketizeConfig, ClipConfig, LogConfig
from rayrec.samples.operations.behaviors import MergeEventsConfig, SelectEventsConfig
from rayrec.samples.operations.fill import FillConfig
from rayrec.samples.operations.hashing import CrossConfig, HashConfig
from rayrec.samples.operations.join_history import JoinHistoryConfig
from rayrec.samples.operations.negatives import NegativesConfig
from rayrec.samples.operations.python_function import PythonConfig
from rayrec.samples.operations.sequences import ConcatConfig, CutConfig
from rayrec.samples.operations.times import AgeConfig, TimeFeaturesConfig

RENAMED = {"bucketise": "bucketize"}
"""Operations of version 0.1 to what they are called now; runs and configs may still use these names."""


def _renamed(values: Any) -> Any:
    if isinstance(values, dict) and values.get("op") in RENAMED:
        return {**values, "op": RENAMED[values["op"]]}
    return values


OperationConfig = Annotated[
    HashConfig
    | CrossConfig
    | BucketizeConfig
    | ClipConfig
    | LogConfig
    | TimeFeaturesConfig
    | AgeConfig
    | CutConfig
    | ConcatConfig
    | SelectEventsConfig
    | MergeEventsConfig
    | NegativesConfig
    | FillConfig
    | JoinHistoryConfig
    | PythonConfig,
    Field(discriminator="op"),
    BeforeValidator(_renamed),
]
"""By `op`: settings of one operation."""
