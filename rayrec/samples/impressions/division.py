"""Which rows train, validate and are tested.

Axis: R rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.samples.base.config import TimeUnit, option
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.impressions.config import FRACTIONS, ImpressionsConfig
from rayrec.samples.impressions.manifest import ImpressionSplit
from rayrec.samples.impressions.source import SPLITS, ImpressionSource, SourcePart
from rayrec.samples.prepare.time_split import time_boundaries
from rayrec.samples.prepare.times import parse_times

SplitCodes = NDArray[np.int8]
"""[R] index in `SPLITS`."""

Progress = Callable[[str, int, int | None], None]
"""(what is being done, rows done, of how many if that is known)."""


@dataclass(frozen=True)
class Division:
    """The rule, and what a pass over the rows had to find out for it."""

    split: ImpressionSplit
    valid_fraction: float
    test_fraction: float
    seed: int
    time: str | None
    time_unit: TimeUnit | None
    num_rows: int | None
    """None if it was not needed."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What `codes` reads beside the columns that are written."""
        return (self.time,) if self.split.kind == "time" and self.time is not None else ()

    def codes(self, part: SourcePart, batch: pa.RecordBatch, first: int, first_in_part: int) -> SplitCodes:
        """[R] the split of each row of a batch.

        Args:
            first: number of the batch's first row in the source.
            first_in_part: its number in the part.
        """
        num_rows = len(batch)
        if part.split is not None:
            return np.full(num_rows, SPLITS.index(part.split), dtype=np.int8)
        if self.split.kind == "time":
            assert self.split.valid_start is not None, "found with the rule"
            assert self.split.test_start is not None, "found with the rule"
            assert self.time is not None, "found with the rule"
            times_R = times_of_rows(part, batch, self.time, self.time_unit, first_in_part)
            starts = np.rint(np.array([self.split.valid_start, self.split.test_start]) * 1_000_000)
            return np.searchsorted(starts.astype(np.int64), times_R, side="right").astype(np.int8)
        rows_R = first + np.arange(num_rows)
        held_out = (1 - self.test_fraction - self.valid_fraction, 1 - self.test_fraction)
        if self.split.kind == "random":
            # The high bits as a number in [0, 1): the same for a row wherever batches are cut.
            draws_R = (combine64(self.seed, rows_R) >> np.uint64(11)) / 2.0**53
            return np.searchsorted(np.array(held_out), draws_R, side="right").astype(np.int8)
        assert self.num_rows is not None, "counted with the rule"
        limits = np.array([round(self.num_rows * part) for part in held_out])
        return np.searchsorted(limits, rows_R, side="right").astype(np.int8)


@dataclass(frozen=True)
class RowsSeen:
    """What a pass over rows has found out for the rule."""

    num_rows: int
    times_T: Int64Array
    """Distinct times in microseconds, ascending; none where rows are not divided by time."""
    counts_T: Int64Array
    """Rows of each."""

    @classmethod
    def of(cls, seen: Iterable[RowsSeen]) -> RowsSeen:
        """Of all rows together: what is kept grows with the distinct times, 16 bytes each."""
        nothing = np.zeros(0, dtype=np.int64)
        num_rows, merged, pending, num_pending = 0, cls(0, nothing, nothing), list[RowsSeen](), 0
        for one in seen:
            num_rows += one.num_rows
            pending.append(one)
            num_pending += len(one.times_T)
            # As many as there are already: every time is merged a logarithmic number of times.
            if num_pending >= max(_PENDING, len(merged.times_T)):
                merged, pending, num_pending = _merged([merged, *pending]), [], 0
        merged = _merged([merged, *pending])
        return cls(num_rows, merged.times_T, merged.counts_T)


_PENDING = 1 << 20
"""Times that are collected before they are merged."""


def _merged(parts: list[RowsSeen]) -> RowsSeen:
    times_T, indices = np.unique(np.concatenate([one.times_T for one in parts]), return_inverse=True)
    counts = np.concatenate([one.counts_T for one in parts])
    return RowsSeen(0, times_T, np.bincount(indices, counts, len(times_T)).astype(np.int64))


def rule_of(
    source: ImpressionSource, config: ImpressionsConfig
) -> Literal["given", "order", "time", "random"]:
    """By what the rows are divided; `given`: their parts say it.

    Raises:
        InputError: the source cannot be divided in this way.
    """
    kind = config.split
    if source.is_divided:
        own = "files" if source.boundaries is None else "time"
        if source.held_out_of is None and kind not in ("auto", own):
            why = "has files for each split" if own == "files" else "is divided by time by its layout"
            raise InputError(f"{source.name} {why}; leave {option('split')} out, or set it to {own}")
        changed = [name for name in FRACTIONS if config.is_changed(name)]
        if changed and own == "files" and source.held_out_of is None:
            raise InputError(
                f"{option(changed[0])} has no effect: {source.name} has files for each split; leave it out"
            )
        return "given"
    if kind == "auto":
        kind = "order" if source.time is None else "time"
    if kind == "files":
        raise InputError(
            f"{source.name}: there are no files for train, valid (or dev) and test; choose order, time or "
            f"random with {option('split')}"
        )
    if kind == "time" and source.time is None:
        raise InputError(
            f"{source.name}: no column is the time; name it ({option('time')}) or split by order"
        )
    return kind


def divide(source: ImpressionSource, config: ImpressionsConfig, progress: Progress) -> Division:
    """Choose the rule; the order of rows and fractions by time take a pass over the source.

    Raises:
        InputError: the source cannot be divided in this way, or nothing would be left to train on.
    """
    rule = rule_of(source, config)
    seen = rows_seen(source, config, progress) if rule in ("order", "time") else None
    return division_of(source, config, seen)


def division_of(source: ImpressionSource, config: ImpressionsConfig, seen: RowsSeen | None) -> Division:
    """The rule as a pass over the rows has made it.

    Args:
        seen: of all rows, where the rule is order or time.

    Raises:
        InputError: as `divide`.
    """
    rule = rule_of(source, config)
    if rule == "given":
        own: Literal["files", "time", "data_set"] = "files" if source.boundaries is None else "time"
        if source.held_out_of is not None:
            own = "data_set"
        valid_start, test_start = source.boundaries or (None, None)
        split = ImpressionSplit(
            kind=own, valid_start=valid_start, test_start=test_start, held_out_of=source.held_out_of
        )
        return _division(split, source, config)
    if rule == "random":
        return _division(ImpressionSplit(kind="random"), source, config)
    assert seen is not None, "the rule takes a pass"
    if rule == "order":
        return _division(ImpressionSplit(kind="order"), source, config, seen.num_rows)
    if not seen.num_rows:
        raise InputError(f"{source.name}: there are no rows in it; expected impressions")
    starts = None
    if config.valid_start is not None and config.test_start is not None:
        starts = (config.valid_start, config.test_start)
    fractions = (config.valid_fraction, config.test_fraction)
    valid_start, test_start = time_boundaries(seen.times_T, seen.counts_T, starts, fractions, "impression")
    split = ImpressionSplit(kind="time", valid_start=valid_start, test_start=test_start)
    return _division(split, source, config, seen.num_rows)


def _division(
    split: ImpressionSplit, source: ImpressionSource, config: ImpressionsConfig, num_rows: int | None = None
) -> Division:
    return Division(
        split=split,
        valid_fraction=config.valid_fraction,
        test_fraction=config.test_fraction,
        seed=config.seed,
        time=source.time,
        time_unit=config.time_unit,
        num_rows=num_rows,
    )


def _passed(
    source: ImpressionSource, columns: tuple[str, ...], progress: Progress
) -> Iterator[tuple[SourcePart, pa.RecordBatch, int]]:
    """Batches, each with the number of its first row in its part."""
    done = 0
    for part in source.parts:
        first = 0
        for batch in part.read(columns):
            yield part, batch, first
            first += len(batch)
            done += len(batch)
            progress("dividing", done, None)


def rows_seen(source: ImpressionSource, config: ImpressionsConfig, progress: Progress) -> RowsSeen:
    """Count the rows of a source, and tally their times where it is to be divided by them."""
    if rule_of(source, config) != "time":
        nothing = np.zeros(0, dtype=np.int64)
        passed = _passed(source, source.schema.labels[:1], progress)
        return RowsSeen(sum(len(batch) for _, batch, _ in passed), nothing, nothing)
    assert source.time is not None, "the rule is by time"
    time, unit = source.time, config.time_unit

    def of_batches() -> Iterator[RowsSeen]:
        for part, batch, first in _passed(source, (time,), progress):
            times_T, counts_T = np.unique(times_of_rows(part, batch, time, unit, first), return_counts=True)
            yield RowsSeen(len(batch), times_T, counts_T)

    return RowsSeen.of(of_batches())


def times_of_rows(
    part: SourcePart, batch: pa.RecordBatch, time: str, unit: TimeUnit | None, first: int
) -> Int64Array:
    """[R] microseconds since 1970."""
    table = pa.table({"timestamp": batch.column(time)})
    return parse_times(RawTable(table, part.where(first), lambda row: part.where(first + row)), unit)
