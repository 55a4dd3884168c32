"""Records on disk, for rows that memory has no room for.

    write ──► pages at the head of the open segment, in large sequential writes
    read  ──► one random read per page, many at once (`page_reads`)
    free  ──► slots are dead; a segment without live ones is written again
    compact ► what still lives in the emptiest segments moves to the head, so that the file stays
              about as large as what is in it

A spill area and nothing else: the file has no name once it is open, so that it is gone with the process
however that ends, and nothing can be read back afterwards.

Why a log: a record is a tenth of a page, so that writing it back in place would be a random write for every
random read. `docs/benchmarks/embeddings.md` has the figures, and those of other stores.

What the disk gives back is compared with a checksum (`page_reads`). It has a mark in it which is another one
every time that a segment is begun: what an earlier use of the segment left is not taken for its records.

Axes: M records of one call, W words of a record, G segments, B bytes of a segment's bitmap.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.embeddings.storage.disk.page_reads import PageReader, Pages, record_checksum
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.files import check_on_disk

_SEGMENT_BYTES = 4 * 2**20
_WRITE_BYTES = 2**20  # of one write, at most, unless a page is larger
_GROWTH = 32  # bitmaps of segments to come; few, since memory for them has to be expected
_SPARE_SEGMENTS = 2  # room for records that `compact` moves while a reserve is used up
_MIN_LIVE = 0.5  # share of the slots in use below which segments are emptied
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Moved(NamedTuple):
    """Records that `compact` has put elsewhere; their old addresses are void."""

    words_KW: Int32Array
    addresses_K: Int64Array


class RecordLog:
    """Records of W 4-byte words, each at an address from `write` to `free`.

    `read` is thread-safe and runs beside everything else; the other calls take turns. An address that
    is freed or moved while another thread reads it may be given out again: a thread that looked
    addresses up under a lock of its own, and reads them after letting go of it, pins them meanwhile.
    """

    def __init__(self, folder: str | Path, words: int, may_be_memory: bool = False) -> None:
        """Open an empty log.

        Args:
            may_be_memory: take a folder that is in memory too.

        Raises:
            OSError: no file can be made in `folder` any more; names it.
            InputError: `folder` does not exist, takes no files, or is not on a disk.
        """
        check_on_disk(Path(folder), may_be_memory)
        self._words = words
        self._pages = Pages.of(words + 1)  # the checksum is one more
        self._segment_pages = max(2, _SEGMENT_BYTES // self._pages.num_bytes)
        self._segment_slots = self._segment_pages * self._pages.records
        self._path = str(folder)
        self._descriptor, self._direct = _open_unnamed(self._path)
        self._reader = PageReader(self._descriptor, self._pages, self._path, self._direct)
        chunk_pages = max(1, _WRITE_BYTES // self._pages.num_bytes)
        self._chunk_pages = chunk_pages
        self._buffer = mmap.mmap(-1, chunk_pages * self._pages.num_bytes)  # aligned, as O_DIRECT wants it
        self._buffer_words = np.frombuffer(self._buffer, dtype=np.int32).reshape(chunk_pages, -1)

        self._lock = threading.Lock()
        self._live_GB = np.zeros((0, -(-self._segment_slots // 8)), dtype=np.uint8)  # a bit per slot
        self._num_live_G = np.zeros(0, dtype=np.int64)
        self._marks_G = np.zeros(0, dtype=np.int64)
        self._num_begun = 0  # segments, so far; also those of writes that failed
        self._num_segments = 0
        self._empty: list[int] = []
        self._open = -1  # the segment that is being filled; -1 for none
        self._next_page = 0  # within it
        self._pin_ids = itertools.count()
        self._pins: dict[int, int] = {}  # pin -> number of releases before it
        self._num_released = 0
        self._released: deque[tuple[int, int]] = deque()  # (number of the release, segment), until no pin

    def __len__(self) -> int:
        """Records that are not freed."""
        return int(self._num_live_G.sum())

    @property
    def num_bytes(self) -> int:
        """Memory: buffers, and a bit per slot."""
        of_segments = self._live_GB.nbytes + self._num_live_G.nbytes + self._marks_G.nbytes
        return len(self._buffer) + of_segments + self._reader.num_bytes

    @property
    def disk_bytes(self) -> int:
        return self._num_segments * self._segment_pages * self._pages.num_bytes

    def write(self, words_MW: Int32Array) -> Int64Array:
        """Append records; returns their addresses, [M].

        Raises:
            OSError: no space (errno ENOSPC, EDQUOT or EFBIG; names the folder and what was needed), or
                the disk's error. Nothing has changed then.
        """
        words_MW = kernel_input(words_MW, np.int32)
        if words_MW.ndim != 2 or words_MW.shape[1] != self._words:
            raise ValueError(f"expected records of {self._words} words, got shape {words_MW.shape}")
        with self._lock:
            return self._write(words_MW)

    def reserve(self, num_records: int) -> None:
        """Take so much of the disk now that writing so many records, a page at a time, cannot find it full.

        Raises:
            OSError: as `write`.
        """
        with self._lock:
            free_pages = len(self._empty) * self._segment_pages
            if self._open >= 0:
                free_pages += self._segment_pages - self._next_page
            # Every call may leave the rest of a page empty; calls are of many records, mostly.
            needed_pages = -(-num_records // self._pages.records) + _SPARE_SEGMENTS * self._segment_pages
            num_more = -(-(needed_pages - free_pages) // self._segment_pages)
            if num_more > 0:
                self._extend(num_more)

    def read(self, addresses_M: Int64Array, num_words: int | None = None) -> Int32Array:
        """[M, W] the records at these addresses, or their first `num_words` words.

        Raises:
            OSError: the disk's error, with the folder's name; or a record is not as it was written.
        """
        words_MW = self._read(addresses_M, num_words or self._words)
        self._drop_cache(0, 0)
        return words_MW

    def free(self, addresses_M: Int64Array) -> None:
        """Give up records; each address once."""
        with self._lock:
            self._free(kernel_input(addresses_M, np.int64))

    def compact(self) -> Moved | None:
        """Empty the segment with the fewest records, if less than half of the slots in use are live.

        Call it after `write` and `free` until it returns None, and note the new addresses each time;
        one call moves a segment's records at most, so that it takes little memory. On a full disk records
        stay where they are.

        Raises:
            OSError: the disk's error; nothing has changed then.
        """
        with self._lock:
            victim = self._emptiest()
            if victim is None:
                return None
            old_K = self._live(victim)
            words_KW = self._read(old_K, self._words)
            # Written before they are freed: the records are somewhere on disk at every moment.
            try:
                new_K = self._write(kernel_input(words_KW, np.int32))
            except OSError as error:
                if error.errno in _NO_ROOM:
                    return None  # nothing needs it now; who writes will hear of it
                raise
            self._free(kernel_input(old_K, np.int64))
            return Moved(words_KW, new_K)

    def pin(self) -> int:
        """Until `unpin`, no address of now is given out again, so that what was written there stays."""
        with self._lock:
            pin = next(self._pin_ids)
            self._pins[pin] = self._num_released
            return pin

    def unpin(self, pin: int) -> None:
        with self._lock:
            del self._pins[pin]
            self._reuse_released()

    def close(self) -> None:
        """Give the disk's space back; no other call may be running, and none may follow."""
        if self._descriptor >= 0:
            self._reader.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def _read(self, addresses_M: Int64Array, num_words: int) -> Int32Array:
        # A segment has one mark as long as something in it can be asked for.
        marks_M = self._marks_G[addresses_M // self._segment_slots]
        return self._reader.read(addresses_M, marks_M, num_words)

    def _write(self, words_MW: Int32Array) -> Int64Array:
        records, num_pages = self._pages.records, -(-len(words_MW) // self._pages.records)
        # All of it is decided on copies, which replace the originals when the pages are on disk: an error of
        # the disk, at any page, leaves the log as it was.
        empty, num_segments, segment, page = (
            list(self._empty),
            self._num_segments,
            self._open,
            self._next_page,
        )
        filled: list[int] = []
        marks = {} if segment < 0 else {segment: int(self._marks_G[segment])}
        addresses_M = np.empty(len(words_MW), dtype=np.int64)
        written = 0
        try:
            while written < num_pages:
                if segment < 0 or page == self._segment_pages:
                    filled.append(segment)
                    # A used segment before a new one: the file grows only when nothing else is free.
                    if not empty:
                        empty, num_segments = [num_segments], num_segments + 1
                    segment, page = empty.pop(), 0
                    self._num_begun += 1
                    marks[segment] = self._num_begun
                num = min(num_pages - written, self._chunk_pages, self._segment_pages - page)
                part = slice(written * records, (written + num) * records)
                first = segment * self._segment_pages + page
                self._write_pages(first, num, words_MW[part], marks[segment])
                addresses_M[part] = first * records + np.arange(len(addresses_M[part]))
                written, page = written + num, page + num
        except OSError as error:
            # Give back what the file grew by; a full disk would stay full for everything else on it.
            os.ftruncate(self._descriptor, self.disk_bytes)
            raise self._described(error, num_pages * self._pages.num_bytes) from error
        self._empty, self._open, self._next_page = empty, segment, page
        self._grow(num_segments)
        for begun, mark in marks.items():
            self._marks_G[begun] = mark
        _mark(self._live_GB, self._num_live_G, self._segment_slots, kernel_input(addresses_M, np.int64), True)
        # `_free` does not release the open segment, since pages are still to come. If all its records are
        # gone by the time it is full, it is released here.
        for segment in filled:
            if segment >= 0 and self._num_live_G[segment] == 0:
                self._release(segment)
        return addresses_M

    def _extend(self, num_segments: int) -> None:
        """Add empty segments and take their space on the disk, by writing them.

        A sparse file would take the space only when records come, and fail in the middle of a step.
        `posix_fallocate` is not on every system and file system.
        """
        num_bytes = num_segments * self._segment_pages * self._pages.num_bytes
        offset, end = self.disk_bytes, self.disk_bytes + num_bytes
        try:
            with memoryview(self._buffer) as buffer:
                while offset < end:
                    offset += os.pwrite(self._descriptor, buffer[: min(len(buffer), end - offset)], offset)
        except OSError as error:
            os.ftruncate(self._descriptor, self.disk_bytes)
            raise self._described(error, num_bytes) from error
        self._drop_cache(self.disk_bytes, num_bytes)
        first = self._num_segments
        self._grow(first + num_segments)
        self._empty += range(first, first + num_segments)

    def _described(self, error: OSError, num_bytes: int) -> OSError:
        if error.errno not in _NO_ROOM:
            return OSError(error.errno, f"cannot write embedding rows to disk ({error.strerror})", self._path)
        return OSError(
            error.errno,
            f"no space on disk for {num_bytes:,} more bytes of embedding rows, beside {self.disk_bytes:,} "
            f"bytes of them ({error.strerror}); no row is lost",
            self._path,
        )

    def _write_pages(self, first_page: int, num_pages: int, words_MW: Int32Array, mark: int) -> None:
        _pack(first_page * self._pages.records, self._pages.records, mark, words_MW, self._buffer_words)
        offset, num_bytes = first_page * self._pages.num_bytes, num_pages * self._pages.num_bytes
        done = 0
        with memoryview(self._buffer) as buffer:
            while done < num_bytes:
                done += os.pwrite(self._descriptor, buffer[done:num_bytes], offset + done)
        self._drop_cache(offset, num_bytes)

    def _free(self, addresses_M: Int64Array) -> None:
        repeated = _mark(self._live_GB, self._num_live_G, self._segment_slots, addresses_M, False)
        assert not repeated, f"{repeated} records on disk were freed that are not there"
        for segment in np.unique(addresses_M // self._segment_slots).tolist():
            if self._num_live_G[segment] == 0 and segment != self._open:
                self._release(segment)

    def _live(self, segment: int) -> Int64Array:
        live_N = np.unpackbits(self._live_GB[segment], bitorder="little")[: self._segment_slots]
        return segment * self._segment_slots + np.flatnonzero(live_N)

    def _emptiest(self) -> int | None:
        """The segment to empty, if one should be."""
        is_candidate_G = self._num_live_G > 0  # those without live records are empty, released or open
        if self._open >= 0:
            is_candidate_G[self._open] = False
        candidates = np.flatnonzero(is_candidate_G)
        if not len(candidates):
            return None
        used = len(candidates) * self._segment_slots + max(0, self._next_page) * self._pages.records
        victim = int(candidates[np.argmin(self._num_live_G[candidates])])
        num_pages_after = -(-int(self._num_live_G[victim]) // self._pages.records)
        # The last condition makes repeated calls end: a move must free more pages than it fills.
        if len(self) >= _MIN_LIVE * used or num_pages_after >= self._segment_pages:
            return None
        return victim

    def _release(self, segment: int) -> None:
        # Not reused at once: a reader that looked up addresses before may still read there, and must find the
        # old records, not new ones. Releases are numbered, and a pin holds those that come after it.
        self._released.append((self._num_released, segment))
        self._num_released += 1
        self._reuse_released()

    def _reuse_released(self) -> None:
        # Of what was released before the oldest pin, no pinned reader can have looked up an address.
        oldest = min(self._pins.values(), default=self._num_released)
        while self._released and self._released[0][0] < oldest:
            self._empty.append(self._released.popleft()[1])

    def _grow(self, num_segments: int) -> None:
        if num_segments > len(self._num_live_G):
            added = num_segments - len(self._num_live_G) + _GROWTH
            self._live_GB = np.pad(self._live_GB, ((0, added), (0, 0)))
            self._num_live_G = np.pad(self._num_live_G, (0, added))
            self._marks_G = np.pad(self._marks_G, (0, added))
        self._num_segments = num_segments

    def _drop_cache(self, offset: int, num_bytes: int) -> None:
        # Without O_DIRECT the system keeps pages in memory that we have promised not to take. What is
        # not on disk yet cannot be dropped, hence the wait for written pages.
        if self._direct or not hasattr(os, "posix_fadvise"):
            return
        if num_bytes:
            os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _open_unnamed(folder: str) -> tuple[int, bool]:
    """(descriptor of a new file without a name, whether it is open with O_DIRECT)."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="rayrec-rows-", dir=folder)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot make a file for embedding rows ({error.strerror})", folder
        ) from error
    try:
        if hasattr(os, "O_DIRECT"):
            try:
                direct = os.open(name, os.O_RDWR | os.O_DIRECT)
            except OSError:  # a file system without; the cache is dropped behind every call instead
                return descriptor, False
            os.close(descriptor)
            return direct, True
        return descriptor, False
    finally:
        os.unlink(name)


@njit(nogil=True, cache=True)
def _pack(first_slot: int, records: int, mark: int, words_MW: Int32Array, pages_PB: Int32Array) -> None:
    """Lay records out in pages, each before its checksum; what is behind them in a page stays as it was."""
    num_words = words_MW.shape[1]
    for m in range(len(words_MW)):
        first = (m % records) * (num_words + 1)
        for w in range(num_words):
            pages_PB[m // records, first + w] = words_MW[m, w]
        pages_PB[m // records, first + num_words] = record_checksum(words_MW[m], first_slot + m, mark)


@njit(nogil=True, cache=True)
def _mark(
    live_GB: NDArray[np.uint8],
    num_live_G: Int64Array,
    segment_slots: int,
    addresses_M: Int64Array,
    live: bool,
) -> int:
    """Set or clear the records' bits; returns how many had that value already, which are not counted."""
    repeated = 0
    for address in addresses_M:
        segment, slot = address // segment_slots, address % segment_slots
        bit = np.uint8(1 << (slot & 7))
        if ((live_GB[segment, slot >> 3] & bit) != 0) == live:
            repeated += 1
            continue
        live_GB[segment, slot >> 3] ^= bit
        num_live_G[segment] += 1 if live else -1
    return repeated
