"""Units of times, and the check that numbers fit the unit that is configured."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import TimeUnit
from rayrec.samples.stores.manifest import PER_SECOND

_FIRST_S = 631_152_000
_STOP_S = 4_102_444_800
"""1990 and 2100: no two units have a number for times between them in common."""


def refuse_other_unit(times_R: Int64Array, unit: TimeUnit, where: str, first_row: int = 0) -> None:
    """Refuse numbers that are no time of today in their unit, but are one in another.

    Small numbers, as of a clock that starts with the log, are no time of today in any unit and pass.

    Args:
        where: file and column, for the message.
        first_row: number of the first value there, from 0.

    Raises:
        InputError: with an example.
    """
    if not len(times_R):
        return
    low, high = int(times_R.min()), int(times_R.max())
    if _is_of_today(low, unit) and _is_of_today(high, unit):
        return
    for other in PER_SECOND:
        first, stop = _FIRST_S * PER_SECOND[other], _STOP_S * PER_SECOND[other]
        if other != unit and high >= first and low < stop:
            alike_R = (times_R >= first) & (times_R < stop)
            if alike_R.any():
                row = int(np.argmax(alike_R))
                value = int(times_R[row])
                date = datetime.fromtimestamp(value / PER_SECOND[other], UTC)
                raise InputError(
                    f"{where}: {value} in row {first_row + row + 1} is said to be in {unit}, where it is no "
                    f"time of today, and would be {date:%Y-%m-%d} in {other} ({int(alike_R.sum())} of "
                    f"{len(times_R)} values); set time_unit (--time-unit) to {other}, or write them as dates"
                )


def converted(times_R: Int64Array, unit: TimeUnit, to: TimeUnit, where: str) -> Int64Array:
    """Times in another unit, rounded down.

    Raises:
        InputError: a time has no number of 64 bits in that unit.
    """
    if PER_SECOND[to] <= PER_SECOND[unit]:
        return times_R // (PER_SECOND[unit] // PER_SECOND[to])
    factor = PER_SECOND[to] // PER_SECOND[unit]
    limit = np.iinfo(np.int64).max // factor
    wrong_R = (times_R > limit) | (times_R < -limit)
    if wrong_R.any():
        row = int(np.argmax(wrong_R))
        raise InputError(
            f"{where}: {times_R[row]} in row {row + 1} is too large for a time in {unit}; set time_unit "
            "(--time-unit) to the unit of these numbers"
        )
    return times_R * factor


def times_of(column: pa.Array, unit: TimeUnit, to: TimeUnit, where: str) -> Int64Array:
    """Times of an Arrow column (integers in `unit`, or timestamps of it) in another unit, rounded down.

    Nothing leaks where the units differ: an event before the rounded time is before the time.

    Raises:
        InputError: integers that are no time of today in their unit, but in another; or too large a time.
    """
    times_K = column.view(pa.int64()).to_numpy()
    if not pt.is_timestamp(column.type):
        refuse_other_unit(times_K, unit, where)
    return converted(times_K, unit, to, where)


def _is_of_today(time: int, unit: TimeUnit) -> bool:
    return _FIRST_S <= time // PER_SECOND[unit] < _STOP_S
