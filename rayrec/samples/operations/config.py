"""All operations that a config may name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayrec.samples.operations.hashing import CrossConfig, HashConfig
from rayrec.samples.operations.numbers import BucketiseConfig, ClipConfig, LogConfig
from rayrec.samples.stores.join import JoinHistoryConfig

OperationConfig = Annotated[
    HashConfig | CrossConfig | BucketiseConfig | ClipConfig | LogConfig | JoinHistoryConfig,
    Field(discriminator="op"),
]
"""By `op`: settings of one operation."""
