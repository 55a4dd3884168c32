"""All operations that a config may name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayrec.samples.operations.arithmetic import BucketiseConfig, ClipConfig, LogConfig
from rayrec.samples.operations.behaviors import MergeEventsConfig, SelectEventsConfig
from rayrec.samples.operations.fill import FillConfig
from rayrec.samples.operations.hashing import CrossConfig, HashConfig
from rayrec.samples.operations.join_history import JoinHistoryConfig
from rayrec.samples.operations.negatives import NegativesConfig
from rayrec.samples.operations.python_function import PythonConfig
from rayrec.samples.operations.sequences import ConcatConfig, CutConfig
from rayrec.samples.operations.times import AgeConfig, TimeFeaturesConfig

OperationConfig = Annotated[
    HashConfig
    | CrossConfig
    | BucketiseConfig
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
]
"""By `op`: settings of one operation."""
