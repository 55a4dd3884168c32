"""All operations that a config may name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayrec.samples.operations.hashing import CrossConfig, HashConfig
from rayrec.samples.operations.numbers import BucketiseConfig, ClipConfig, LogConfig

OperationConfig = Annotated[
    HashConfig | CrossConfig | BucketiseConfig | ClipConfig | LogConfig,
    Field(discriminator="op"),
]
"""By `op`: settings of one operation."""
