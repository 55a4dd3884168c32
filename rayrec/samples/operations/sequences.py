"""`truncate` and `concat`: lists made shorter, and joined. Nothing is padded.

Axes: R rows, N values of all rows' lists, S lists to be joined, 1 an extra element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numba import njit
from pydantic import Field

from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.errors import InputError
from rayrec.samples.operations.columns import (
    Lists,
    input_type,
    is_list,
    list_column,
    list_type,
    lists_of,
    parallel_lists,
    value_type,
)
from rayrec.samples.operations.operation import OperationSettings, RowContext


class TruncateConfig(OperationSettings):
    """Keeps the newest or oldest events of parallel lists, which are in order of time, oldest first.

    A null list stays null; nulls in a list are events like others.
    """

    op: Literal["truncate"] = "truncate"
    inputs: tuple[str, ...] = Field(min_length=1)
    """Lists with as many events as each other in every row; all are truncated alike."""
    outputs: tuple[str, ...] | None = None
    """As many; None replaces the inputs."""
    length: int = Field(ge=1)
    """Most events to keep."""
    keep: Literal["newest", "oldest"] = "newest"

    def bind(self, schema: pa.Schema) -> Truncate:
        types = [list_type(schema, name) for name in self.inputs]
        outputs = outputs_for(self.inputs, self.outputs)
        return Truncate(
            self.inputs, dict(zip(outputs, types, strict=True)), self.length, self.keep == "newest"
        )


@dataclass(frozen=True)
class Truncate:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    length: int
    newest: bool

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        lists = parallel_lists(columns, self.inputs)
        return {
            output: self._truncated(columns[name], mine)
            for name, output, mine in zip(self.inputs, self.outputs, lists, strict=True)
        }

    def _truncated(self, column: pa.Array, lists: Lists) -> pa.Array:
        if np.diff(lists.offsets_R1).max(initial=0) <= self.length:
            return column
        indices_N, offsets_R1 = _kept_indices(lists.offsets_R1, self.length, self.newest)
        return list_column(lists.values.take(pa.array(indices_N)), offsets_R1, lists.valid_R)


class ConcatConfig(OperationSettings):
    """Joins lists, and columns without lists as lists of one, in order.

    What is null adds nothing; the result is never null. Nulls in a list stay.
    """

    op: Literal["concat"] = "concat"
    inputs: tuple[str, ...] = Field(min_length=2)
    output: str

    def bind(self, schema: pa.Schema) -> Concat:
        types = [value_type(input_type(schema, name, lambda _: True, "")) for name in self.inputs]
        for name, dtype in zip(self.inputs, types, strict=True):
            if dtype != types[0]:
                raise InputError(
                    f"column {name!r} holds {dtype} and {self.inputs[0]!r} {types[0]}; a list needs one type"
                )
        return Concat(self.inputs, {self.output: pa.list_(types[0])})


@dataclass(frozen=True)
class Concat:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        joined = joined_lists([columns[name] for name in self.inputs])
        return {output: list_column(joined.values, joined.offsets_R1)}


def outputs_for(inputs: tuple[str, ...], outputs: tuple[str, ...] | None) -> tuple[str, ...]:
    """Names for the results of an operation that writes a column for each that it reads."""
    outputs = inputs if outputs is None else outputs
    if len(outputs) != len(inputs):
        raise InputError(f"there are {len(inputs)} inputs and {len(outputs)} outputs; give one for each")
    if len(set(outputs)) < len(outputs):
        raise InputError(f"two outputs have one name among {', '.join(outputs)}; give each its own")
    return outputs


def joined_lists(columns: Sequence[pa.Array]) -> Lists:
    """The lists of a row, one after the other; a column without lists adds its value, if it has one."""
    lists = [lists_of(column) if is_list(column.type) else _of_one(column) for column in columns]
    if len(lists) == 1:
        return Lists(lists[0].values, lists[0].offsets_R1, None)
    starts_S, offsets_SR1 = side_by_side(lists)
    indices_N, offsets_R1 = _joined_indices(starts_S, offsets_SR1)
    values = pa.concat_arrays([mine.values for mine in lists])
    return Lists(values.take(pa.array(indices_N)), kernel_input(offsets_R1, np.int32), None)


def side_by_side(lists: Sequence[Lists]) -> tuple[Int64Array, Int32Array]:
    """(where the values of each begin when all values are concatenated, their offsets_SR1)."""
    starts_S = np.cumsum([0, *(len(mine.values) for mine in lists[:-1])])
    offsets_SR1 = np.stack([mine.offsets_R1 for mine in lists])
    return kernel_input(starts_S, np.int64), kernel_input(offsets_SR1, np.int32)


def _of_one(column: pa.Array) -> Lists:
    offsets_R1 = np.zeros(len(column) + 1, dtype=np.int32)
    np.cumsum(column.is_valid().to_numpy(zero_copy_only=False), out=offsets_R1[1:])
    return Lists(column.drop_null(), kernel_input(offsets_R1, np.int32), None)


@njit(nogil=True, cache=True)
def _kept_indices(offsets_R1: Int32Array, most: int, newest: bool) -> tuple[Int64Array, Int32Array]:
    """(indices_N of the values that are kept, their offsets_R1)."""
    kept_R1 = np.zeros(len(offsets_R1), dtype=np.int32)
    indices_N = np.empty(offsets_R1[-1], dtype=np.int64)
    n = 0
    for r in range(len(offsets_R1) - 1):
        start, stop = np.int64(offsets_R1[r]), np.int64(offsets_R1[r + 1])
        if stop - start > most:
            if newest:
                start = stop - most
            else:
                stop = start + most
        for index in range(start, stop):
            indices_N[n] = index
            n += 1
        kept_R1[r + 1] = n
    return indices_N[:n], kept_R1


@njit(nogil=True, cache=True)
def _joined_indices(starts_S: Int64Array, offsets_SR1: Any) -> tuple[Int64Array, Int32Array]:
    joined_R1 = np.zeros(offsets_SR1.shape[1], dtype=np.int32)
    indices_N = np.empty(np.sum(offsets_SR1[:, -1]), dtype=np.int64)
    n = 0
    for r in range(offsets_SR1.shape[1] - 1):
        for s in range(len(starts_S)):
            for index in range(offsets_SR1[s, r], offsets_SR1[s, r + 1]):
                indices_N[n] = starts_S[s] + index
                n += 1
        joined_R1[r + 1] = n
    return indices_N, joined_R1
