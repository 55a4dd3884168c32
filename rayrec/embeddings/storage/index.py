"""id -> row: an open-addressing hash table over any 64-bit ids.

A slot is an (id, row) pair in one cache line; a slot is empty when its row is -1, so that every int64
is a valid id. Collisions go to the next slot. Removing leaves no marks behind: the followers of the
freed slot are shifted back (Knuth, TAOCP 3, 6.4, algorithm R), and the row goes to a free list.

Axes: M ids of one call, C slots, R ids in the index, F free rows, K ids of B buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from rayrec.embeddings.base.compiled import RowAddresses, int32_at, prefetch, row_address
from rayrec.embeddings.base.routing import NUM_BUCKETS
from rayrec.embeddings.base.threads import in_parts
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input, mix64

MISSING = -1
"""Row number of an id that is not in the index."""

_ANY = -1
"""Number of ids to be removed, whatever it is."""
_MIN_SLOTS = 1024
_MAX_LOAD = 0.6
_AHEAD = 24  # slots asked for this many ids early, as many as a core keeps on their way from memory
_CHUNK = 1024  # slots moved at a time
_SLOTS_PER_GROUPED_ID = 64  # so that all groups of ids take no more than 40 passes over the slots

HASHES = 2**64
"""Where `IdMap.ids_from` ends."""


class IdMap:
    """Maps ids to numbers that the caller chooses, any but -1. Not thread-safe."""

    def __init__(self, expected_ids: int = 0) -> None:
        self._slots_C2 = _empty_slots(index_slots(expected_ids))
        self._num_ids = 0

    def __len__(self) -> int:
        return self._num_ids

    @property
    def num_slots(self) -> int:
        return len(self._slots_C2)

    @property
    def num_bytes(self) -> int:
        return self._slots_C2.nbytes

    def find(self, ids_M: Int64Array, num_threads: int = 1) -> Int64Array:
        """[M] number of each id, -1 where it is not in the map."""
        ids_M, numbers_M = kernel_input(ids_M, np.int64), np.empty(len(ids_M), dtype=np.int64)
        slots_C2, shift = self._slots_C2, _shift(self._slots_C2)
        in_parts(
            num_threads,
            len(ids_M),
            lambda first, last: _find(slots_C2, shift, ids_M[first:last], numbers_M[first:last]),
        )
        return numbers_M

    def assign(self, ids_M: Int64Array, numbers_M: Int64Array) -> None:
        """Set the numbers of ids, new ones or not."""
        ids_M, numbers_M = kernel_input(ids_M, np.int64), kernel_input(numbers_M, np.int64)
        # Asked before room is made: to set the numbers of ids that are there takes none.
        if self.growth_bytes(len(ids_M)):
            self.reserve(int(np.count_nonzero(self.find(ids_M) == MISSING)))
        self._num_ids += _assign(self._slots_C2, _shift(self._slots_C2), ids_M, numbers_M)

    def remove(self, ids_M: Int64Array) -> Int64Array:
        """Forget distinct ids.

        Returns:
            [M] the number each id had, -1 where it was not in the map.
        """
        return self._remove(ids_M, _ANY)

    def remove_those(self, ids_M: Int64Array, number: int) -> None:
        """Forget those of these distinct ids that have this number."""
        self._remove(ids_M, number)

    def _remove(self, ids_M: Int64Array, number: int) -> Int64Array:
        numbers_M = _remove(self._slots_C2, _shift(self._slots_C2), kernel_input(ids_M, np.int64), number)
        self._num_ids -= int(np.count_nonzero(numbers_M != MISSING))
        return numbers_M

    def reserve(self, num_more: int) -> None:
        """Make room for so many more ids, so that adding them cannot fail for memory."""
        num_ids = self._num_ids + num_more
        if num_ids > _MAX_LOAD * len(self._slots_C2):
            grown_C2 = _empty_slots(index_slots(num_ids))
            _move(self._slots_C2, grown_C2, _shift(grown_C2))
            self._slots_C2 = grown_C2

    def growth_bytes(self, num_more: int) -> int:
        """What `reserve` takes for so many more ids: new slots, beside the old ones while ids are moved."""
        num_ids = self._num_ids + num_more
        return index_bytes(num_ids) if num_ids > _MAX_LOAD * len(self._slots_C2) else 0

    def items(self) -> tuple[Int64Array, Int64Array]:
        """([R] ids, [R] numbers), in no order."""
        used_R2 = self._slots_C2[self._slots_C2[:, 1] != MISSING]
        return np.ascontiguousarray(used_R2[:, 0]), np.ascontiguousarray(used_R2[:, 1])

    def ids_from(self, first: int, num_slots: int, buckets: range) -> tuple[Int64Array, int]:
        """Some of the ids, and where to go on: from 0 to `HASHES` the calls find all of them.

        Ids may come and go between two calls, and the map may grow: an id that is there all the time is found
        once, and none twice.

        Args:
            first: hash from which on they are wanted, 0 or what the call before returned.
            num_slots: how many slots to look at, about.
            buckets: of which they are wanted.
        """
        # A slot says little of an id, which moves when others go or the map grows; where it would lie if it
        # were alone is the beginning of its hash.
        bits = 64 - int(_shift(self._slots_C2))
        home = first >> (64 - bits)
        end = min(home + num_slots, 1 << bits)
        ids_K = _ids_of_homes(self._slots_C2, _shift(self._slots_C2), home, end, buckets.start, buckets.stop)
        return ids_K, end << (64 - bits)

    def by_bucket(self, least: int) -> Iterator[tuple[Int64Array, Int64Array]]:
        """All ids in groups of whole virtual buckets, one after the other.

        A group takes a pass over the slots, and `grouping_bytes` of memory; there are 40 at most, however
        many ids there are. No id may come or go in between.

        Args:
            least: ids for which a group has room, however few slots there are; a bucket may have more.

        Returns:
            Groups of ([K] ids ordered by bucket, then as uint64, [B] where each bucket ends among them).
        """
        counts = _count_by_bucket(self._slots_C2)

        def fill(bucket: int, positions_B: Int64Array, ids_K: Int64Array) -> None:
            _ids_by_bucket(self._slots_C2, bucket, positions_B, ids_K)

        return groups_by_bucket(counts, max(least, grouped_ids(self.num_slots)), fill)


class IdIndex(IdMap):
    """Maps ids to row numbers. Not thread-safe.

    Rows are numbered 0, 1, 2, ... as their ids arrive; a row whose id was removed is given out again first.
    """

    def __init__(self, expected_ids: int = 0) -> None:
        super().__init__(expected_ids)
        self._free_F = np.empty(0, dtype=np.int64)
        """Free rows, and behind the first `num_free` of them room for more."""
        self._num_free = 0

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._free_F.nbytes

    @property
    def num_rows(self) -> int:
        """One more than the highest row given out so far."""
        return self._num_ids + self._num_free

    def find_or_add(self, ids_M: Int64Array) -> Int64Array:
        """[M] row of each id; new ids get the next row numbers, in the order in which they appear."""
        ids_M = kernel_input(ids_M, np.int64)
        rows_M = np.full(len(ids_M), MISSING, dtype=np.int64)
        if self.growth_bytes(len(ids_M)):  # asked as if all of them were new; it may be that few of them are
            rows_M = self.find(ids_M)
            self.reserve(int(np.count_nonzero(rows_M == MISSING)))
        self._add_missing(ids_M, rows_M, only_new=False)
        return rows_M

    def add_new(self, ids_M: Int64Array) -> Int64Array:
        """[M] rows of those of these distinct ids that are new, -1 for the others; room must be reserved."""
        ids_M = kernel_input(ids_M, np.int64)
        rows_M = np.full(len(ids_M), MISSING, dtype=np.int64)
        self._add_missing(ids_M, rows_M, only_new=True)
        return rows_M

    def _add_missing(self, ids_M: Int64Array, rows_M: Int64Array, only_new: bool) -> None:
        num_added = _add_missing(
            self._slots_C2,
            _shift(self._slots_C2),
            ids_M,
            rows_M,
            self._free_F[: self._num_free],
            self.num_rows,
            only_new,
        )
        self._num_ids += num_added
        self._num_free -= min(num_added, self._num_free)

    def remove(self, ids_M: Int64Array) -> Int64Array:
        """Forget distinct ids; their rows will be given out again.

        Returns:
            [M] the row each id had, -1 where it was not in the index.
        """
        rows_M = super().remove(ids_M)
        self._set_free(rows_M[rows_M != MISSING])
        return rows_M

    def remove_older(
        self, ids_K: Int64Array, records: RowAddresses, step_word: int, last_step: int
    ) -> tuple[Int64Array, Int64Array, Int32Array]:
        """Forget those of some distinct ids whose rows no step after `last_step` has changed.

        Args:
            step_word: of a record, where its last step is.

        Returns:
            (ids that are forgotten, [L] those that have rows still, [L] their last steps).
        """
        ids_K = kernel_input(ids_K, np.int64)
        gone_K, freed_K, left_K = (np.empty(len(ids_K), dtype=np.int64) for _ in range(3))
        steps_K = np.empty(len(ids_K), dtype=np.int32)
        num_gone, num_left = _remove_older(
            self._slots_C2,
            _shift(self._slots_C2),
            ids_K,
            records,
            step_word,
            last_step,
            gone_K,
            freed_K,
            left_K,
            steps_K,
        )
        self._num_ids -= num_gone
        self._set_free(freed_K[:num_gone])
        return gone_K[:num_gone].copy(), left_K[:num_left], steps_K[:num_left]

    def _set_free(self, freed_F: Int64Array) -> None:
        """These rows have lost their ids."""
        if self._num_free + len(freed_F) > len(self._free_F):
            larger_F = np.empty(2 * (self._num_free + len(freed_F)), dtype=np.int64)
            larger_F[: self._num_free] = self._free_F[: self._num_free]
            self._free_F = larger_F
        self._free_F[self._num_free : self._num_free + len(freed_F)] = freed_F
        self._num_free += len(freed_F)

    def free_growth_bytes(self, num_freed: int) -> int:
        """What the list of free rows grows by when so many ids are removed."""
        num_free = self._num_free + num_freed
        return 2 * 8 * num_free if num_free > len(self._free_F) else 0

    def rows_after(self, num_more: int) -> int:
        """What `num_rows` will be at most when so many new ids have been added."""
        return max(self.num_rows, self._num_ids + num_more)

    def items(self) -> tuple[Int64Array, Int64Array]:
        """([R] ids, [R] rows), ordered by row."""
        ids_R, rows_R = super().items()
        order_R = np.argsort(rows_R)
        return ids_R[order_R], rows_R[order_R]


def groups_by_bucket(
    counts: Int64Array, size: int, fill: Callable[[int, Int64Array, Int64Array], None]
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Groups of `by_bucket`, so many ids each.

    Args:
        counts: ids of every bucket.
        fill: writes ids of the buckets from a first one on, each to where it begins in an array.
    """
    ends = np.cumsum(counts)
    bucket = num_done = 0
    while num_done < ends[-1]:
        # As many whole buckets as fit, and at least the next one that is not empty.
        end = int(np.searchsorted(ends, num_done + size, side="right"))
        end = max(end, int(np.searchsorted(ends, num_done, side="right")) + 1)
        ends_B = ends[bucket:end] - num_done
        ids_K = np.empty(int(ends_B[-1]), dtype=np.int64)
        fill(bucket, np.concatenate(([0], ends_B[:-1])), ids_K)
        _sort_buckets(ids_K.view(np.uint64), ends_B)
        yield ids_K, ends_B
        bucket, num_done = end, int(ends[end - 1])


def ordered_by_bucket(ids_K: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Ids by virtual bucket, then as uint64; and where each of all buckets ends among them.

    An id that comes several times is there once.
    """
    ordered_K, ends_B = _ordered(kernel_input(ids_K, np.int64))
    is_first_K = np.ones(len(ordered_K), dtype=np.bool_)
    np.not_equal(ordered_K[1:], ordered_K[:-1], out=is_first_K[1:])
    if not is_first_K.all():
        ends_B = np.concatenate(([0], np.cumsum(is_first_K)))[ends_B]
        ordered_K = ordered_K[is_first_K]
    return ordered_K, ends_B


def index_bytes(num_ids: int) -> int:
    """`IdIndex.num_bytes` with so many ids and no free rows."""
    return 16 * index_slots(num_ids)


def index_slots(num_ids: int) -> int:
    """`IdMap.num_slots` with so many ids."""
    needed = max(_MIN_SLOTS, int(num_ids / _MAX_LOAD) + 1)
    return 1 << (needed - 1).bit_length()


def grouped_ids(num_slots: int) -> int:
    """Most ids in one of the groups of `by_bucket`, unless there are more in a bucket."""
    return num_slots // _SLOTS_PER_GROUPED_ID


def grouping_bytes(num_slots: int) -> int:
    """What such a group takes: its ids, and where buckets begin and end."""
    return 8 * (grouped_ids(num_slots) + 3 * NUM_BUCKETS)


def _empty_slots(num_slots: int) -> Int64Array:
    return np.full((num_slots, 2), MISSING, dtype=np.int64)


def _shift(slots_C2: Int64Array) -> np.uint64:
    # An id's slot is the *high* bits of its hash: the low ones chose the shard, so that within one
    # shard they take few values and would crowd its ids into a corner of the table.
    return np.uint64(64 - (len(slots_C2).bit_length() - 1))


@njit(nogil=True, cache=True)
def _find(slots_C2: Int64Array, shift: np.uint64, ids_M: Int64Array, numbers_M: Int64Array) -> None:
    num_ids, mask = len(ids_M), np.uint64(len(slots_C2) - 1)
    base = np.uint64(slots_C2.ctypes.data)
    for m in range(num_ids):
        if m + _AHEAD < num_ids:
            slot = mix64(np.uint64(ids_M[m + _AHEAD])) >> shift
            prefetch(base + slot * np.uint64(16))
        slot = mix64(np.uint64(ids_M[m])) >> shift
        while slots_C2[slot, 0] != ids_M[m] and slots_C2[slot, 1] != MISSING:
            slot = (slot + np.uint64(1)) & mask
        numbers_M[m] = slots_C2[slot, 1]


@njit(nogil=True, cache=True)
def _add_missing(
    slots_C2: Int64Array,
    shift: np.uint64,
    ids_M: Int64Array,
    rows_M: Int64Array,
    free_F: Int64Array,
    next_row: int,
    only_new: bool,
) -> int:
    """Give every id whose entry of rows_M is -1 a row, free ones first, from the end; return how many.

    Args:
        only_new: leave the entry at -1 where the id has a row.
    """
    mask = len(slots_C2) - 1
    base = np.uint64(slots_C2.ctypes.data)
    num_added = 0
    for m in range(len(ids_M)):
        if m + _AHEAD < len(ids_M) and rows_M[m + _AHEAD] == MISSING:
            ahead = mix64(np.uint64(ids_M[m + _AHEAD])) >> shift
            prefetch(base + ahead * np.uint64(16))
        if rows_M[m] != MISSING:
            continue
        slot = np.int64(mix64(np.uint64(ids_M[m])) >> shift)
        while slots_C2[slot, 1] != MISSING and slots_C2[slot, 0] != ids_M[m]:
            slot = (slot + 1) & mask
        if slots_C2[slot, 1] == MISSING:  # otherwise the id was added a moment ago: it is in ids_M twice
            if num_added < len(free_F):
                slots_C2[slot, 1] = free_F[len(free_F) - 1 - num_added]
            else:
                slots_C2[slot, 1] = next_row + num_added - len(free_F)
            slots_C2[slot, 0] = ids_M[m]
            num_added += 1
        elif only_new:
            continue
        rows_M[m] = slots_C2[slot, 1]
    return num_added


@njit(nogil=True, cache=True, inline="always")
def _empty_slot(slots_C2: Int64Array, shift: np.uint64, slot: Any) -> None:
    mask = len(slots_C2) - 1
    # A follower may move into the hole unless its own first slot lies behind the hole.
    hole, follower = slot, (slot + 1) & mask
    while slots_C2[follower, 1] != MISSING:
        first = np.int64(mix64(np.uint64(slots_C2[follower, 0])) >> shift)
        if ((follower - first) & mask) >= ((follower - hole) & mask):
            slots_C2[hole, 0] = slots_C2[follower, 0]
            slots_C2[hole, 1] = slots_C2[follower, 1]
            hole = follower
        follower = (follower + 1) & mask
    slots_C2[hole, 1] = MISSING


@njit(nogil=True, cache=True)
def _remove(slots_C2: Int64Array, shift: np.uint64, ids_M: Int64Array, only: int) -> Int64Array:
    """Returns the number that each id had, -1 where it was not there or had another one than `only`."""
    mask = len(slots_C2) - 1
    base = np.uint64(slots_C2.ctypes.data)
    rows_M = np.empty(len(ids_M), dtype=np.int64)
    for m in range(len(ids_M)):
        if m + _AHEAD < len(ids_M):
            ahead = mix64(np.uint64(ids_M[m + _AHEAD])) >> shift
            prefetch(base + ahead * np.uint64(16))
            # The ids behind it may have to move; most often some of them are in the next cache line.
            prefetch(base + ahead * np.uint64(16) + np.uint64(64))
        slot = np.int64(mix64(np.uint64(ids_M[m])) >> shift)
        while slots_C2[slot, 1] != MISSING and slots_C2[slot, 0] != ids_M[m]:
            slot = (slot + 1) & mask
        rows_M[m] = slots_C2[slot, 1]
        if only != _ANY and rows_M[m] != only:
            rows_M[m] = MISSING
        if rows_M[m] == MISSING:
            continue
        _empty_slot(slots_C2, shift, slot)
    return rows_M


@njit(nogil=True, cache=True)
def _remove_older(
    slots_C2: Int64Array,
    shift: np.uint64,
    ids_K: Int64Array,
    records: RowAddresses,
    step_word: int,
    last_step: int,
    gone_K: Int64Array,
    freed_K: Int64Array,
    left_K: Int64Array,
    steps_K: Int32Array,
) -> tuple[int, int]:
    """Returns how many ids are gone, and how many are left."""
    mask, offset = len(slots_C2) - 1, np.uint64(4 * step_word)
    base = np.uint64(slots_C2.ctypes.data)
    num_gone = num_left = 0
    slots_K = np.empty(len(ids_K), dtype=np.int64)
    # An id is found when its slot has come from memory, and looked at when its record has: what is removed
    # is in the cache still.
    for ahead in range(len(ids_K) + 2 * _AHEAD):
        if ahead < len(ids_K):
            slot = np.int64(mix64(np.uint64(ids_K[ahead])) >> shift)
            slots_K[ahead] = slot
            prefetch(base + np.uint64(slot) * np.uint64(16))
            prefetch(base + np.uint64(slot) * np.uint64(16) + np.uint64(64))
        k = ahead - _AHEAD
        if 0 <= k < len(ids_K):
            slots_K[k] = slot = _slot_of(slots_C2, mask, slots_K[k], ids_K[k])
            if slots_C2[slot, 1] != MISSING:
                prefetch(row_address(records, slots_C2[slot, 1]) + offset)
        k -= _AHEAD
        if k < 0:
            continue
        slot = slots_K[k]
        if slots_C2[slot, 0] != ids_K[k] or slots_C2[slot, 1] == MISSING:  # moved since, or not there
            slot = _slot_of(slots_C2, mask, np.int64(mix64(np.uint64(ids_K[k])) >> shift), ids_K[k])
        row = slots_C2[slot, 1]
        if row == MISSING:
            continue
        step = carray(int32_at(row_address(records, row) + offset), 1)[0]
        if step <= last_step:
            _empty_slot(slots_C2, shift, slot)
            gone_K[num_gone] = ids_K[k]
            freed_K[num_gone] = row
            num_gone += 1
        else:
            left_K[num_left] = ids_K[k]
            steps_K[num_left] = step
            num_left += 1
    return num_gone, num_left


@njit(nogil=True, cache=True, inline="always")
def _slot_of(slots_C2: Int64Array, mask: int, slot: Any, wanted: int) -> Any:
    """The slot of an id, or the empty one where it would be, from its first slot on."""
    while slots_C2[slot, 1] != MISSING and slots_C2[slot, 0] != wanted:
        slot = (slot + 1) & mask
    return slot


@njit(nogil=True, cache=True)
def _move(old_C2: Int64Array, new_C2: Int64Array, shift: np.uint64) -> None:
    mask = len(new_C2) - 1
    # A chunk at a time, its full slots first: whether a slot is full is as good as random, and a
    # branch on that costs more than the move.
    full_2 = np.empty((_CHUNK, 2), dtype=np.int64)
    for first in range(0, len(old_C2), _CHUNK):
        num_full = 0
        for old in range(first, min(first + _CHUNK, len(old_C2))):
            full_2[num_full, 0] = old_C2[old, 0]
            full_2[num_full, 1] = old_C2[old, 1]
            num_full += old_C2[old, 1] != MISSING
        for place in range(num_full):
            slot = np.int64(mix64(np.uint64(full_2[place, 0])) >> shift)
            while new_C2[slot, 1] != MISSING:
                slot = (slot + 1) & mask
            new_C2[slot, 0] = full_2[place, 0]
            new_C2[slot, 1] = full_2[place, 1]


@njit(nogil=True, cache=True)
def _assign(slots_C2: Int64Array, shift: np.uint64, ids_M: Int64Array, numbers_M: Int64Array) -> int:
    """Set the ids' numbers; returns how many ids are new."""
    mask = len(slots_C2) - 1
    base = np.uint64(slots_C2.ctypes.data)
    num_added = 0
    for m in range(len(ids_M)):
        if m + _AHEAD < len(ids_M):
            prefetch(base + (mix64(np.uint64(ids_M[m + _AHEAD])) >> shift) * np.uint64(16))
        slot = np.int64(mix64(np.uint64(ids_M[m])) >> shift)
        while slots_C2[slot, 1] != MISSING and slots_C2[slot, 0] != ids_M[m]:
            slot = (slot + 1) & mask
        num_added += slots_C2[slot, 1] == MISSING
        slots_C2[slot, 0] = ids_M[m]
        slots_C2[slot, 1] = numbers_M[m]
    return num_added


@njit(nogil=True, cache=True)
def _ids_by_bucket(
    slots_C2: Int64Array, first_bucket: int, positions_B: Int64Array, ids_K: Int64Array
) -> None:
    """Write ids of B buckets to ids_K, from where their bucket begins; moves these positions on."""
    for slot in range(len(slots_C2)):
        if slots_C2[slot, 1] == MISSING:
            continue
        b = np.int64(mix64(np.uint64(slots_C2[slot, 0])) & np.uint64(NUM_BUCKETS - 1)) - first_bucket
        if 0 <= b < len(positions_B):
            ids_K[positions_B[b]] = slots_C2[slot, 0]
            positions_B[b] += 1


@njit(nogil=True, cache=True)
def _ids_of_homes(
    slots_C2: Int64Array, shift: np.uint64, home: int, end: int, first_bucket: int, end_bucket: int
) -> Int64Array:
    """Ids of some buckets whose hashes begin with numbers from `home` to `end`."""
    mask, slot = len(slots_C2) - 1, end
    # Those that were pushed past the end, too; but no slot twice.
    while slot - home < len(slots_C2) and slots_C2[slot & mask, 1] != MISSING:
        slot += 1
    found_K = np.empty(slot - home, dtype=np.int64)
    num_found = 0
    for at in range(home, slot):
        # No branches: whether a slot is full is as good as random.
        hashed = mix64(np.uint64(slots_C2[at & mask, 0]))
        begins = np.int64(hashed >> shift)
        bucket = np.int64(hashed & np.uint64(NUM_BUCKETS - 1))
        found_K[num_found] = slots_C2[at & mask, 0]
        is_there = slots_C2[at & mask, 1] != MISSING
        is_here = (begins >= home) & (begins < end) & (bucket >= first_bucket) & (bucket < end_bucket)
        num_found += is_there & is_here
    return found_K[:num_found].copy()


@njit(nogil=True, cache=True)
def _ordered(ids_K: Int64Array) -> tuple[Int64Array, Int64Array]:
    counts_B = np.zeros(NUM_BUCKETS, dtype=np.int64)
    for k in range(len(ids_K)):
        counts_B[np.int64(mix64(np.uint64(ids_K[k])) & np.uint64(NUM_BUCKETS - 1))] += 1
    ends_B = np.cumsum(counts_B)
    positions_B = ends_B - counts_B
    ordered_K = np.empty(len(ids_K), dtype=np.int64)
    for k in range(len(ids_K)):
        b = np.int64(mix64(np.uint64(ids_K[k])) & np.uint64(NUM_BUCKETS - 1))
        ordered_K[positions_B[b]] = ids_K[k]
        positions_B[b] += 1
    _sort_buckets(ordered_K.view(np.uint64), ends_B)
    return ordered_K, ends_B


@njit(nogil=True, cache=True)
def _sort_buckets(ids_K: NDArray[np.uint64], ends_B: Int64Array) -> None:
    start = 0
    for end in ends_B:
        if end > start + 1:
            ids_K[start:end].sort()
        start = end


@njit(nogil=True, cache=True)
def _count_by_bucket(slots_C2: Int64Array) -> Int64Array:
    counts = np.zeros(NUM_BUCKETS, dtype=np.int64)
    for slot in range(len(slots_C2)):
        if slots_C2[slot, 1] != MISSING:
            counts[np.int64(mix64(np.uint64(slots_C2[slot, 0])) & np.uint64(NUM_BUCKETS - 1))] += 1
    return counts
