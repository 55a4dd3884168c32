"""Many random reads of one file at once: records out of the pages that hold them.

A disk answers random reads fast only when it has many of them to choose from. Linux's asynchronous I/O
(`io_submit`) keeps a hundred in flight from one thread, at half of the processor time that a pool of
blocking threads takes; it needs a file opened with O_DIRECT. Elsewhere such a pool does it.

Every record ends with a checksum of itself, of the slot that it was written to and of the mark that its
writer gave it. A disk that loses a write gives back what was there before, and one that misplaces it gives
back another record: both are whole, and have another mark or slot.

Axes: M records of one call, W words that are wanted of each, Q reads in flight.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types

from rayrec.embeddings.base.compiled import int32_at
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input

ALIGNMENT = 4096
"""Bytes; what O_DIRECT asks of positions, lengths and memory, on every file system that has it."""

_DEPTH = 128
_SCRATCH_BYTES = 4 * 2**20
_MIN_DEPTH = 8
_NUM_THREADS = 16


class _SystemCalls(NamedTuple):
    """Numbers of io_setup, io_destroy, io_getevents and io_submit."""

    open: int
    close: int
    wait: int
    submit: int


_CALLS_BY_MACHINE = {"x86_64": _SystemCalls(206, 207, 208, 209), "aarch64": _SystemCalls(0, 1, 4, 2)}
_CALLS = _CALLS_BY_MACHINE.get(platform.machine()) if sys.platform == "linux" else None

# Found by name in the C library when a kernel is loaded, so that kernels that call them can be cached.
_int64 = types.int64
_syscall: Any = types.ExternalFunction("syscall", _int64(_int64, _int64, _int64, _int64, _int64, _int64))
_pread: Any = types.ExternalFunction("pread", _int64(types.int32, types.uint64, types.uint64, _int64))
_errno_location: Any = types.ExternalFunction("__errno_location", types.uint64())


class Pages(NamedTuple):
    """How records lie in a file: record s is number `s mod records` of page `s // records`."""

    words: int
    """4-byte words of a record; the last is its checksum."""
    records: int
    """Records in a page; none straddles two."""
    num_bytes: int
    """Bytes of a page, a multiple of ALIGNMENT."""

    @classmethod
    def of(cls, words: int) -> Pages:
        num_bytes = -(-4 * words // ALIGNMENT) * ALIGNMENT
        return cls(words, num_bytes // (4 * words), num_bytes)


class PageReader:
    """Reads records of one open file; thread-safe, and calls of several threads run at once."""

    def __init__(self, descriptor: int, pages: Pages, path: str, direct: bool) -> None:
        """Prepare reads of one open file.

        Args:
            descriptor: the open file; stays the caller's, who closes it after `close`.
            path: for messages.
            direct: whether it is open with O_DIRECT; asynchronous I/O would block without.
        """
        self._descriptor = descriptor
        self._pages = pages
        self._path = path
        self._depth = max(_MIN_DEPTH, min(_DEPTH, _SCRATCH_BYTES // pages.num_bytes))
        self._lock = threading.Lock()
        self._idle: list[_Ring] = []  # at most as many as there were calls at once
        self._lost: list[_Ring] = []  # their memory stays: a read may still arrive there
        self._num_rings = 0
        self._threads: ThreadPoolExecutor | None = None
        if direct:
            self._idle = [ring for ring in [_Ring.open(self._depth, pages.num_bytes)] if ring is not None]
            self._num_rings = len(self._idle)
        self._asynchronous = bool(self._idle)

    @property
    def num_bytes(self) -> int:
        """Memory that reads go through."""
        buffers = self._num_rings * self._depth if self._asynchronous else _NUM_THREADS
        return buffers * self._pages.num_bytes

    def read(self, slots_M: Int64Array, marks_M: Int64Array, num_words: int) -> Int32Array:
        """[M, num_words] of each record; one read for all that are wanted of a page.

        Args:
            marks_M: those that the records were written with.

        Raises:
            OSError: the file cannot be read at some offset, or a record is not as it was written.
        """
        words_MW = np.empty((len(slots_M), num_words), dtype=np.int32)
        slots_M, marks_M = kernel_input(slots_M, np.int64), kernel_input(marks_M, np.int64)
        # Sorted, so that records of one page follow each other and the page is read once.
        order_M = kernel_input(np.argsort(slots_M), np.int64)
        failed = self._read_asynchronously if self._asynchronous else self._read_on_threads
        spoiled_1 = np.full(1, -1, dtype=np.int64)
        code = failed(slots_M, marks_M, order_M, words_MW, spoiled_1)
        if code == _SPOILED:
            block = spoiled_1[0] // self._pages.records
            raise OSError(
                errno.EIO,
                f"block {block:,} of embedding rows on disk, at byte {block * self._pages.num_bytes:,}, is "
                "not as it was written: the disk lost or changed it. Check the disk, or name a folder "
                "on another one (disk.folder), and resume the run from its last snapshot",
                self._path,
            )
        if code:
            reason = os.strerror(code)
            raise OSError(code, f"cannot read embedding rows back from disk ({reason})", self._path)
        return words_MW

    def close(self) -> None:
        """Give everything back; no call may be running."""
        for ring in self._idle:
            ring.close()
        self._idle, self._num_rings = [], 0
        if self._threads is not None:
            # They have nothing to do, so nobody waits for their end. The collector may be what calls this,
            # inside of a thread that starts, with the lock that ending threads need.
            self._threads.shutdown(wait=False)
            self._threads = None

    def _read_asynchronously(
        self,
        slots_M: Int64Array,
        marks_M: Int64Array,
        order_M: Int64Array,
        words_MW: Int32Array,
        spoiled_1: Int64Array,
    ) -> int:
        ring = self._take_ring()
        if ring is None:  # more callers than the system has queues for
            return self._read_on_threads(slots_M, marks_M, order_M, words_MW, spoiled_1)
        code = _QUEUE_BROKE
        try:
            code = _read_queued(
                ring.context,
                ring.calls.submit,
                ring.calls.wait,
                self._descriptor,
                self._pages,
                slots_M,
                marks_M,
                order_M,
                words_MW,
                spoiled_1,
                ring.scratch_address,
                ring.requests_Q8,
                ring.pointers_Q,
                ring.events_Q4,
            )
        finally:
            # A queue that broke has reads in flight, which would write into the next call's memory.
            if code != _QUEUE_BROKE:
                with self._lock:
                    self._idle.append(ring)
            else:
                self._give_up(ring)
        if code == _EAGAIN:  # the system takes no more reads now
            return self._read_on_threads(slots_M, marks_M, order_M, words_MW, spoiled_1)
        return _EIO if code == _QUEUE_BROKE else code

    def _give_up(self, ring: _Ring) -> None:
        is_closed = ring.close()  # waits for reads that are in flight
        with self._lock:
            if is_closed:
                self._num_rings -= 1
            else:
                self._lost.append(ring)

    def _take_ring(self) -> _Ring | None:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        ring = _Ring.open(self._depth, self._pages.num_bytes)
        if ring is not None:
            with self._lock:
                self._num_rings += 1
        return ring

    def _read_on_threads(
        self,
        slots_M: Int64Array,
        marks_M: Int64Array,
        order_M: Int64Array,
        words_MW: Int32Array,
        spoiled_1: Int64Array,
    ) -> int:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="page-reads")
            threads = self._threads

        def read_part(order: Int64Array) -> int:
            scratch = mmap.mmap(-1, self._pages.num_bytes)
            address = np.uint64(np.frombuffer(scratch, dtype=np.uint8).ctypes.data)
            return _read_blocking(
                self._descriptor, self._pages, slots_M, marks_M, order, words_MW, spoiled_1, address
            )

        # By parts of the sorted order: at most one page is read by two threads at each border.
        codes = list(threads.map(read_part, np.array_split(order_M, _NUM_THREADS)))
        return next((code for code in codes if code), 0)


class _Ring:
    """A queue of the kernel for reads in flight, and the memory that they are read into."""

    def __init__(self, calls: _SystemCalls, context: int, depth: int, page_bytes: int) -> None:
        self.calls = calls
        self.context = context
        self._scratch = mmap.mmap(-1, depth * page_bytes)  # aligned, as O_DIRECT wants it
        self.scratch_address = np.uint64(np.frombuffer(self._scratch, dtype=np.uint8).ctypes.data)
        self.requests_Q8 = np.zeros((depth, 8), dtype=np.int64)
        self.pointers_Q = np.zeros(depth, dtype=np.int64)
        self.events_Q4 = np.zeros((depth, 4), dtype=np.int64)

    @classmethod
    def open(cls, depth: int, page_bytes: int) -> _Ring | None:
        """None where the system has none to give: another system, a sandbox, or its limit is reached."""
        if _CALLS is None:
            return None
        context = ctypes.c_ulong(0)
        if ctypes.CDLL(None).syscall(_CALLS.open, ctypes.c_uint(depth), ctypes.byref(context)) != 0:
            return None
        return cls(_CALLS, context.value, depth, page_bytes)

    def close(self) -> bool:
        """Wait for what is in flight and give the queue back; returns whether the system has it."""
        return ctypes.CDLL(None).syscall(self.calls.close, ctypes.c_ulong(self.context)) == 0


_EINTR, _EAGAIN, _EIO = errno.EINTR, errno.EAGAIN, errno.EIO
_QUEUE_BROKE, _SPOILED = -1, -2


@njit(nogil=True, cache=True)
def _read_queued(
    context: int,
    submit_call: int,
    wait_call: int,
    descriptor: int,
    pages: Pages,
    slots_M: Int64Array,
    marks_M: Int64Array,
    order_M: Int64Array,
    words_MW: Int32Array,
    spoiled_1: Int64Array,
    scratch: np.uint64,
    requests_Q8: Int64Array,
    pointers_Q: Int64Array,
    events_Q4: Int64Array,
) -> int:
    """Fill words_MW, with as many reads in flight as the queue takes; 0, or the number of an error.

    That is EAGAIN where the queue takes none at all, _QUEUE_BROKE where reads are left in flight, and
    _SPOILED where a record, whose slot is put into spoiled_1, is not as it was written.

    requests_Q8 are `struct iocb`, events_Q4 `struct io_event` of linux/aio_abi.h.
    """
    depth = len(requests_Q8)
    starts_Q, ends_Q = np.empty(depth, dtype=np.int64), np.empty(depth, dtype=np.int64)
    idle_Q = np.arange(depth)
    num_idle, num_ready, num_flying, following, failed = depth, 0, 0, 0, 0
    while num_flying > 0 or ((num_ready > 0 or following < len(order_M)) and failed == 0):
        # The kernel writes to the buffers of reads in flight at any time, so after an error nothing more is
        # submitted, but the loop goes on until all of them are back.
        while num_idle > 0 and following < len(order_M) and failed == 0:
            page = slots_M[order_M[following]] // pages.records
            num_idle -= 1
            q = idle_Q[num_idle]
            starts_Q[q] = following
            while following < len(order_M) and slots_M[order_M[following]] // pages.records == page:
                following += 1
            ends_Q[q] = following
            # Words of `struct iocb`: 0 comes back with the answer, 2 operation and file, 3 buffer, 4 length,
            # 5 offset.
            requests_Q8[q, 0] = q
            requests_Q8[q, 2] = np.int64(descriptor) << 32  # the operation, IOCB_CMD_PREAD, is 0
            requests_Q8[q, 3] = np.int64(scratch) + q * pages.num_bytes
            requests_Q8[q, 4] = pages.num_bytes
            requests_Q8[q, 5] = page * pages.num_bytes
            pointers_Q[num_ready] = requests_Q8.ctypes.data + q * 64
            num_ready += 1
        sent = 0
        while sent < num_ready and failed == 0:
            taken = _syscall(submit_call, context, num_ready - sent, pointers_Q.ctypes.data + sent * 8, 0, 0)
            if taken > 0:
                sent += taken
                continue
            number = int32_at(_errno_location())[0] if taken < 0 else _EAGAIN
            if number == _EAGAIN and num_flying + sent > 0:
                break  # full: the others go when some are back
            if number != _EINTR:
                failed = number
        num_flying += sent
        num_ready -= sent
        pointers_Q[:num_ready] = pointers_Q[sent : sent + num_ready].copy()
        if num_flying == 0:
            break
        # A quarter at a time: to wait for one would be a system call for every page, to wait for all would
        # leave the disk without requests to choose from.
        at_least = min(num_flying, max(1, depth // 4))
        num_done = _syscall(wait_call, context, at_least, depth, events_Q4.ctypes.data, 0)
        if num_done < 0:
            if int32_at(_errno_location())[0] == _EINTR:
                continue
            return _QUEUE_BROKE
        num_flying -= num_done
        for e in range(num_done):
            q = events_Q4[e, 0]
            # Less than a page is an error, too: the file is made of whole pages.
            if events_Q4[e, 2] != pages.num_bytes:
                failed = -events_Q4[e, 2] if events_Q4[e, 2] < 0 else _EIO
            else:
                address = scratch + np.uint64(q * pages.num_bytes)
                part = order_M[starts_Q[q] : ends_Q[q]]
                spoiled = _copy_records(pages, address, slots_M, marks_M, part, words_MW)
                if spoiled >= 0:
                    failed, spoiled_1[0] = _SPOILED, spoiled
            idle_Q[num_idle] = q
            num_idle += 1
    return failed


@njit(nogil=True, cache=True)
def _read_blocking(
    descriptor: int,
    pages: Pages,
    slots_M: Int64Array,
    marks_M: Int64Array,
    order: Int64Array,
    words_MW: Int32Array,
    spoiled_1: Int64Array,
    scratch: np.uint64,
) -> int:
    """The records of `order`, one page after the other; 0, or the number of an error."""
    start = 0
    while start < len(order):
        page = slots_M[order[start]] // pages.records
        end = start
        while end < len(order) and slots_M[order[end]] // pages.records == page:
            end += 1
        found = _pread(
            np.int32(descriptor), scratch, np.uint64(pages.num_bytes), np.int64(page * pages.num_bytes)
        )
        if found != pages.num_bytes:
            return _EIO
        spoiled = _copy_records(pages, scratch, slots_M, marks_M, order[start:end], words_MW)
        if spoiled >= 0:
            spoiled_1[0] = spoiled
            return _SPOILED
        start = end
    return 0


@njit(nogil=True, cache=True)
def _copy_records(
    pages: Pages,
    address: np.uint64,
    slots_M: Int64Array,
    marks_M: Int64Array,
    order: Int64Array,
    words_MW: Int32Array,
) -> int:
    """The slot of a record that is not as it was written; -1 if there is none."""
    page_words = carray(int32_at(address), pages.num_bytes // 4)
    for m in order:
        first = (slots_M[m] % pages.records) * pages.words
        last = first + pages.words - 1
        if page_words[last] != record_checksum(page_words[first:last], slots_M[m], marks_M[m]):
            return int(slots_M[m])
        for w in range(words_MW.shape[1]):
            words_MW[m, w] = page_words[first + w]
    return -1


@njit(nogil=True, cache=True)
def record_checksum(words: Int32Array, slot: int, mark: int) -> np.int32:
    """32 bits of a record's words, where it lies, and the mark of its writer.

    Every word is multiplied into one of four sums, since one sum would wait for each product. An odd
    multiplier loses nothing, so a change of one word always shows before the last fold.
    """
    factor = np.uint64(0x9E3779B97F4A7C15)
    a, b = np.uint64(slot) + factor, np.uint64(mark) ^ np.uint64(0xC2B2AE3D27D4EB4F)
    c, d = np.uint64(len(words)) * factor, np.uint64(0x165667B19E3779F9)
    whole = len(words) - len(words) % 4
    for w in range(0, whole, 4):
        a = (a ^ np.uint64(np.uint32(words[w]))) * factor
        b = (b ^ np.uint64(np.uint32(words[w + 1]))) * factor
        c = (c ^ np.uint64(np.uint32(words[w + 2]))) * factor
        d = (d ^ np.uint64(np.uint32(words[w + 3]))) * factor
    for w in range(whole, len(words)):
        a = (a ^ np.uint64(np.uint32(words[w]))) * factor
    for part in (b, c, d):
        a = ((a ^ (a >> np.uint64(29))) * factor) ^ part
    a = (a ^ (a >> np.uint64(32))) * factor
    return np.int32(np.uint32(a >> np.uint64(32)))
