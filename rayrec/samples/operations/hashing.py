"""`hash` and `cross`: ids from texts and integers, and from several of them together.

Axes: R rows, N values of all rows' lists (or rows, where a column has no lists), 1 an extra element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numba import njit
from numpy.typing import NDArray
from pydantic import Field

from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array
from rayrec.platform.compiled import extend64, kernel_input, reciprocal64, remainder64
from rayrec.samples.operations.columns import (
    both_valid,
    column_of,
    complete_lists,
    input_type,
    is_key,
    is_list,
    list_column,
    map_values,
    numbers_of,
    with_values,
)
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.operations.text_hash import hash_texts
from rayrec.samples.prepare.ids import hash_strings

_KEYS = "texts, integers or booleans (bucketize other numbers first)"


class HashConfig(OperationSettings):
    """Texts and integers, also in lists, to int64 ids. A null stays null.

    A text is hashed as at preparation, so ids agree with those of a prepared data set; an integer by
    `mix64`. With a salt, the hash is `combine64(hash of the salt, hash of the text or the integer)`.
    """

    op: Literal["hash"] = "hash"
    input: str
    output: str | None = None
    """None replaces the input."""
    buckets: int | None = Field(None, ge=1, lt=2**63)
    """Ids are in [0, buckets): the hash, unsigned, modulo this. None: all 64 bits."""
    salt: str = ""
    """Other salts give other ids: for several hashes of one column."""

    def bind(self, schema: pa.Schema) -> Hash:
        dtype = input_type(schema, self.input, is_key, _KEYS)
        output = self.output or self.input
        return Hash(
            inputs=(self.input,),
            outputs={output: with_values(dtype, pa.int64())},
            salt=_salt(self.salt),
            buckets=self.buckets or 0,
        )


@dataclass(frozen=True)
class Hash:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    salt: int | None
    buckets: int

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        return {output: map_values(columns[self.inputs[0]], self._hash)}

    def _hash(self, values: pa.Array) -> pa.Array:
        ids_N, valid_N = _ids(values)
        if self.salt is None and pt.is_string(values.type):
            return column_of(_modulo(ids_N, self.buckets), valid_N, pa.int64())
        hashed_N = _hashed(_prefix(self.salt), ids_N, np.uint64(self.buckets))
        return column_of(hashed_N, valid_N, pa.int64())


class CrossConfig(OperationSettings):
    """Several columns to one id per row, or per event where some of them hold lists.

    The id is `combine64` of each text's hash and each integer. Lists must be parallel: as many
    events in each; a column without lists goes with every event. Null if one of the parts is null.
    """

    op: Literal["cross"] = "cross"
    inputs: tuple[str, ...] = Field(min_length=2)
    output: str
    buckets: int | None = Field(None, ge=1, lt=2**63)
    """Ids are in [0, buckets). None: all 64 bits."""
    salt: str = ""

    def bind(self, schema: pa.Schema) -> Cross:
        types = [input_type(schema, name, is_key, _KEYS) for name in self.inputs]
        has_lists = any(is_list(dtype) for dtype in types)
        return Cross(
            inputs=self.inputs,
            outputs={self.output: pa.list_(pa.int64()) if has_lists else pa.int64()},
            salt=_salt(self.salt),
            buckets=self.buckets or 0,
        )


@dataclass(frozen=True)
class Cross:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    salt: int | None
    buckets: int

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        ((output, dtype),) = self.outputs.items()
        return {output: self._events(columns) if is_list(dtype) else self._rows(columns)}

    def _rows(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        *first, last = self.inputs
        hashed_R = np.full(len(columns[last]), _prefix(self.salt), dtype=np.uint64)
        valid_R: BoolArray | None = None
        for name in first:
            ids_R, part_valid_R = _ids(columns[name])
            _extend(hashed_R, ids_R)
            valid_R = both_valid(valid_R, part_valid_R)
        ids_R, part_valid_R = _ids(columns[last])
        _extend_last(hashed_R, ids_R, np.uint64(self.buckets))
        return column_of(hashed_R.view(np.int64), both_valid(valid_R, part_valid_R), pa.int64())

    def _events(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        valid_R: BoolArray | None = None
        for name in self.inputs:
            if columns[name].null_count:
                valid_R = both_valid(valid_R, columns[name].is_valid().to_numpy(zero_copy_only=False))
        names = [name for name in self.inputs if is_list(columns[name].type)]
        lists = dict(zip(names, complete_lists(columns, names, valid_R), strict=True))
        offsets_R1 = lists[names[0]].offsets_R1
        hashed_N = np.full(offsets_R1[-1], _prefix(self.salt), dtype=np.uint64)
        valid_N: BoolArray | None = None
        for name in self.inputs:
            if name in lists:
                ids_N, part_valid_N = _ids(lists[name].values)
                _extend(hashed_N, ids_N)
                valid_N = both_valid(valid_N, part_valid_N)
            else:
                ids_R, _ = _ids(columns[name])
                _extend_rows(hashed_N, offsets_R1, ids_R)
        values = column_of(self._in_buckets(hashed_N), valid_N, pa.int64())
        return list_column(values, offsets_R1, valid_R)

    def _in_buckets(self, hashed_N: NDArray[np.uint64]) -> Int64Array:
        return _modulo(hashed_N.view(np.int64), self.buckets)


def _salt(salt: str) -> int | None:
    return int(hash_strings([salt])[0]) if salt else None


def _prefix(salt: int | None) -> np.uint64:
    """What `combine64` has come to before the first part."""
    return np.uint64(0) if salt is None else extend64(np.uint64(0), np.uint64(salt % 2**64))


def _ids(values: pa.Array) -> tuple[Int64Array, BoolArray | None]:
    """64 bits per value: the hash of a text, an integer itself; and which are valid."""
    if pt.is_string(values.type):
        valid_N = values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None
        return kernel_input(hash_texts(values), np.int64), valid_N
    array_N, valid_N = numbers_of(values)
    return kernel_input(array_N.view(np.int64) if array_N.dtype == np.uint64 else array_N, np.int64), valid_N


@njit(nogil=True, cache=True)
def _extend(hashed_N: NDArray[np.uint64], ids_N: Int64Array) -> None:
    for n in range(len(hashed_N)):
        hashed_N[n] = extend64(hashed_N[n], np.uint64(ids_N[n]))


@njit(nogil=True, cache=True)
def _extend_last(hashed_N: NDArray[np.uint64], ids_N: Int64Array, buckets: Any) -> None:
    """`_extend`, then the bucket of each hash; all 64 bits of it if there are 0 buckets."""
    if buckets == 0:
        for n in range(len(hashed_N)):
            hashed_N[n] = extend64(hashed_N[n], np.uint64(ids_N[n]))
        return
    reciprocal = reciprocal64(buckets)
    for n in range(len(hashed_N)):
        hashed_N[n] = remainder64(extend64(hashed_N[n], np.uint64(ids_N[n])), buckets, reciprocal)


@njit(nogil=True, cache=True)
def _hashed(prefix: Any, ids_N: Int64Array, buckets: Any) -> Int64Array:
    """[N] the bucket of each id's hash, or all of its 64 bits if there are 0 buckets, in one pass."""
    hashed_N = np.empty(len(ids_N), dtype=np.int64)
    if buckets == 0:
        for n in range(len(ids_N)):
            hashed_N[n] = np.int64(extend64(prefix, np.uint64(ids_N[n])))
        return hashed_N
    reciprocal = reciprocal64(buckets)
    for n in range(len(ids_N)):
        hashed_N[n] = np.int64(remainder64(extend64(prefix, np.uint64(ids_N[n])), buckets, reciprocal))
    return hashed_N


@njit(nogil=True, cache=True)
def _extend_rows(hashed_N: NDArray[np.uint64], offsets_R1: Int32Array, ids_R: Int64Array) -> None:
    for r in range(len(ids_R)):
        part = np.uint64(ids_R[r])
        for n in range(offsets_R1[r], offsets_R1[r + 1]):
            hashed_N[n] = extend64(hashed_N[n], part)


def _modulo(hashed_N: Int64Array, buckets: int) -> Int64Array:
    """[N] buckets in [0, buckets); the hashes themselves if there are 0 buckets."""
    if not buckets:
        return hashed_N
    return _unsigned_modulo(kernel_input(hashed_N, np.int64), np.uint64(buckets))


@njit(nogil=True, cache=True)
def _unsigned_modulo(hashed_N: Int64Array, buckets: Any) -> Int64Array:
    indices_N = np.empty(len(hashed_N), dtype=np.int64)
    reciprocal = reciprocal64(buckets)
    for n in range(len(hashed_N)):
        indices_N[n] = np.int64(remainder64(np.uint64(hashed_N[n]), buckets, reciprocal))
    return indices_N
