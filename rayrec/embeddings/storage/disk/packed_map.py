"""id -> number in eleven bytes a slot, nine of ten slots in use: the map of a table whose rows are on disk.

    hash of the id   | partition: 12 bits | key: 52 bits |     the id follows from it: mix64 is a bijection
    slot             | key: 52 bits | number + 1: 36 bits |    88 bits; all 0 is an empty slot
    slots            | partition 0 | partition 1 | ...         one array; each partition has what it needs

An id's slot is looked for from its home on, which its key says; of two ids, the one farther from home goes
first (robin hood hashing: Celis, Larson and Munro, FOCS 1985), so that a crowded partition has no long
searches. Removing shifts followers back and leaves no marks.

The map grows by an eighth, in place, and a little at each step: the array is made longer, and partitions move
to their new places from the last one to the first, each onto room that those behind it have left. So there is
never a second map beside the first one, and no step that moves all of it.

Axes: M ids of one call, P partitions, K ids of B buckets.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.embeddings.base.compiled import load64, prefetch, store32, store64
from rayrec.embeddings.base.routing import NUM_BUCKETS
from rayrec.embeddings.storage.index import HASHES, MISSING, grouped_ids, groups_by_bucket
from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.compiled import kernel_input, mix64, unmix64

_PARTITION_BITS = 12
_NUM_PARTITIONS = 2**_PARTITION_BITS
_KEY_BITS = 64 - _PARTITION_BITS
_SLOT_BYTES = 11
_AFTER_GROWTH, _MOST_LOAD = 0.87, 0.945
"""Share of the slots in use when the map has grown, and when it grows again."""
_SPARE_SLOTS = 8
"""Of every partition, since chance fills small ones unevenly."""
_MOST_SPARE_SLOTS = 32
"""The same and room for new ids, of a map to which a hundred thousand ids come at once at most."""
_DEVIATIONS = 5
"""Of chance: one partition gets so many more of new ids than the others in one of a thousand times."""
_MOVED_WITHIN = 0.02
"""Every partition has moved to its new place when there are so many more ids: it is crowded until then."""
_SPARE_ROOM = 1 / 8
"""Addresses beyond the array that are taken with it. They take no memory, and a partition that chance has
filled can grow there in the middle of a step, which must not fail."""
_AHEAD = 16  # ids whose slots are asked for early


class PackedMap:
    """Maps ids to numbers that the caller chooses: any from -2**35 to 2**35 - 2 but -1. Not thread-safe."""

    def __init__(self) -> None:
        self._starts_P = np.zeros(_NUM_PARTITIONS, dtype=np.int64)
        self._sizes_P = np.zeros(_NUM_PARTITIONS, dtype=np.int64)
        self._counts_P = np.zeros(_NUM_PARTITIONS, dtype=np.int64)
        self._num_ids = 0
        # Where partitions are moving to. Those from `_num_waiting` on are there.
        self._new_starts_P, self._new_sizes_P = self._starts_P, self._sizes_P
        self._num_waiting = 0
        self._num_ids_then = 0
        """Ids when the map began to grow."""
        self._num_slots = 0
        self._memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._grow(0)

    def __len__(self) -> int:
        return self._num_ids

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_bytes(self) -> int:
        return _SLOT_BYTES * self._num_slots + _PARTITIONS_BYTES

    def find(self, ids_M: Int64Array) -> Int64Array:
        """[M] number of each id, -1 where it is not in the map."""
        numbers_M = np.empty(len(ids_M), dtype=np.int64)
        _find(self._base, self._starts_P, self._sizes_P, kernel_input(ids_M, np.int64), numbers_M)
        return numbers_M

    def assign(self, ids_M: Int64Array, numbers_M: Int64Array) -> None:
        """Set the numbers of ids, new ones or not; `reserve` has to make room for new ones before."""
        ids_M, numbers_M = kernel_input(ids_M, np.int64), kernel_input(numbers_M, np.int64)
        first = 0
        while True:
            done, num_added = _assign(
                self._base,
                self._starts_P,
                self._sizes_P,
                self._counts_P,
                ids_M[first:],
                numbers_M[first:],
            )
            self._num_ids += num_added
            first += done
            if first == len(ids_M):
                return
            self._make_room_for(ids_M[first : first + 1])

    def remove(self, ids_M: Int64Array) -> Int64Array:
        """Forget distinct ids.

        Returns:
            [M] the number each id had, -1 where it was not in the map.
        """
        numbers_M = _remove(
            self._base, self._starts_P, self._sizes_P, self._counts_P, kernel_input(ids_M, np.int64)
        )
        self._num_ids -= int(np.count_nonzero(numbers_M != MISSING))
        return numbers_M

    def reserve(self, num_more: int) -> None:
        """Make room for so many more ids, so that adding them cannot fail for memory."""
        if self._has_to_grow(num_more):
            self._move(0)
            self._grow(num_more)
        if self._num_waiting:
            num_added = self._num_ids + num_more - self._num_ids_then
            share_left = max(0.0, 1 - num_added / (1 + _MOVED_WITHIN * self._num_ids_then))
            self._move(int(share_left * _NUM_PARTITIONS))

    def growth_bytes(self, num_more: int) -> int:
        """What `reserve` takes for so many more ids; it takes nothing else on the way."""
        if not self._has_to_grow(num_more):
            return 0
        return _SLOT_BYTES * max(0, int(self._sizes_for(num_more).sum()) - self._num_slots)

    def ids_from(self, first: int, num_slots: int, buckets: range) -> tuple[Int64Array, int]:
        """As `IdMap.ids_from`; whole partitions."""
        begin = first >> _KEY_BITS
        end = begin + max(1, int(np.searchsorted(np.cumsum(self._sizes_P[begin:]), num_slots)))
        ids_K = _ids_of_partitions(
            self._base, self._starts_P, self._sizes_P, begin, end, buckets.start, buckets.stop
        )
        return ids_K, min(end << _KEY_BITS, HASHES)

    def by_bucket(self, least: int) -> Iterator[tuple[Int64Array, Int64Array]]:
        """As `IdMap.by_bucket`."""
        counts = _count_by_bucket(self._base, self._starts_P, self._sizes_P)

        def fill(bucket: int, positions_B: Int64Array, ids_K: Int64Array) -> None:
            _ids_by_bucket(self._base, self._starts_P, self._sizes_P, bucket, positions_B, ids_K)

        return groups_by_bucket(counts, max(least, grouped_ids(self._num_slots)), fill)

    def _has_to_grow(self, num_more: int) -> bool:
        if not num_more:
            return False
        if self._num_ids + num_more > _MOST_LOAD * self._num_slots:
            return True
        return bool((self._most_after(num_more) > _usable(self._new_sizes_P)).any())

    def _most_after(self, num_more: int) -> Float64Array:
        """[P] ids of each partition when so many more have come, at most but for chance."""
        mean = num_more / _NUM_PARTITIONS
        return self._counts_P + np.ceil(mean + _DEVIATIONS * np.sqrt(mean))

    def _sizes_for(self, num_more: int) -> Int64Array:
        """[P] slots of each partition when so many more ids have come; none gets smaller."""
        expected_P = self._counts_P + num_more / _NUM_PARTITIONS
        sizes_P = np.ceil(expected_P / _AFTER_GROWTH).astype(np.int64) + _SPARE_SLOTS
        most_P = np.ceil(self._most_after(num_more) * 64 / 63).astype(np.int64) + 2
        return np.maximum(np.maximum(sizes_P, most_P), self._new_sizes_P)

    def _grow(self, num_more: int) -> None:
        """Give every partition a new place; they are moved there later."""
        assert not self._num_waiting
        sizes_P = self._sizes_for(num_more)
        ends_P = np.cumsum(sizes_P)
        self._make_longer(int(ends_P[-1]))
        self._new_sizes_P, self._new_starts_P = sizes_P, ends_P - sizes_P
        self._num_waiting, self._num_ids_then = _NUM_PARTITIONS, self._num_ids
        if not self._num_ids:
            self._move(0)

    def _make_longer(self, num_slots: int) -> None:
        needed = _SLOT_BYTES * num_slots
        if needed > len(self._memory):
            num_bytes = -(-int(needed * (1 + _SPARE_ROOM)) // mmap.PAGESIZE) * mmap.PAGESIZE
            try:
                self._memory = _longer(self._memory, num_bytes)
            except OSError as error:
                raise MemoryError(f"no memory for a map of {needed} bytes of ids: {error}") from error
        self._base = np.uint64(np.frombuffer(self._memory, dtype=np.uint8).ctypes.data)
        self._num_slots = num_slots

    def _move(self, until: int) -> None:
        """Move partitions to their new places, down to this one."""
        if until < self._num_waiting:
            _move(
                self._base,
                self._starts_P,
                self._sizes_P,
                self._counts_P,
                self._new_starts_P,
                self._new_sizes_P,
                until,
                self._num_waiting,
            )
            self._num_waiting = until

    def _make_room_for(self, id_1: Int64Array) -> None:
        """In a partition that chance has filled."""
        partition = int(_partition(id_1))
        if partition >= self._num_waiting:
            self._move(0)
            self._grow(0)
        self._move(partition)


_PARTITIONS_BYTES = 5 * 8 * _NUM_PARTITIONS


def _usable(sizes_P: Int64Array) -> Int64Array:
    """[P] ids that partitions take. One slot in 64 stays empty: searches of a full one would be long."""
    return sizes_P - 1 - (sizes_P >> 6)


def packed_slots(num_ids: int) -> int:
    """Most `PackedMap.num_slots` with so many ids, which came a few at a time."""
    return int(num_ids / _AFTER_GROWTH) + _MOST_SPARE_SLOTS * _NUM_PARTITIONS


def packed_bytes(num_ids: int) -> int:
    """Most `PackedMap.num_bytes` then."""
    return _SLOT_BYTES * packed_slots(num_ids) + _PARTITIONS_BYTES


def _longer(memory: mmap.mmap, num_bytes: int) -> mmap.mmap:
    try:
        memory.resize(num_bytes)  # by mremap: nothing is copied
    except SystemError:  # a system without
        longer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        longer[: len(memory)] = memory[:]
        memory = longer
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them; only speed is lost
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_KEY = np.uint64(2**_KEY_BITS - 1)
_SHIFT = np.uint64(_KEY_BITS)
_HOME_SHIFT = np.uint64(_KEY_BITS - 32)
_BYTES = np.uint64(_SLOT_BYTES)
_NUMBER_SHIFT = np.uint64(_KEY_BITS - 24)
_NUMBER_AT, _UPPER_AT = np.uint64(3), np.uint64(7)
_UPPER_SHIFT = np.uint64(4)
_TO_HOME = np.int64(32)


@njit(nogil=True, cache=True, inline="always")
def _at(base: Any, slot: Any) -> Any:
    return base + np.uint64(slot) * _BYTES


@njit(nogil=True, cache=True, inline="always")
def _home(key: Any, size: Any) -> Any:
    """Ascends with the key, so that ids go by hash."""
    return (np.int64(key >> _HOME_SHIFT) * size) >> _TO_HOME


@njit(nogil=True, cache=True, inline="always")
def _stored(address: Any) -> Any:
    """One more than the number of a slot; 0 of an empty one."""
    return np.int64(load64(address + _NUMBER_AT)) >> np.int64(_NUMBER_SHIFT)


@njit(nogil=True, cache=True, inline="always")
def _write(address: Any, key: Any, stored: Any) -> None:
    number = np.uint64(stored)
    store64(address, key | (number << _SHIFT))
    store32(address + _UPPER_AT, number >> _UPPER_SHIFT)


@njit(nogil=True, cache=True, inline="always")
def _copy(target: Any, source: Any) -> None:
    upper = load64(source + _NUMBER_AT) >> np.uint64(32)
    store64(target, load64(source))
    store32(target + _UPPER_AT, upper)


@njit(nogil=True, cache=True)
def _search(base: Any, start: Any, size: Any, key: Any) -> Any:
    """(slot within the partition, whether the key is there); where it belongs if not, -1 if all are full."""
    slot, distance = _home(key, size), np.int64(0)
    while distance < size:
        address = _at(base, start + slot)
        if _stored(address) == 0:
            return slot, False
        other = load64(address) & _KEY
        if other == key:
            return slot, True
        far = slot - _home(other, size)
        if far < 0:
            far += size
        if far < distance:
            return slot, False
        slot += 1
        if slot == size:
            slot = np.int64(0)
        distance += 1
    return np.int64(-1), False


@njit(nogil=True, cache=True)
def _insert(base: Any, start: Any, size: Any, slot: Any, key: Any, stored: Any) -> None:
    """Put a key where it belongs; those from there on move by one, to the next empty slot."""
    empty = slot
    while _stored(_at(base, start + empty)) != 0:
        empty += 1
        if empty == size:
            empty = np.int64(0)
    while empty != slot:
        before = empty - 1 if empty > 0 else size - 1
        _copy(_at(base, start + empty), _at(base, start + before))
        empty = before
    _write(_at(base, start + slot), key, stored)


@njit(nogil=True, cache=True)
def _ask_ahead(base: Any, starts_P: Int64Array, sizes_P: Int64Array, id_: Any) -> None:
    hashed = mix64(np.uint64(id_))
    partition = np.int64(hashed >> _SHIFT)
    address = _at(base, starts_P[partition] + _home(hashed & _KEY, sizes_P[partition]))
    prefetch(address)
    prefetch(address + np.uint64(64))


@njit(nogil=True, cache=True)
def _partition(id_1: Int64Array) -> int:
    return int(mix64(np.uint64(id_1[0])) >> _SHIFT)


@njit(nogil=True, cache=True)
def _find(
    base: np.uint64, starts_P: Int64Array, sizes_P: Int64Array, ids_M: Int64Array, numbers_M: Int64Array
) -> None:
    for m in range(len(ids_M)):
        if m + _AHEAD < len(ids_M):
            _ask_ahead(base, starts_P, sizes_P, ids_M[m + _AHEAD])
        hashed = mix64(np.uint64(ids_M[m]))
        partition = np.int64(hashed >> _SHIFT)
        start, size = starts_P[partition], sizes_P[partition]
        slot, is_there = _search(base, start, size, hashed & _KEY)
        numbers_M[m] = _stored(_at(base, start + slot)) - 1 if is_there else MISSING


@njit(nogil=True, cache=True)
def _assign(
    base: np.uint64,
    starts_P: Int64Array,
    sizes_P: Int64Array,
    counts_P: Int64Array,
    ids_M: Int64Array,
    numbers_M: Int64Array,
) -> tuple[int, int]:
    """(ids that were done before one had no room, how many of them are new)."""
    num_added = 0
    for m in range(len(ids_M)):
        if m + _AHEAD < len(ids_M):
            _ask_ahead(base, starts_P, sizes_P, ids_M[m + _AHEAD])
        hashed = mix64(np.uint64(ids_M[m]))
        partition, key = np.int64(hashed >> _SHIFT), hashed & _KEY
        start, size = starts_P[partition], sizes_P[partition]
        slot, is_there = _search(base, start, size, key)
        if is_there:
            _write(_at(base, start + slot), key, numbers_M[m] + 1)
            continue
        if counts_P[partition] >= size - 1 - (size >> 6):  # as `_usable` says
            return m, num_added
        _insert(base, start, size, slot, key, numbers_M[m] + 1)
        counts_P[partition] += 1
        num_added += 1
    return len(ids_M), num_added


@njit(nogil=True, cache=True)
def _remove(
    base: np.uint64, starts_P: Int64Array, sizes_P: Int64Array, counts_P: Int64Array, ids_M: Int64Array
) -> Int64Array:
    numbers_M = np.full(len(ids_M), MISSING, dtype=np.int64)
    for m in range(len(ids_M)):
        if m + _AHEAD < len(ids_M):
            _ask_ahead(base, starts_P, sizes_P, ids_M[m + _AHEAD])
        hashed = mix64(np.uint64(ids_M[m]))
        partition = np.int64(hashed >> _SHIFT)
        start, size = starts_P[partition], sizes_P[partition]
        hole, is_there = _search(base, start, size, hashed & _KEY)
        if not is_there:
            continue
        numbers_M[m] = _stored(_at(base, start + hole)) - 1
        counts_P[partition] -= 1
        while True:
            follower = hole + 1 if hole + 1 < size else np.int64(0)
            address = _at(base, start + follower)
            if _stored(address) == 0 or _home(load64(address) & _KEY, size) == follower:
                break
            _copy(_at(base, start + hole), address)
            hole = follower
        _write(_at(base, start + hole), np.uint64(0), 0)
    return numbers_M


@njit(nogil=True, cache=True)
def _move(
    base: np.uint64,
    starts_P: Int64Array,
    sizes_P: Int64Array,
    counts_P: Int64Array,
    new_starts_P: Int64Array,
    new_sizes_P: Int64Array,
    first: int,
    end: int,
) -> None:
    """Move partitions from the last one to the first; what is in a new place is of none that waits."""
    for partition in range(end - 1, first - 1, -1):
        num_ids = counts_P[partition]
        keys_K, stored_K = np.empty(num_ids, dtype=np.uint64), np.empty(num_ids, dtype=np.int64)
        k = 0
        for slot in range(starts_P[partition], starts_P[partition] + sizes_P[partition]):
            stored = _stored(_at(base, slot))
            if stored != 0:
                keys_K[k], stored_K[k] = load64(_at(base, slot)) & _KEY, stored
                k += 1
        start, size = new_starts_P[partition], new_sizes_P[partition]
        for slot in range(start, start + size):
            _write(_at(base, slot), np.uint64(0), 0)
        starts_P[partition], sizes_P[partition] = start, size
        for k in range(num_ids):
            slot, _ = _search(base, start, size, keys_K[k])
            _insert(base, start, size, slot, keys_K[k], stored_K[k])


@njit(nogil=True, cache=True)
def _ids_of_partitions(
    base: np.uint64,
    starts_P: Int64Array,
    sizes_P: Int64Array,
    first: int,
    end: int,
    first_bucket: int,
    end_bucket: int,
) -> Int64Array:
    found_K = np.empty(sizes_P[first:end].sum(), dtype=np.int64)
    num_found = 0
    for partition in range(first, min(end, len(starts_P))):
        for slot in range(starts_P[partition], starts_P[partition] + sizes_P[partition]):
            key = load64(_at(base, slot)) & _KEY
            bucket = np.int64(key & np.uint64(NUM_BUCKETS - 1))
            # Without a branch: whether a slot is of these buckets is as good as random.
            found_K[num_found] = np.int64(unmix64((np.uint64(partition) << _SHIFT) | key))
            is_there = _stored(_at(base, slot)) != 0
            num_found += is_there & (bucket >= first_bucket) & (bucket < end_bucket)
    return found_K[:num_found].copy()


@njit(nogil=True, cache=True)
def _count_by_bucket(base: np.uint64, starts_P: Int64Array, sizes_P: Int64Array) -> Int64Array:
    counts = np.zeros(NUM_BUCKETS, dtype=np.int64)
    for partition in range(len(starts_P)):
        for slot in range(starts_P[partition], starts_P[partition] + sizes_P[partition]):
            if _stored(_at(base, slot)) != 0:
                counts[np.int64(load64(_at(base, slot)) & np.uint64(NUM_BUCKETS - 1))] += 1
    return counts


@njit(nogil=True, cache=True)
def _ids_by_bucket(
    base: np.uint64,
    starts_P: Int64Array,
    sizes_P: Int64Array,
    first_bucket: int,
    positions_B: NDArray[np.int64],
    ids_K: Int64Array,
) -> None:
    """Write ids of B buckets to ids_K, from where their bucket begins; moves these positions on."""
    for partition in range(len(starts_P)):
        for slot in range(starts_P[partition], starts_P[partition] + sizes_P[partition]):
            key = load64(_at(base, slot)) & _KEY
            b = np.int64(key & np.uint64(NUM_BUCKETS - 1)) - first_bucket
            if 0 <= b < len(positions_B) and _stored(_at(base, slot)) != 0:
                ids_K[positions_B[b]] = np.int64(unmix64((np.uint64(partition) << _SHIFT) | key))
                positions_B[b] += 1
