"""Python values, as requests have them, as Arrow columns: checked, then converted.

Arrow alone would make 1 of 1.5, and a list of a text.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.errors import InputError
from rayrec.samples.operations.columns import is_list, is_text

_INTEGERS = (int, np.integer, NoneType)
_NUMBERS = (int, float, np.integer, np.floating, NoneType)


def is_value_of(value: Any, dtype: pa.DataType) -> bool:
    """Whether a column of this type can hold a value as it is; None is a value of every type."""
    return _kind(dtype)(value) and _converts(value, dtype)


def _kind(dtype: pa.DataType) -> Callable[[Any], bool]:
    """Tells values of the Python types that stand for this one from others."""
    if is_list(dtype):
        of_kind = _kind(dtype.value_type)
        return lambda value: (
            value is None or (isinstance(value, (list, tuple, np.ndarray)) and all(map(of_kind, value)))
        )
    if pt.is_dictionary(dtype):
        return _kind(dtype.value_type)
    if pt.is_boolean(dtype):
        return lambda value: isinstance(value, (bool, np.bool_, NoneType))
    if pt.is_integer(dtype):
        return lambda value: isinstance(value, _INTEGERS) and not isinstance(value, bool)
    if pt.is_floating(dtype):
        return lambda value: isinstance(value, _NUMBERS) and not isinstance(value, bool)
    if is_text(dtype):
        return lambda value: isinstance(value, (str, NoneType))
    return lambda value: True


def _converts(value: Any, dtype: pa.DataType) -> bool:
    try:
        pa.array([value], dtype)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def batch_of(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows by field name as one batch; a field that a row lacks is null.

    Raises:
        InputError: a field is unknown or of the wrong type, or one that may not be null is missing.
    """
    for row in rows:
        for name in row:
            if name not in schema.names:
                close = difflib.get_close_matches(str(name), schema.names, n=1, cutoff=0.6)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(schema.names)}"
                raise InputError(f"there is no field {name!r}; {hint}")
    if not len(schema):  # a batch without columns has rows only as what is left of one that had some
        return pa.RecordBatch.from_arrays([pa.nulls(len(rows))], names=["none"]).select([])
    return pa.RecordBatch.from_arrays([_column(field, rows) for field in schema], schema=schema)


def _column(field: pa.Field, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
    values = [_value(row.get(field.name), field) for row in rows]
    if not field.nullable and None in values:
        raise InputError(f"the field {field.name!r} ({field.type}) is missing, and may not be null")
    for value in values:
        if not is_value_of(value, field.type):
            raise InputError(f"the field {field.name!r} must be {field.type}, got {value!r}")
    return pa.array(values, field.type)


def _value(value: Any, field: pa.Field) -> Any:
    """JSON has no times: a text stands for one."""
    if not (isinstance(value, str) and pt.is_temporal(field.type)):
        return value
    try:
        return pa.scalar(value).cast(field.type).as_py()
    except pa.ArrowException as error:
        raise InputError(
            f"the field {field.name!r} must be {field.type}, such as '2026-01-31T12:00:00', got {value!r}"
        ) from error
