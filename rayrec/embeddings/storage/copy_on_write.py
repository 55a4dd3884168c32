"""The copy-on-write buffer of a snapshot: records as steps copy them, read by virtual bucket.

    heads   [bucket]  ─► newest entry ─► the one before ─► ...        a chain per bucket
    entries  id | next entry | record                                 used again once they are taken

Every step waits for its copies, so a copy is an append and no more: no id is looked for. `take` drops what
came twice.

Axes: K ids of one call, E entries, W words of a record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rayrec.embeddings.base.routing import NUM_BUCKETS
from rayrec.embeddings.storage.records import Records
from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array
from rayrec.platform.compiled import SIGN_BIT, kernel_input, mix64, stable_order

ENTRY_BYTES = 16
"""Of an entry beside its record."""
_NONE = -1
_LEAST_ENTRIES = 1024
_SORTED_BY_HAND = 32
"""Entries of a bucket up to which sorting needs no call."""


class _Entries(NamedTuple):
    ids_E: Int64Array
    next_E: Int64Array


class CopyOnWriteBuffer:
    """Records by id, any of them several times, until their bucket is taken. Not thread-safe."""

    def __init__(self, num_words: int) -> None:
        self.records = Records(num_words)
        self._num_words = num_words
        self._heads_B = np.empty(0, dtype=np.int64)
        """Of every bucket, once there is an entry."""
        self._entries = _Entries(np.empty(0, np.int64), np.empty(0, np.int64))
        self._num_entries = self._num_free = 0
        self._free = _NONE
        """First of a chain of entries to be used again."""

    def __len__(self) -> int:
        return self._num_entries - self._num_free

    @property
    def num_bytes(self) -> int:
        """Of all entries that were in use at once: their memory is used again, and not given back before."""
        return (4 * self._num_words + ENTRY_BYTES) * self._num_entries

    def add(self, ids_K: Int64Array) -> Int64Array:
        """[K] entries for records of these ids, which the caller writes to `records`.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        if not len(ids_K):
            return np.empty(0, dtype=np.int64)
        if not len(self._heads_B):
            self._heads_B = np.full(NUM_BUCKETS, _NONE, dtype=np.int64)
        self._reserve(self._num_entries + max(0, len(ids_K) - self._num_free))
        entries_K, self._free, self._num_entries = _chain(
            self._heads_B, self._entries, self._free, self._num_entries, kernel_input(ids_K, np.int64)
        )
        self._num_free = max(0, self._num_free - len(ids_K))
        return entries_K

    def take(self, first: int, end: int) -> tuple[Int64Array, Int32Array]:
        """Take all entries out of these buckets.

        Returns:
            (their ids, by bucket and as uint64; what each held when it first came).
        """
        if not len(self):
            return np.empty(0, dtype=np.int64), np.empty((0, self._num_words), dtype=np.int32)
        taken_E, is_first_E = _taken(self._heads_B, self._entries, first, end)
        first_E = taken_E[is_first_E]
        records_KW = self.records.read(first_E, 0, self._num_words)
        ids_K = self._entries.ids_E[first_E]
        self._free = _freed(self._heads_B, self._entries, first, end, taken_E, self._free)
        self._num_free += len(taken_E)
        return ids_K, records_KW

    def end_within(self, buckets: range, most: int) -> int:
        """Where buckets end that have so many entries at most; after the first one at the earliest."""
        if not len(self):
            return buckets.stop
        return int(_end_within(self._heads_B, self._entries, buckets.start, buckets.stop, most))

    def _reserve(self, num_entries: int) -> None:
        self.records.reserve(num_entries)
        if num_entries > len(self._entries.ids_E):
            size = max(_LEAST_ENTRIES, num_entries, 2 * len(self._entries.ids_E))
            self._entries = _Entries(*(_grown(array_E, size) for array_E in self._entries))


def _grown(array_E: Int64Array, size: int) -> Int64Array:
    grown_E = np.empty(size, dtype=array_E.dtype)
    grown_E[: len(array_E)] = array_E
    return grown_E


@njit(nogil=True, cache=True)
def _chain(
    heads_B: Int64Array, entries: _Entries, free: int, num_entries: int, ids_K: Int64Array
) -> tuple[Int64Array, int, int]:
    entries_K = np.empty(len(ids_K), dtype=np.int64)
    for k in range(len(ids_K)):
        if free == _NONE:
            entry = num_entries
            num_entries += 1
        else:
            entry = free
            free = entries.next_E[entry]
        bucket = np.int64(mix64(np.uint64(ids_K[k])) & np.uint64(NUM_BUCKETS - 1))
        entries.ids_E[entry] = ids_K[k]
        entries.next_E[entry] = heads_B[bucket]
        heads_B[bucket] = entry
        entries_K[k] = entry
    return entries_K, free, num_entries


@njit(nogil=True, cache=True)
def _length(heads_B: Int64Array, entries: _Entries, bucket: int) -> int:
    num_entries, entry = 0, heads_B[bucket]
    while entry != _NONE:
        num_entries += 1
        entry = entries.next_E[entry]
    return num_entries


@njit(nogil=True, cache=True)
def _end_within(heads_B: Int64Array, entries: _Entries, first: int, end: int, most: int) -> int:
    num_entries = 0
    for bucket in range(first, end):
        num_entries += _length(heads_B, entries, bucket)
        if num_entries > most:
            return max(bucket, first + 1)
    return end


@njit(nogil=True, cache=True)
def _taken(heads_B: Int64Array, entries: _Entries, first: int, end: int) -> tuple[Int64Array, BoolArray]:
    """Entries of these buckets by bucket and id, and whether each is the first that came of its id."""
    num_taken = 0
    for bucket in range(first, end):
        num_taken += _length(heads_B, entries, bucket)
    taken_E = np.empty(num_taken, dtype=np.int64)
    is_first_E = np.ones(num_taken, dtype=np.bool_)
    start = 0
    for bucket in range(first, end):
        stop, entry = start, heads_B[bucket]
        while entry != _NONE:
            taken_E[stop] = entry
            stop += 1
            entry = entries.next_E[entry]
        _sort(entries.ids_E, taken_E[start:stop][::-1].copy(), taken_E[start:stop])
        for position in range(start + 1, stop):
            is_first_E[position] = entries.ids_E[taken_E[position]] != entries.ids_E[taken_E[position - 1]]
        start = stop
    return taken_E, is_first_E


@njit(nogil=True, cache=True)
def _sort(ids_E: Int64Array, oldest_first_E: Int64Array, sorted_E: Int64Array) -> None:
    """Entries by id as uint64, those of one id as they came."""
    if len(sorted_E) > _SORTED_BY_HAND:
        keys_E = np.empty(len(sorted_E), dtype=np.int64)
        for e in range(len(sorted_E)):
            keys_E[e] = ids_E[oldest_first_E[e]] ^ SIGN_BIT  # in the order of uint64
        for e, place in enumerate(stable_order(keys_E)):
            sorted_E[e] = oldest_first_E[place]
        return
    for e in range(len(sorted_E)):
        entry, position = oldest_first_E[e], e
        while position > 0 and np.uint64(ids_E[sorted_E[position - 1]]) > np.uint64(ids_E[entry]):
            sorted_E[position] = sorted_E[position - 1]
            position -= 1
        sorted_E[position] = entry


@njit(nogil=True, cache=True)
def _freed(
    heads_B: Int64Array, entries: _Entries, first: int, end: int, taken_E: Int64Array, free: int
) -> int:
    heads_B[first:end] = _NONE
    for entry in taken_E:
        entries.next_E[entry] = free
        free = entry
    return free
