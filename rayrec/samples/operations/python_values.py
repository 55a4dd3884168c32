"""Which Python values a column may hold. Arrow alone would make 1 of 1.5, and a list of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rayrec.samples.operations.columns import is_list, is_text


def is_value_of(value: Any, dtype: pa.DataType) -> bool:
    """Whether a column of this type can hold a value as it is; None is a value of every type."""
    return _is_of_kind(value, dtype) and _converts(value, dtype)


def _is_of_kind(value: Any, dtype: pa.DataType) -> bool:
    if value is None:
        return True
    if is_list(dtype):
        return isinstance(value, list | tuple | np.ndarray) and all(
            _is_of_kind(element, dtype.value_type) for element in value
        )
    if pt.is_dictionary(dtype):
        return _is_of_kind(value, dtype.value_type)
    if pt.is_boolean(dtype):
        return isinstance(value, bool | np.bool_)
    if pt.is_integer(dtype):
        return isinstance(value, int | np.integer) and not isinstance(value, bool)
    if pt.is_floating(dtype):
        return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return isinstance(value, str) if is_text(dtype) else True


def _converts(value: Any, dtype: pa.DataType) -> bool:
    try:
        pa.array([value], dtype)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True
