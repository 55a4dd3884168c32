"""Many lists of ids that grow and shrink at once, in blocks of one memory.

    list ─► newest block: next block | 31 ids ─► the one before ─► ...        free blocks are chained, too

To add ids to hundreds of lists costs as much as to add them to one: nothing is sorted, and no list is looked
at but those that are named.

Axes: M ids of one call, L lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rayrec.embeddings.base.compiled import RowAddresses, load64, row_address, store64
from rayrec.embeddings.storage.records import Records
from rayrec.platform.arrays import Int64Array
from rayrec.platform.compiled import kernel_input

_NONE = -1
_IDS = 31
"""Of a block."""
_BLOCK_WORDS = 2 * (1 + _IDS)
BLOCK_BYTES = 4 * _BLOCK_WORDS
_KEPT_BLOCKS = 2**12
"""A megabyte: what is kept of the memory when there are no ids."""


class IdLists:
    """Lists by number. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks = Records(_BLOCK_WORDS)
        self._num_blocks = self._num_free = 0
        self._free = _NONE
        """First of a chain of blocks to be used again."""
        self._heads_L, self._counts_L = np.empty(0, np.int64), np.empty(0, np.int64)
        self._unused: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Of the blocks that were in use at once, since there were no ids."""
        return BLOCK_BYTES * self._num_blocks

    def make(self) -> int:
        """Number of a new list."""
        if not self._unused:
            size = max(64, 2 * len(self._heads_L))
            self._unused = list(range(len(self._heads_L), size))[::-1]
            more_L = np.full(len(self._unused), _NONE, dtype=np.int64)
            self._heads_L = np.concatenate((self._heads_L, more_L))
            self._counts_L = np.concatenate((self._counts_L, np.zeros_like(more_L)))
        return self._unused.pop()

    def drop(self, number: int) -> None:
        """Forget an empty list."""
        assert not self.count(number)
        self._unused.append(number)

    def count(self, number: int) -> int:
        """How many ids are in a list."""
        return int(self._counts_L[number])

    def add(self, ids_M: Int64Array, lists_L: Int64Array, which_M: Int64Array) -> None:
        """Put each id into list `lists_L[which_M]`; all of them into the first where `which_M` is empty."""
        self._blocks.reserve(self._num_blocks + len(ids_M) // _IDS + len(lists_L))
        self._free, num_new, num_reused = _add(
            self._blocks.addresses,
            self._heads_L,
            self._counts_L,
            self._free,
            self._num_blocks,
            kernel_input(ids_M, np.int64),
            kernel_input(lists_L, np.int64),
            kernel_input(which_M, np.int64),
        )
        self._num_blocks += num_new
        self._num_free -= num_reused

    def put(self, number: int, ids_M: Int64Array) -> None:
        """Put ids into one list."""
        self.add(ids_M, np.array([number]), np.empty(0, dtype=np.int64))

    def take(self, number: int, most: int) -> Int64Array:
        """Take ids out of a list, the newest first, so many at most."""
        ids_K = np.empty(min(most, self.count(number)), dtype=np.int64)
        self._free, num_freed = _take(
            self._blocks.addresses, self._heads_L, self._counts_L, number, self._free, ids_K, True
        )
        self._num_free += num_freed
        if self._num_free == self._num_blocks:  # a table may give up nearly all, and have few from then on
            if self._num_blocks > _KEPT_BLOCKS:
                self._blocks.give_back(0)
            self._num_blocks = self._num_free = 0
            self._free = _NONE
        return ids_K

    def ids(self, number: int) -> Int64Array:
        """A copy of a list."""
        ids_K = np.empty(self.count(number), dtype=np.int64)
        _take(self._blocks.addresses, self._heads_L, self._counts_L, number, self._free, ids_K, False)
        return ids_K


@njit(nogil=True, cache=True)
def _add(
    blocks: RowAddresses,
    heads_L: Int64Array,
    counts_L: Int64Array,
    free: Any,
    num_blocks: int,
    ids_M: Int64Array,
    lists_L: Int64Array,
    which_M: Int64Array,
) -> tuple[Any, int, int]:
    """Returns the first free block, and how many blocks are new or were free."""
    num_new = num_reused = 0
    for m in range(len(ids_M)):
        number = lists_L[which_M[m]] if len(which_M) else lists_L[0]
        at = counts_L[number] % _IDS
        if at == 0:  # the newest block is full, or there is none
            if free == _NONE:
                block = np.int64(num_blocks + num_new)
                num_new += 1
            else:
                block = np.int64(free)
                free = np.int64(load64(row_address(blocks, block)))
                num_reused += 1
            store64(row_address(blocks, block), np.uint64(heads_L[number]))
            heads_L[number] = block
        store64(row_address(blocks, heads_L[number]) + np.uint64(8 + 8 * at), np.uint64(ids_M[m]))
        counts_L[number] += 1
    return np.int64(free), num_new, num_reused


@njit(nogil=True, cache=True)
def _take(
    blocks: RowAddresses,
    heads_L: Int64Array,
    counts_L: Int64Array,
    number: int,
    free: Any,
    ids_K: Int64Array,
    is_taken: bool,
) -> tuple[Any, int]:
    """Copy ids of a list, and take them out or not; returns the first free block, and how many came free."""
    block, count, num_freed = heads_L[number], counts_L[number], 0
    for k in range(len(ids_K)):
        address = row_address(blocks, block)
        at = (count - 1) % _IDS
        ids_K[k] = np.int64(load64(address + np.uint64(8 + 8 * at)))
        count -= 1
        if at == 0:
            before = np.int64(load64(address))
            if is_taken:
                store64(address, np.uint64(free))
                free = block
                num_freed += 1
            block = before
    if is_taken:
        heads_L[number], counts_L[number] = block, count
    return np.int64(free), num_freed
