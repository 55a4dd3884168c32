"""Columns as a source has them become those of a data set: labels, numbers, keys of ids.

Every refusal names the row and the value. Axis: R rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from rayrec.platform.errors import InputError
from rayrec.samples.base.jagged import offsets_from_lengths, without_nulls
from rayrec.samples.impressions.ids import key_texts
from rayrec.samples.operations.columns import is_list, is_text

Where = Callable[[int], str]
"""Where a row of the batch is in the source."""


def label_column(column: pa.Array, name: str, where: Where) -> pa.Int8Array:
    """0, 1, or null where it is not known; NaN says that, too.

    Raises:
        InputError: another value.
    """
    numbers = _as_numbers(column, name, where, "0, 1 or nothing")
    values_R = numbers.to_numpy(zero_copy_only=False)  # null is NaN
    unknown_R = np.isnan(values_R)
    wrong_R = (values_R != 0) & (values_R != 1) & ~unknown_R
    if wrong_R.any():
        raise _refusal(column, name, int(np.argmax(wrong_R)), where, "0, 1 or nothing")
    return pa.array(np.where(unknown_R, 0, values_R).astype(np.int8), mask=unknown_R)


def number_column(column: pa.Array, name: str, where: Where) -> pa.FloatArray:
    """float32; null where there is none, and for NaN, which is no number.

    Raises:
        InputError: no number, or one that float32 has not.
    """
    numbers = _as_numbers(column, name, where, "a number or nothing")
    values_R = numbers.fill_null(0).to_numpy(zero_copy_only=False)
    missing_R = np.isnan(values_R)
    with np.errstate(over="ignore"):
        small_R = values_R.astype(np.float32)
    infinite_R = np.isinf(small_R)
    if infinite_R.any():
        raise _refusal(column, name, int(np.argmax(infinite_R)), where, "a finite number (float32)")
    return pa.array(small_R, mask=numbers.is_null().to_numpy(zero_copy_only=False) | missing_R)


def key_column(column: pa.Array, name: str, where: Where) -> pa.StringArray:
    """Keys as texts without blanks around them; null where there is none.

    Raises:
        InputError: the column can be no id.
    """
    if pt.is_string(column.type):
        column = pc.utf8_trim_whitespace(column)
    try:
        return key_texts(column, name)
    except InputError as error:
        raise InputError(f"{where(0)}: {error}") from error


def key_lists(column: pa.Array, name: str, where: Where, separator: str) -> pa.ListArray:
    """Lists of keys; a missing list is empty, and what is missing in a list is left out.

    Args:
        separator: between the elements, where the list is written as a text.

    Raises:
        InputError: neither lists of keys nor texts.
    """
    if is_text(column.type):
        # An empty text is one empty key to Arrow, which falls out below.
        column = pc.split_pattern(column.cast(pa.string()), separator)
    elif not is_list(column.type):
        raise InputError(
            f"{where(0)}: column {name} has the type {column.type}; expected lists, or texts with elements "
            f"separated by {separator!r}"
        )
    column = without_nulls(column.cast(pa.list_(column.type.value_type)))
    # Empty texts are missing, too, which only shows once the elements are keys.
    keys = key_column(column.flatten(), name, where)
    offsets_R1 = offsets_from_lengths(column.value_lengths().to_numpy(zero_copy_only=False))
    return without_nulls(pa.ListArray.from_arrays(pa.array(offsets_R1, pa.int32()), keys))


def _as_numbers(column: pa.Array, name: str, where: Where, expected: str) -> pa.DoubleArray:
    kind = column.type
    if is_text(kind):
        texts = pc.utf8_trim_whitespace(column.cast(pa.string()))
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        try:
            return texts.cast(pa.float64())
        except pa.ArrowInvalid:
            raise _refusal(column, name, _first_that_is_no_number(texts), where, expected) from None
    if pt.is_boolean(kind):
        return column.cast(pa.int8()).cast(pa.float64())
    if pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_null(kind):
        return column.cast(pa.float64(), safe=False)
    raise InputError(f"{where(0)}: column {name} has the type {kind}; expected {expected}")


def _first_that_is_no_number(texts: pa.StringArray) -> int:
    """Arrow says which value it could not read, but not where: halve until one is left."""
    start, stop = 0, len(texts)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            texts.slice(start, middle - start).cast(pa.float64())
            start = middle
        except pa.ArrowInvalid:
            stop = middle
    return start


def _refusal(column: pa.Array, name: str, row: int, where: Where, expected: str) -> InputError:
    return InputError(f"{where(row)}: {name} is {column[row].as_py()!r}; expected {expected}")
