"""The training read: every row once per epoch, in an order that depends on seed and files alone.

    files ─► row groups, permuted per epoch ─► windows ─► rows, permuted per window ─► batches

A window is the unit of decoding and of shuffling: memory stays bounded by a few of them. Steps are
read at random: any number of readers may share them out, and a run resumes at any step.

Axes: G row groups of all files in file order, W windows of an epoch, R rows of a window.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.samples.batches import Int64Array, Interval, SampleBatch
from rayrec.samples.dataset import Dataset
from rayrec.samples.jagged import list_values, offsets_from_lengths, take_rows
from rayrec.samples.manifest import EVALUATION_FILES, Split

ORDER = 1
"""Version of the way in which `windows` and `window_order` draw; another one reads other rows."""
COLUMNS = {"user_id": pa.int64(), "item_ids": pa.list_(pa.int64())}
"""What training reads of a row; other columns are never decoded."""


@dataclass(frozen=True)
class Window:
    """Row groups that are decoded and shuffled together."""

    number: int
    groups: tuple[int, ...]
    """Row groups in file order (not in the order drawn)."""
    start: int
    """Place of its first row in the epoch."""
    num_rows: int


@dataclass(frozen=True)
class ReadPosition:
    """What has been read of a run's data once a step is committed, and in which order."""

    epoch: int
    rows: int
    """Rows of this epoch that were read."""
    order: str
    """`ReadPlan.order_fingerprint`: two plans with the same one read the same rows from here on."""


@dataclass(frozen=True)
class ReadPlan:
    """Which rows make up which step. Plain numbers: it travels to any process."""

    root: str
    files: tuple[str, ...]
    """Names below `root`; a file's number is its place here."""
    group_file_G: Int64Array
    group_number_G: Int64Array
    """Number of the row group within its file."""
    group_start_G: Int64Array
    """Its first row, as numbered in its file."""
    group_rows_G: Int64Array
    batch_size: int
    seed: int
    window_rows: int

    @classmethod
    def of(cls, dataset: Dataset, batch_size: int, seed: int = 0, window_rows: int = 65_536) -> ReadPlan:
        """Plan from the footers of the training files; no row is read.

        Raises:
            InputError: a file is not readable Parquet or differs in schema, or there are no rows.
        """
        if batch_size < 1 or window_rows < 1:
            raise InputError(
                f"batch_size and window_rows must be at least 1, got {batch_size} and {window_rows}"
            )
        groups: list[tuple[int, int, int, int]] = []
        first: pa.Schema | None = None
        for number, name in enumerate(dataset.train_files):
            path = dataset.root / name
            with _open(path) as file:
                first = _check_schema(path, file.schema_arrow, first)
                start = 0
                for group in range(file.metadata.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    groups.append((number, group, start, rows))
                    start += rows
        group_file_G, group_number_G, group_start_G, group_rows_G = (
            np.array(groups, dtype=np.int64).reshape(-1, 4).T.copy()
        )
        if not group_rows_G.sum():
            raise InputError(
                f"{dataset.root}: the training set is empty; prepare data that has training events"
            )
        return cls(
            root=str(dataset.root),
            files=dataset.train_files,
            group_file_G=group_file_G,
            group_number_G=group_number_G,
            group_start_G=group_start_G,
            group_rows_G=group_rows_G,
            batch_size=batch_size,
            seed=seed,
            window_rows=window_rows,
        )

    @property
    def rows_per_epoch(self) -> int:
        return int(self.group_rows_G.sum())

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the last may be short, and no batch mixes epochs."""
        return -(-self.rows_per_epoch // self.batch_size)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, batch within the epoch) of a step; all count from 0."""
        return divmod(step, self.steps_per_epoch)

    def position(self, step: int) -> ReadPosition:
        """What has been read before a step."""
        epoch, batch = self.locate(step)
        return ReadPosition(epoch, batch * self.batch_size, self.order_fingerprint)

    @property
    def order_fingerprint(self) -> str:
        """Hex sha256 of all that the order of rows depends on: the row groups, seed and window."""
        digest = hashlib.sha256(repr((ORDER, self.files, self.seed, self.window_rows)).encode())
        for array_G in (self.group_file_G, self.group_number_G, self.group_start_G, self.group_rows_G):
            digest.update(array_G.tobytes())
        return digest.hexdigest()

    def windows(self, epoch: int) -> list[Window]:
        """The windows of an epoch, in the order they are read."""
        order_G = np.random.default_rng([self.seed, epoch, 0]).permutation(len(self.group_rows_G))
        windows: list[Window] = []
        groups: list[int] = []
        start = rows = 0
        for group in order_G.tolist():
            groups.append(group)
            rows += int(self.group_rows_G[group])
            if rows >= self.window_rows:
                windows.append(Window(len(windows), tuple(sorted(groups)), start, rows))
                start, rows, groups = start + rows, 0, []
        if groups:
            windows.append(Window(len(windows), tuple(sorted(groups)), start, rows))
        return windows

    def window_order(self, epoch: int, window: Window) -> Int64Array:
        """[R] order in which the rows of a window are read; entries count in file order."""
        return np.random.default_rng([self.seed, epoch, 1 + window.number]).permutation(window.num_rows)


@dataclass(frozen=True)
class _Rows:
    """Decoded rows, in reading order."""

    file_R: Int64Array
    row_R: Int64Array
    user_ids_R: Int64Array
    item_ids_N: Int64Array
    offsets_R1: Int64Array

    def take(self, rows_B: Int64Array) -> _Rows:
        item_ids_N, offsets_B1 = take_rows(self.item_ids_N, self.offsets_R1, rows_B)
        return _Rows(self.file_R[rows_B], self.row_R[rows_B], self.user_ids_R[rows_B], item_ids_N, offsets_B1)

    @staticmethod
    def concatenate(parts: list[_Rows]) -> _Rows:
        if len(parts) == 1:
            return parts[0]
        return _Rows(
            np.concatenate([part.file_R for part in parts]),
            np.concatenate([part.row_R for part in parts]),
            np.concatenate([part.user_ids_R for part in parts]),
            np.concatenate([part.item_ids_N for part in parts]),
            offsets_from_lengths(np.concatenate([np.diff(part.offsets_R1) for part in parts])),
        )


class SampleReader:
    """Step -> SampleBatch, at random; neighbouring steps share decoded windows."""

    def __init__(self, plan: ReadPlan, cached_windows: int = 2) -> None:
        self.plan = plan
        self._cached_windows = cached_windows
        self._decoded: OrderedDict[tuple[int, int], _Rows] = OrderedDict()
        # Two epochs: steps around the turn of an epoch alternate between them.
        self._windows = lru_cache(maxsize=2)(plan.windows)

    def read(self, step: int) -> SampleBatch:
        """The batch of a training step.

        Raises:
            InputError: a file cannot be read or no longer has the rows it was planned with.
        """
        epoch, batch = self.plan.locate(step)
        start = batch * self.plan.batch_size
        stop = min(start + self.plan.batch_size, self.plan.rows_per_epoch)
        parts = []
        for window in self._windows(epoch):
            low, high = max(start, window.start), min(stop, window.start + window.num_rows)
            if low < high:
                rows_B = np.arange(low - window.start, high - window.start)
                parts.append(self._window_rows(epoch, window).take(rows_B))
        rows = _Rows.concatenate(parts)
        return SampleBatch(
            step=step,
            row_keys_B=row_keys(rows.file_R, rows.row_R),
            user_ids_B=rows.user_ids_R,
            item_ids_N=rows.item_ids_N,
            offsets_B1=rows.offsets_R1,
            cursor=intervals(self.plan.files, rows.file_R, rows.row_R),
        )

    def _window_rows(self, epoch: int, window: Window) -> _Rows:
        key = (epoch, window.number)
        if key not in self._decoded:
            # Evict first: the bound holds while the new window is decoded, too.
            while len(self._decoded) >= self._cached_windows:
                self._decoded.popitem(last=False)
            self._decoded[key] = self._decode(window).take(self.plan.window_order(epoch, window))
        self._decoded.move_to_end(key)
        return self._decoded[key]

    def _decode(self, window: Window) -> _Rows:
        groups_W = np.array(window.groups)
        parts = []
        for number in np.unique(self.plan.group_file_G[groups_W]).tolist():
            mine = groups_W[self.plan.group_file_G[groups_W] == number]
            path = Path(self.plan.root) / self.plan.files[number]
            table = _read_groups(path, self.plan.group_number_G[mine].tolist())
            rows_of_groups = [
                np.arange(start, start + rows)
                for start, rows in zip(
                    self.plan.group_start_G[mine].tolist(), self.plan.group_rows_G[mine].tolist(), strict=True
                )
            ]
            row_R = np.concatenate(rows_of_groups)
            if len(row_R) != table.num_rows:
                raise InputError(f"{path}: the file has changed since the run was planned; start it again")
            item_ids_N, offsets_R1 = list_values(table["item_ids"])
            file_R = np.full(len(row_R), number, dtype=np.int64)
            parts.append(_Rows(file_R, row_R, table["user_id"].to_numpy(), item_ids_N, offsets_R1))
        return _Rows.concatenate(parts)


def evaluation_batches(
    dataset: Dataset, split: Split, batch_size: int, max_rows: int | None = None
) -> Iterator[SampleBatch]:
    """The first `max_rows` rows of an evaluation split, in file order, with `targets_B`; None is all.

    The last batch may be short.
    """
    rows = dataset.evaluation_rows(split)
    num_rows = len(rows) if max_rows is None else min(max_rows, len(rows))
    # A file number of its own: keys differ from those of the training rows and of the other split.
    file_number = len(dataset.train_files) + list(EVALUATION_FILES).index(split)
    for step, start in enumerate(range(0, num_rows, batch_size)):
        rows_B = np.arange(start, min(start + batch_size, num_rows))
        item_ids_N, offsets_B1 = take_rows(rows.history_ids_N, rows.offsets_B1, rows_B)
        yield SampleBatch(
            step=step,
            row_keys_B=row_keys(np.full(len(rows_B), file_number), rows_B),
            user_ids_B=rows.user_ids_B[rows_B],
            item_ids_N=item_ids_N,
            offsets_B1=offsets_B1,
            targets_B=rows.targets_B[rows_B],
        )


def row_keys(file_B: Int64Array, row_B: Int64Array) -> Int64Array:
    """[B] identity of rows from the number of their file and their place in it."""
    return combine64(file_B, row_B).view(np.int64)


def intervals(files: tuple[str, ...], file_B: Int64Array, row_B: Int64Array) -> tuple[Interval, ...]:
    """Rows as the fewest intervals, sorted by file and row."""
    order_B = np.lexsort((row_B, file_B))
    file_B, row_B = file_B[order_B], row_B[order_B]
    breaks = np.flatnonzero((np.diff(file_B) != 0) | (np.diff(row_B) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(row_B)]])
    return tuple(
        Interval(files[file_B[start]], int(row_B[start]), int(row_B[stop - 1]) + 1)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    )


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{path}: not a readable Parquet file, it may be truncated ({error}); prepare the data set again"
        ) from error


def _read_groups(path: Path, groups: list[int]) -> pa.Table:
    try:
        with _open(path) as file:
            return file.read_row_groups(groups, columns=list(COLUMNS), use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{path}: a row group cannot be decoded ({error}); prepare the data set again"
        ) from error


def _check_schema(path: Path, schema: pa.Schema, first: pa.Schema | None) -> pa.Schema:
    for column, expected in COLUMNS.items():
        if column not in schema.names:
            raise InputError(
                f"{path}: no column {column!r}; found {', '.join(schema.names)}; prepare the data set again"
            )
        found = schema.field(column).type
        # The name of a list's element field ("item", "element") depends on the writer.
        if str(found).replace("element:", "item:") != str(expected).replace("element:", "item:"):
            raise InputError(f"{path}: column {column!r} is {found}, expected {expected}")
    if first is not None and not schema.remove_metadata().equals(first.remove_metadata()):
        raise InputError(
            f"{path}: its columns ({', '.join(schema.names)}) differ in name or type from those of the first "
            f"training file ({', '.join(first.names)}); all files of a data set must have one schema"
        )
    return first or schema
