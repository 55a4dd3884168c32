"""Lists of different lengths as one array of values and one of offsets.

Row r of (values_N, offsets_R1) is values_N[offsets_R1[r]:offsets_R1[r + 1]].
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Int64Array


def offsets_from_lengths(lengths_R: NDArray[np.integer] | BoolArray) -> Int64Array:
    """[R + 1] offsets of rows that lie one after the other."""
    offsets_R1 = np.zeros(len(lengths_R) + 1, dtype=np.int64)
    np.cumsum(lengths_R, out=offsets_R1[1:])
    return offsets_R1


def concatenated_ranges(starts_R: Int64Array, lengths_R: Int64Array) -> Int64Array:
    """start, start + 1, ..., start + length - 1 of every row, one after the other."""
    offsets_R1 = offsets_from_lengths(lengths_R)
    return np.arange(offsets_R1[-1]) + np.repeat(starts_R - offsets_R1[:-1], lengths_R)


def take_rows(
    values_N: Int64Array, offsets_R1: Int64Array, rows_B: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """The values and offsets of the chosen rows, in the order asked for."""
    starts_B = offsets_R1[rows_B]
    lengths_B = offsets_R1[rows_B + 1] - starts_B
    return values_N[concatenated_ranges(starts_B, lengths_B)], offsets_from_lengths(lengths_B)


def list_values(column: pa.ChunkedArray) -> tuple[Int64Array, Int64Array]:
    """An Arrow column of integer lists, without nulls in them, as (values_N, offsets_R1)."""
    chunks = column.chunks
    if any(chunk.flatten().null_count for chunk in chunks):
        # NumPy would make floats of all values, which round large ids.
        raise ValueError("a list has a null in it")
    lengths_R = np.concatenate(
        [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks] or [[]]
    )
    values_N = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks] or [[]])
    return values_N.astype(np.int64, copy=False), offsets_from_lengths(lengths_R.astype(np.int64))


def without_nulls(lists: pa.ListArray) -> pa.ListArray:
    """The same lists, in each of which nulls are left out; a list that is null is empty."""
    values = lists.flatten()
    if not lists.null_count and not values.null_count:
        return lists
    lengths_R = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    rows_N = np.repeat(np.arange(len(lengths_R)), lengths_R)
    kept_N = values.is_valid().to_numpy(zero_copy_only=False)
    offsets_R1 = offsets_from_lengths(np.bincount(rows_N[kept_N], minlength=len(lengths_R)))
    return pa.ListArray.from_arrays(pa.array(offsets_R1, pa.int32()), values.drop_null())


def list_rows(values: pa.Array, starts_R: Int64Array, lengths_R: Int64Array) -> pa.ListArray:
    """An Arrow list column: row r is values[starts_R[r]:starts_R[r] + lengths_R[r]]."""
    offsets = pa.array(offsets_from_lengths(lengths_R), pa.int32())
    return pa.ListArray.from_arrays(offsets, values.take(pa.array(concatenated_ranges(starts_R, lengths_R))))


def list_array(values_N: Int64Array, offsets_R1: Int64Array) -> pa.ListArray:
    """(values_N, offsets_R1) as an Arrow list column."""
    return pa.ListArray.from_arrays(pa.array(offsets_R1, pa.int32()), pa.array(values_N))
