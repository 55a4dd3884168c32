"""What a run has consumed: explicit intervals of rows, per epoch and file.

Steps commit the rows that they trained on. The cursor says nothing of readers, trainers or steps, so it
holds for any number of them; and it holds rows, not a position in an order, so that "every row once" can be
looked up and does not have to be believed. Committing a row twice is an error of ours and ends the run.

Axes: K intervals of one epoch and file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.intervals import Interval, Intervals

FORMAT = 1
SCHEMA = pa.schema(
    [
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("unreadable", pa.bool_(), nullable=False),
    ]
)
"""Of `Cursor.to_table`: rows `start` to `stop` (exclusive), as numbered in the file."""
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class FileProgress:
    """What has been consumed of one file in one epoch."""

    epoch: int
    file: str
    consumed: int
    """Rows."""
    unreadable: int
    """Rows that were passed over since they cannot be decoded."""
    rows: int | None
    """That the file has; None where it is not known."""


class _Rows:
    """Rows of one file as sorted intervals that do not touch."""

    def __init__(self, starts_K: Int64Array = _NONE, stops_K: Int64Array = _NONE) -> None:
        self.starts_K = starts_K
        self.stops_K = stops_K

    @property
    def count(self) -> int:
        return int((self.stops_K - self.starts_K).sum())

    def first_shared(self, starts_K: Int64Array, stops_K: Int64Array) -> int | None:
        """A row that is in these intervals, too; None: there is none."""
        if not len(self.starts_K):
            return None
        after_K = np.searchsorted(self.stops_K, starts_K, side="right")
        inside_K = np.minimum(after_K, len(self.starts_K) - 1)
        shared_K = (after_K < len(self.starts_K)) & (self.starts_K[inside_K] < stops_K)
        if not shared_K.any():
            return None
        at = int(np.argmax(shared_K))
        return int(max(starts_K[at], self.starts_K[inside_K[at]]))

    def joined(self, starts_K: Int64Array, stops_K: Int64Array) -> _Rows:
        """With further intervals, which share no row with these."""
        starts_K = np.concatenate([self.starts_K, starts_K])
        stops_K = np.concatenate([self.stops_K, stops_K])
        order_K = np.argsort(starts_K, kind="stable")
        starts_K, stops_K = starts_K[order_K], stops_K[order_K]
        apart = stops_K[:-1] != starts_K[1:]
        return _Rows(starts_K[np.append(True, apart)], stops_K[np.append(apart, True)])


class Cursor:
    """The rows of a data set that have been consumed; unreadable ones, which were passed over, apart."""

    def __init__(self, dataset: str) -> None:
        """
        Args:
            dataset: fingerprint of the data set that files and row numbers are of.
        """
        self.dataset = dataset
        self._rows: dict[tuple[int, str, bool], _Rows] = {}
        self._first_epoch = 0
        """Rows of epochs before it were taken: all that there were to consume are consumed."""

    def commit(self, epoch: int, read: Iterable[Interval], unreadable: Iterable[Interval] = ()) -> None:
        """Rows of an epoch that have now been trained on, and those that were passed over.

        Nothing is changed if one of them was consumed before.

        Raises:
            ValueError: a row was, or is named twice; says which one.
        """
        changed: dict[tuple[int, str, bool], _Rows] = {}
        if epoch < self._first_epoch:
            for file, starts_K, _ in Intervals.of([*read, *unreadable]).by_file():
                raise _consumed_twice(epoch, file, int(starts_K[0]))
        for is_unreadable, intervals in ((False, read), (True, unreadable)):
            for file, starts_K, stops_K in Intervals.of(intervals).by_file():
                for kind in (False, True):
                    key = (epoch, file, kind)
                    shared = changed.get(key, self._of(key)).first_shared(starts_K, stops_K)
                    if shared is not None:
                        raise _consumed_twice(epoch, file, shared)
                overlap = np.flatnonzero(stops_K[:-1] > starts_K[1:])
                if len(overlap):
                    raise _consumed_twice(epoch, file, int(starts_K[overlap[0] + 1]))
                key = (epoch, file, is_unreadable)
                changed[key] = changed.get(key, self._of(key)).joined(starts_K, stops_K)
        self._rows |= changed

    def take(self, stop: int) -> dict[tuple[int, str, bool], tuple[list[int], list[int]]]:
        """Hand over what was consumed in the epochs before one, which are over.

        Returns:
            By epoch, file, and whether rows are unreadable: where intervals start and stop.
        """
        self._first_epoch = max(stop, self._first_epoch)
        taken = [key for key in self._rows if key[0] < stop]
        rows = {key: self._rows.pop(key) for key in taken}
        return {key: (found.starts_K.tolist(), found.stops_K.tolist()) for key, found in rows.items()}

    def put_back(self, epoch: int, file: str, unreadable: bool, starts: list[int], stops: list[int]) -> None:
        """Have again what `take` handed over.

        Raises:
            ValueError: rows of the file are here already, or are named twice.
        """
        key = (epoch, file, unreadable)
        if key in self._rows:
            raise _consumed_twice(epoch, file, starts[0])
        bounds = [bound for pair in zip(starts, stops, strict=True) for bound in pair]
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"intervals of {file} in epoch {epoch} are not in order")
        rows = _Rows(np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64))
        other = self._rows.get((epoch, file, not unreadable))
        if other is not None and (shared := other.first_shared(rows.starts_K, rows.stops_K)) is not None:
            raise _consumed_twice(epoch, file, shared)
        self._rows[key] = rows

    @property
    def epochs(self) -> list[int]:
        return sorted({epoch for epoch, _, _ in self._rows})

    def intervals(self, epoch: int, unreadable: bool = False) -> list[Interval]:
        """Consumed (or passed over) rows of an epoch as the fewest intervals, sorted."""
        return [
            Interval(file, start, stop)
            for (of_epoch, file, kind), rows in sorted(self._rows.items(), key=lambda item: item[0])
            if (of_epoch, kind) == (epoch, unreadable)
            for start, stop in zip(rows.starts_K.tolist(), rows.stops_K.tolist(), strict=True)
        ]

    def num_rows(self, epoch: int, unreadable: bool = False) -> int:
        return sum(
            rows.count
            for (of_epoch, _, kind), rows in self._rows.items()
            if (of_epoch, kind) == (epoch, unreadable)
        )

    def progress(
        self, rows_of_files: Callable[[int], Mapping[str, int]] = lambda epoch: {}
    ) -> list[FileProgress]:
        """One line for each epoch and file, sorted.

        Args:
            rows_of_files: of an epoch, the rows of every file, as far as they are known; those of which
                nothing was consumed get their lines, too.
        """
        names: dict[int, set[str]] = {}
        for epoch, file, _ in self._rows:
            names.setdefault(epoch, set()).add(file)
        lines = []
        for epoch in sorted(names):
            known = rows_of_files(epoch)
            lines += [
                FileProgress(
                    epoch,
                    file,
                    self._of((epoch, file, False)).count,
                    self._of((epoch, file, True)).count,
                    known.get(file),
                )
                for file in sorted({*known, *names[epoch]})
            ]
        return lines

    def to_table(self) -> pa.Table:
        """As `SCHEMA` says, sorted; the fingerprint of the data set is in the schema's metadata."""
        keys = sorted(self._rows)
        counts = [len(self._rows[key].starts_K) for key in keys]
        columns = [
            pa.array(np.repeat(np.array([epoch for epoch, _, _ in keys], dtype=np.int64), counts)),
            pa.array(np.repeat(np.array([file for _, file, _ in keys], dtype=object), counts), pa.string()),
            pa.array(np.concatenate([_NONE, *(self._rows[key].starts_K for key in keys)])),
            pa.array(np.concatenate([_NONE, *(self._rows[key].stops_K for key in keys)])),
            pa.array(np.repeat(np.array([kind for _, _, kind in keys], dtype=bool), counts)),
        ]
        return pa.Table.from_arrays(
            columns,
            schema=SCHEMA.with_metadata({"rayrec.cursor": str(FORMAT), "rayrec.dataset": self.dataset}),
        )

    @classmethod
    def from_table(cls, table: pa.Table, source: str) -> Cursor:
        """The cursor that a table of a snapshot holds.

        Args:
            source: where the table was read; messages begin with it.

        Raises:
            InputError: it is no cursor, or names a row twice.
        """
        metadata = table.schema.metadata or {}
        if metadata.get(b"rayrec.cursor") != str(FORMAT).encode() or not table.schema.equals(SCHEMA):
            raise InputError(
                f"{source}: not a cursor of format {FORMAT}; found columns {', '.join(table.column_names)}"
            )
        cursor = cls(metadata[b"rayrec.dataset"].decode())
        rows: dict[int, tuple[list[Interval], list[Interval]]] = {}
        for epoch, file, start, stop, unreadable in zip(
            *(column.to_pylist() for column in table.columns), strict=True
        ):
            rows.setdefault(epoch, ([], []))[unreadable].append(Interval(file, start, stop))
        try:
            for epoch, (read, unreadable) in rows.items():
                cursor.commit(epoch, read, unreadable)
        except ValueError as error:
            raise InputError(f"{source}: the cursor is damaged: {error}") from error
        return cursor

    def check_belongs_to(self, dataset: str, source: str) -> None:
        """Check that the cursor counts rows of this data set.

        Raises:
            InputError: the cursor is of another data set.
        """
        if self.dataset != dataset:
            raise InputError(
                f"{source}: belongs to another data set (fingerprint {self.dataset[:12]}..., this one has "
                f"{dataset[:12]}...); continue with the data that the run began with, or start a new run"
            )

    def _of(self, key: tuple[int, str, bool]) -> _Rows:
        return self._rows.get(key, _Rows())


def _consumed_twice(epoch: int, file: str, row: int) -> ValueError:
    return ValueError(f"row {row} of {file} was to be consumed twice in epoch {epoch}")
