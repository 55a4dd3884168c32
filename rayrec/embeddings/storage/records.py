"""Memory of table rows: fixed-size blocks that never move, so that growing copies nothing."""

from __future__ import annotations

import contextlib
import functools
import mmap

import numpy as np
from numba import carray, njit

from rayrec.embeddings.base.compiled import (
    LANES,
    RowAddresses,
    copy_lanes,
    int32_at,
    prefetch_row,
    prefetch_words,
    row_address,
)
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.memory import machine_bytes

_LEAST_BLOCK_BYTES = 16 * 2**20
"""Several huge pages; pages that no row has reached cost nothing."""
_MOST_BLOCKS = 2**13
"""That all memory of a machine makes, or twice as many, since a block has a power of two of rows. A process
may have 65,530 mappings by default (`vm.max_map_count`)."""
_AHEAD = 16  # records asked for this many rows early


class RecordAccess:
    """Rows of 4-byte words, one contiguous record per row, numbered from 0. Not thread-safe.

    Axes: M rows of one call, W words of a part of the record.
    """

    addresses: RowAddresses

    def read(self, rows_M: Int64Array, first: int, num_words: int) -> Int32Array:
        """[M, W] copy of words `first` to `first + num_words` of each row's record."""
        words_MW = np.empty((len(rows_M), num_words), dtype=np.int32)
        self.read_into(rows_M, first, words_MW)
        return words_MW

    def read_into(self, rows_M: Int64Array, first: int, words_MW: Int32Array) -> None:
        """`read` as many words as there is room for."""
        _read(self.addresses, kernel_input(rows_M, np.int64), first, words_MW)

    def write(self, rows_M: Int64Array, first: int, words_MW: Int32Array) -> None:
        """Set words `first` to `first + W` of each row's record."""
        _write(self.addresses, kernel_input(rows_M, np.int64), first, kernel_input(words_MW, np.int32))

    def copy_rows(self, rows_K: Int64Array, others: RecordAccess, to_K: Int64Array) -> None:
        """Copy whole records to rows of others."""
        rows_K, to_K = kernel_input(rows_K, np.int64), kernel_input(to_K, np.int64)
        _copy_rows(self.addresses, rows_K, others.addresses, to_K)


class RecordArray(RecordAccess):
    """Records that lie in one array, which may be read only."""

    def __init__(self, records_MW: Int32Array) -> None:
        assert records_MW.flags.c_contiguous
        self.array = records_MW
        start = np.array([records_MW.ctypes.data], dtype=np.uint64)
        self.addresses = RowAddresses(start, 62, records_MW.shape[1])

    def copy_to(self, rows_K: Int64Array, others_JW: Int32Array, at_K: Int64Array) -> None:
        """others_JW[at_K] = the records of these rows."""
        _copy_to(self.addresses, kernel_input(rows_K, np.int64), others_JW, kernel_input(at_K, np.int64))


class Records(RecordAccess):
    """Records in blocks, as many as need be."""

    def __init__(self, words: int) -> None:
        self._blocks: list[mmap.mmap] = []
        shift = max(0, (_block_bytes_here() // (4 * words)).bit_length() - 1)
        self._block_bytes = (4 * words) << shift
        self.addresses = RowAddresses(np.empty(0, dtype=np.uint64), shift, words)

    def reserve(self, num_rows: int) -> None:
        """Make rows 0 to num_rows - 1 addressable; raises MemoryError and changes nothing if it cannot."""
        num_blocks = -(-num_rows >> self.addresses.shift)
        added = [_new_block(self._block_bytes) for _ in range(num_blocks - len(self._blocks))]
        if added:
            self._blocks += added
            starts = [np.frombuffer(block, dtype=np.int32).ctypes.data for block in self._blocks]
            self.addresses = self.addresses._replace(blocks=np.array(starts, dtype=np.uint64))

    def give_back(self, num_rows: int) -> None:
        """Let the system have the memory of all rows from number `num_rows` on; what they hold is lost."""
        kept = num_rows * 4 * self.addresses.words
        for block in self._blocks:
            start = -(-max(0, min(kept, self._block_bytes)) // mmap.PAGESIZE) * mmap.PAGESIZE
            if start < self._block_bytes:
                block.madvise(mmap.MADV_DONTNEED, start, self._block_bytes - start)
            kept -= self._block_bytes


def block_bytes(memory: int) -> int:
    """Most bytes of a block of records, on a machine of so much memory."""
    return max(_LEAST_BLOCK_BYTES, 1 << (memory // _MOST_BLOCKS).bit_length())


@functools.cache  # limits of a container are read from a dozen files, for every table
def _block_bytes_here() -> int:
    return block_bytes(machine_bytes())


def _new_block(num_bytes: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for another block of {num_bytes} bytes of embedding rows: {error}"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Random rows miss the translation buffer with 4 KiB pages; a third of the gather time is there.
        with contextlib.suppress(OSError):  # a kernel built without them; only speed is lost
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


@njit(nogil=True, cache=True)
def _read(rows: RowAddresses, rows_M: Int64Array, first: int, words_MW: Int32Array) -> None:
    # From 0 on, or the compiler copies word by word.
    num_words, offset = words_MW.shape[1], np.uint64(4 * first)
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M):
            prefetch_words(row_address(rows, rows_M[m + _AHEAD]) + offset, num_words)
        part = carray(int32_at(row_address(rows, rows_M[m]) + offset), num_words)
        for w in range(num_words):
            words_MW[m, w] = part[w]


@njit(nogil=True, cache=True)
def _copy_to(rows: RowAddresses, rows_K: Int64Array, others_JW: Int32Array, at_K: Int64Array) -> None:
    for k in range(len(rows_K)):
        if k + _AHEAD < len(rows_K):
            prefetch_row(rows, rows_K[k + _AHEAD])
        record = carray(int32_at(row_address(rows, rows_K[k])), rows.words)
        for w in range(rows.words):
            others_JW[at_K[k], w] = record[w]


@njit(nogil=True, cache=True)
def _write(rows: RowAddresses, rows_M: Int64Array, first: int, words_MW: Int32Array) -> None:
    # From 0 on, or the compiler copies word by word.
    num_words, offset = words_MW.shape[1], np.uint64(4 * first)
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M):
            prefetch_words(row_address(rows, rows_M[m + _AHEAD]) + offset, num_words)
        part = carray(int32_at(row_address(rows, rows_M[m]) + offset), num_words)
        for w in range(num_words):
            part[w] = words_MW[m, w]


@njit(nogil=True, cache=True)
def _copy_rows(rows: RowAddresses, rows_K: Int64Array, others: RowAddresses, to_K: Int64Array) -> None:
    words = rows.words
    whole = words - words % LANES
    for k in range(len(rows_K)):
        if k + _AHEAD < len(rows_K):
            prefetch_row(rows, rows_K[k + _AHEAD])
        source, target = row_address(rows, rows_K[k]), row_address(others, to_K[k])
        for word in range(0, whole, LANES):
            copy_lanes(target + np.uint64(4 * word), source + np.uint64(4 * word))
        record, copied = carray(int32_at(source), words), carray(int32_at(target), words)
        for word in range(whole, words):
            copied[word] = record[word]
