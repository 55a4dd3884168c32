"""Which Python values a column may hold. Arrow alone would make 1 of 1.5, and a list of a text."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

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
