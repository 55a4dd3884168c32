"""Rows of decoded row groups into the order in which they are read, column by column.

Rows arrive in file order and go to their positions: every row is touched once, reads are in sequence. Columns
without nulls, of fixed width or lists (and strings) of such, are moved by compiled loops that run beside
other threads; what else there is is left to Arrow's `take`.

Axes: G rows of one row group, R rows of a window, N elements of its lists, 1 an extra element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import extend64
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.samples.reading.blocks import Blocks

Array = NDArray[Any]
_UNSIGNED: dict[int, type[np.generic]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_MOST_OFFSET = 2**31 - 1


def positions_of(order_R: Int32Array) -> Int32Array:
    """[R] the inverse of an order: where each row goes."""
    position_R = np.empty(len(order_R), dtype=np.int32)
    _invert(order_R, position_R)
    return position_R


def reordered(
    column: list[pa.Array], kind: pa.DataType, positions: list[Int32Array], blocks: Blocks
) -> pa.Array:
    """One array of all rows, each at its position.

    Args:
        column: of each row group, its rows in file order.
        kind: plain type of the result.
        positions: of each row group, [G] where its rows go; all together they are 0 to R - 1.
        blocks: lend the memory of the result.

    Raises:
        InputError: the lists of the window have more elements than 32-bit offsets can count.
    """
    if _is_fixed(kind) and not any(part.null_count for part in column):
        return _fixed(column, kind, positions, blocks)
    if _is_varying(kind) and not any(part.null_count or _inner_nulls(part) for part in column):
        return _varying(column, kind, positions, blocks)
    order_R = np.empty(sum(map(len, positions)), dtype=np.int64)
    order_R[np.concatenate(positions)] = np.arange(len(order_R))
    try:
        return pa.concat_arrays(column).take(pa.array(order_R))
    except pa.ArrowInvalid as error:
        raise InputError(f"a window of rows is too large ({error}); lower window_rows") from error


def keys_in_order(file_of: list[int], row_of: list[Int64Array], positions: list[Int32Array]) -> Int64Array:
    """[R] identity of every row (see `row_keys`) at its position."""
    keys_R = np.empty(sum(map(len, positions)), dtype=np.uint64)
    for file, row_G, position_G in zip(file_of, row_of, positions, strict=True):
        _put_keys(np.uint64(combine64(file)), row_G, position_G, keys_R)
    return keys_R.view(np.int64)


def _is_fixed(kind: pa.DataType) -> bool:
    return (pa.types.is_primitive(kind) and kind.bit_width in _UNSIGNED) and not pa.types.is_boolean(kind)


def _is_varying(kind: pa.DataType) -> bool:
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return True
    return pa.types.is_list(kind) and _is_fixed(kind.value_type)


def _inner_nulls(part: pa.Array) -> int:
    return part.values.null_count if pa.types.is_list(part.type) else 0


def _words(part: pa.Array, kind: pa.DataType) -> Array:
    """The values of a column of fixed width, as unsigned integers of that width."""
    return _view(part.buffers()[1], _UNSIGNED[kind.bit_width], part.offset, len(part))


def _view(buffer: pa.Buffer | None, dtype: type[np.generic], offset: int, count: int) -> Array:
    if buffer is None or not count:
        values = np.empty(0, dtype)
        values.flags.writeable = False
        return values
    values = np.frombuffer(buffer, dtype, offset=offset * np.dtype(dtype).itemsize, count=count)
    values.flags.writeable = False  # always, or decoded arrays would be of two types to the compiler
    return values


def _room(blocks: Blocks, count: int, dtype: type[np.generic]) -> tuple[pa.Buffer, Array]:
    buffer = blocks.lend(count * np.dtype(dtype).itemsize)
    return buffer, np.frombuffer(buffer, dtype, count=count)


def _fixed(
    column: list[pa.Array], kind: pa.DataType, positions: list[Int32Array], blocks: Blocks
) -> pa.Array:
    num_rows = sum(map(len, positions))
    buffer, out_R = _room(blocks, num_rows, _UNSIGNED[kind.bit_width])
    for part, position_G in zip(column, positions, strict=True):
        _put_words(_words(part, kind), position_G, out_R)
    return pa.Array.from_buffers(kind, num_rows, [None, buffer])


def _varying(
    column: list[pa.Array], kind: pa.DataType, positions: list[Int32Array], blocks: Blocks
) -> pa.Array:
    num_rows = sum(map(len, positions))
    offsets_buffer, offsets_R1 = _room(blocks, num_rows + 1, np.int32)
    width = _UNSIGNED[kind.value_type.bit_width] if pa.types.is_list(kind) else np.uint8
    parts = []
    for part in column:
        inner = part.values if pa.types.is_list(kind) else None
        data = part.buffers()[2] if inner is None else inner.buffers()[1]
        starts_G1 = _view(part.buffers()[1], np.int32, part.offset, len(part) + 1 if len(part) else 0)
        last = int(starts_G1[-1]) if len(part) else 0
        parts.append((starts_G1, _view(data, width, 0 if inner is None else inner.offset, last)))
    for (starts_G1, _), position_G in zip(parts, positions, strict=True):
        _put_lengths(starts_G1, position_G, offsets_R1)
    total = int(_add_up(offsets_R1))
    if total > _MOST_OFFSET:
        raise InputError(
            f"a window of {num_rows:,} rows has lists of {total:,} elements, more than {_MOST_OFFSET:,}; "
            "lower window_rows, or write smaller row groups"
        )
    values_buffer, out_N = _room(blocks, total, width)
    for (starts_G1, values), position_G in zip(parts, positions, strict=True):
        _put_lists(starts_G1, values, position_G, offsets_R1, out_N)
    if pa.types.is_list(kind):
        elements = pa.Array.from_buffers(kind.value_type, total, [None, values_buffer])
        return pa.Array.from_buffers(kind, num_rows, [None, offsets_buffer], children=[elements])
    return pa.Array.from_buffers(kind, num_rows, [None, offsets_buffer, values_buffer])


# Indices below are unsigned, or numba would ask of each whether it counts from the end: a third of the time.


@njit(nogil=True, cache=True)
def _invert(order_R: Int32Array, position_R: Int32Array) -> None:
    for number in range(len(order_R)):
        position_R[np.uintp(order_R[number])] = number


@njit(nogil=True, cache=True)
def _put_words(values_G: Array, position_G: Int32Array, out_R: Array) -> None:
    for row in range(len(position_G)):
        out_R[np.uintp(position_G[row])] = values_G[row]


@njit(nogil=True, cache=True)
def _put_lengths(starts_G1: Array, position_G: Int32Array, offsets_R1: Array) -> None:
    for row in range(len(position_G)):
        offsets_R1[np.uintp(position_G[row] + 1)] = starts_G1[row + 1] - starts_G1[row]


@njit(nogil=True, cache=True)
def _add_up(offsets_R1: Array) -> np.int64:
    """Lengths, of which row r has its own at r + 1, into offsets; returns the sum."""
    total = np.int64(0)
    offsets_R1[0] = 0
    for row in range(1, len(offsets_R1)):
        total += offsets_R1[row]
        offsets_R1[row] = total
    return total


@njit(nogil=True, cache=True)
def _put_lists(
    starts_G1: Array, values: Array, position_G: Int32Array, offsets_R1: Array, out_N: Array
) -> None:
    one = np.uintp(1)
    for row in range(len(position_G)):
        source, stop = np.uintp(starts_G1[row]), np.uintp(starts_G1[row + 1])
        target = np.uintp(offsets_R1[np.uintp(position_G[row])])
        while source < stop:
            out_N[target] = values[source]
            source, target = source + one, target + one


@njit(nogil=True, cache=True)
def _put_keys(of_file: np.uint64, row_G: Int64Array, position_G: Int32Array, keys_R: Array) -> None:
    """mix64(of_file ^ row), compiled; see rayrec.platform.hashing."""
    for row in range(len(row_G)):
        keys_R[np.uintp(position_G[row])] = extend64(of_file, np.uint64(row_G[row]))
