"""Times of a split by fractions: the event of a rank, found by counting finer and finer periods.

Days are counted in the first pass, as there are at most two million. Where a boundary lies within a day is
found by counting its seconds, and within a second its microseconds: what is held is small at any size of the
log, and however its times are distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.samples.prepare.distributed.rows import DAY_US
from rayrec.samples.prepare.distributed.spill import read_partitions

_SECOND_US = 1_000_000


@dataclass(frozen=True)
class Period:
    """A period of time, in microseconds since 1970, in which a boundary lies."""

    start: int
    length: int
    rank: int
    """Of the boundary, among the events of the period."""


@dataclass(frozen=True)
class TimesJob:
    """What the tasks share that count times."""

    periods: tuple[Period, ...]
    unit: int
    """Microseconds of what is counted."""
    num_partitions: int


def period_of_rank(counts: dict[int, int], unit: int, rank: int) -> Period:
    """The period that has the event of a rank.

    Args:
        counts: events of each period, by its number since 1970.
        unit: microseconds of a period.
    """
    before = 0
    for number in sorted(counts):
        if rank < before + counts[number]:
            return Period(number * unit, unit, rank - before)
        before += counts[number]
    raise AssertionError("a rank lies below the number of events")


def count_times(job: TimesJob, path: Path) -> tuple[dict[int, int], ...]:
    """Events of a spilled table in each unit of each period."""
    found = []
    times_E = np.concatenate(
        [
            np.zeros(0, dtype=np.int64),
            *(rows["timestamp"].to_numpy() for rows in _times(path, job.num_partitions)),
        ]
    )
    for period in job.periods:
        within = times_E[(times_E >= period.start) & (times_E < period.start + period.length)]
        numbers, counts = np.unique(within // job.unit, return_counts=True)
        found.append(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    return tuple(found)


def finer(
    periods: Sequence[Period], counts: Iterator[tuple[dict[int, int], ...]], unit: int
) -> tuple[Period, ...]:
    """The units of periods in which the boundaries lie.

    Args:
        counts: what `count_times` has found in each table.
    """
    merged: list[dict[int, int]] = [{} for _ in periods]
    for of_table in counts:
        for total, found in zip(merged, of_table, strict=True):
            for number, count in found.items():
                total[number] = total.get(number, 0) + count
    return tuple(
        period_of_rank(total, unit, period.rank) for period, total in zip(periods, merged, strict=True)
    )


UNITS = (_SECOND_US, 1)
"""In which days are counted, one after the other."""
FIRST_UNIT = DAY_US


def _times(path: Path, num_partitions: int) -> Iterator[pa.Table]:
    return read_partitions([path], 0, num_partitions, ["timestamp"])
