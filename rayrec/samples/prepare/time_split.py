"""Where a split by time has its boundaries: given, or found so that parts of the rows lie after them."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import option

_PER_SECOND = 1_000_000


def time_boundaries(
    times_T: Int64Array,
    counts_T: Int64Array,
    starts: tuple[float, float] | None,
    fractions: tuple[float, float],
    rows: str = "event",
) -> tuple[float, float]:
    """UNIX seconds from which rows validate, and from which they are tested.

    Args:
        times_T: distinct times in microseconds, ascending.
        counts_T: rows of each.
        starts: the boundaries, where they are given.
        fractions: parts of all rows that validate and that are tested, where they are not. Rows of one time
            are never divided, so these are approximate.
        rows: what a row is, for messages.

    Raises:
        InputError: nothing is left to train on, or nothing to test on.
    """
    if starts is None:
        stops_T = np.cumsum(counts_T)
        at = np.searchsorted(stops_T, boundary_ranks(int(stops_T[-1]), fractions), side="right")
        valid_start, test_start = (times_T[at] / _PER_SECOND).tolist()
        starts = valid_start, test_start
    check_boundaries(int(times_T[0]), int(times_T[-1]), starts, rows)
    return starts


def boundary_ranks(num_rows: int, fractions: tuple[float, float]) -> tuple[int, int]:
    """Which of the rows, in order of their times and counted from 0, have the times of the two boundaries."""
    valid_fraction, test_fraction = fractions
    first, second = (
        min(round(num_rows * part), num_rows - 1)
        for part in (1 - test_fraction - valid_fraction, 1 - test_fraction)
    )
    return first, second


def check_boundaries(
    earliest_us: int, latest_us: int, starts: tuple[float, float], rows: str = "event"
) -> None:
    """Check that there is something to train on and something to test on.

    Args:
        earliest_us, latest_us: times of rows, in microseconds.

    Raises:
        InputError: there is not.
    """
    valid_start, test_start = starts
    earliest_s, latest_s = earliest_us / _PER_SECOND, latest_us / _PER_SECOND
    if earliest_s >= valid_start:
        raise InputError(
            f"no {rows} is before the validation boundary {_time(valid_start)}, the earliest is at "
            f"{_time(earliest_s)}, so nothing is left to train on; move {option('valid_start')} or lower "
            f"{option('valid_fraction')} and {option('test_fraction')}"
        )
    if latest_s < test_start:
        raise InputError(
            f"no {rows} is on or after the test boundary {_time(test_start)}, the latest is at "
            f"{_time(latest_s)}, so nothing is left to test on; move {option('test_start')}"
        )


def _time(seconds: float) -> str:
    """For messages: the date, and the number that a log of numbers has for it."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC ({seconds:.0f} s)"
