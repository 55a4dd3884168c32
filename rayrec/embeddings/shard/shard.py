"""One server's part of every table: lookups that wait for a step, steps that commit whole.

    lookup(after_step=t-1) ──waits──► [ committed_step >= t-1 ] ──► rows
                                            ▲ wakes
    apply(step t, source 0) ─┐              │
    apply(step t, source 1) ─┴► all there ──┴► summed in trainer order, committed to every table

`apply` does not wait for other trainers: it stores a contribution, and the call that brings the last one
commits the step. A refused contribution ends the incarnation: calls that wait for that step raise the
error at once. A server that runs these calls on threads needs one for `apply` beside every lookup that
may be waiting.

Sources may send the head of a step first (see `contributions`): when all heads are there its rows take the
step, and `apply_head` answers with rows that the next batch reads. Until the rest has come too, all other
calls wait, since the tables hold a part of a step.

Of large parts, sources ask first whether there is room for them (`admit`, see `step_buffer`): what comes
before its turn in the sum is held.

All of it happens under one lock. While a large step is applied, the lock is lent now and then, between
two rows, to reads of rows that need no later step (not where a table has rows on disk, or evicts): they
get whole rows, some of them with the step's changes, some without. That is within the contract: a lookup
names the earliest step that it accepts, and may arrive after a later one. Exact modes ask early only for
ids that no step in flight updates, so that both versions are the same; a mode that takes stale rows has a
bound that holds for every row. All other calls find the tables as they are between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import (
    Contribution,
    DirtyRows,
    Part,
    SparseUpdate,
    StepContributions,
    UpdateTag,
)
from rayrec.embeddings.shard.disk_prefetch import DiskPrefetch
from rayrec.embeddings.shard.step_buffer import DEFAULT_STEP_BUFFER, PartKey, StepBuffer
from rayrec.embeddings.shard.step_checks import StepChecks, bytes_after, table_named
from rayrec.embeddings.shard.step_lock import StepLock
from rayrec.embeddings.storage.consistent_snapshot import SnapshotEndedError
from rayrec.embeddings.table.table import EmbeddingTable, TableCounts, TableSnapshot
from rayrec.embeddings.table.table_rows import TableRows
from rayrec.platform.arrays import BoolArray, Float32Array, Int32Array, Int64Array

LookupRequest = Mapping[str, Int64Array]
"""Distinct ids by table."""
LookupReply = dict[str, Float32Array]
"""[M, D] rows by table, in the order of the requested ids."""
FetchReply = dict[str, tuple[Int32Array, BoolArray]]
"""([M, W] whole records, [M] whether the id has a row) by table, in the order of the requested ids."""

_LENT_EVERY = 2**19
"""Gradient numbers that are applied before reads are let in: half a millisecond's work."""
HELD_UP_SHARE = 0.25
"""Of `wait_timeout_s`, the most that a snapshot may hold up one step. Lookups here and on other shards, and
groups of trainers, wait for that step, and began before: they have to outlast it, or the run goes back."""


def _key(tag: UpdateTag) -> PartKey:
    return PartKey(tag.step, tag.rank, tag.part)


class StepTimeoutError(TimeoutError):
    """A step was not committed in time, since an update of it has not come."""


@dataclass(frozen=True)
class ShardStats:
    """What one shard holds and has done since it was made."""

    num_rows: dict[str, int]
    num_bytes: int
    lookup_s: float
    """Time spent reading rows."""
    update_s: float
    """Time spent changing them."""
    counts: dict[str, TableCounts] = field(default_factory=dict)
    """What has become of ids, by table."""
    disk_bytes: int = 0
    """Size of the files that hold rows, of tables larger than their memory."""
    read_ahead_s: float = 0.0
    """Time spent bringing rows up from disk before they are needed, beside other calls."""
    step_buffer_bytes: int = 0
    """Most that gradients have taken that came before their turn in the sum of a step."""
    num_held_back: int = 0
    """Parts of steps that waited at their trainers until there was room for them, or it was their turn."""

    @property
    def busy_s(self) -> float:
        return self.lookup_s + self.update_s


@dataclass
class _ShardSnapshot:
    step: int
    tables: dict[str, TableSnapshot] = field(default_factory=dict)
    """Empty until the step is committed and the snapshot begins."""


class EmbeddingShard:
    """Thread-safe; every row is read and changed under one lock.

    Args:
        max_staleness: steps that a trainer may train without the updates before them. A trainer may send a
            step while another one's update of the step before is still on its way; further ahead it
            cannot be, since trainers wait for their own older updates and meet in every dense step.
        memory_limit: most bytes that the tables may take; None for what the machine gives.
        num_threads: that one call may use; the rows do not depend on it.
        called_by: what a rank is the number of, for messages.
        step_buffer: bytes for gradients that come before their turn in the sum of a step; what callers
            send without asking counts on its being kept to.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        shard: int,
        num_trainers: int,
        incarnation: int = 0,
        wait_timeout_s: float = 120.0,
        max_staleness: int = 0,
        memory_limit: int | None = None,
        num_threads: int = 1,
        called_by: str = "trainer",
        step_buffer: int = DEFAULT_STEP_BUFFER,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        names = [config.name for config in tables]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two tables are named {twice!r}; a table is known by its name")
        self._configs = tuple(tables)
        self._shard = shard
        self._num_trainers = num_trainers
        self._wait_timeout_s = wait_timeout_s
        self._steps_ahead = 1 + max_staleness
        self._memory_limit = memory_limit
        self._num_threads = num_threads
        self._called_by = called_by
        self._clock = clock
        self._checks = StepChecks(shard, num_trainers, called_by)
        self._lock = StepLock()
        self._tables = self._empty_tables()
        self._incarnation = incarnation
        self._committed_step = -1
        self._pending: dict[int, StepContributions] = {}
        self._buffer = StepBuffer(step_buffer)
        self._held_back: dict[PartKey, threading.Condition] = {}
        """Who waits for room, each woken alone: a step has as many parts as all of its trainers send."""
        self._step_buffer_bytes = 0
        self._failure: BaseException | None = None
        self._snapshot: _ShardSnapshot | None = None
        self._is_restored = False
        """Whether the rows are those of a snapshot, and no incarnation has begun with them."""
        self._lookup_s = 0.0
        self._update_s = 0.0
        self._held_up_s = 0.0
        """Time that steps spent waiting for the writer of a snapshot."""
        self._held_up_step, self._held_up_before_s = (incarnation, -1), 0.0
        """The step that was held up last, and what `_held_up_s` was before it."""
        self._has_disk = any(config.disk is not None for config in tables)
        self._disk_prefetch = DiskPrefetch(shard, self._table, self._lock, clock)

    @property
    def committed_step(self) -> int:
        """Last step whose update is in the rows; -1 before the first."""
        return self._committed_step

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def lookup(
        self,
        request: LookupRequest,
        after_step: int | None = None,
        empty: Callable[..., Float32Array] = np.empty,
    ) -> LookupReply:
        """Rows of the requested ids, once step `after_step` is committed; creates nothing.

        Rows are whole, and each is as some step from `after_step` on left it. If a later step is being
        applied, that may be the later one for some of them, where it touches them.

        Args:
            request: ids by table.
            after_step: step to wait for; None or -1 waits for none.
            empty: makes the arrays of the reply, so that a transport can have rows read right into its
                memory; called as `np.empty`.

        Raises:
            ValueError: unknown table, or ids of the wrong shape or dtype; or the error with which the
                update of a step it waits for was refused.
            StepTimeoutError: the step was not committed in time.
            RuntimeError: a new incarnation began meanwhile.
            OSError: rows cannot be read from disk, or have to make room there for them and it is full.
        """
        needs = -1 if after_step is None else after_step
        return self._rows(request, needs, lambda: self._committed_step >= needs, empty)

    def fetch(
        self,
        request: LookupRequest,
        after_step: int | None = None,
        empty: Callable[..., Int32Array] = np.empty,
    ) -> FetchReply:
        """Whole records of the requested ids, for a trainer's cache; otherwise as `lookup`."""
        self._disk_prefetch.bring_up(request)
        needs = -1 if after_step is None else after_step
        with self._reading(needs, lambda: self._committed_step >= needs):
            started = self._clock()
            reply = {name: self._table(name).read_records(ids_M, empty) for name, ids_M in request.items()}
            self._lookup_s += self._clock() - started
            return reply

    def prefetch(self, request: LookupRequest) -> None:
        """Read rows that will be looked up soon from disk, in the background.

        Changes no value and waits for nothing. A prefetch that comes while several others wait is dropped,
        and so is one that fails: the lookup will read the rows itself, or raise.
        """
        if self._has_disk:
            self._disk_prefetch.prefetch(request)

    def evicted(self, since_step: int, after_step: int | None = None) -> dict[str, Int64Array]:
        """By table, ids whose rows commits after `since_step` gave up and which have none now.

        Waits and raises as `lookup`, but knows whole steps only.
        """
        with self._lock.between_steps():
            if after_step is not None:
                self._wait_until_committed(after_step)
            found = {name: table.evicted_since(since_step).ids_V for name, table in self._tables.items()}
            return {name: ids_V for name, ids_V in found.items() if len(ids_V)}

    def write_back(self, incarnation: int, after_step: int, dirty: DirtyRows) -> int:
        """Take records that a trainer's cache has changed, between two steps; the same twice is as once.

        Returns:
            The last committed step.

        Raises:
            ValueError: another incarnation's call; or records of a wrong shape, of an id without a row, or
                of one that comes twice: then no row has changed. Otherwise as `lookup`.
        """
        with self._lock.between_steps():
            if incarnation != self._incarnation:
                raise ValueError(
                    f"shard {self._shard} is in incarnation {self._incarnation} and refuses rows that a "
                    f"trainer of incarnation {incarnation} brings back"
                )
            self._wait_until_committed(after_step)
            # A call that is delivered again after later steps would put old records over newer rows.
            if self._committed_step == after_step:
                self._checks.written_back(self._tables, after_step, dirty)
                for name, (ids_K, _) in dirty.items():
                    self._table(name).reserve(ids_K[:0], num_written=len(ids_K))
                for name, (ids_K, records_KW) in dirty.items():
                    self._table(name).write_records(ids_K, records_KW)
            return self._committed_step

    def apply(self, tag: UpdateTag, update: SparseUpdate, dirty: DirtyRows | None = None) -> int:
        """Take one trainer's contribution to a step; the last one commits the step to all tables.

        A trainer sends one contribution for every step, empty if it has none. A contribution that came
        before is dropped. All of a step is refused together: then no row has changed.

        Args:
            dirty: records that the trainer has changed and writes back, with this step's changes if they
                had any; none of them is in an update.

        Returns:
            The last committed step, after this call.

        Raises:
            ValueError: another incarnation's tag, a step too far ahead, an unknown trainer or table,
                wrong shapes, a gradient that is not finite (names table, id and source), or a record of an
                id without a row or that something else in the step changes.
            MemoryError: no room for new rows, in the machine or within the limit; no row has changed.
            OSError: the disk below the tables is full; no row has changed. Or it fails, which may be in the
                middle of a step: restore before going on.
        """
        with self._lock.between_steps():
            self._take(tag, Contribution(update, dirty or {}, {}))
            return self._committed_step

    def apply_head(
        self,
        tag: UpdateTag,
        head: SparseUpdate,
        rest: Mapping[str, Int64Array],
        wanted: LookupRequest,
        empty: Callable[..., Float32Array] = np.empty,
    ) -> LookupReply:
        """`take_head`; then rows that its trainer needs next, once every head is there.

        Args:
            wanted: ids by table, that no rest of the step has.
            empty: as for `lookup`.

        Raises:
            As `take_head` and `lookup` do.
        """
        self.take_head(tag, head, rest)
        return self._rows(wanted, tag.step, lambda: self.has_heads(tag.step), empty)

    def take_head(self, tag: UpdateTag, head: SparseUpdate, rest: Mapping[str, Int64Array]) -> None:
        """Take the head of one trainer's contribution; the last one lets the rows of all heads take the step.

        `apply` with the rest has to follow, also if there is none. Tables with rows on disk, and those that
        evict at this step, have no heads: their rows are known only when the step is committed.

        Args:
            tag: with part `HEAD`.
            rest: ids of what will follow, by table, for which room is made now.

        Raises:
            As `apply` does; then no row has changed.
        """
        with self._lock.between_steps():
            self._take(tag, Contribution(head, {}, rest))

    def admit(self, tag: UpdateTag, num_bytes: int) -> None:
        """Wait until there is room for a part that is about to be sent, or it is its turn in the sum.

        Args:
            tag: of the part.
            num_bytes: of its gradients and their ids.

        Raises:
            ValueError: another incarnation's tag, a step too far ahead, or an unknown trainer.
            StepTimeoutError: parts of lower ranks, which are to come first, have not come in time.
            RuntimeError: a new incarnation began meanwhile.
        """
        with self._lock.between_steps():
            if not self._ask_for_room(tag, num_bytes):
                key = _key(tag)
                self._wait_for(
                    f"room for its part of step {tag.step} from {self._called_by} {tag.rank}",
                    lambda: self._buffer.is_granted(key) or self._is_duplicate(tag),
                    self._held_back.setdefault(key, self._lock.condition()),
                )

    def ask_for_room(self, tag: UpdateTag, num_bytes: int) -> bool:
        """`admit` without waiting: whether the part may be sent now; otherwise ask again later."""
        with self._lock.between_steps():
            return self._ask_for_room(tag, num_bytes)

    def begin(self, committed_step: int, incarnation: int) -> None:
        """Start an incarnation whose next step is `committed_step + 1`; lookups that wait are woken.

        Raises:
            ValueError: an incarnation older than the current one.
            RuntimeError: rows have a part of a step, and `restore` has not replaced them.
        """
        with self._lock.between_steps():
            self._check_whole()
            if incarnation < self._incarnation:
                raise ValueError(
                    f"shard {self._shard} is in incarnation {self._incarnation} and cannot return to "
                    f"{incarnation}; a recovery raises the number"
                )
            self._incarnation = incarnation
            if self._snapshot is not None:
                self._end_snapshot(f"incarnation {incarnation} began")
            if self._is_restored:
                for table in self._tables.values():
                    table.begin_changes(committed_step)
            self._is_restored = False
            self._committed_step = committed_step
            self._failure = None
            self._forget_steps()

    def export(self, table: str) -> TableRows:
        """A copy of one table's rows, ordered by virtual bucket, then by id as uint64.

        Raises:
            RuntimeError: a step's head is in the rows and its rest is not.
        """
        with self._lock.between_steps():
            self._check_whole()
            return self._table(table).export()

    def begin_snapshot(self, step: int) -> None:
        """Begin a consistent snapshot of what the tables hold after a step; later steps go on meanwhile.

        May be called before that step is committed, and until anything of the next one is applied; records
        that trainers write back after the step belong to it. `release` ends it.

        Raises:
            ValueError: the next step has begun.
            RuntimeError: there is another snapshot, which has not been released.
        """
        with self._lock.between_steps():
            if self._snapshot is not None:
                raise RuntimeError(
                    f"shard {self._shard}: the snapshot after step {self._snapshot.step} is not written "
                    f"yet; a snapshot after step {step} has to wait until it is released"
                )
            last = self._committed_step + self.has_heads(self._committed_step + 1)
            if last > step:
                raise ValueError(
                    f"shard {self._shard}: too late for a snapshot after step {step}: rows have changes of "
                    f"step {last}"
                )
            self._snapshot = _ShardSnapshot(step)

    def release(self, step: int, incarnation: int | None = None) -> None:
        """Give up the snapshot after this step, if there is one; its reader gets a `SnapshotEndedError`.

        Args:
            incarnation: that it was begun in; one that was begun after a return is another's. None: any.
        """
        with self._lock.changed:
            is_meant = incarnation is None or incarnation == self.incarnation
            if self._snapshot is not None and self._snapshot.step == step and is_meant:
                self._end_snapshot("it was released")

    def export_snapshot(
        self, table: str, step: int, since: int | None = None, incarnation: int | None = None
    ) -> Generator[TableRows, None, None]:
        """One table as it is in the snapshot, in parts by virtual bucket, while steps go on.

        Once for each table: what was read is not kept.

        Args:
            step: that the snapshot follows; waited for.
            since: step of an earlier snapshot: only what later steps have changed. Where it is not known
                which rows were evicted since then, it is everything all the same, and the parts say so.
            incarnation: that it was begun in: after a return, the same step may have another snapshot. None:
                any.

        Raises:
            RuntimeError: no snapshot was begun after that step.
            SnapshotEndedError: the snapshot was released, an incarnation began, there was no memory for it,
                or it was read so slowly that a step had to wait too long (`HELD_UP_SHARE`).
        """
        with self._lock.changed:  # also if a step is held up for want of a reader
            if incarnation not in (None, self._incarnation):
                raise SnapshotEndedError(
                    f"shard {self._shard}: the snapshot after step {step} of incarnation {incarnation} was "
                    f"given up: incarnation {self._incarnation} began"
                )
            snapshot = self._snapshot
            if snapshot is None or snapshot.step != step:
                found = "there is none" if snapshot is None else f"there is one after step {snapshot.step}"
                raise RuntimeError(
                    f"shard {self._shard}: expected a snapshot after step {step} to read, but {found}; begin "
                    "it first"
                )
            if not snapshot.tables:
                self._wait_until_committed(snapshot.step)
                self._take_snapshot()
            if self._snapshot is not snapshot:
                raise SnapshotEndedError(
                    f"shard {self._shard}: the snapshot after step {snapshot.step} was given up meanwhile"
                )
            source = self._table(table)
        yield from source.snapshot_parts(snapshot.tables[table], self._beside_steps, since)

    def restore(self, rows: Mapping[str, Iterable[TableRows]]) -> None:
        """Replace the contents of every table; until `begin` follows, contributions are refused.

        The rows that were there are gone before the first new one is read: there may be no room for both.

        Args:
            rows: by table, in parts of any size.

        Raises:
            ValueError: a table is missing or unknown, and nothing has changed; or one does not fit, and the
                tables are empty. So they are after any other error while parts are read.
        """
        if set(rows) != set(self._tables):
            raise ValueError(
                f"shard {self._shard} holds tables {sorted(self._tables)}, got rows of {sorted(rows)}"
            )
        self._replace_tables(self._empty_tables(), f"shard {self._shard} is being restored")
        # Loaded beside the tables that calls see, and without the lock: a lookup meanwhile finds empty tables
        # or fails, never half of a snapshot.
        restored = self._empty_tables()
        for name, table in restored.items():
            table.load(rows[name])
        self._replace_tables(restored, f"shard {self._shard} was restored; an incarnation has to begin")
        self._is_restored = True

    def roll_back(
        self,
        step: int,
        incarnation: int,
        rows_of: Callable[[Mapping[str, Int64Array]], Mapping[str, Iterable[TableRows]]],
    ) -> bool:
        """Be again what a snapshot holds, by the rows that have changed since, and begin an incarnation.

        Other calls wait meanwhile, and those that wait for a step are let go.

        Args:
            step: of the snapshot.
            rows_of: what it holds of ids by table, in parts; sighted and evicted ids whole.

        Returns:
            Whether it is known which rows have changed since; otherwise nothing has changed.

        Raises:
            ValueError: an incarnation older than the current one.
            Exception: as `restore`, or of `rows_of`; `restore` before going on.
        """
        with self._lock.between_steps():
            changed = {name: table.changed_since(step) for name, table in self._tables.items()}
            known = {name: ids_K for name, ids_K in changed.items() if ids_K is not None}
            if len(known) < len(changed) or self._is_restored:
                return False
            if self._snapshot is not None:
                self._end_snapshot("the rows go back to an earlier snapshot")
            self._failure = RuntimeError(f"shard {self._shard} is going back to step {step}")
            self._forget_steps()
            parts = rows_of(known)
            for name, table in self._tables.items():
                table.roll_back(known[name], parts[name])
            self._is_restored = True
            self.begin(step, incarnation)
            return True

    def _empty_tables(self) -> dict[str, EmbeddingTable]:
        return {config.name: EmbeddingTable(config, self._num_threads) for config in self._configs}

    def _replace_tables(self, tables: dict[str, EmbeddingTable], why_refused: str) -> None:
        with self._lock.between_steps():
            if self._snapshot is not None:
                self._end_snapshot("other rows are restored")
            self._tables = tables
            # What is still on its way belongs to the rows that were here before.
            self._failure = RuntimeError(why_refused)
            self._forget_steps()

    def stats(self) -> ShardStats:
        with self._lock.between_steps():
            return ShardStats(
                num_rows={name: table.num_rows for name, table in self._tables.items()},
                num_bytes=sum(table.num_bytes for table in self._tables.values()),
                lookup_s=self._lookup_s,
                update_s=self._update_s,
                counts={name: table.counts for name, table in self._tables.items()},
                disk_bytes=sum(table.disk_bytes for table in self._tables.values()),
                read_ahead_s=self._disk_prefetch.busy_s,
                step_buffer_bytes=self._step_buffer_bytes,
                num_held_back=self._buffer.num_held_back,
            )

    def _table(self, name: str) -> EmbeddingTable:
        return table_named(self._tables, name)

    def _rows(
        self,
        request: LookupRequest,
        step: int,
        is_there: Callable[[], bool],
        empty: Callable[..., Float32Array],
    ) -> LookupReply:
        """The rows, once what is needed of `step` is there; a later one may be half applied then."""
        self._disk_prefetch.bring_up(request)
        with self._reading(step, is_there):
            started = self._clock()
            reply = {name: self._table(name).lookup(ids_M, empty) for name, ids_M in request.items()}
            self._lookup_s += self._clock() - started
            return reply

    @contextmanager
    def _reading(self, step: int, is_there: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock once what is needed of `step` is there; a later one may be half applied then."""
        with self._lock.reading(is_there, lambda: self._wait_for(f"step {step}", is_there)):
            yield

    def has_heads(self, step: int) -> bool:
        """Whether the rows of the step's heads have taken it."""
        arrived = self._pending.get(step)  # once: other threads ask, too, without the lock
        return self._committed_step >= step or (arrived is not None and arrived.is_begun)

    def _check_whole(self) -> None:
        step = self._committed_step + 1
        if self.has_heads(step):
            raise RuntimeError(
                f"shard {self._shard} has applied a part of step {step} and waits for the rest from "
                f"{self._called_by}s {self._pending[step].missing()}"
            )

    def _let_reads_in(self) -> None:
        # A read of a table on disk might move rows, and take the room there that was reserved for the step.
        if self._has_disk or not self._lock.is_wanted:
            return
        started = self._clock()
        self._lock.lend()
        self._update_s -= self._clock() - started  # it is the reads' time

    def abort(self, error: BaseException) -> None:
        """Let go those that wait for a step: a trainer that it needs has failed."""
        with self._lock.changed:
            if self._failure is None:
                self._failure = error
            self._wake_all()

    def _forget_steps(self) -> None:
        """Contributions that are here, and who waits for something of their steps."""
        self._pending = {}
        self._buffer.clear()
        self._wake_all()

    def _wake_all(self) -> None:
        self._lock.changed.notify_all()
        held_back, self._held_back = self._held_back, {}
        for condition in held_back.values():
            condition.notify_all()

    def _ask_for_room(self, tag: UpdateTag, num_bytes: int) -> bool:
        if self._is_duplicate(tag):
            return True
        if self._failure is not None:
            raise self._failure
        self._checks.order(tag, self._incarnation, self._committed_step, self._steps_ahead)
        return self._buffer.ask(_key(tag), num_bytes, self._is_turn)

    def _is_turn(self, key: PartKey) -> bool:
        arrived = self._pending.get(key.step)
        return key.rank == 0 if arrived is None else arrived.is_next(key.rank, key.part)

    def _make_room_in_buffer(self, step: int, summed: Iterable[tuple[int, Part]]) -> None:
        """Let parts be sent for which there is room since others have gone into the sum."""
        self._buffer.release(PartKey(step, rank, part) for rank, part in summed)
        for key in self._buffer.grant(self._is_turn):
            if key in self._held_back:
                self._held_back.pop(key).notify_all()

    def _wait_until_committed(self, step: int) -> None:
        """Wait until a step is committed and no later one is half applied."""
        self._wait_for(f"step {step}", lambda: self._committed_step >= step)
        self._lock.wait_until_whole()

    def _wait_for(
        self, what: str, is_there: Callable[[], bool], changed: threading.Condition | None = None
    ) -> None:
        """Until what is needed of a step is there; a later one may be half applied then.

        Args:
            changed: notified when it may be; None: with every change.
        """
        incarnation = self._incarnation
        # The incarnation, too: a recovery may commit a step of the same number with other rows.
        in_time = (changed or self._lock.changed).wait_for(
            lambda: is_there() or self._failure is not None or self._incarnation != incarnation,
            self._wait_timeout_s,
        )
        if self._incarnation != incarnation:
            raise RuntimeError(
                f"shard {self._shard}: incarnation {self._incarnation} began while a call of "
                f"incarnation {incarnation} waited for {what}"
            )
        if is_there():
            return
        if self._failure is not None:
            raise self._failure
        assert not in_time
        next_step = self._committed_step + 1
        arrived = self._pending.get(next_step, StepContributions(self._num_trainers))
        raise StepTimeoutError(
            f"shard {self._shard}: waited {self._wait_timeout_s:g} s for {what}, but the last "
            f"committed step is {self._committed_step}; no complete update of step {next_step} "
            f"came from {self._called_by}s {arrived.missing()}"
        )

    def _take(self, tag: UpdateTag, contribution: Contribution) -> None:
        """With the lock held, between two steps: keep a contribution, and go as far as it allows."""
        if self._is_duplicate(tag):
            return
        if self._failure is not None:
            raise self._failure
        self._checks.order(tag, self._incarnation, self._committed_step, self._steps_ahead)
        started, held_up_s = self._clock(), self._held_up_s
        try:
            # Before it is stored: a contribution that is refused must not count as one that has arrived.
            self._checks.contribution(self._tables, tag, contribution)
            if tag.step not in self._pending:
                self._pending[tag.step] = StepContributions(self._num_trainers)
            summed = self._pending[tag.step].add(tag, contribution)
            self._step_buffer_bytes = max(
                self._step_buffer_bytes, sum(arrived.waiting_bytes for arrived in self._pending.values())
            )
            self._make_room_in_buffer(tag.step, summed)
            self._go_on()
        except Exception as error:
            if self.has_heads(self._committed_step + 1):
                error.add_note(
                    f"shard {self._shard}: rows of the head of step {self._committed_step + 1} have it; "
                    "restore before going on"
                )
            # Kept for the calls that wait for this step, and for those that come: the step will never be
            # complete, and without the error they would wait until they time out.
            self._failure = error
            self._wake_all()
            raise
        finally:
            # Time that a snapshot's writer held the step up is not time spent changing rows.
            self._update_s += self._clock() - started - (self._held_up_s - held_up_s)
            self._lock.changed.notify_all()

    def _is_duplicate(self, tag: UpdateTag) -> bool:
        # A transport may deliver a call twice; gradients must count once. Committed steps are known by their
        # number, so nothing has to be remembered of them.
        return tag.incarnation == self._incarnation and (
            tag.step <= self._committed_step
            or (tag.step in self._pending and self._pending[tag.step].has(tag))
        )

    def _go_on(self) -> None:
        """Commit the steps that are complete, and begin the next one if all its heads are there."""
        while True:
            step = self._committed_step + 1
            arrived = self._pending.get(step)
            if arrived is None:
                return
            if not arrived.missing():
                # Before the first row changes: a snapshot after the last step begins here at the latest.
                self._take_snapshot()
                self._commit(step, arrived.left(), arrived.dirty(), arrived.newest_event)
                del self._pending[step]
                self._committed_step = step
                continue
            if arrived.has_all_heads() and not arrived.is_begun:
                self._take_snapshot()
                self._begin_step(step, arrived)
            return

    def _begin_step(self, step: int, arrived: StepContributions) -> None:
        heads = arrived.heads()
        self._checks.sums(self._tables, heads)
        # Of the whole step: what refuses it should do so before a row has changed.
        self._make_room(step, arrived.ids_of_all(), [])
        self._apply(step, heads)
        arrived.begin()

    def _commit(
        self,
        step: int,
        update: Mapping[str, tuple[Int64Array, Float32Array]],
        dirty: list[DirtyRows],
        newest_event: int | None,
    ) -> None:
        """Records come in the order of their trainers."""
        self._checks.sums(self._tables, update)
        self._checks.dirty(self._tables, step, dirty, update)
        self._make_room(step, {name: ids_M for name, (ids_M, _) in update.items()}, dirty)
        # From here on nothing fails: all checks and all memory come before the first change, so that a
        # refused step leaves every table as it was.
        for records in dirty:
            for name, (ids_K, records_KW) in records.items():
                self._tables[name].write_records(ids_K, records_KW)
        self._apply(step, update)
        for table in self._tables.values():
            table.evict(step, newest_event)

    def _take_snapshot(self) -> None:
        """With the lock held: let the snapshot begin, if it is one after the last committed step."""
        snapshot = self._snapshot
        if snapshot is not None and not snapshot.tables and snapshot.step == self._committed_step:
            snapshot.tables = {
                name: table.begin_snapshot(snapshot.step, self._wait_for_writer, self._snapshot_room(name))
                for name, table in self._tables.items()
            }

    def _snapshot_room(self, name: str) -> int | None:
        """Bytes within the limit for what is kept of a table while a snapshot is written."""
        if self._memory_limit is None:
            return None
        held = {name: table.num_bytes for name, table in self._tables.items()}
        room = max(0, self._memory_limit - sum(held.values()))
        return room * held[name] // max(1, sum(held.values()))

    @property
    def _snapshot_bytes(self) -> int:
        tables = {} if self._snapshot is None else self._snapshot.tables
        return sum(table.num_bytes for table in tables.values())

    def _end_snapshot(self, why: str) -> None:
        """With the lock held."""
        assert self._snapshot is not None
        error = SnapshotEndedError(
            f"shard {self._shard}: the snapshot after step {self._snapshot.step} is given up: {why}"
        )
        for name, snapshot in self._snapshot.tables.items():
            snapshot.end(error)
            self._tables[name].end_snapshot()
        self._snapshot = None
        self._lock.changed.notify_all()

    def _wait_for_writer(self, is_room: Callable[[], bool]) -> None:
        step = (self._incarnation, self._committed_step + 1)
        if self._held_up_step != step:
            self._held_up_step, self._held_up_before_s = step, self._held_up_s
        most_s = self._wait_timeout_s * HELD_UP_SHARE
        left_s = most_s - (self._held_up_s - self._held_up_before_s)
        started = self._clock()
        if not self._lock.hold_up(is_room, max(0.0, left_s)):
            self._end_snapshot(
                "what steps have changed since then fills the memory that it may take, and writing it has "
                f"made too little room in the {most_s:g} s that it may hold up a step"
            )
        self._held_up_s += self._clock() - started

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Hold the lock to read a snapshot, which may be anywhere in a step."""
        with self._lock.changed:
            yield
            self._lock.notify_held_up()

    def _make_room(self, step: int, ids: Mapping[str, Int64Array], dirty: list[DirtyRows]) -> None:
        self._check_memory(step, ids)
        nothing = np.empty(0, dtype=np.int64)
        for name, table in self._tables.items():
            num_written = sum(len(records[name][0]) for records in dirty if name in records)
            table.reserve(ids.get(name, nothing), num_written)

    def _apply(self, step: int, update: Mapping[str, tuple[Int64Array, Float32Array]]) -> None:
        # A row that the step changes and gives up would be seen in between, as no step leaves it.
        lends = not any(table.config.evicts_at(step) for table in self._tables.values())
        for name, (ids_M, grads_MD) in update.items():
            num_ids = max(1, _LENT_EVERY // grads_MD.shape[1])
            for first in range(0, len(ids_M), num_ids):
                part = slice(first, first + num_ids)
                self._tables[name].apply_checked(ids_M[part], grads_MD[part], step)
                if lends:
                    self._let_reads_in()

    def _check_memory(self, step: int, ids: Mapping[str, Int64Array]) -> None:
        if self._memory_limit is None:
            return
        num_more = {name: len(ids.get(name, ())) for name in self._tables}
        if bytes_after(self._tables, num_more) + self._snapshot_bytes <= self._memory_limit:
            return  # even if every id were new: most steps need not look for their ids
        num_more |= {name: self._tables[name].num_missing(ids_M) for name, ids_M in ids.items()}
        needed = bytes_after(self._tables, num_more)
        limit = self._memory_limit
        if needed + self._snapshot_bytes > limit and self._snapshot_bytes:
            # New rows are not refused for a snapshot's sake: it is written first, or given up.
            self._wait_for_writer(lambda: needed + self._snapshot_bytes <= limit)
        if needed + self._snapshot_bytes > limit and any(num_more.values()):
            raise self._checks.beyond_memory(step, self._tables, num_more, limit)
