"""When the events of a history were: a list of times beside the list of items."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError

TIMES = "timestamps"
"""Column of lists beside `item_ids`, in training rows and in the file of histories. A data set has integers
there, UNIX seconds; other rows may have dates and times."""
HISTORY_TIMES = "history_timestamps"
"""The same beside `history`, in the rows to evaluate on."""

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_TOO_LATE_S = 100_000_000_000
"""The year 5138; in milliseconds, a day of 1973."""


def are_event_times(dtype: pa.DataType) -> bool:
    """Whether a column of this type can hold the times of events."""
    is_list = pt.is_list(dtype) or pt.is_large_list(dtype)
    return is_list and (pt.is_integer(dtype.value_type) or pt.is_timestamp(dtype.value_type))


def seconds(values: pa.Array, where: str) -> Int64Array:
    """UNIX seconds of times without nulls, rounded down; integers are seconds already.

    Args:
        where: names the values, for the message.

    Raises:
        InputError: a number is no time in seconds that anybody means.
    """
    if pt.is_timestamp(values.type):
        return values.view(pa.int64()).to_numpy() // _PER_SECOND[values.type.unit]
    times_N = values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    if len(times_N) and times_N.max() >= _TOO_LATE_S:
        raise InputError(
            f"{where} has {times_N.max()}, which is no time in seconds; write seconds since 1970, or dates "
            "and times"
        )
    return times_N


def as_type(times_N: Int64Array, dtype: pa.DataType) -> pa.Array:
    """UNIX seconds as integers or dates and times of a type: the inverse of `seconds`."""
    if pt.is_timestamp(dtype):
        return pa.array(times_N * _PER_SECOND[dtype.unit]).view(dtype)
    return pa.array(times_N).cast(dtype)
