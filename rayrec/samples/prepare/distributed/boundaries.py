"""Times of a split by fractions: the event of a rank, found by counting finer and finer periods.

Days are counted in the first pass, as there are at most two million. Where a boundary lies within a day is
found by counting its seconds, and within a second its microseconds: what is held is small at any size of the
log, and however its times are distributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayrec.platform.arrays import Int64Array
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


@dataclass
class Counts:
    """Events of periods of one length, by their numbers since 1970; those of tables merge."""

    numbers_N: Int64Array
    """Ascending."""
    counts_N: Int64Array

    @classmethod
    def of(cls, times_E: Int64Array, unit: int) -> Counts:
        """Count times by their periods of so many microseconds."""
        return cls(*np.unique(times_E // unit, return_counts=True))

    def merge(self, other: Counts) -> Counts:
        """Counts of both."""
        both = np.concatenate([self.numbers_N, other.numbers_N])
        numbers_N, at = np.unique(both, return_inverse=True)
        counts_N = np.zeros(len(numbers_N), dtype=np.int64)
        np.add.at(counts_N, at, np.concatenate([self.counts_N, other.counts_N]))
        return Counts(numbers_N, counts_N)

    def period_of_rank(self, unit: int, rank: int) -> Period:
        """The period that has the event of a rank.

        Args:
            unit: microseconds of a period.
        """
        stops_N = np.cumsum(self.counts_N)
        at = int(np.searchsorted(stops_N, rank, side="right"))
        before = int(stops_N[at - 1]) if at else 0
        return Period(int(self.numbers_N[at]) * unit, unit, rank - before)


def count_times(job: TimesJob, path: Path) -> tuple[Counts, ...]:
    """Events of a spilled table in each unit of each period."""
    tables = read_partitions([path], 0, job.num_partitions, ["timestamp"])
    nothing = np.zeros(0, dtype=np.int64)
    times_E = np.concatenate([nothing, *(rows["timestamp"].to_numpy() for rows in tables)])
    return tuple(
        Counts.of(times_E[(times_E >= period.start) & (times_E < period.start + period.length)], job.unit)
        for period in job.periods
    )


UNITS = (_SECOND_US, 1)
"""In which days are counted, one after the other."""
FIRST_UNIT = DAY_US
