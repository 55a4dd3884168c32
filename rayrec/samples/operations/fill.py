"""`fill`: what stands where nothing does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from rayrec.platform.errors import InputError
from rayrec.samples.base.jagged import list_rows
from rayrec.samples.operations.columns import input_type, is_list, list_column, lists_of, map_values
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.operations.python_values import is_value_of

Scalar = bool | int | float | str


class FillConfig(OperationSettings):
    """Replaces null and NaN by a value.

    In a column of lists, a list (which may be empty) stands for null lists, and a single value for the
    nulls in lists.
    """

    op: Literal["fill"] = "fill"
    input: str
    output: str | None = None
    """None replaces the input."""
    value: Scalar | tuple[Scalar, ...]

    def bind(self, schema: pa.Schema) -> Fill:
        dtype = input_type(schema, self.input, _is_plain, "numbers, texts or booleans, or lists of them")
        fills_lists = isinstance(self.value, tuple)
        if fills_lists and not is_list(dtype):
            raise InputError(f"column {self.input!r} is {dtype}, which the list {self.value} cannot fill")
        single = dtype.value_type if is_list(dtype) else dtype
        given = self.value if isinstance(self.value, tuple) else (self.value,)
        for value in given:
            if not is_value_of(value, single):
                raise InputError(f"column {self.input!r} is {dtype}, which {value!r} cannot fill")
        return Fill((self.input,), {self.output or self.input: dtype}, pa.array(given, single), fills_lists)


@dataclass(frozen=True)
class Fill:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    values: pa.Array
    """One value, or those of the list that stands for null lists."""
    fills_lists: bool

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        column = columns[self.inputs[0]]
        return {output: self._filled_lists(column) if self.fills_lists else map_values(column, self._filled)}

    def _filled(self, values: pa.Array) -> pa.Array:
        if pt.is_floating(values.type):
            values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
        return values.fill_null(self.values[0]) if values.null_count else values

    def _filled_lists(self, column: pa.Array) -> pa.Array:
        lists = lists_of(column)
        if lists.valid_R is None:
            return column
        if not len(self.values):
            return list_column(lists.values, lists.offsets_R1)
        starts_R = np.where(lists.valid_R, lists.offsets_R1[:-1].astype(np.int64), len(lists.values))
        lengths_R = np.where(lists.valid_R, np.diff(lists.offsets_R1).astype(np.int64), len(self.values))
        return list_rows(pa.concat_arrays([lists.values, self.values]), starts_R, lengths_R)


def _is_plain(dtype: pa.DataType) -> bool:
    return pt.is_integer(dtype) or pt.is_floating(dtype) or pt.is_string(dtype) or pt.is_boolean(dtype)
