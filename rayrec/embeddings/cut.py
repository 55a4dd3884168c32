"""What some ids held at a step boundary, read while steps go on: copy on write of records.

    steps    ── whatever is about to change or remove an id's record, sets it aside first, once ──► aside
    writer   bucket after bucket: what is aside, and of the others what no later step has stamped

Nothing is copied at the cut itself, and no list of ids is made: an id that comes later is known by the step
in its record, which is later than the cut. What the writer has passed is no longer set aside, and what is
aside of it is freed.

The writer holds the lock for a small part at a time, about a millisecond, so that steps wait for it no
longer; whoever finds too much aside waits for the writer, which then has the lock to itself.

Axes: M ids of one call, K ids of a part, W words of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from rayrec.embeddings.compiled import (
    RowAddresses,
    int32_at,
    prefetch,
    row_address,
)
from rayrec.embeddings.index import HASHES, MISSING, ordered_by_bucket
from rayrec.embeddings.layout import NEVER, STEP_WORD
from rayrec.embeddings.records import RecordAccess
from rayrec.embeddings.routing import NUM_BUCKETS, bucket_of
from rayrec.embeddings.row_storage import CutSource, MemoryRows, Reading
from rayrec.platform.compiled import kernel_input, mix64

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

Wait = Callable[[Callable[[], bool]], None]
"""Called with the lock held: lets the writer go on, and returns when that says True or the cut has ended."""

ABSENT = np.iinfo(np.int32).max
"""Last step of an id that has no record: later than any cut."""

_SCANNED_SLOTS = 2**16
"""Slots that are looked at under the lock: a few tenths of a millisecond."""
_PART_BYTES = 2**20
"""Records that are copied under the lock: about a millisecond."""
_LEAST_LISTED, _SLOTS_PER_LISTED_ID = 2**18, 8
"""Ids that are listed at once: so many, or one for so many slots of the map. Each list takes a pass over
these, and another one says where lists begin; a map has up to 0.6 ids per slot, which makes 5 lists."""
_AHEAD = 24  # records asked for this many ids early
_KEPT_IDS = 8192
"""Ids that are set aside between two looks at whether there is room."""
LEAST_ASIDE_BYTES, ASIDE_SHARE = 16 * 2**20, 4
"""What is aside of a table may take so much, or a quarter of what the table takes in memory."""


def most_aside_bytes(num_bytes: int) -> int:
    """Of something that takes so much memory, what may be aside before a step waits for the writer."""
    return max(LEAST_ASIDE_BYTES, num_bytes // ASIDE_SHARE)


def most_listed(index_bytes: int) -> int:
    """Ids of a map of so many bytes that are listed at once."""
    return max(_LEAST_LISTED, index_bytes // 16 // _SLOTS_PER_LISTED_ID)


class CutRecords(NamedTuple):
    """Records of a part."""

    ids_K: Int64Array
    """By virtual bucket, then as uint64."""
    records_KW: Int32Array


class CutEndedError(RuntimeError):
    """A cut was given up before all of it was read."""


class Cut:
    """One source's records as a step left them. Not thread-safe: the caller locks.

    Args:
        step: that the cut follows. Every change of a record from now on belongs to a later one.
        most_bytes: that may be aside before `wait` is called.
        wait: for the writer, when there is too much aside.
    """

    def __init__(self, source: CutSource, step: int, most_bytes: int, wait: Wait) -> None:
        self.step = step
        self._source = source
        self._most_bytes = most_bytes
        self._wait = wait
        self._aside = MemoryRows(source.num_words)
        self._passed = 0
        """Buckets below this have been read."""
        self._ended: Exception | None = None

    @property
    def num_aside(self) -> int:
        """Records that are aside now."""
        return len(self._aside)

    def keep(self, ids_M: Int64Array, steps_M: Int32Array, read: Callable[[Int64Array], Int32Array]) -> None:
        """Set aside what distinct ids hold before it changes, or goes.

        Memory that is lacking for it is no reason to refuse a step: the cut is given up.

        Args:
            steps_M: last step that changed each record, `ABSENT` where there is none.
            read: gives records of ids at these positions.
        """
        old_M = np.flatnonzero(steps_M <= self.step)  # others are later, and what was changed later is aside
        old_M = old_M[bucket_of(ids_M[old_M]) >= self._passed]
        self._keep(ids_M, old_M, lambda at_K, rows_K: self._aside.records.write(rows_K, 0, read(at_K)))

    def keep_rows(self, ids_M: Int64Array, records: RecordAccess, rows_M: Int64Array) -> None:
        """`keep` of records that end with step and count; -1 for an id that has none."""
        rows_M, ids_M = kernel_input(rows_M, np.int64), kernel_input(ids_M, np.int64)
        old_M = _older(records.addresses, rows_M, ids_M, self.step, self._passed)
        self._keep(
            ids_M, old_M, lambda at_K, to_K: records.copy_rows(rows_M[at_K], self._aside.records, to_K)
        )

    def _keep(
        self, ids_M: Int64Array, old_M: Int64Array, copy: Callable[[Int64Array, Int64Array], None]
    ) -> None:
        """
        Args:
            copy: copies records of ids at the given positions to the given rows of those aside.
        """
        for first in range(0, len(old_M), _KEPT_IDS):
            if self._passed == NUM_BUCKETS:
                return
            try:
                self._keep_some(ids_M, old_M[first : first + _KEPT_IDS], copy)
            except MemoryError as error:
                lacking = CutEndedError(
                    f"no memory for what steps change while the cut after step {self.step} is read"
                )
                lacking.__cause__ = error
                self.end(lacking)

    def end(self, error: Exception) -> None:
        """Give up what has not been read; whoever reads it gets this error."""
        self._ended = error
        self._pass(NUM_BUCKETS)

    def parts(
        self, lock: Callable[[], AbstractContextManager[object]], after_step: int | None = None
    ) -> Iterator[CutRecords]:
        """Everything, in the order of buckets, in parts of whole ones; steps may go on in between.

        Args:
            lock: holds the lock.
            after_step: only records that a step after this one has changed.

        Raises:
            Exception: what `end` was given.
        """
        for buckets in self._lists(lock):
            ids_K, ends_B = self._list_ids(lock, buckets)
            first, bucket = 0, buckets.start
            most = max(1, _PART_BYTES // (4 * self._source.num_words))
            while bucket < buckets.stop:
                # As many whole buckets as fit, and at least the next one.
                end = int(np.searchsorted(ends_B, first + most, side="right"))
                end = min(max(end, bucket + 1), buckets.stop)
                part = self._part(lock, ids_K[first : ends_B[end - 1]], end, after_step)
                if len(part.ids_K):
                    yield part
                first, bucket = int(ends_B[end - 1]), end

    def _keep_some(
        self, ids_M: Int64Array, some_M: Int64Array, copy: Callable[[Int64Array, Int64Array], None]
    ) -> None:
        bytes_after = 4 * self._source.num_words * len(some_M)

        def is_room() -> bool:
            return self._passed == NUM_BUCKETS or self._num_bytes + bytes_after <= self._most_bytes

        if not is_room() and self.num_aside:
            self._wait(is_room)
            some_M = some_M[bucket_of(ids_M[some_M]) >= self._passed]
        rows = self._aside.add_new(ids_M[some_M])
        is_new = rows != MISSING
        if not is_new.all():  # records that came back from trainers bear no later step, and were kept before
            some_M, rows = some_M[is_new], rows[is_new]
        copy(some_M, rows)

    @property
    def _num_bytes(self) -> int:
        return 4 * self._source.num_words * self.num_aside

    def _lists(self, lock: Callable[[], AbstractContextManager[object]]) -> Iterator[range]:
        """Buckets whose ids are listed at once."""
        with lock():
            num_ids, most = len(self._source.ids), most_listed(self._source.ids.num_bytes)
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
        """Every id of these buckets that is in the cut, and some that came later; ordered, with ends."""
        found = list(self._scan(lock, buckets))
        with self._checked(lock):
            # Those that are gone since the cut.
            aside_K = self._aside.ids.items()[0]
        at_K = bucket_of(aside_K)
        found.append(aside_K[(at_K >= buckets.start) & (at_K < buckets.stop)])
        return ordered_by_bucket(np.concatenate(found))

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
        end: int,
        after_step: int | None,
    ) -> CutRecords:
        """What of these ids is in the cut; buckets up to `end` are passed then."""
        after = NEVER - 1 if after_step is None else after_step
        with self._checked(lock):
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
        at_K, records_KW, aside, aside_KW = found
        if len(aside):
            is_wanted = self._source.steps(aside_KW) > after
            at_K, records_KW = _merged(at_K, records_KW, aside[is_wanted], aside_KW[is_wanted])
        return CutRecords(ids_K[at_K], records_KW)

    def _pass_part(
        self, reading: Reading | None, ids_K: Int64Array, end: int, after: int
    ) -> tuple[Int64Array, Int32Array, Int64Array, Int32Array]:
        """Copies of what is live and of what is aside, each with its ascending places in ids_K."""
        aside_rows_K = self._aside.find(ids_K)
        aside = np.flatnonzero(aside_rows_K != MISSING)
        at_K, records_KW = self._source.finish_reading(reading, ids_K, after, self.step)
        aside_KW = self._aside.records.read(aside_rows_K[aside], 0, self._source.num_words)
        if len(aside):
            # Records that come back from trainers may bear no later step than the cut's.
            is_live_K = aside_rows_K[at_K] == MISSING
            if not is_live_K.all():
                at_K, records_KW = at_K[is_live_K], records_KW[is_live_K]
            self._aside.remove(ids_K[aside])
        self._pass(end)
        return at_K, records_KW, aside, aside_KW

    def _pass(self, end: int) -> None:
        self._passed = end
        if end == NUM_BUCKETS:
            self._aside = MemoryRows(self._source.num_words)

    @contextmanager
    def _checked(self, lock: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        with lock():
            if self._ended is not None:
                raise self._ended
            yield


def _merged(
    at_K: Int64Array, records_KW: Int32Array, others: Int64Array, others_KW: Int32Array
) -> tuple[Int64Array, Int32Array]:
    """Records of two lists of ascending places, as one."""
    all_K = np.concatenate((at_K, others))
    order_K = np.argsort(all_K, kind="stable")
    return all_K[order_K], np.concatenate((records_KW, others_KW))[order_K]


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
