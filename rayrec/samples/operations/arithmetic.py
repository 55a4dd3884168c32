"""`bucketize`, `clip` and `log`: numbers, alone or in lists.

A null stays null, and NaN, which is no number, becomes null. Axis: N values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.errors import InputError
from rayrec.samples.operations.columns import (
    NUMBERS,
    both_valid,
    column_of,
    input_type,
    is_number,
    map_values,
    numbers_of,
    value_type,
    with_values,
)
from rayrec.samples.operations.operation import OperationSettings, RowContext

_INT64 = np.iinfo(np.int64)
_COMPARE_ALL = 32
"""Up to so many boundaries, comparing with each is faster than a binary search (26 times with 4, SIMD)."""


class BucketizeConfig(OperationSettings):
    """Numbers to the number of boundaries that they reach: int64 in [0, number of boundaries]."""

    op: Literal["bucketize"] = "bucketize"
    input: str
    output: str | None = None
    """None replaces the input."""
    boundaries: tuple[int | float, ...] = Field(min_length=1)
    """Ascending. A value that equals a boundary has reached it."""

    @field_validator("boundaries")
    @classmethod
    def _boundaries_ascend(cls, value: tuple[int | float, ...]) -> tuple[int | float, ...]:
        for low, high in pairwise(value):
            if low >= high:
                raise ValueError(f"boundaries must ascend, but {low} stands before {high}")
        return value

    def bind(self, schema: pa.Schema) -> Bucketize:
        dtype = input_type(schema, self.input, is_number, NUMBERS)
        if value_type(dtype) == pa.int64():
            # An integer reaches 2.5 if it reaches 3; as floats, large ones would lose their last digits.
            whole = [math.ceil(boundary) for boundary in self.boundaries]
            _check_fits(self.input, "boundary", whole)
            boundaries = np.array(whole, dtype=np.int64)
        else:
            boundaries = np.array(self.boundaries, dtype=np.float64)
        return Bucketize(
            inputs=(self.input,),
            outputs={self.output or self.input: with_values(dtype, pa.int64())},
            boundaries=boundaries,
        )


@dataclass(frozen=True)
class Bucketize:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    boundaries: NDArray[Any]

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        return {output: map_values(columns[self.inputs[0]], self._buckets)}

    def _buckets(self, values: pa.Array) -> pa.Array:
        array_N, valid_N = numbers_of(values)
        dtype = self.boundaries.dtype.type
        buckets_N = _num_reached(kernel_input(array_N, dtype), kernel_input(self.boundaries, dtype))
        return column_of(buckets_N, valid_N, pa.int64())


class ClipConfig(OperationSettings):
    """Numbers moved to the nearest limit where they lie outside; their type stays."""

    op: Literal["clip"] = "clip"
    input: str
    output: str | None = None
    """None replaces the input."""
    low: int | float | None = None
    """None: no limit."""
    high: int | float | None = None

    @model_validator(mode="after")
    def _limits_leave_something(self) -> ClipConfig:
        if self.low is None and self.high is None:
            raise ValueError("clip needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"clip from low {self.low} to high {self.high} leaves no number; swap them")
        return self

    def bind(self, schema: pa.Schema) -> Clip:
        dtype = input_type(schema, self.input, is_number, NUMBERS)
        if value_type(dtype) == pa.int64():
            for limit in (self.low, self.high):
                if limit is not None and limit != int(limit):
                    raise InputError(
                        f"column {self.input!r} holds integers, so its limits must be integers, got {limit}"
                    )
            _check_fits(self.input, "limit", [int(x) for x in (self.low, self.high) if x is not None])
        return Clip((self.input,), {self.output or self.input: dtype}, self.low, self.high)


@dataclass(frozen=True)
class Clip:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    low: float | None
    high: float | None

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        return {output: map_values(columns[self.inputs[0]], self._clip)}

    def _clip(self, values: pa.Array) -> pa.Array:
        array_N, valid_N = numbers_of(values)
        as_values = array_N.dtype.type
        low, high = (None if limit is None else as_values(limit) for limit in (self.low, self.high))
        return column_of(np.clip(array_N, low, high), valid_N, values.type)


Negatives = Literal["signed", "zero", "null"]


class LogarithmConfig(OperationSettings):
    """log(1 + x), the natural logarithm, as float32; x is the number plus `shift`."""

    op: Literal["log"] = "log"
    input: str
    output: str | None = None
    """None replaces the input."""
    shift: float = 0.0
    """Added first, such as 1 where -1 stands for nothing."""
    negatives: Negatives = "signed"
    """Where x is below 0: `signed` is -log(1 - x), so that the result has the sign of x; `zero`; `null`."""

    def bind(self, schema: pa.Schema) -> Logarithm:
        dtype = input_type(schema, self.input, is_number, NUMBERS)
        return Logarithm(
            (self.input,),
            {self.output or self.input: with_values(dtype, pa.float32())},
            self.shift,
            self.negatives,
        )


@dataclass(frozen=True)
class Logarithm:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    shift: float
    negatives: Negatives

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        return {output: map_values(columns[self.inputs[0]], self._log)}

    def _log(self, values: pa.Array) -> pa.Array:
        array_N, valid_N = numbers_of(values)
        logarithms_N, any_negative = _logarithms(
            kernel_input(array_N, array_N.dtype.type), float(self.shift), self.negatives == "signed"
        )
        if any_negative and self.negatives == "null":
            valid_N = both_valid(valid_N, array_N.astype(np.float64) + self.shift >= 0)
        return column_of(logarithms_N, valid_N, pa.float32())


def _check_fits(column: str, what: str, numbers: list[int]) -> None:
    for number in numbers:
        if not _INT64.min <= number <= _INT64.max:
            raise InputError(f"column {column!r} holds 64-bit integers, which the {what} {number} is not")


def _num_reached(array_N: NDArray[Any], boundaries: NDArray[Any]) -> Int64Array:
    """[N] how many boundaries are at most the number."""
    if len(boundaries) > _COMPARE_ALL:
        return np.searchsorted(boundaries, array_N, side="right")
    return _compared_with_each(array_N, boundaries)


@njit(nogil=True, cache=True)
def _compared_with_each(array_N: Any, boundaries: Any) -> Int64Array:
    reached_N = np.zeros(len(array_N), dtype=np.int64)
    for boundary in boundaries:
        for n in range(len(array_N)):
            reached_N[n] += boundary <= array_N[n]
    return reached_N


@njit(nogil=True, cache=True)
def _logarithms(array_N: Any, shift: float, signed: bool) -> tuple[Float32Array, bool]:
    """[N] log(1 + |x|) of x = number + shift, and whether any x is negative; those are signed, or 0.

    In float64 a logarithm and not log1p, which takes eight times as long: below 1e-9, where they differ,
    neither is more than a float32 feature can tell from 0.
    """
    logarithms_N = np.empty(len(array_N), dtype=np.float32)
    any_negative = False
    for n in range(len(array_N)):
        shifted = np.float64(array_N[n]) + shift
        logarithm = np.float32(np.log(1 + abs(shifted)))
        if shifted < 0:
            any_negative = True
            logarithm = -logarithm if signed else np.float32(0)
        logarithms_N[n] = logarithm
    return logarithms_N, any_negative
