"""Rows and gradients as they travel between nodes, and rows as they are published: float32, or numbers of 16
or 8 bits.

    bfloat16   the upper half of a float32, with 8 of its 24 bits of precision
    int8_row   whole numbers from -127 to 127, and a float32 scale for each row: its largest magnitude / 127

Rows that are read are rounded to the nearest number. Gradients are rounded stochastically: up with a
probability of their distance from the number below, so that what a step loses is kept on average over many.
The random bits are a hash of (table seed, rank, step, id, column): a call that is repeated, or a run that is
resumed, rounds alike, in every mode and by every transport.

Finite numbers stay finite. NaN and infinities keep their places, so that the receiver can refuse them.

Source of the rounding: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3.

Axes: M distinct ids of one table, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import DTypeLike, NDArray

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.compiled import extend64, kernel_input
from rayrec.platform.hashing import combine64

Wire = Literal["float32", "bfloat16", "int8_row"]
NarrowWire = Literal["bfloat16", "int8_row"]
_Empty = Callable[..., NDArray[Any]]
"""Called as `np.empty`."""

_DTYPES: dict[NarrowWire, DTypeLike] = {"bfloat16": np.uint16, "int8_row": np.int8}
_GRADIENTS = 0x67726164
"""In the hashes: 16-bit weights are rounded by those of (table seed, id, step), which must be others."""
_LEVELS = 127
_NOT_FINITE = -128
_SMALLEST = np.finfo(np.float32).tiny
"""Of scales: with subnormal ones, a quotient might be no whole number of them."""
_LARGEST = np.float32(np.finfo(np.float32).max * (1 - 2.0**-21))
"""That a scale is made for: 127 scales must be finite after both roundings."""
_INFINITY, _MAGNITUDE, _SIGN = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), np.uint32(0x8000)
_LOW, _S16 = np.uint64(0xFFFF), np.uint64(16)


class NarrowRows(NamedTuple):
    """Rows of one table; the dtype of the values says which of the formats they have."""

    values_MD: NDArray[Any]
    """uint16 of `bfloat16`, int8 of `int8_row`."""
    scales_M: Float32Array | None = None
    """Of `int8_row`."""


class RoundingKey(NamedTuple):
    """What stochastic rounding goes by, of the gradients that one caller sends of one table and step."""

    table_seed: int
    rank: int
    step: int

    @property
    def hash(self) -> np.uint64:
        return np.uint64(combine64(self.table_seed, _GRADIENTS, self.rank, self.step))


def narrow_bytes(wire: NarrowWire, num_rows: int, dim: int) -> int:
    """Of so many rows, without what says where they are."""
    return num_rows * (2 * dim if wire == "bfloat16" else dim + 4)


def encode_rows(wire: NarrowWire, rows_MD: Float32Array, empty: _Empty = np.empty) -> NarrowRows:
    """Round rows to the nearest numbers; `empty` makes the arrays."""
    narrow, rows_MD = _empty_like(wire, rows_MD, empty), kernel_input(rows_MD, np.float32)
    if narrow.scales_M is None:
        _halves_of_rows(rows_MD, narrow.values_MD)
    else:
        _bytes_of_rows(rows_MD, narrow.values_MD, narrow.scales_M)
    return narrow


def encode_gradients(
    wire: NarrowWire,
    ids_M: Int64Array,
    grads_MD: Float32Array,
    key: RoundingKey,
    empty: _Empty = np.empty,
) -> NarrowRows:
    """Round gradients up or down, by a hash of key, id and column; `empty` makes the arrays."""
    assert grads_MD.dtype == np.float32, "which clients check"
    assert ids_M.shape == grads_MD.shape[:1], "which clients check"
    narrow = _empty_like(wire, grads_MD, empty)
    ids_M, grads_MD = kernel_input(ids_M, np.int64), kernel_input(grads_MD, np.float32)
    if narrow.scales_M is None:
        _halves_of_gradients(ids_M, grads_MD, key.hash, narrow.values_MD)
    else:
        _bytes_of_gradients(ids_M, grads_MD, key.hash, narrow.values_MD, narrow.scales_M)
    return narrow


def decode(narrow: NarrowRows) -> Float32Array:
    """[M, D] float32 that equal what was encoded."""
    rows_MD = np.empty(narrow.values_MD.shape, dtype=np.float32)
    if narrow.scales_M is None:
        _widen_halves(kernel_input(narrow.values_MD, np.uint16), rows_MD)
    else:
        values_MD = kernel_input(narrow.values_MD, np.int8)
        _widen_bytes(values_MD, kernel_input(narrow.scales_M, np.float32), rows_MD)
    return rows_MD


def _empty_like(wire: NarrowWire, rows_MD: Float32Array, empty: _Empty) -> NarrowRows:
    values_MD = empty(rows_MD.shape, dtype=_DTYPES[wire])
    return NarrowRows(values_MD, None if wire == "bfloat16" else empty(rows_MD.shape[:1], dtype=np.float32))


@njit(nogil=True, cache=True)
def _halves_of_rows(rows_MD: Float32Array, halves_MD: NDArray[np.uint16]) -> None:
    bits_MD = rows_MD.view(np.uint32)
    for m in range(bits_MD.shape[0]):
        for d in range(bits_MD.shape[1]):
            bits = bits_MD[m, d]
            is_odd = (bits >> np.uint32(16)) & np.uint32(1)
            halves_MD[m, d] = _half(bits, np.uint32(0x7FFF) + is_odd)  # a tie goes to the even one


@njit(nogil=True, cache=True)
def _halves_of_gradients(
    ids_M: Int64Array, grads_MD: Float32Array, key: np.uint64, halves_MD: NDArray[np.uint16]
) -> None:
    bits_MD = grads_MD.view(np.uint32)
    random = np.uint64(0)
    for m in range(bits_MD.shape[0]):
        id_hash = extend64(key, np.uint64(ids_M[m]))
        for d in range(bits_MD.shape[1]):
            random = _next_random(random, id_hash, d)
            halves_MD[m, d] = _half(bits_MD[m, d], np.uint32(random & _LOW))


@njit(nogil=True, cache=True, inline="always")
def _next_random(random: Any, id_hash: Any, d: int) -> Any:
    """16 random bits of column d, the lowest ones; a hash has those of four columns."""
    return extend64(id_hash, np.uint64(d >> 2)) if d & 3 == 0 else random >> _S16


@njit(nogil=True, cache=True, inline="always")
def _half(bits: Any, added: Any) -> Any:
    """Upper half of a float32 with something added to the lower one; finite if the number was."""
    magnitude, upper = bits & _MAGNITUDE, bits >> np.uint32(16)
    if magnitude >= _INFINITY:
        # With one bit more for a NaN, which might have had its bits in the lower half.
        return np.uint16(upper | np.uint32(0x40) if magnitude > _INFINITY else upper)
    if magnitude + added >= _INFINITY:
        return np.uint16((upper & _SIGN) | np.uint32(0x7F7F))
    return np.uint16((bits + added) >> np.uint32(16))


@njit(nogil=True, cache=True)
def _widen_halves(halves_MD: NDArray[np.uint16], rows_MD: Float32Array) -> None:
    bits_MD = rows_MD.view(np.uint32)
    for m in range(bits_MD.shape[0]):
        for d in range(bits_MD.shape[1]):
            bits_MD[m, d] = np.uint32(halves_MD[m, d]) << np.uint32(16)


@njit(nogil=True, cache=True)
def _bytes_of_rows(rows_MD: Float32Array, values_MD: NDArray[np.int8], scales_M: Float32Array) -> None:
    for m in range(rows_MD.shape[0]):
        scale = _scale(rows_MD[m], scales_M[m : m + 1])
        if not np.isfinite(scale):
            _mark_not_finite(rows_MD[m], values_MD[m])
            continue
        for d in range(rows_MD.shape[1]):
            values_MD[m, d] = np.int8(np.rint(rows_MD[m, d] / scale))


@njit(nogil=True, cache=True)
def _bytes_of_gradients(
    ids_M: Int64Array,
    grads_MD: Float32Array,
    key: np.uint64,
    values_MD: NDArray[np.int8],
    scales_M: Float32Array,
) -> None:
    random = np.uint64(0)
    for m in range(grads_MD.shape[0]):
        scale = _scale(grads_MD[m], scales_M[m : m + 1])
        if not np.isfinite(scale):
            _mark_not_finite(grads_MD[m], values_MD[m])
            continue
        id_hash = extend64(key, np.uint64(ids_M[m]))
        for d in range(grads_MD.shape[1]):
            random = _next_random(random, id_hash, d)
            # Whole numbers of 2**-16, to which a chance of 16 bits is exact; a rounding error may have one
            # beyond 127.
            fixed = np.int32(np.rint(grads_MD[m, d] / scale * np.float32(65536)))
            fixed = min(max(fixed, np.int32(-_LEVELS << 16)), np.int32(_LEVELS << 16))
            values_MD[m, d] = np.int8((fixed + np.int32(random & _LOW)) >> 16)


@njit(nogil=True, cache=True, inline="always")
def _scale(row_D: Float32Array, scale_1: Float32Array) -> Any:
    """Write and return what the row's whole numbers count; or its first number that is not finite."""
    bits_D = row_D.view(np.uint32)
    largest = np.uint32(0)
    for d in range(len(bits_D)):
        largest = max(largest, bits_D[d] & _MAGNITUDE)
    scale_1.view(np.uint32)[0] = largest
    if largest >= _INFINITY:
        for d in range(len(row_D)):
            if not np.isfinite(row_D[d]):
                scale_1[0] = row_D[d]
                break
    else:
        scale_1[0] = max(min(scale_1[0], _LARGEST) / np.float32(_LEVELS), _SMALLEST)
    return scale_1[0]


@njit(nogil=True, cache=True)
def _mark_not_finite(row_D: Float32Array, values_D: NDArray[np.int8]) -> None:
    for d in range(len(row_D)):
        values_D[d] = 0 if np.isfinite(row_D[d]) else _NOT_FINITE


@njit(nogil=True, cache=True)
def _widen_bytes(values_MD: NDArray[np.int8], scales_M: Float32Array, rows_MD: Float32Array) -> None:
    for m in range(values_MD.shape[0]):
        scale = scales_M[m]
        if np.isfinite(scale):
            for d in range(values_MD.shape[1]):
                rows_MD[m, d] = np.float32(values_MD[m, d]) * scale
        else:
            for d in range(values_MD.shape[1]):
                rows_MD[m, d] = scale if values_MD[m, d] == _NOT_FINITE else np.float32(0)
