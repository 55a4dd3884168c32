"""One embedding table: rows for 64-bit ids, created when an update first names them.

A row's record is described in `rayrec.embeddings.base.layout`.

An id that no update has named, that is not admitted yet, or whose row was evicted has its initial value
(see `rayrec.embeddings.table.row_operations`).

Axes: M ids of one call, D numbers of a row, S numbers of its optimizer state, W words of a record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayrec.embeddings.base.distinct_ids import first_repeated
from rayrec.embeddings.base.layout import NEVER, STEP_WORD
from rayrec.embeddings.config import EvictionConfig, TableConfig
from rayrec.embeddings.storage.consistent_snapshot import ConsistentSnapshot, Wait, max_buffer_bytes
from rayrec.embeddings.storage.disk.tiered_rows import Fetch, TieredRows
from rayrec.embeddings.storage.index import MISSING, IdMap, ordered_by_bucket
from rayrec.embeddings.storage.records import RecordAccess, RecordArray
from rayrec.embeddings.storage.row_storage import MemoryRows, RowsPart, RowStorage, SnapshotSource
from rayrec.embeddings.table.admission import Sighted, SightingCounters
from rayrec.embeddings.table.age_calendar import LISTED_BYTES, AgeCalendar, calendar_of
from rayrec.embeddings.table.event_clock import ClockState, EventClock
from rayrec.embeddings.table.eviction import Evicted, Tombstones, choose_victims
from rayrec.embeddings.table.ids_since import IdsSince
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.embeddings.table.table_rows import Forgotten, TableRows, joined
from rayrec.platform.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input

_EVICTING = 120
"""Bytes per row: tombstones of all (35 to 62), free rows (16), choosing, an eighth at a time (15), and what
the allocator keeps meanwhile: 92 in all were measured, and 117 once."""
GIVEN_UP_SHARE, CHANGED_SHARE = 4, 16
"""Ids are known whose rows were given up, up to a quarter of the rows: a snapshot of what has changed since
is not worth it beyond. And those whose rows have changed, up to a sixteenth: to find an id takes several
times longer than to pass by it in a look at all rows, and they take memory all the time."""


@dataclass(frozen=True)
class TableSnapshot:
    """A table as a step left it, while it changes."""

    step: int
    step_before: int | None
    """Of the snapshot before this one, if there was one."""
    rows: ConsistentSnapshot
    sighted: ConsistentSnapshot
    evicted: ConsistentSnapshot
    forgotten: Forgotten
    clock: ClockState

    def end(self, error: Exception) -> None:
        for snapshot in (self.rows, self.sighted, self.evicted):
            snapshot.end(error)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept for it."""
        return self.rows.num_bytes + self.sighted.num_bytes + self.evicted.num_bytes


@dataclass(frozen=True)
class TableCounts:
    """What has become of ids in this table since it was made."""

    num_created: int = 0
    num_evicted: int = 0
    num_not_admitted: int = 0
    """Gradients dropped because their id had not been seen often enough."""
    num_waiting: int = 0
    """Ids that are counted until they are admitted."""
    num_from_disk: int = 0
    """Rows that were brought back into memory."""


class EmbeddingTable:
    """Rows of one table, or of one shard of it. Not thread-safe; `EmbeddingShard` locks."""

    def __init__(self, config: TableConfig, num_threads: int = 1) -> None:
        """Make a table without rows.

        Args:
            num_threads: that lookups and updates may use; the rows do not depend on it.
        """
        self.config = config
        self._num_threads = num_threads
        self._ops = RowOperations(config, num_threads)
        self._beside = _Beside(*self._nothing_waits(), calendar_of(config.eviction))
        self._clock = self._clock_at(ClockState())
        self._rows: RowStorage = self._empty_rows(self._beside)
        self._most_rows = config.most_rows
        self._num_created = self._num_evicted = self._num_not_admitted = 0
        self._snapshot: TableSnapshot | None = None
        self._last_snapshot_step: int | None = None
        self._given_up, self._changed = IdsSince(GIVEN_UP_SHARE), IdsSince(CHANGED_SHARE)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that were in use at once, of the index, and of what waits for admission."""
        known = self._given_up.num_bytes + self._changed.num_bytes
        return self._rows.num_bytes + known + self._beside.num_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file that holds what memory has no room for."""
        return self._rows.disk_bytes if isinstance(self._rows, TieredRows) else 0

    @property
    def counts(self) -> TableCounts:
        return TableCounts(
            self._num_created,
            self._num_evicted,
            self._num_not_admitted,
            len(self._sightings),
            self._rows.num_from_disk if isinstance(self._rows, TieredRows) else 0,
        )

    def lookup(self, ids_M: Int64Array, empty: Callable[..., Float32Array] = np.empty) -> Float32Array:
        """[M, D] weights of each id; creates nothing, an absent id has its initial value.

        Args:
            empty: makes the array of the rows where the caller wants them; called as `np.empty`.
        """
        self._check_ids(ids_M)
        ids_M = kernel_input(ids_M, np.int64)
        rows_MD = empty((len(ids_M), self.config.dim), dtype=np.float32)
        for piece in self._rows.pieces(len(ids_M)):
            rows_M = self._rows.find(ids_M[piece])
            self._ops.gather(self._rows.records, rows_M, ids_M[piece], rows_MD[piece])
        return rows_MD

    def read_records(
        self, ids_M: Int64Array, empty: Callable[..., Int32Array] = np.empty
    ) -> tuple[Int32Array, BoolArray]:
        """([M, W] records, [M] whether there is a row); an absent id has the record of a new row.

        Args:
            empty: as for `lookup`.
        """
        self._check_ids(ids_M)
        records_MW = empty((len(ids_M), self._ops.num_words), dtype=np.int32)
        present_M = np.empty(len(ids_M), dtype=np.bool_)
        for piece in self._rows.pieces(len(ids_M)):
            rows_M = self._rows.find(ids_M[piece])
            is_there_M = present_M[piece] = rows_M != MISSING
            if is_there_M.all():  # most often, and then there is nothing to pick
                self._rows.records.read_into(rows_M, 0, records_MW[piece])
                continue
            absent = np.flatnonzero(~is_there_M)
            records_MW[piece][is_there_M] = self._rows.records.read(
                rows_M[is_there_M], 0, self._ops.num_words
            )
            records_MW[piece][absent] = self._ops.new_records(ids_M[piece][absent])
        return records_MW, present_M

    def check_records(self, ids_M: Int64Array, records_MW: Int32Array) -> None:
        """Check the shape and type of records that are to be written.

        Raises:
            ValueError: wrong shape or dtype: there must be one whole record for each id.
        """
        self._check_ids(ids_M)
        expected = (len(ids_M), self._ops.num_words)
        if records_MW.shape != expected or records_MW.dtype != np.int32:
            raise ValueError(
                f"table {self.config.name!r}: records must be int32 of shape {expected}, one row per id; "
                f"got {records_MW.dtype} of shape {records_MW.shape}"
            )

    def check_have_rows(self, ids_M: Int64Array) -> None:
        """Check that every id has a row.

        Raises:
            ValueError: an id has no row; names it.
        """
        missing_M = ~self._rows.present(ids_M)
        if missing_M.any():
            raise ValueError(
                f"table {self.config.name!r}: id {ids_M[missing_M][0]} has no row for its record to come "
                "back to; no row has changed"
            )

    def check_distinct(self, ids_M: Int64Array) -> None:
        """Check that no id comes twice.

        Raises:
            ValueError: an id comes twice; names it.
        """
        repeated = first_repeated(ids_M)
        if repeated is not None:
            raise ValueError(f"table {self.config.name!r}: id {repeated} comes twice; no row has changed")

    def write_records(self, ids_M: Int64Array, records_MW: Int32Array) -> None:
        """Set the whole records of distinct ids, which must have rows: they were read from here."""
        for piece in self._rows.pieces(len(ids_M)):
            rows_M = self._rows.find(ids_M[piece])
            assert not np.any(rows_M == MISSING), f"{self.config.name!r}: a record came back to no row"
            self._keep(ids_M[piece], self._rows.records, rows_M)
            if self._changed.is_on and len(rows_M):
                before_M = self._ops.stamps(self._rows.records, rows_M)[:, 0]
                newest = int(records_MW[piece, STEP_WORD].max())
                self._note_changes(ids_M[piece], before_M, newest)
            self._rows.records.write(rows_M, 0, records_MW[piece])

    def apply(
        self, ids_M: Int64Array, grads_MD: Float32Array, step: int, newest_event: int | None = None
    ) -> None:
        """One step's update: admit ids, create their rows, let the optimizer change all of them, evict.

        Args:
            ids_M: [M] distinct ids.
            grads_MD: [M, D] their gradients, float32.
            step: number of the step, from 0.
            newest_event: UNIX seconds of the newest event that the step has read, if it says so.

        Raises:
            ValueError: wrong shape or dtype, or a gradient that is not finite; nothing has changed.
            MemoryError: no room for the new rows; nothing has changed.
        """
        self.check_update(ids_M, grads_MD)
        self.reserve(ids_M)
        self.apply_checked(ids_M, grads_MD, step)
        self.evict(step, newest_event)

    def check_update(self, ids_M: Int64Array, grads_MD: Float32Array) -> None:
        """Raise the ValueError that `apply` would raise; changes nothing."""
        self._ops.check_gradients(ids_M, grads_MD)

    def has_rows(self, ids_M: Int64Array) -> BoolArray:
        """[M] whether each id has a row; nothing is read from disk for it."""
        return self._rows.present(kernel_input(ids_M, np.int64))

    def num_missing(self, ids_M: Int64Array) -> int:
        """How many of these distinct ids have no row."""
        return int(np.count_nonzero(~self._rows.present(ids_M)))

    def bytes_after(self, num_more: int) -> int:
        """Most that `num_bytes` is, and takes on the way, when so many more ids have rows."""
        waiting = self._beside.num_bytes
        if self.config.admission.min_sightings > 1:
            waiting += self._sightings.growth_bytes(num_more)
        if self._ages is not None:
            waiting += LISTED_BYTES * num_more
        return self._rows.bytes_after(num_more) + waiting

    def reserve(self, ids_M: Int64Array, num_written: int = 0) -> None:
        """Make room for the rows of those ids, so that `apply_checked` cannot fail for memory or disk.

        Args:
            num_written: rows that `write_records` will set before it.

        Raises:
            MemoryError, OSError: there is none, in memory or on disk; nothing has changed.
        """
        num_new = len(ids_M)
        is_counted = self.config.admission.min_sightings > 1
        if is_counted or not self._rows.has_room(num_new):
            num_new = self.num_missing(ids_M)
        if num_new and is_counted:
            self._sightings.reserve(num_new)
        self._rows.reserve(num_new, len(ids_M) + num_written)

    def apply_checked(self, ids_M: Int64Array, grads_MD: Float32Array, step: int) -> None:
        """The part of `apply` that changes rows, for an update that was checked and has room."""
        ids_M = kernel_input(ids_M, np.int64)
        for piece in self._rows.pieces(len(ids_M)):
            self._apply_piece(ids_M[piece], self._rows.find(ids_M[piece]), grads_MD[piece], step)

    def evicting_bytes(self, num_more: int) -> int:
        """Most that an eviction takes on the way, when so many more ids have rows, beside `num_bytes`."""
        return 0 if self.config.eviction is None else _EVICTING * (self.num_rows + num_more)

    def evict(self, step: int, newest_event: int | None = None) -> None:
        """Give up the rows that the config wants given up when this step commits.

        Args:
            newest_event: as for `apply`.
        """
        self._sightings.forget(step)
        self._tombstones.forget_old(step)
        if self._clock is not None:
            self._clock.advance(newest_event)
        eviction = self.config.eviction
        if eviction is None:
            return
        if not eviction.is_due(step):
            self._look_ahead(step)
            return
        old_step = NEVER - 1 if self._clock is None else self._clock.old_step(step)
        # While a snapshot is read, rows are copied for it before one of them goes.
        if self._ages is not None and self._snapshot is None and isinstance(self._rows, MemoryRows):
            ids_V = self._remove_old(self._ages, self._rows, step, old_step)
        else:
            ids_V = self._victims(eviction, step, old_step)
            self._rows.remove(ids_V)
        self._tombstones.add(ids_V, step)
        self._given_up.add(ids_V, step, self.num_rows + len(ids_V))
        self._num_evicted += len(ids_V)

    def _remove_old(self, ages: AgeCalendar, rows: MemoryRows, step: int, old_step: int) -> Int64Array:
        """Give up what is too old; returns its ids. Each row is found once for it."""
        eviction = self.config.eviction
        assert eviction is not None, "there are ages"
        last_step = old_step
        if eviction.max_age_steps is not None:
            last_step = max(last_step, step - eviction.max_age_steps - 1)
        found = [np.empty(0, dtype=np.int64)]
        for ids_K in ages.take(self._last_list(step, old_step)):
            gone, left_L, steps_L = rows.remove_older(ids_K, last_step)
            found.append(gone)
            ages.add(left_L, steps_L)
        return np.concatenate(found)

    def _victims(self, eviction: EvictionConfig, step: int, old_step: int) -> Int64Array:
        """Ids whose rows are to be given up; they have been copied for the snapshot that is read."""
        found = [np.empty(0, dtype=np.int64)]
        # In parts: to choose takes 113 bytes for each row that is looked at.
        for ids_M, records, rows_M in self._rows_to_evict_from(step, old_step):
            stamps_M2 = self._ops.stamps(records, rows_M)
            victims_M = choose_victims(
                eviction, self._most_rows, ids_M, stamps_M2[:, 0], stamps_M2[:, 1], step, old_step
            )
            found.append(ids_M[victims_M])
            self._keep(ids_M[victims_M], records, rows_M[victims_M])
            if self._ages is not None:
                self._ages.add(ids_M[~victims_M], stamps_M2[~victims_M, 0])
        return np.concatenate(found)

    def _rows_to_evict_from(self, step: int, old_step: int) -> Iterator[RowsPart]:
        """Rows among which all victims of a step are, in parts."""
        if self._ages is None:
            yield from self._rows.parts(ordered=False)
            return
        for ids_K in self._ages.take(self._last_list(step, old_step)):
            yield from self._rows.look(ids_K)

    def _last_list(self, step: int, old_step: int) -> int:
        """Up to which list of the calendar rows may be too old."""
        eviction = self.config.eviction
        assert eviction is not None, "there are ages"
        if eviction.ttl_hours is None:
            return step
        # Lists of steps of the last change. One may hold rows that are too old by steps, and others.
        if eviction.max_age_steps is not None:
            old_step = max(old_step, step - eviction.max_age_steps + eviction.every_steps - 2)
        return old_step

    def _look_ahead(self, step: int) -> None:
        """Look at some of the rows that may be too old soon, rather than at all of them in one step."""
        # Not where rows may be on disk: those that go would be read twice. Nor where nobody knows how soon.
        if self._ages is None or self._clock is not None or not self._rows.stay:
            return
        for some_K in self._ages.ahead(step):
            for ids_K, records, rows_K in self._rows.look(some_K):
                self._ages.add_ahead(ids_K, self._ops.stamps(records, rows_K)[:, 0], step)

    def fetchable(self, ids_M: Int64Array) -> list[Int64Array]:
        """Those of the ids whose rows are on disk, in parts that may be fetched one after the other."""
        self._check_ids(ids_M)
        return self._rows.fetchable(ids_M) if isinstance(self._rows, TieredRows) else []

    def begin_fetch(self, ids_K: Int64Array) -> Fetch:
        """Begin to bring up a part that `fetchable` gave; `Fetch.read` waits for the disk, without the table.

        `finish_fetch` must follow.
        """
        assert isinstance(self._rows, TieredRows)
        return self._rows.begin_fetch(ids_K)

    def finish_fetch(self, fetch: Fetch) -> None:
        """Put into memory what was read, unless it has moved or changed since."""
        assert isinstance(self._rows, TieredRows)
        self._rows.finish_fetch(fetch)

    def evicted_since(self, step: int) -> Evicted:
        """Ids whose rows commits after `step` gave up, and which have none now."""
        return self._tombstones.since(step)

    def export(self) -> TableRows:
        """A copy of every row, ordered by virtual bucket, then by id as uint64."""
        return joined(list(self.export_parts()))

    def export_parts(self) -> Iterator[TableRows]:
        """`export` in parts that follow each other, each a copy, no larger than the table's memory allows.

        The first has what is not a row. Between parts rows may be read, but none may change.
        """
        sighted, evicted = self._sightings.export(), self._tombstones.since(NEVER)
        clock = self._clock_state
        for ids_M, records, rows_M in self._rows.parts(ordered=True):
            weights_MD = np.empty((len(ids_M), self.config.dim), dtype=np.float32)
            self._ops.gather(records, rows_M, ids_M, weights_MD)
            stamps_M2 = self._ops.stamps(records, rows_M)
            yield TableRows(
                ids_M=ids_M,
                weights_MD=weights_MD,
                state_MS=self._ops.state(records, rows_M),
                steps_M=np.ascontiguousarray(stamps_M2[:, 0]),
                counts_M=np.ascontiguousarray(stamps_M2[:, 1]),
                sighted=sighted,
                evicted=evicted,
                clock=clock,
            )
            sighted, evicted, clock = Sighted.nothing(), Evicted.nothing(), ClockState()

    def begin_snapshot(self, step: int, wait: Wait, most_bytes: int | None = None) -> TableSnapshot:
        """Begin a snapshot of what the table holds now; `snapshot_parts` reads it, `end_snapshot` ends it.

        Args:
            step: that was committed last.
            wait: as for `ConsistentSnapshot`.
            most_bytes: of what is kept of rows that change, if that is less than what is usual.
        """
        assert self._snapshot is None, f"{self.config.name!r}: there is a snapshot already"

        def snapshot_of(source: SnapshotSource, num_bytes: int) -> ConsistentSnapshot:
            usual = max_buffer_bytes(num_bytes)
            most = usual if most_bytes is None else min(usual, most_bytes)
            return ConsistentSnapshot(source, step, most, wait)

        self._snapshot = TableSnapshot(
            step,
            self._last_snapshot_step,
            snapshot_of(self._rows, self._rows.num_bytes),
            snapshot_of(self._sightings, self._sightings.num_bytes),
            snapshot_of(self._tombstones, self._tombstones.num_bytes),
            Forgotten(self._sightings.forgotten_step, self._tombstones.forgotten_step),
            self._clock_state,
        )
        self._sightings.snapshot, self._tombstones.snapshot = self._snapshot.sighted, self._snapshot.evicted
        self.begin_changes(step)
        self._last_snapshot_step = step
        return self._snapshot

    def begin_changes(self, step: int) -> None:
        """Let a later snapshot say what has changed since this step, which was committed last."""
        for known in (self._given_up, self._changed, self._sightings.changed):
            known.begin(step)

    def end_snapshot(self) -> None:
        """What changes from now on need not be kept."""
        self._snapshot = self._sightings.snapshot = self._tombstones.snapshot = None

    def snapshot_parts(
        self, snapshot: TableSnapshot, lock: Callable[[], AbstractContextManager[object]], since: int | None
    ) -> Iterator[TableRows]:
        """What the table held at the snapshot, in parts by virtual bucket, while steps go on.

        Args:
            lock: holds the table's lock.
            since: only rows that steps after this one have changed, if the ids whose rows they gave up are
                known; those come first. Likewise of sighted and evicted ids.
        """
        with lock():
            if since is not None and not self._given_up.knows(since):
                since = None
            removed: list[Int64Array] = []
            changed = named = evicted = None
            if since is not None:
                removed = self._given_up.between(since, snapshot.step)
                changed = self._changed.since(since)
                named = self._sightings.changed.since(since)
                evicted = self._tombstones.named_since(since)
            # If this snapshot fails, the next is since the same step as this one, or the one before.
            needed = snapshot.step_before if since is None else since
            if needed is not None:
                for known in (self._given_up, self._changed, self._sightings.changed):
                    known.forget(needed)
        # Without the lock: there may be millions.
        changed_K, named_K, evicted_V = (
            None if parts is None else _distinct(parts) for parts in (changed, named, evicted)
        )
        forgotten = Forgotten() if since is None else snapshot.forgotten
        nothing = replace(self._no_rows(), since=since)
        yield replace(nothing, removed_X=_distinct(removed), forgotten=forgotten, clock=snapshot.clock)
        for part in snapshot.evicted.parts(lock, since, evicted_V):
            yield replace(nothing, evicted=Evicted.of(part))
        for part in snapshot.sighted.parts(lock, since, named_K):
            yield replace(nothing, sighted=Sighted.of(part))
        for ids_K, records_KW in snapshot.rows.parts(lock, since, changed_K):
            yield replace(nothing, **self._unpacked(ids_K, records_KW))

    def _unpacked(self, ids_K: Int64Array, records_KW: Int32Array) -> dict[str, Any]:
        """Rows of whole records."""
        records, rows_K = RecordArray(records_KW), np.arange(len(ids_K))
        return {
            "ids_M": ids_K,
            "weights_MD": self._ops.weights(records_KW),
            "state_MS": self._ops.state(records, rows_K),
            "steps_M": np.ascontiguousarray(records_KW[:, STEP_WORD]),
            "counts_M": np.ascontiguousarray(records_KW[:, STEP_WORD + 1]),
        }

    def _no_rows(self) -> TableRows:
        return TableRows(
            **self._unpacked(np.empty(0, np.int64), np.empty((0, self._ops.num_words), np.int32))
        )

    def load(self, parts: Iterable[TableRows]) -> None:
        """Fill an empty table with rows that come in parts; what is not a row may be in any of them.

        Parts with `since` change what those before them have filled in.

        Raises:
            ValueError: the table has rows, an id comes twice, or a shape is not this table's.
            MemoryError, OSError: no room, in memory or on disk.
        """
        if self.num_rows:
            raise ValueError(f"table {self.config.name!r} has {self.num_rows} rows; load into an empty one")
        beside = _Beside(*self._nothing_waits(), calendar_of(self.config.eviction))
        filled = self._empty_rows(beside)
        self._clock = self._fill(filled, beside, parts)
        self._rows, self._beside = filled, beside

    def changed_since(self, step: int) -> Int64Array | None:
        """[K] distinct ids whose rows later steps have made, changed or given up; None where it is not known.

        Args:
            step: of a snapshot that was begun, or that the rows were loaded from.
        """
        if not self._given_up.knows(step):
            return None
        changed = self._given_up.between(step, sys.maxsize)
        if self._changed.knows(step):
            changed += self._changed.between(step, sys.maxsize)
        else:  # there were too many to remember; each record has the step that changed it last
            for ids_M, records, rows_M in self._rows.parts(ordered=False):
                changed.append(ids_M[self._ops.stamps(records, rows_M)[:, 0] > step])
        return _distinct(changed)

    def roll_back(self, changed_K: Int64Array, parts: Iterable[TableRows]) -> None:
        """Be again what a snapshot holds, of which only the rows that have changed since are read.

        After an error the table is neither.

        Args:
            changed_K: as `changed_since` gave them.
            parts: as for `load`, of rows these alone; the others' ids are named (`TableRows.unread_X`).

        Raises: as `load`.
        """
        assert self._snapshot is None, f"{self.config.name!r}: a snapshot is being read"
        self._rows.remove(changed_K)
        if self._ages is not None:
            listed = IdMap(len(changed_K))
            listed.assign(changed_K, np.zeros(len(changed_K), dtype=np.int64))
            self._ages.discard(listed)
        self._beside.sightings, self._beside.tombstones = self._nothing_waits()
        self._clock = self._fill(self._rows, self._beside, parts)
        self._given_up, self._changed = IdsSince(GIVEN_UP_SHARE), IdsSince(CHANGED_SHARE)
        self._last_snapshot_step = None

    def _fill(self, filled: RowStorage, beside: _Beside, parts: Iterable[TableRows]) -> EventClock | None:
        """Put parts into rows that have none of their ids, and what is no row beside; returns the clock."""
        sightings, tombstones, ages = beside.sightings, beside.tombstones, beside.ages
        clock = ClockState()
        listed = IdMap()
        """Ids that were removed: they are still in the calendar, in a list that is early enough."""
        for part in parts:
            self._check_part(part)
            clock = ClockState.latest(clock, part.clock)
            if part.since is not None:
                self._apply_waiting(part, sightings, tombstones)
            if len(part.removed_X):
                if ages is not None:  # others came and went between two snapshots, and were never listed
                    had_row_X = part.removed_X[filled.present(part.removed_X)]
                    listed.assign(had_row_X, np.zeros(len(had_row_X), dtype=np.int64))
                filled.remove(part.removed_X)
            filled.reserve(len(part.ids_M), len(part.ids_M))
            for piece in filled.pieces(len(part.ids_M)):
                new = self._load_piece(filled, part, piece)
                if ages is not None:
                    ids_M, steps_M = part.ids_M[piece][new], part.steps_M[piece][new]
                    is_new_M = listed.find(ids_M) == MISSING
                    ages.add(ids_M[is_new_M], steps_M[is_new_M])
            sightings.put(part.sighted)
            tombstones.put(part.evicted)
        tombstones.sort()
        if ages is not None and len(listed):
            listed_K = listed.items()[0]
            listed.remove(listed_K[filled.present(listed_K)])
            ages.discard(listed)  # one that gets a row again would be there twice, and given up twice
        return self._clock_at(clock)

    @staticmethod
    def _apply_waiting(part: TableRows, sightings: SightingCounters, tombstones: Tombstones) -> None:
        """What a part with `since` ends of ids without rows, before what it puts in."""
        for ids_K in (part.removed_X, part.ids_M, part.unread_X):  # all were admitted
            sightings.drop(ids_K)
        for ids_K in (part.ids_M, part.unread_X):
            tombstones.forget(ids_K)
        forgotten = part.forgotten
        if forgotten.sighted_step > NEVER:
            sightings.forget_until(forgotten.sighted_step, forgotten.buckets)
        if forgotten.evicted_step > NEVER:
            tombstones.forget_until(forgotten.evicted_step, forgotten.buckets)

    def _check_part(self, rows: TableRows) -> None:
        self._check_ids(rows.ids_M)
        layout, num_rows = self._ops.layout, len(rows.ids_M)
        found = (rows.weights_MD.shape, rows.state_MS.shape, rows.steps_M.shape, rows.counts_M.shape)
        expected = ((num_rows, layout.dim), (num_rows, layout.state_size), (num_rows,), (num_rows,))
        if found != expected:
            raise ValueError(
                f"table {self.config.name!r}: expected weights, state, steps and counts of shapes "
                f"{expected}, found {found}"
            )

    def _load_piece(self, filled: RowStorage, rows: TableRows, piece: slice) -> slice | Int64Array:
        """Put rows in; returns which of the piece had none before."""
        ids_M, num_before = rows.ids_M[piece], len(filled)
        rows_M = filled.find(ids_M)
        is_there_M = rows_M != MISSING
        num_known = 0 if rows.since is None else int(np.count_nonzero(is_there_M))
        new = np.flatnonzero(~is_there_M) if num_known else slice(None)
        rows_M[new] = filled.add(ids_M[new])
        if len(filled) != num_before + len(ids_M) - num_known:
            ids_K, counts_K = np.unique(ids_M, return_counts=True)
            is_repeated_K = counts_K > 1
            repeated = ids_K[is_repeated_K][0] if is_repeated_K.any() else ids_M[is_there_M][0]
            raise ValueError(f"table {self.config.name!r}: id {repeated} comes twice in the rows to load")
        self._ops.set_weights(filled.records, rows_M, ids_M, rows.weights_MD[piece])
        self._ops.set_state(filled.records, rows_M, rows.state_MS[piece])
        stamps_M2 = np.column_stack((rows.steps_M[piece], rows.counts_M[piece]))
        self._ops.set_stamps(filled.records, rows_M, stamps_M2)
        return new

    def _check_ids(self, ids_M: Int64Array) -> None:
        if ids_M.ndim != 1 or ids_M.dtype != np.int64:
            raise ValueError(
                f"table {self.config.name!r}: ids must be one-dimensional int64, "
                f"got {ids_M.dtype} of shape {ids_M.shape}"
            )

    @property
    def _clock_state(self) -> ClockState:
        return ClockState() if self._clock is None else self._clock.state

    def _clock_at(self, state: ClockState) -> EventClock | None:
        """The clock of a table whose rows live for some hours."""
        if self.config.eviction is None or self.config.eviction.ttl_hours is None:
            return None
        return EventClock(3600 * self.config.eviction.ttl_hours, state)

    @property
    def _sightings(self) -> SightingCounters:
        return self._beside.sightings

    @property
    def _tombstones(self) -> Tombstones:
        return self._beside.tombstones

    @property
    def _ages(self) -> AgeCalendar | None:
        return self._beside.ages

    def _nothing_waits(self) -> tuple[SightingCounters, Tombstones]:
        remember_steps = self.config.eviction.remember_steps if self.config.eviction else 0
        return SightingCounters(self.config.admission), Tombstones(remember_steps)

    def _empty_rows(self, beside: _Beside) -> RowStorage:
        if self.config.disk is None:
            return MemoryRows(self._ops.num_words, self._num_threads)
        # Not a method of this table: the two would keep each other, and the disk's space, until a collection.
        return TieredRows(self.config.name, self._ops.num_words, self.config.disk, lambda: beside.num_bytes)

    def _keep(self, ids_M: Int64Array, records: RecordAccess, rows_M: Int64Array) -> None:
        """Before records change or go; -1 for an id without a row."""
        if self._snapshot is not None:
            self._snapshot.rows.keep_rows(ids_M, records, rows_M)

    def _apply_piece(self, ids_M: Int64Array, rows_M: Int64Array, grads_MD: Float32Array, step: int) -> None:
        self._keep(ids_M, self._rows.records, rows_M)
        missing = np.flatnonzero(rows_M == MISSING)
        if len(missing):
            admitted_M = self._sightings.admit(ids_M[missing], step)
            new = missing[admitted_M]
            rows_M[new] = self._create(ids_M[new])
            if self._ages is not None:
                self._ages.add_new(ids_M[new], step)
            if len(new) < len(missing):
                self._num_not_admitted += len(missing) - len(new)
                has_row_M = rows_M != MISSING
                ids_M, rows_M, grads_MD = ids_M[has_row_M], rows_M[has_row_M], grads_MD[has_row_M]
        before_M = self._ops.apply(self._rows.records, rows_M, ids_M, grads_MD, step)
        if self._changed.is_on:
            self._note_changes(ids_M, before_M, step)

    def _note_changes(self, ids_M: Int64Array, before_M: Int32Array, step: int) -> None:
        """Remember those of the ids that have not changed since the last snapshot began, until this step.

        Args:
            before_M: step of the change before.
        """
        self._changed.add(ids_M[before_M <= self._changed.newest], step, self.num_rows)

    def _create(self, ids_M: Int64Array) -> Int64Array:
        """[M] rows of ids that have none yet."""
        # First: it may let a snapshot be read, which would find rows that no step has stamped yet.
        self._tombstones.forget(ids_M)
        rows_M = self._rows.add(ids_M)
        self._rows.records.write(rows_M, 0, self._ops.new_records(ids_M))
        self._num_created += len(ids_M)
        return rows_M


def _distinct(parts: Sequence[Int64Array]) -> Int64Array:
    """Distinct ids of all parts, in the order of buckets."""
    return ordered_by_bucket(np.concatenate([np.empty(0, dtype=np.int64), *parts]))[0]


@dataclass
class _Beside:
    """What a table holds beside its rows, and their bound on memory has to count."""

    sightings: SightingCounters
    tombstones: Tombstones
    ages: AgeCalendar | None

    @property
    def num_bytes(self) -> int:
        ages = 0 if self.ages is None else self.ages.num_bytes
        return self.sightings.num_bytes + self.tombstones.num_bytes + ages
