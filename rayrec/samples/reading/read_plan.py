"""Which rows make up which step: every row once per epoch, in an order that depends on seed and files alone.

    files ─► row groups, permuted per epoch ─► windows ─► rows, permuted per window ─► batches

A window is the unit of decoding and of shuffling: memory is bounded by a few of them. A plan decodes nothing
(but, once, the columns that filters and batches by length ask for); what it hands to readers is
self-contained. Any batch can be computed without those before it, so a run resumes at any step.

Axes: G row groups of all files in file order, W windows of an epoch, R rows of a window, E rows of an epoch,
S steps of an epoch, 1 an extra element.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from operator import and_
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numba import njit
from pyarrow import compute as pc
from pyarrow import dataset as ds

from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.processors import num_processors
from rayrec.samples.base.hive import values_of_folders
from rayrec.samples.base.intervals import Interval
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.reading.decoding import CorruptGroupError, GroupDecoder, ReadSpec, RowGroup
from rayrec.samples.reading.filters import Filters, as_filters, filter_expression
from rayrec.samples.reading.permutation import permutation
from rayrec.samples.reading.sources import (
    OnCorrupt,
    ParquetSource,
    SourceFile,
    columns_of,
    columns_of_files,
    is_of_folder,
)

logger = logging.getLogger(__name__)

ORDER = 1
"""Version of the order of rows: raised when `shuffled_windows` or `Window.order` would give another one."""
PREPARED_COLUMNS = {"user_id": pa.int64(), "item_ids": pa.list_(pa.int64())}
"""What training reads of a row of a prepared data set; other columns are never decoded."""
FIRST_WINDOW_ROWS = 65_536
"""Of a folder of Parquet: larger windows are grown into, each twice as large as the one before, so that the
first batch does not wait for a large one."""


@dataclass(frozen=True)
class Window:
    """Row groups that are decoded and shuffled together."""

    epoch: int
    number: int
    """Within the epoch."""
    groups: tuple[RowGroup, ...]
    """In file order (not in the shuffled order)."""
    start: int
    """Position of its first row in the epoch."""
    num_rows: int
    seed: int

    def order(self) -> Int32Array:
        """[R] order in which the rows are read; entries count in file order."""
        return permutation([self.seed, self.epoch, 1 + self.number], self.num_rows)


@dataclass(frozen=True)
class ReadPart:
    """Rows `start` to `stop` (exclusive) of a window, counted in its shuffled order."""

    window: Window
    start: int
    stop: int


@dataclass(frozen=True)
class BatchPlan:
    """The rows of one step."""

    step: int
    epoch: int
    parts: tuple[ReadPart, ...]

    @property
    def num_rows(self) -> int:
        return sum(part.stop - part.start for part in self.parts)


@dataclass(frozen=True)
class AssignedPart:
    """A part of a step, and the reader that reads it."""

    reader: int
    part: ReadPart
    ahead: Window | None
    """What the same reader will be asked for next: it may decode that meanwhile."""


@dataclass(frozen=True)
class ReadPosition:
    """What has been read of a run's data once a step is committed, and in which order."""

    epoch: int
    rows: int
    """Rows of this epoch that were read."""
    order: str
    """`ReadPlan.order_fingerprint`: two plans with the same one read the same rows from here on."""


@dataclass(frozen=True)
class Batching:
    """Where an epoch is cut into batches; no batch mixes epochs, and the last may be short."""

    batch_size: int | None = None
    """Most rows of a batch."""
    batch_tokens: int | None = None
    """Most list elements of a batch, over its rows; a row that has more is a batch of its own."""
    length_of: str | None = None
    """The column whose lists are counted."""
    min_batches: int = 1
    """Of an epoch: one that has few rows is cut into batches of fewer, down to one row each."""

    def check(self, schema: pa.Schema, source: str) -> None:
        """Check that the bounds fit the columns.

        Raises:
            InputError: neither bound is given, one is less than 1, or there is no such column of lists.
        """
        bounds = {
            "batch_size": self.batch_size,
            "batch_tokens": self.batch_tokens,
            "min_batches": self.min_batches,
        }
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        if self.batch_size is None and self.batch_tokens is None:
            raise InputError("batches need a bound; give batch_size, batch_tokens, or both")
        for name, bound in given.items():
            if bound < 1:
                raise InputError(f"{name} must be at least 1, got {bound}")
        if self.batch_tokens is None:
            return
        if self.length_of is None:
            raise InputError("batch_tokens needs length_of, the column whose lists are counted")
        is_there = self.length_of in schema.names
        found = columns_of(schema, [self.length_of], source).field(0).type if is_there else None
        if found is None or not (pa.types.is_list(found) or pa.types.is_large_list(found)):
            raise InputError(
                f"{source}: length_of must name a column of lists, {self.length_of!r} is "
                + ("not there" if found is None else f"{found}")
            )

    def cuts(self, num_rows: int, lengths_E: Int64Array | None) -> Int64Array:
        """[S + 1] where batches begin and end, from the lengths of the epoch's rows in reading order."""
        most_rows = max(1, min(self.batch_size or num_rows, num_rows // self.min_batches))
        if self.batch_tokens is None:
            return np.append(np.arange(0, num_rows, most_rows), num_rows)
        assert lengths_E is not None, "lengths were counted when the plan was made"
        cuts_E = np.empty(num_rows + 1, dtype=np.int64)
        return cuts_E[: _cut(lengths_E, self.batch_tokens, most_rows, cuts_E)].copy()


@njit(nogil=True, cache=True)
def _cut(lengths_E: Int64Array, most_tokens: int, most_rows: int, cuts_E: Int64Array) -> int:
    """Fill batches greedily: one ends before the row that would exceed a bound."""
    cuts_E[0] = 0
    count, tokens = 1, 0
    for row in range(len(lengths_E)):
        full = tokens + lengths_E[row] > most_tokens or row - cuts_E[count - 1] == most_rows
        # A row that alone exceeds the bound is a batch of its own, never an empty batch before it.
        if full and row > cuts_E[count - 1]:
            cuts_E[count] = row
            count, tokens = count + 1, 0
        tokens += lengths_E[row]
    cuts_E[count] = len(lengths_E)
    return count + 1


@dataclass(frozen=True)
class Groups:
    """Row groups of some files, and what is known of their rows."""

    groups: tuple[RowGroup, ...]
    lengths: tuple[Int64Array, ...] | None = None
    """Of each group, the list lengths of its rows; only for batches by length."""
    unreadable: tuple[Interval, ...] = ()
    """Of groups that could not be decoded when they were counted, and are left out."""

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self.groups)

    @classmethod
    def of(
        cls, spec: ReadSpec, files: Sequence[SourceFile], batching: Batching, first_number: int = 0
    ) -> Groups:
        """The row groups of these files, counted where batching or filters require it.

        Args:
            first_number: of the first file; the others count on.

        Raises:
            InputError: a row group that has to be counted cannot be decoded, or a filter does not apply.
        """
        groups = []
        for number, file in enumerate(files, first_number):
            first_rows = np.cumsum([0, *file.group_rows]).tolist()
            for group, rows in enumerate(file.group_rows):
                groups.append(
                    RowGroup(number, file.name, group, first_rows[group], rows, rows, file.size, file.version)
                )
        if not spec.filters and batching.batch_tokens is None:
            return cls(tuple(groups))
        return _counted(spec, groups, batching)


def _counted(spec: ReadSpec, groups: list[RowGroup], batching: Batching) -> Groups:
    """Row groups with the number of rows that pass the filters; those without such rows are left out.

    Statistics in the footers rule groups out before anything is read.
    """
    decoder = GroupDecoder(spec)
    possible = _not_ruled_out(spec, groups)
    length_of = batching.length_of if batching.batch_tokens is not None else None

    def count(group: RowGroup) -> tuple[Int64Array, Int64Array] | CorruptGroupError:
        try:
            return decoder.matching_rows(group, length_of)
        except CorruptGroupError as error:
            if spec.on_corrupt == "stop":
                raise corrupt_group(spec, group, error) from error
            return error

    with ThreadPoolExecutor(num_processors()) as threads:
        counts = list(threads.map(count, possible))
    kept, lengths, unreadable = [], [], []
    for group, found in zip(possible, counts, strict=True):
        if isinstance(found, CorruptGroupError):
            unreadable.append(Interval(group.name, group.first_row, group.first_row + group.total_rows))
        elif len(found[0]):
            kept.append(replace(group, num_rows=len(found[0])))
            lengths.append(found[1])
    return Groups(tuple(kept), tuple(lengths) if length_of else None, tuple(unreadable))


def warn_of_unreadable(url: str, unreadable: Sequence[Interval]) -> None:
    """Of rows that were left out when they were counted, since the settings allow it."""
    if unreadable:
        logger.warning(
            "%s: left out, since they cannot be decoded: %s",
            url,
            "; ".join(f"{one.file} rows {one.start} to {one.stop - 1}" for one in unreadable),
        )


def corrupt_group(spec: ReadSpec, group: RowGroup, error: CorruptGroupError) -> InputError:
    """What to say of a row group that cannot be decoded."""
    return InputError(
        f"{spec.folder.shown(group.name)}: row group {group.group} (rows {group.first_row:,} to "
        f"{group.first_row + group.total_rows - 1:,}) cannot be decoded ({error}); "
        "write the file again, or allow it to be skipped (on_corrupt)"
    )


def _not_ruled_out(spec: ReadSpec, groups: list[RowGroup]) -> list[RowGroup]:
    """Row groups that may have rows that pass, as far as the statistics in footers tell."""
    if not spec.filters:
        return groups
    expression = filter_expression(spec.filters, spec.all_columns, spec.folder.url)

    def pruned(name: str) -> set[tuple[str, int]]:
        return {(name, group) for group in _groups_of(spec, name, expression)}

    with ThreadPoolExecutor(num_processors()) as threads:
        found = threads.map(pruned, dict.fromkeys(group.name for group in groups))
        possible = set().union(*found)
    return [group for group in groups if (group.name, group.group) in possible]


def _groups_of(spec: ReadSpec, name: str, expression: pc.Expression) -> list[int]:
    of_folders = [
        pc.field(key).is_null() if value is None else pc.field(key) == value
        for key, value in values_of_folders(name).items()
        if key in spec.all_columns.names and is_of_folder(spec.all_columns.field(key))
    ]
    fragment = ds.ParquetFileFormat().make_fragment(
        spec.folder.path_of(name),
        spec.folder.filesystem,
        partition_expression=reduce(and_, of_folders) if of_folders else None,
    )
    try:
        return [info.id for info in fragment.subset(expression, schema=spec.all_columns).row_groups]
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{spec.folder.shown(name)}: the file cannot be read any more ({error})") from error


def shuffled_windows(
    groups: Sequence[RowGroup], seed: int, epoch: int, window_rows: int, first_rows: int
) -> list[tuple[tuple[int, ...], Window]]:
    """The windows of an epoch in the order they are read, each with the indices of its row groups."""
    windows: list[tuple[tuple[int, ...], Window]] = []
    chosen: list[int] = []
    start = rows = 0
    # The first window is small and each further one twice as large: training begins when the first one is
    # decoded, and later ones are decoded meanwhile.
    wanted = min(first_rows, window_rows)
    order = np.random.default_rng([seed, epoch, 0]).permutation(len(groups)).tolist()
    for index, group in enumerate(order, 1):
        chosen.append(group)
        rows += groups[group].num_rows
        if rows >= wanted or index == len(order):
            # Sorted, so that groups of one file are read in sequence; the rows are permuted anyway.
            mine = tuple(sorted(chosen))
            window = Window(epoch, len(windows), tuple(groups[one] for one in mine), start, rows, seed)
            windows.append((mine, window))
            start, rows, chosen = start + rows, 0, []
            wanted = min(2 * wanted, window_rows)
    return windows


class EpochPlan:
    """One pass over some row groups: its windows, and where it is cut into batches."""

    def __init__(
        self, groups: Groups, batching: Batching, seed: int, epoch: int, window_rows: int, first_rows: int
    ) -> None:
        shuffled = shuffled_windows(groups.groups, seed, epoch, window_rows, first_rows)
        self.epoch = epoch
        self.windows = [window for _, window in shuffled]
        self._starts = [window.start for window in self.windows]
        lengths_E = None
        if groups.lengths is not None:
            lengths = groups.lengths
            # Lengths must be in reading order, which costs the permutation of every window at this point.
            lengths_E = np.concatenate(
                [np.concatenate([lengths[one] for one in mine])[window.order()] for mine, window in shuffled]
            )
        self.cuts_S1 = batching.cuts(groups.num_rows, lengths_E)

    @property
    def num_steps(self) -> int:
        return len(self.cuts_S1) - 1

    def batch(self, step: int, index: int) -> BatchPlan:
        """Which rows of which windows make up a batch.

        Args:
            step: what the batch is called.
            index: which one of this epoch it is.
        """
        start, stop = int(self.cuts_S1[index]), int(self.cuts_S1[index + 1])
        parts = []
        for number in range(bisect_right(self._starts, start) - 1, len(self.windows)):
            window = self.windows[number]
            if window.start >= stop:
                break
            low, high = max(start, window.start), min(stop, window.start + window.num_rows)
            if low < high:
                parts.append(ReadPart(window, low - window.start, high - window.start))
        return BatchPlan(step, self.epoch, tuple(parts))

    def window(self, number: int) -> Window | None:
        """By its number; None: there are fewer."""
        return self.windows[number] if number < len(self.windows) else None


class RowPlan(Protocol):
    """What readers and loops need of a plan."""

    spec: ReadSpec

    def batch(self, step: int) -> BatchPlan | None:
        """None: there is no such step yet."""

    def window_after(self, window: Window, num_readers: int) -> Window | None:
        """The next one that the same reader reads; None where that is not known yet."""


def readings(plan: RowPlan, batch: BatchPlan, num_readers: int) -> list[AssignedPart]:
    """Which reader reads which part of a step: a window has one reader, neighboring windows different ones.

    The epoch is added because a growing folder may have many epochs of one window, which would otherwise all
    go to the first reader.
    """
    return [
        AssignedPart(
            (part.window.epoch + part.window.number) % num_readers,
            part,
            plan.window_after(part.window, num_readers),
        )
        for part in batch.parts
    ]


@dataclass(frozen=True)
class ReadSettings:
    """How the rows of a source are put in order and cut."""

    batching: Batching
    seed: int = 0
    window_rows: int = 65_536
    """Least rows that are shuffled together; windows are made of whole row groups."""
    first_window_rows: int = FIRST_WINDOW_ROWS

    def check(self, schema: pa.Schema, source: str) -> None:
        """Check that settings fit the columns.

        Raises:
            InputError: a bound is missing or out of range.
        """
        self.batching.check(schema, source)
        if self.window_rows < 1:
            raise InputError(f"window_rows must be at least 1, got {self.window_rows}")


def _source_of(root: Path, names: Sequence[str]) -> ParquetSource:
    source = ParquetSource.of_names(root, names) if names else None
    if source is None or not any(file.num_rows for file in source.files):
        raise InputError(f"{root}: the training set is empty; prepare data that has training events")
    return source


class ReadPlan:
    """Epochs over files that stay as they are."""

    def __init__(self, source: ParquetSource, spec: ReadSpec, settings: ReadSettings) -> None:
        """
        Raises:
            InputError: settings or filters do not fit the columns, a row group that has to be counted
                cannot be decoded, or there are no rows.
        """
        settings.check(source.schema, source.folder.url)
        self.source = source
        self.spec = spec
        self.settings = settings
        self.groups = Groups.of(spec, source.files, settings.batching)
        if not self.groups.num_rows:
            more = "; no row passes the filters" if spec.filters else ""
            raise InputError(f"{source.folder.url}: there are no rows to read{more}")
        # Two: readers look ahead into the next epoch while the last steps of this one are planned.
        self._epoch_plan = lru_cache(maxsize=2)(self._epoch_of)
        self._first_steps = [0]
        """First steps of the epochs planned so far: with batches by length, epochs differ in their steps."""

    @classmethod
    def of(cls, dataset: Dataset, batch_size: int, seed: int = 0, window_rows: int = 65_536) -> ReadPlan:
        """Plan for the training files of a prepared data set from their footers; no row is read.

        Raises:
            InputError: a file is not readable Parquet or differs in schema, or there are no rows.
        """
        source = _source_of(dataset.root, dataset.train_files)
        found = columns_of(source.schema, PREPARED_COLUMNS, source.folder.url)
        for column, expected in PREPARED_COLUMNS.items():
            if found.field(column).type != expected:
                raise InputError(
                    f"{dataset.root / dataset.train_files[0]}: column {column!r} is "
                    f"{found.field(column).type}, expected {expected}; prepare the data set again"
                )
        settings = ReadSettings(Batching(batch_size), seed, window_rows, first_window_rows=window_rows)
        return cls(source, ReadSpec(source.folder, found, source.schema), settings)

    @classmethod
    def of_files(
        cls, root: Path, names: Sequence[str], batch_size: int, seed: int = 0, window_rows: int = 65_536
    ) -> ReadPlan:
        """Plan for files of a folder, with all of their columns.

        Raises:
            InputError: as `of`.
        """
        source = _source_of(root, names)
        settings = ReadSettings(Batching(batch_size), seed, window_rows, first_window_rows=window_rows)
        return cls(source, read_spec(source, None, (), "stop"), settings)

    @classmethod
    def over(
        cls,
        url: str | Path,
        settings: ReadSettings,
        columns: Sequence[str] | None = None,
        filters: Sequence[Any] | Filters = (),
        on_corrupt: OnCorrupt = "stop",
    ) -> ReadPlan:
        """Plan for all Parquet files below a folder.

        Args:
            columns: what is read; None is all.
            filters: which rows are read (see `rayrec.samples.reading.filters`).

        Raises:
            InputError: see `ParquetSource.open` and the constructor.
        """
        source = ParquetSource.open(url, on_corrupt)
        spec = read_spec(source, columns, filters, on_corrupt)
        return cls(source, spec, settings)

    @property
    def files(self) -> tuple[str, ...]:
        """Names; a file's number is its index here."""
        return tuple(file.name for file in self.source.files)

    def rows_of_files(self, epoch: int) -> dict[str, int]:
        """Rows to be read of every file in an epoch, by its name."""
        rows = dict.fromkeys(self.files, 0)
        for group in self.groups.groups:
            rows[group.name] += group.num_rows
        return rows

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the first epoch; others have as many, but for batches by length, which vary a little."""
        return self.epoch(0).num_steps

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, batch within the epoch) of a step; all count from 0."""
        if self.settings.batching.batch_tokens is None:
            return divmod(step, self.steps_per_epoch)
        while self._first_steps[-1] <= step:
            epoch = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[-1] + self.epoch(epoch).num_steps)
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def first_step(self, epoch: int) -> int:
        """Of an epoch."""
        if self.settings.batching.batch_tokens is None:
            return epoch * self.steps_per_epoch
        while len(self._first_steps) <= epoch:
            self.locate(self._first_steps[-1])
        return self._first_steps[epoch]

    def position(self, step: int) -> ReadPosition:
        """What has been read before a step."""
        epoch, index = self.locate(step)
        return ReadPosition(epoch, int(self.epoch(epoch).cuts_S1[index]), self.order_fingerprint)

    def batch(self, step: int) -> BatchPlan:
        """The rows of a step."""
        epoch, index = self.locate(step)
        return self.epoch(epoch).batch(step, index)

    def windows(self, epoch: int) -> list[Window]:
        """Those of an epoch, in the order they are read."""
        return self.epoch(epoch).windows

    def window_after(self, window: Window, num_readers: int) -> Window | None:
        """The next one that the same reader reads."""
        following = self.epoch(window.epoch).window(window.number + num_readers)
        # Window w of epoch e has reader (e + w) % n, so in the next epoch its windows are one lower.
        return following or self.epoch(window.epoch + 1).window((window.number - 1) % num_readers)

    @cached_property
    def order_fingerprint(self) -> str:
        """Hex sha256 of all that the order of rows depends on: the row groups, seed and window."""
        settings = self.settings
        digest = hashlib.sha256(repr((ORDER, self.files, settings.seed, settings.window_rows)).encode())
        columns = zip(*((g.file, g.group, g.first_row, g.num_rows) for g in self.groups.groups), strict=True)
        for column_G in columns:
            digest.update(np.array(column_G, dtype=np.int64).tobytes())
        # Only where they matter: plans without these settings keep the fingerprints that they had.
        if settings.first_window_rows < settings.window_rows:
            digest.update(repr(settings.first_window_rows).encode())
        if self.spec.filters:
            digest.update(repr(self.spec.filters).encode())
        return digest.hexdigest()

    def epoch(self, epoch: int) -> EpochPlan:
        return self._epoch_plan(epoch)

    def _epoch_of(self, epoch: int) -> EpochPlan:
        settings = self.settings
        return EpochPlan(
            self.groups,
            settings.batching,
            settings.seed,
            epoch,
            settings.window_rows,
            settings.first_window_rows,
        )


def read_spec(
    source: ParquetSource, columns: Sequence[str] | None, filters: Sequence[Any], on_corrupt: OnCorrupt
) -> ReadSpec:
    """What to read of the files of a source.

    Raises:
        InputError: there is no such column, or a filter does not apply.
    """
    names = columns_of_files(source.schema) if columns is None else columns
    return ReadSpec(
        source.folder,
        columns_of(source.schema, names, source.folder.url),
        source.schema,
        as_filters(filters, source.folder.url),
        on_corrupt,
    )
