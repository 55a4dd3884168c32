"""Arrow columns as arrays for kernels, and back; which types operations meet.

Axes: R rows, N values of all rows' lists, 1 an extra element.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Int32Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.errors import InputError


class Lists(NamedTuple):
    """A list column; row r owns values[offsets_R1[r]:offsets_R1[r + 1]], nothing where it is null."""

    values: pa.Array
    offsets_R1: Int32Array
    """From 0 to len(values)."""
    valid_R: BoolArray | None
    """None if no row is null."""


def normal_type(dtype: pa.DataType) -> pa.DataType:
    """The type in which operations meet a column: few types, whatever the file's writer chose.

    Integers are int64 (uint64 stays), half floats float32, texts of all kinds string, lists of all
    kinds `list_` with 32-bit offsets; dictionaries are decoded.
    """
    if is_list(dtype):
        return pa.list_(normal_type(dtype.value_type))
    if pt.is_dictionary(dtype):
        return normal_type(dtype.value_type)
    if pt.is_integer(dtype) and dtype != pa.uint64():
        return pa.int64()
    if pt.is_float16(dtype):
        return pa.float32()
    if is_text(dtype):
        return pa.string()
    return dtype


_LISTS = {
    dtype.id
    for dtype in (
        pa.list_(pa.null()),
        pa.large_list(pa.null()),
        pa.list_(pa.null(), 1),
        pa.list_view(pa.null()),
        pa.large_list_view(pa.null()),
    )
}


def is_list(dtype: pa.DataType) -> bool:
    return dtype.id in _LISTS


def is_text(dtype: pa.DataType) -> bool:
    return pt.is_string(dtype) or pt.is_large_string(dtype) or pt.is_string_view(dtype)


def value_type(dtype: pa.DataType) -> pa.DataType:
    """Of the values in a column's lists, or of the column itself where it has none."""
    return dtype.value_type if is_list(dtype) else dtype


def with_values(dtype: pa.DataType, values: pa.DataType) -> pa.DataType:
    """A type of the same shape, a list or not, with other values."""
    return pa.list_(values) if is_list(dtype) else values


def input_type(
    schema: pa.Schema, name: str, accepts: Callable[[pa.DataType], bool], expected: str
) -> pa.DataType:
    """Type of a column that an operation reads.

    Args:
        accepts: whether the operation takes values of a type; asked about the values of a list column.
        expected: what it takes, for the message.

    Raises:
        InputError: there is no such column, or it is of another type.
    """
    if name not in schema.names:
        close = difflib.get_close_matches(name, schema.names, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(schema.names)}"
        raise InputError(f"there is no column {name!r}; {hint}")
    dtype = schema.field(name).type
    if not accepts(value_type(dtype)):
        raise InputError(f"column {name!r} is {dtype}, expected {expected}")
    return dtype


def list_type(
    schema: pa.Schema, name: str, accepts: Callable[[pa.DataType], bool] = lambda _: True, of: str = ""
) -> pa.DataType:
    """`input_type` of a column that must hold lists (`of` what, for the message)."""
    dtype = input_type(schema, name, accepts, f"lists{of}")
    if not is_list(dtype):
        raise InputError(f"column {name!r} is {dtype}, expected lists{of}")
    return dtype


def is_key(dtype: pa.DataType) -> bool:
    """Whether values can be hashed."""
    return pt.is_integer(dtype) or pt.is_boolean(dtype) or pt.is_string(dtype)


def is_number(dtype: pa.DataType) -> bool:
    """Whether values can be computed with; uint64 holds ids, which do not fit any signed type."""
    return dtype == pa.int64() or pt.is_float32(dtype) or pt.is_float64(dtype)


def is_time(dtype: pa.DataType) -> bool:
    return dtype == pa.int64() or pt.is_timestamp(dtype)


NUMBERS = "numbers (uint64 is taken for ids; write int64 or float64)"


def lists_of(column: pa.ListArray) -> Lists:
    if not column.null_count:
        offsets_R1 = column.offsets.to_numpy()
        first, last = int(offsets_R1[0]), int(offsets_R1[-1])
        values = column.values.slice(first, last - first)
        return Lists(values, kernel_input(offsets_R1 - first if first else offsets_R1, np.int32), None)
    lengths_R = column.value_lengths().fill_null(0).to_numpy()
    offsets_R1 = np.zeros(len(column) + 1, dtype=np.int32)
    np.cumsum(lengths_R, out=offsets_R1[1:])
    valid_R = column.is_valid().to_numpy(zero_copy_only=False)
    return Lists(column.flatten(), kernel_input(offsets_R1, np.int32), valid_R)


def list_column(values: pa.Array, offsets_R1: Int32Array, valid_R: BoolArray | None = None) -> pa.ListArray:
    """The column of these lists; null where a row is not valid."""
    mask = None if valid_R is None else pa.array(~valid_R)
    return pa.ListArray.from_arrays(pa.array(offsets_R1, pa.int32()), values, mask=mask)


def map_values(column: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply a function of values to a column, or to the values in its lists, which stay lists."""
    if not is_list(column.type):
        return function(column)
    lists = lists_of(column)
    return list_column(function(lists.values), lists.offsets_R1, lists.valid_R)


def numbers_of(values: pa.Array) -> tuple[NDArray[Any], BoolArray | None]:
    """Numbers, and which of them are valid; None if all are. NaN is no number: it is not valid.

    The number of an invalid one is undefined. Booleans are 0 and 1; times are
    counted in their unit.
    """
    if pt.is_timestamp(values.type):
        values = values.view(pa.int64())
    valid_N = None
    if values.null_count:
        valid_N = values.is_valid().to_numpy(zero_copy_only=False)
        values = values.fill_null(False if pt.is_boolean(values.type) else 0)
    array_N = values.to_numpy(zero_copy_only=False)
    if array_N.dtype.kind == "f":
        nan_N = np.isnan(array_N)
        if nan_N.any():
            valid_N = ~nan_N if valid_N is None else valid_N & ~nan_N
    return array_N, valid_N


def both_valid(first: BoolArray | None, second: BoolArray | None) -> BoolArray | None:
    """Where both are valid; None stands for everywhere."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def column_of(array_N: NDArray[Any], valid_N: BoolArray | None, dtype: pa.DataType) -> pa.Array:
    """Numbers as a column; null where they are not valid."""
    return pa.array(array_N, dtype, mask=None if valid_N is None else ~valid_N)


def parallel_lists(columns: Mapping[str, pa.Array], names: Sequence[str]) -> list[Lists]:
    """Lists whose values belong together index by index; a null list goes with one of any length.

    Raises:
        InputError: in some row, one is longer than another.
    """
    lists = [lists_of(columns[name]) for name in names]
    first = lists[0]
    lengths_R, valid_R = np.diff(first.offsets_R1), first.valid_R
    for mine in lists[1:]:
        if valid_R is None and np.array_equal(mine.offsets_R1, first.offsets_R1):
            continue
        mine_R = np.diff(mine.offsets_R1)
        differ_R = lengths_R != mine_R
        both_R = both_valid(valid_R, mine.valid_R)
        if both_R is not None:
            differ_R &= both_R
        if differ_R.any():
            row = int(np.flatnonzero(differ_R)[0])
            raise InputError(
                f"columns {' and '.join(map(repr, names))} have {lengths_R[row]} and {mine_R[row]} values in "
                "one row; lists that belong together need the same number in every row"
            )
        if valid_R is not None:  # where there was none yet, this one says how many there are
            lengths_R = np.where(valid_R, lengths_R, mine_R)
            valid_R = None if mine.valid_R is None else valid_R | mine.valid_R
    return lists


def complete_lists(
    columns: Mapping[str, pa.Array], names: Sequence[str], valid_R: BoolArray | None = None
) -> list[Lists]:
    """Parallel lists, all of them null where one of them is, or where a row is not valid."""
    lists = parallel_lists(columns, names)
    for mine in lists:
        valid_R = both_valid(valid_R, mine.valid_R)
    if valid_R is None:
        return lists
    return [lists_of(list_column(mine.values, mine.offsets_R1, valid_R)) for mine in lists]
