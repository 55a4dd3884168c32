"""A consistent snapshot: what some ids held at a step boundary, read while steps go on (copy on write).

    steps    ── copy an id's record before they change or remove it ──► copy-on-write buffer
    reader   bucket after bucket: what is in the buffer, and of the others what no later step has stamped

Nothing is copied when the snapshot begins, and no list of ids is made: an id that is added later is known by
the step in its record, which is later than the snapshot's. Buckets that the reader has passed are not copied
any more, and their memory in the buffer is used again. An id may be in the buffer twice, if a record without
a later step was written back by a trainer in between; the first copy counts.

The reader holds the lock for a small part at a time, less than a millisecond, so that steps wait for it no
longer; a step that finds the buffer full waits for the reader, which then has the lock to itself.

Axes: M ids of one call, K ids of a part, W words of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
from numba import carray, njit

from rayrec.embeddings.base.compiled import (
    RowAddresses,
    int32_at,
    prefetch,
    row_address,
)
from rayrec.embeddings.base.layout import NEVER, STEP_WORD
from rayrec.embeddings.base.routing import NUM_BUCKETS, bucket_of
from rayrec.embeddings.storage.copy_on_write import ENTRY_BYTES, CopyOnWriteBuffer
from rayrec.embeddings.storage.index import HASHES, MISSING, ordered_by_bucket
from rayrec.embeddings.storage.records import RecordAccess, RecordArray
from rayrec.embeddings.storage.row_storage import RowReading, SnapshotSource, Wanted
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input, mix64

Wait = Callable[[Callable[[], bool]], None]
"""Called with the lock held: lets the reader go on until the argument says True or the snapshot has ended.

The reader sees the rows as they are then, so callers of `keep` change nothing before it has returned.
"""

ABSENT = np.iinfo(np.int32).max
"""Last step of an id that has no record: later than any snapshot."""

_SCANNED_SLOTS = 2**16
"""Slots that are looked at under the lock: a few tenths of a millisecond."""
_PART_BYTES = 2**20
"""Records that are copied under the lock, of the buffer and of the others: half a millisecond each."""
_LEAST_LISTED, _SLOTS_PER_LISTED_ID = 2**18, 8
"""Ids that are listed at once: so many, or one for so many slots of the map. Each list takes a pass over
these, and another one says where lists begin; a map has up to 0.6 ids per slot, which makes 5 lists."""
_AHEAD = 24  # records asked for this many ids early
_KEPT_IDS = 8192
"""Ids that are copied to the buffer between two looks at whether there is room."""
MIN_BUFFER_BYTES, BUFFER_SHARE = 16 * 2**20, 4
"""The buffer of a table may take so much, or a quarter of what the table takes in memory."""


def max_buffer_bytes(num_bytes: int) -> int:
    """Size of the buffer, for something of so much memory, at which a step waits for the reader."""
    return max(MIN_BUFFER_BYTES, num_bytes // BUFFER_SHARE)


def most_listed(num_slots: int) -> int:
    """Ids of a map of so many slots that are listed at once."""
    return max(_LEAST_LISTED, num_slots // _SLOTS_PER_LISTED_ID)


class SnapshotRecords(NamedTuple):
    """Records of a part."""

    ids_K: Int64Array
    """By virtual bucket, then as uint64."""
    records_KW: Int32Array


class SnapshotEndedError(RuntimeError):
    """A snapshot was given up before all of it was read."""


class ConsistentSnapshot:
    """One source's records as a step left them. Not thread-safe: the caller locks.

    Args:
        step: that the snapshot follows. Every change of a record from now on belongs to a later one.
        most_bytes: of the buffer, before `wait` is called.
        wait: for the reader, when the buffer is full.
    """

    def __init__(self, source: SnapshotSource, step: int, most_bytes: int, wait: Wait) -> None:
        self.step = step
        self._source = source
        self._most_bytes = most_bytes
        self._wait = wait
        self._buffer = CopyOnWriteBuffer(source.num_words)
        self._passed = 0
        """Buckets below this have been read."""
        self._ended: Exception | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the buffer."""
        return self._buffer.num_bytes

    @property
    def num_buffered(self) -> int:
        """Records in the buffer now."""
        return len(self._buffer)

    def keep(self, ids_M: Int64Array, steps_M: Int32Array, read: Callable[[Int64Array], Int32Array]) -> None:
        """Copy what distinct ids hold to the buffer, before it changes or is removed.

        Where memory is lacking for it, the snapshot is given up and the step goes on.

        Args:
            steps_M: last step that changed each record, `ABSENT` where there is none.
            read: gives records of ids at these positions.
        """
        with self._ended_for_want_of_memory():
            # A later stamp: an earlier change has copied the record already, or the snapshot has none.
            old_M = np.flatnonzero(steps_M <= self.step)
            old_M = self._not_passed(ids_M, old_M)
            self._keep(ids_M, old_M, lambda at_K, rows_K: self._buffer.records.write(rows_K, 0, read(at_K)))

    def keep_rows(self, ids_M: Int64Array, records: RecordAccess, rows_M: Int64Array) -> None:
        """`keep` of records that end with step and count; -1 for an id that has none."""
        with self._ended_for_want_of_memory():
            rows_M, ids_M = kernel_input(rows_M, np.int64), kernel_input(ids_M, np.int64)
            old_M = _older(records.addresses, rows_M, ids_M, self.step, self._passed)
            self._keep(
                ids_M, old_M, lambda at_K, to_K: records.copy_rows(rows_M[at_K], self._buffer.records, to_K)
            )

    def _keep(
        self, ids_M: Int64Array, old_M: Int64Array, copy: Callable[[Int64Array, Int64Array], None]
    ) -> None:
        """Copy records to the buffer, a part at a time.

        Args:
            copy: copies records of ids at the given positions to the given rows of the buffer.
        """
        passed = self._passed
        for first in range(0, len(old_M), _KEPT_IDS):
            some_M = old_M[first : first + _KEPT_IDS]
            # While a part before this one waited, the reader may have passed buckets of these ids. Copies
            # made now would never be taken, since the reader does not come back.
            if self._passed != passed:
                some_M = self._not_passed(ids_M, some_M)
            self._keep_some(ids_M, some_M, copy)

    @contextmanager
    def _ended_for_want_of_memory(self) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            lacking = SnapshotEndedError(
                f"no memory for what steps change while the snapshot after step {self.step} is read"
            )
            lacking.__cause__ = error
            self.end(lacking)

    def _not_passed(self, ids_M: Int64Array, some_M: Int64Array) -> Int64Array:
        """Positions of ids that are still to be read."""
        return some_M[bucket_of(ids_M[some_M]) >= self._passed]

    def end(self, error: Exception) -> None:
        """Give up what has not been read; the reader gets this error."""
        self._ended = error
        self._pass(NUM_BUCKETS)

    def parts(
        self,
        lock: Callable[[], AbstractContextManager[object]],
        after_step: int | None = None,
        changed_K: Int64Array | None = None,
    ) -> Iterator[SnapshotRecords]:
        """Everything, in the order of buckets, in parts of whole ones; steps may go on in between.

        Args:
            lock: holds the lock.
            after_step: only records that a step after this one has changed.
            changed_K: distinct ids in the order of buckets that have all of these among them; None to look
                at every id.

        Raises:
            Exception: what `end` was given.
        """
        for buckets in self._lists(lock) if changed_K is None else (range(NUM_BUCKETS),):
            if changed_K is None:
                ids_K, ends_B = self._list_ids(lock, buckets)
            else:
                ids_K = changed_K
                ends_B = np.cumsum(np.bincount(bucket_of(ids_K), minlength=NUM_BUCKETS))
            first, bucket = 0, buckets.start
            while bucket < buckets.stop:
                # As many whole buckets as fit, and at least the next one.
                end = int(np.searchsorted(ends_B, first + self._part_rows, side="right"))
                end = min(max(end, bucket + 1), buckets.stop)
                part, end = self._part(lock, ids_K, first, ends_B, range(bucket, end), after_step)
                if len(part.ids_K):
                    yield part
                first, bucket = int(ends_B[end - 1]), end

    def _keep_some(
        self, ids_M: Int64Array, some_M: Int64Array, copy: Callable[[Int64Array, Int64Array], None]
    ) -> None:
        bytes_after = (4 * self._source.num_words + ENTRY_BYTES) * len(some_M)

        def is_room() -> bool:
            return self._passed == NUM_BUCKETS or self._num_bytes + bytes_after <= self._most_bytes

        # An empty buffer takes anything: waiting could not make more room than there is.
        if not is_room() and self.num_buffered:
            self._wait(is_room)
            some_M = self._not_passed(ids_M, some_M)
        copy(some_M, self._buffer.add(ids_M[some_M]))

    @property
    def _part_rows(self) -> int:
        return max(1, _PART_BYTES // (4 * self._source.num_words))

    @property
    def _num_bytes(self) -> int:
        return (4 * self._source.num_words + ENTRY_BYTES) * self.num_buffered

    def _lists(self, lock: Callable[[], AbstractContextManager[object]]) -> Iterator[range]:
        """Buckets whose ids are listed at once."""
        with lock():
            num_ids, most = len(self._source.ids), most_listed(self._source.ids.num_slots)
        if num_ids <= most:
            yield range(NUM_BUCKETS)
            return
        counts_B = np.zeros(NUM_BUCKETS, dtype=np.int64)
        for ids_K in self._scan(lock, range(NUM_BUCKETS)):
            counts_B += np.bincount(bucket_of(ids_K), minlength=NUM_BUCKETS)
        ends_B = np.cumsum(counts_B)
        first = num_before = 0
        while first < NUM_BUCKETS:
            end = int(np.searchsorted(ends_B, num_before + most, side="right"))
            end = max(end, first + 1)
            yield range(first, end)
            first, num_before = end, int(ends_B[end - 1])

    def _list_ids(
        self, lock: Callable[[], AbstractContextManager[object]], buckets: range
    ) -> tuple[Int64Array, Int64Array]:
        """Ids of these buckets that are there, ordered, with ends.

        Ids that were removed since the snapshot began are missing here; their records are in the buffer.
        """
        return ordered_by_bucket(np.concatenate(list(self._scan(lock, buckets))))

    def _scan(
        self, lock: Callable[[], AbstractContextManager[object]], buckets: range
    ) -> Iterator[Int64Array]:
        first = 0
        while first < HASHES:
            with self._checked(lock):
                ids_K, first = self._source.ids.ids_from(first, _SCANNED_SLOTS, buckets)
            yield ids_K

    def _part(
        self,
        lock: Callable[[], AbstractContextManager[object]],
        ids_K: Int64Array,
        first: int,
        ends_B: Int64Array,
        buckets: range,
        after_step: int | None,
    ) -> tuple[SnapshotRecords, int]:
        """What the snapshot has of these buckets, or of the first of them, and where those end.

        Args:
            ids_K: as they are listed.
            first: of the first bucket among them.
            ends_B: of every bucket among them.
        """
        after = NEVER - 1 if after_step is None else after_step
        # The lock is given back while the disk is read. Rows that steps change meanwhile are copied to the
        # buffer, since these buckets are not passed before `_pass_part` has seen both under one lock.
        with self._checked(lock):
            end = self._buffer.end_within(buckets, self._part_rows)
            ids_K = ids_K[first : ends_B[end - 1]]
            reading = self._source.begin_reading(ids_K)
            if reading is None:
                found = self._pass_part(None, ids_K, end, after)
        if reading is not None:
            try:
                reading.read()
                with self._checked(lock):
                    found = self._pass_part(reading, ids_K, end, after)
            finally:
                with lock():
                    reading.close()
        live, buffered = found
        is_wanted_A = self._source.steps(buffered.records_KW) > after
        if not is_wanted_A.all():
            buffered = SnapshotRecords(buffered.ids_K[is_wanted_A], buffered.records_KW[is_wanted_A])
        return (_merged(live, buffered) if len(buffered.ids_K) else live), end

    def _pass_part(
        self, reading: RowReading | None, ids_K: Int64Array, end: int, after: int
    ) -> tuple[SnapshotRecords, SnapshotRecords]:
        """Copies of what no step has changed since the snapshot began, and of what is in the buffer."""
        buffered = SnapshotRecords(*self._buffer.take(self._passed, end))
        # An id in both was changed since: the table has the new record, the buffer the one that is wanted.
        live_K = _not_among(ids_K, buffered.ids_K)
        at_K, records_KW = self._source.finish_reading(reading, Wanted(ids_K, live_K, after, self.step))
        self._pass(end)
        return SnapshotRecords(ids_K[at_K], records_KW), buffered

    def _pass(self, end: int) -> None:
        self._passed = end
        if end == NUM_BUCKETS:
            self._buffer = CopyOnWriteBuffer(self._source.num_words)

    @contextmanager
    def _checked(self, lock: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        with lock():
            if self._ended is not None:
                raise self._ended
            yield


def _merged(live: SnapshotRecords, buffered: SnapshotRecords) -> SnapshotRecords:
    """Records of ids that are in only one of the two."""
    positions_L, positions_A = _positions(live.ids_K, buffered.ids_K)
    num_ids, num_words = len(positions_L) + len(positions_A), buffered.records_KW.shape[1]
    merged = SnapshotRecords(np.empty(num_ids, np.int64), np.empty((num_ids, num_words), np.int32))
    for part, positions in ((live, positions_L), (buffered, positions_A)):
        merged.ids_K[positions] = part.ids_K
        RecordArray(part.records_KW).copy_to(np.arange(len(positions)), merged.records_KW, positions)
    return merged


@njit(nogil=True, cache=True)
def _comes_before(id_: int, other: int) -> bool:
    """In the order of buckets, and as uint64 within one."""
    bucket = mix64(np.uint64(id_)) & np.uint64(NUM_BUCKETS - 1)
    bucket_of_other = mix64(np.uint64(other)) & np.uint64(NUM_BUCKETS - 1)
    comes_before = bucket < bucket_of_other
    if bucket == bucket_of_other:
        comes_before = np.uint64(id_) < np.uint64(other)
    return bool(comes_before)


@njit(nogil=True, cache=True)
def _not_among(ids_K: Int64Array, others_A: Int64Array) -> Int64Array:
    """Positions of ids that are not among others, both in the order of buckets."""
    found_K = np.empty(len(ids_K), dtype=np.int64)
    num_found = a = 0
    for k in range(len(ids_K)):
        while a < len(others_A) and _comes_before(others_A[a], ids_K[k]):
            a += 1
        if a == len(others_A) or others_A[a] != ids_K[k]:
            found_K[num_found] = k
            num_found += 1
    return found_K[:num_found]


@njit(nogil=True, cache=True)
def _positions(ids_L: Int64Array, others_A: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Where distinct ids of two lists, both in the order of buckets, stand in a list of all."""
    positions_L, positions_A = np.empty(len(ids_L), dtype=np.int64), np.empty(len(others_A), dtype=np.int64)
    live = a = 0
    while live < len(ids_L) or a < len(others_A):
        if a == len(others_A) or (live < len(ids_L) and _comes_before(ids_L[live], others_A[a])):
            positions_L[live] = live + a
            live += 1
        else:
            positions_A[a] = live + a
            a += 1
    return positions_L, positions_A


@njit(nogil=True, cache=True)
def _older(
    rows: RowAddresses, rows_M: Int64Array, ids_M: Int64Array, step: int, first_bucket: int
) -> Int64Array:
    """Positions of ids from some bucket on whose records were changed last in this step or before."""
    found_M = np.empty(len(rows_M), dtype=np.int64)
    num_found, stamp = 0, np.uint64(4 * (rows.words + STEP_WORD))
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M) and rows_M[m + _AHEAD] != MISSING:
            prefetch(row_address(rows, rows_M[m + _AHEAD]) + stamp)
        if rows_M[m] == MISSING or carray(int32_at(row_address(rows, rows_M[m]) + stamp), 1)[0] > step:
            continue
        if np.int64(mix64(np.uint64(ids_M[m])) & np.uint64(NUM_BUCKETS - 1)) >= first_bucket:
            found_M[num_found] = m
            num_found += 1
    return found_M[:num_found].copy()
