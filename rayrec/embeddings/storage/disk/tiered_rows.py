"""Rows of a table that is larger than its memory: those that are used lie in memory, the others on disk.

    find ──► in memory? ──yes──► its row
                 │ no
                 ▼
        make room: the clock's hand passes over the rows and takes one of the uses of each;
                 │ those that have none left go to disk, many in one sequential write
                 ▼
        read from disk, many at once, into the rows that are free now; forget the disk's copy

The map of ids says where each row is: a number from 0 is a row in memory, one below -1 an address on
disk. A row is in one place, whole, bit by bit as the last step left it, so nothing that a table computes
depends on where its rows are.

What counts as memory, and stays below the limit: records in memory, 17 bytes per row for its id, its use
and the list of free ones, the map (`packed_map`), ids that are being put in the order of buckets, the log's
buffers and bitmap, and copies on the way to and from disk. Rows in memory are what the rest leaves room for;
when the map grows, some of them go to disk. What callers hold (ids, replies, gradients) does not count.

Axes: M ids of one call, W words of a record, R rows in memory, F free rows, K ids of a part, V victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.embeddings.base.layout import STEP_WORD
from rayrec.embeddings.config import DiskConfig
from rayrec.embeddings.storage.disk.packed_map import PackedMap
from rayrec.embeddings.storage.disk.record_log import RecordLog
from rayrec.embeddings.storage.index import MISSING, grouping_bytes
from rayrec.embeddings.storage.records import Records
from rayrec.embeddings.storage.row_storage import RowReading, RowsPart, Wanted
from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.memory import human_size

_ID_WORDS = 2
_COPY_BYTES = 2**20
"""Records on their way to or from disk at once."""
_NUM_COPIES = 12
"""Of that size: what two calls read or make, what they write, and one more copy of each; and as much again,
since the C library keeps memory that was freed for what comes next."""
_COMPACTED_BYTES = 6 * 2**20
"""What moves in one call of `RecordLog.compact`, twice, and the segment's bits."""
_MIN_ROWS = 64

# What `_use_R` says of a row in memory: how often it was used, up to _MOST, less one for every time that the
# hand came by; or:
_MOST = np.uint8(31)
_HELD = np.uint8(128)  # added while a caller has its number
_FREE = np.uint8(255)  # no row


@dataclass
class Fetch:
    """Rows on their way up, between `TieredRows.begin_fetch` and `finish_fetch`."""

    ids_K: Int64Array
    addresses_K: Int64Array
    log: RecordLog
    pin: int
    words: int
    records_KW: Int32Array | None = None

    def read(self) -> None:
        """Wait for the disk; needs no lock."""
        self.records_KW = self.log.read(self.addresses_K, self.words)


@dataclass
class TieredReading:
    """Rows on their way to a copy, those of them that were on disk when it began."""

    fetch: Fetch
    at_K: Int64Array
    """Their positions."""

    def read(self) -> None:
        self.fetch.read()

    def close(self) -> None:
        self.fetch.log.unpin(self.fetch.pin)


class TieredRows:
    """A `RowStorage` with the rows that memory has no room for on disk."""

    stay = False

    def __init__(self, name: str, words: int, config: DiskConfig, beside: Callable[[], int]) -> None:
        """Make storage without rows, and its file.

        Args:
            name: of the table, for messages.
            words: W, of a record.
            beside: bytes of the same limit that are taken elsewhere.

        Raises:
            MemoryError: the memory allowed is too little for any rows.
            OSError: no file can be made in the folder.
            InputError: the folder is in memory itself.
        """
        self.records = Records(words)
        self._name = name
        self._words = words
        self._limit = int(config.memory)
        self._beside = beside
        self._map = PackedMap()
        self._log = RecordLog(config.folder_path, words + _ID_WORDS, config.may_be_memory)
        self._copied_rows = max(1, _COPY_BYTES // (4 * (words + _ID_WORDS)))
        self._ids_R, self._use_R = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8)
        most_rows = self._capacity_beside(0) * self._row_bytes // (self._row_bytes + 8 + 1)
        if most_rows < _MIN_ROWS:
            raise self._too_little(0)
        self._ids_R = np.zeros(most_rows, dtype=np.int64)
        self._use_R = np.full(most_rows, _FREE, dtype=np.uint8)
        self._capacity = most_rows
        self._free_F = np.empty(0, dtype=np.int64)
        self._num_rows = 0  # rows from here on were never used, or were given back
        self._hand = 0
        self._held: list[Int64Array] = []
        self.num_from_disk = 0
        """Rows that were brought up so far."""

    @property
    def ids(self) -> PackedMap:
        return self._map

    @property
    def num_words(self) -> int:
        return self._words

    def __len__(self) -> int:
        return len(self._map)

    @property
    def num_bytes(self) -> int:
        return self._num_rows * self._row_bytes + self._fixed_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file on disk."""
        return self._log.disk_bytes

    @property
    def num_on_disk(self) -> int:
        """Rows that are on disk now."""
        return len(self._log)

    def bytes_after(self, num_more: int) -> int:
        return self._limit - self._beside()

    def pieces(self, num_ids: int) -> Iterator[slice]:
        # So that what is made of a piece is one more copy of bounded size. Half of memory at most, because
        # rows that are brought up for a piece need some that it does not hold.
        size = max(1, min(self._copied_rows, self._capacity // 2))
        for first in range(0, num_ids, size) or (0,):
            yield slice(first, min(first + size, num_ids))

    def find(self, ids_M: Int64Array) -> Int64Array:
        self._let_go()
        self._fit()
        rows_M = self._map.find(ids_M)
        self._hold(rows_M[rows_M >= 0])
        on_disk = np.flatnonzero(rows_M < MISSING)
        if len(on_disk):
            ids_K = np.unique(ids_M[on_disk])
            for first in range(0, len(ids_K), self._copied_rows):
                self._bring_up(ids_K[first : first + self._copied_rows])
            rows_M[on_disk] = self._map.find(ids_M[on_disk])
        return rows_M

    def add(self, ids_M: Int64Array) -> Int64Array:
        rows_M = self._take_rows(len(ids_M))
        self._map.assign(ids_M, rows_M)
        self._ids_R[rows_M] = ids_M
        self._use_R[rows_M] = 0
        self._hold(rows_M)
        return rows_M

    def present(self, ids_M: Int64Array) -> BoolArray:
        return self._map.find(ids_M) != MISSING

    def remove(self, ids_M: Int64Array) -> None:
        self._let_go()
        numbers_M = self._map.remove(ids_M)
        self._give_back(numbers_M[numbers_M >= 0])
        self._log.free(_address(numbers_M[numbers_M < MISSING]))
        self._compact()
        self._fit()

    def has_room(self, num_new: int) -> bool:
        return not self._map.growth_bytes(num_new)

    def reserve(self, num_new: int, num_changed: int) -> None:
        self._let_go()
        growth = self._map.growth_bytes(num_new)
        if growth:
            self._fit(growth)
        self._map.reserve(num_new)
        self._compact()
        # Every row that comes in may send another one out, and the batch's own, if it comes in pieces.
        self._log.reserve(2 * num_changed)
        self._fit()

    def look(self, ids_M: Int64Array) -> Iterator[RowsPart]:
        self._let_go()
        copies = Records(self._words)
        copies.reserve(min(len(ids_M), self._copied_rows))
        for first in range(0, len(ids_M), self._copied_rows):
            ids_K = ids_M[first : first + self._copied_rows]
            ids_K = ids_K[self.present(ids_K)]
            self._copy(ids_K, copies)
            yield RowsPart(ids_K, copies, np.arange(len(ids_K)))

    def parts(self, ordered: bool) -> Iterator[RowsPart]:
        self._let_go()
        copies = Records(self._words)
        for ids_K, ends_B in self._map.by_bucket(self._copied_rows):
            first = 0
            while first < len(ids_K):
                # As many whole buckets as fit, and at least the next one that is not empty.
                end = int(np.searchsorted(ends_B, first + self._copied_rows, side="right"))
                end = max(end, int(np.searchsorted(ends_B, first, side="right")) + 1)
                ids_M = ids_K[first : ends_B[end - 1]]
                copies.reserve(len(ids_M))
                self._copy(ids_M, copies)
                yield RowsPart(ids_M, copies, np.arange(len(ids_M)))
                first = int(ends_B[end - 1])
        if not len(self._map):
            yield RowsPart(np.empty(0, dtype=np.int64), copies, np.empty(0, dtype=np.int64))

    def fetchable(self, ids_M: Int64Array) -> list[Int64Array]:
        """Those of the ids that are on disk, in parts to be fetched one after the other.

        No more than a quarter of the rows in memory, so that what is read ahead leaves room for itself.
        """
        on_disk_K = np.unique(ids_M[self._map.find(ids_M) < MISSING])[: max(1, self._capacity // 4)]
        starts = range(self._copied_rows, len(on_disk_K), self._copied_rows)
        return np.split(on_disk_K, starts) if len(on_disk_K) else []

    def begin_fetch(self, ids_K: Int64Array) -> Fetch:
        """Begin to bring rows up; `Fetch.read` may run beside everything else, `finish_fetch` must follow."""
        numbers_K = self._map.find(ids_K)
        on_disk = numbers_K < MISSING
        addresses_K = _address(numbers_K[on_disk])
        return Fetch(ids_K[on_disk], addresses_K, self._log, self._log.pin(), self._words)

    def finish_fetch(self, fetch: Fetch) -> None:
        """Put rows that were read into memory, unless they have moved since."""
        try:
            if fetch.records_KW is None:
                return
            self._let_go()
            # The pin keeps addresses from being given out again: the same address is the same record.
            same_K = self._map.find(fetch.ids_K) == _number(fetch.addresses_K)
            same_K[self._capacity // 2 :] = False  # memory may have become smaller meanwhile
            ids_K, records_KW = fetch.ids_K, fetch.records_KW
            if not same_K.all():
                ids_K, records_KW = ids_K[same_K], records_KW[same_K]
            rows_K = self._take_rows(len(ids_K))
            self._put(ids_K, rows_K, records_KW)
        finally:
            self._log.unpin(fetch.pin)

    def begin_reading(self, ids_M: Int64Array) -> TieredReading | None:
        numbers_M = self._map.find(ids_M)
        at_K = np.flatnonzero(numbers_M < MISSING)
        if not len(at_K):
            return None
        fetch = Fetch(ids_M[at_K], _address(numbers_M[at_K]), self._log, self._log.pin(), self._words)
        return TieredReading(fetch, at_K)

    def finish_reading(self, reading: RowReading | None, wanted: Wanted) -> tuple[Int64Array, Int32Array]:
        numbers_M = np.full(len(wanted.ids_M), MISSING)
        numbers_M[wanted.at_K] = self._map.find(wanted.ids_K)
        records_MW = np.empty((len(numbers_M), self._words), dtype=np.int32)
        in_memory = np.flatnonzero(numbers_M >= 0)
        records_MW[in_memory] = self.records.read(numbers_M[in_memory], 0, self._words)
        is_left_M = numbers_M < MISSING
        if isinstance(reading, TieredReading) and reading.fetch.records_KW is not None:
            # A record on disk does not change, and the pin keeps its address from being given out again.
            same_K = numbers_M[reading.at_K] == _number(reading.fetch.addresses_K)
            records_MW[reading.at_K[same_K]] = reading.fetch.records_KW[same_K]
            is_left_M[reading.at_K[same_K]] = False
        left = np.flatnonzero(is_left_M)  # sent down, or moved on disk, since the reading began
        for first in range(0, len(left), self._copied_rows):
            part = left[first : first + self._copied_rows]
            records_MW[part] = self._log.read(_address(numbers_M[part]), self._words)
        at_K = np.flatnonzero((numbers_M != MISSING) & wanted.is_between(records_MW[:, STEP_WORD]))
        return at_K, records_MW[at_K]

    def steps(self, records_KW: Int32Array) -> Int32Array:
        return records_KW[:, STEP_WORD]

    @property
    def _row_bytes(self) -> int:
        """Of a row in memory: its record, and its number while it is free."""
        return 4 * self._words + 8

    @property
    def _fixed_bytes(self) -> int:
        copies = _NUM_COPIES * _COPY_BYTES + _COMPACTED_BYTES
        of_rows = self._ids_R.nbytes + self._use_R.nbytes  # as many as there can be: they do not shrink
        finding = self._map.num_bytes + grouping_bytes(self._map.num_slots)
        return finding + self._log.num_bytes + of_rows + copies

    def _capacity_beside(self, num_bytes: int) -> int:
        """Rows that memory has room for beside so many bytes more."""
        room = self._limit - self._beside() - self._fixed_bytes - num_bytes
        return max(0, room // self._row_bytes)

    def _too_little(self, num_bytes: int) -> MemoryError:
        needed = self._beside() + self._fixed_bytes + num_bytes + _MIN_ROWS * self._row_bytes
        return MemoryError(
            f"table {self._name!r}: {human_size(needed)} of memory are needed to find {len(self._map):,} "
            f"rows and to move them between disk and memory; disk.memory allows {human_size(self._limit)}"
        )

    def _hold(self, rows_M: Int64Array) -> None:
        """Count a use of rows in memory, and keep them there until `_let_go`."""
        _use(self._use_R, kernel_input(rows_M, np.int64))
        self._held.append(rows_M)

    def _let_go(self) -> None:
        for rows_M in self._held:
            _release(self._use_R, kernel_input(rows_M, np.int64))
        self._held = []

    def _bring_up(self, ids_K: Int64Array) -> None:
        """Put rows of distinct ids, which are on disk, into memory and hold them there."""
        rows_K = self._take_rows(len(ids_K))  # first: making room may move what is on disk
        try:
            records_KW = self._log.read(_address(self._map.find(ids_K)), self._words)
        except OSError:
            self._give_back(rows_K)
            raise
        self._put(ids_K, rows_K, records_KW)
        self._hold(rows_K)

    def _put(self, ids_K: Int64Array, rows_K: Int64Array, records_KW: Int32Array) -> None:
        self.records.write(rows_K, 0, records_KW)
        addresses_K = _address(self._map.find(ids_K))
        self._map.assign(ids_K, rows_K)
        self._ids_R[rows_K] = ids_K
        # Its last word says how many steps have changed it: what was used often will be again. With Zipf
        # ids a tenth fewer rows have to be brought up than if all began alike.
        self._use_R[rows_K] = np.clip(records_KW[:, -1], 0, _MOST)
        self._log.free(addresses_K)
        self.num_from_disk += len(ids_K)

    def _take_rows(self, num: int) -> Int64Array:
        """[num] rows in memory that nobody has; others go to disk for them."""
        while (num_lacking := num - len(self._free_F) - (self._capacity - self._num_rows)) > 0:
            # Many at once, since a write costs little more for many than for one.
            self._send_down(min(self._copied_rows, max(num_lacking, self._capacity // 16)))
        num_reused = min(num, len(self._free_F))
        reused_F, self._free_F = np.split(self._free_F, [num_reused])
        new_M = np.arange(self._num_rows, self._num_rows + num - num_reused)
        self.records.reserve(self._num_rows + len(new_M))
        self._num_rows += len(new_M)
        return np.concatenate((reused_F, new_M))

    def _give_back(self, rows_M: Int64Array) -> None:
        self._use_R[rows_M] = _FREE
        self._free_F = np.concatenate((self._free_F, rows_M))

    def _send_down(self, num: int) -> None:
        """Move about so many rows to disk, of those that were used least lately."""
        rows_V, self._hand = _sweep(self._use_R[: self._num_rows], self._hand, num)
        assert len(rows_V), f"all {self._num_rows} rows of {self._name!r} in memory are held"
        try:
            self._move_down(rows_V)
        except OSError:
            self._use_R[rows_V] = 0
            raise
        self._compact()

    def _move_down(self, rows_V: Int64Array) -> None:
        ids_V = self._ids_R[rows_V]
        records_VW = np.empty((len(rows_V), self._words + _ID_WORDS), dtype=np.int32)
        records_VW[:, : self._words] = self.records.read(rows_V, 0, self._words)
        records_VW[:, self._words :] = ids_V.view(np.int32).reshape(-1, _ID_WORDS)
        addresses_V = self._log.write(records_VW)  # if it fails, the rows are where they were
        self._map.assign(ids_V, _number(addresses_V))
        self._give_back(rows_V)

    def _copy(self, ids_M: Int64Array, copies: Records) -> None:
        """Write the records of ids to rows 0, 1, ... of other records, wherever they are."""
        numbers_M = self._map.find(ids_M)
        in_memory = np.flatnonzero(numbers_M >= 0)
        copies.write(in_memory, 0, self.records.read(numbers_M[in_memory], 0, self._words))
        on_disk = np.flatnonzero(numbers_M < MISSING)
        for first in range(0, len(on_disk), self._copied_rows):
            part = on_disk[first : first + self._copied_rows]
            copies.write(part, 0, self._log.read(_address(numbers_M[part]), self._words))

    def _compact(self) -> None:
        while (moved := self._log.compact()) is not None:
            self._map.assign(self._ids_in(moved.words_KW), _number(moved.addresses_K))

    def _ids_in(self, words_MW: Int32Array) -> Int64Array:
        """The ids behind records as they are on disk."""
        return np.ascontiguousarray(words_MW[:, self._words :]).view(np.int64).reshape(-1)

    def _fit(self, num_bytes: int = 0) -> None:
        """Let memory hold as many rows as it has room for beside so many bytes; those beyond go to disk."""
        capacity = min(self._capacity_beside(num_bytes), len(self._ids_R))
        if capacity < _MIN_ROWS:
            raise self._too_little(num_bytes)
        if self._num_rows > capacity:
            used_R = capacity + np.flatnonzero(self._use_R[capacity : self._num_rows] != _FREE)
            for first in range(0, len(used_R), self._copied_rows):
                self._move_down(used_R[first : first + self._copied_rows])
                self._compact()
            self._free_F = self._free_F[self._free_F < capacity]
            self._num_rows = capacity
            self.records.give_back(capacity)
        self._capacity = capacity


def _address(numbers_M: Int64Array) -> Int64Array:
    """Addresses on disk as the map has them, below MISSING, and back (`_number`)."""
    return MISSING - 1 - numbers_M


_number = _address


@njit(nogil=True, cache=True)
def _use(use_R: NDArray[np.uint8], rows_M: Int64Array) -> None:
    for row in rows_M:
        if row >= 0:
            use_R[row] = min((use_R[row] & ~_HELD) + 1, _MOST) | _HELD


@njit(nogil=True, cache=True)
def _release(use_R: NDArray[np.uint8], rows_M: Int64Array) -> None:
    for row in rows_M:
        if row >= 0 and use_R[row] != _FREE:
            use_R[row] &= ~_HELD


@njit(nogil=True, cache=True)
def _sweep(use_R: NDArray[np.uint8], hand: int, num: int) -> tuple[Int64Array, int]:
    """Rows to give up, and where the hand stops: those it finds unused; used ones lose one use each time."""
    rows_V = np.empty(num, dtype=np.int64)
    found = 0
    hand = hand % len(use_R)
    for _ in range((np.int64(_MOST) + 1) * len(use_R)):
        if found == num:
            break
        if use_R[hand] == 0:
            rows_V[found] = hand
            use_R[hand] = _HELD  # so that the hand does not take it twice
            found += 1
        elif use_R[hand] < _HELD:
            use_R[hand] -= 1
        hand = (hand + 1) % len(use_R)
    return rows_V[:found], hand
