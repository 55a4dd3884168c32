"""Feature operations on a few rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.platform.config import Config
from rayrec.samples.operations.config import OperationConfig
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram


class Declared(Config):
    """The part of a run's config that declares operations."""

    features: tuple[OperationConfig, ...] = ()


def program(schema: pa.Schema, *operations: Mapping[str, Any]) -> FeatureProgram:
    return FeatureProgram.compile(Declared.parse({"features": list(operations)}).features, schema)


def context(num_rows: int, seed: int = 0, first_key: int = 0) -> RowContext:
    return RowContext(np.arange(first_key, first_key + num_rows), seed, step=0)


def computed(columns: Mapping[str, pa.Array], *operations: Mapping[str, Any]) -> pa.RecordBatch:
    """What operations make of these columns."""
    rows = pa.RecordBatch.from_pydict(dict(columns))
    return program(rows.schema, *operations)(rows, context(rows.num_rows))


def column(values: Sequence[Any] | pa.Array, dtype: pa.DataType, **settings: Any) -> list[Any]:
    """What one operation makes of a column `x`, as Python values."""
    given = values if isinstance(values, pa.Array) else pa.array(values, dtype)
    return computed({"x": given}, {"input": "x", **settings}).column(settings.get("output", "x")).to_pylist()
