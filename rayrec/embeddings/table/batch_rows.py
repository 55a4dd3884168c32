"""From rows of distinct ids to rows of a batch, and from its gradients back to one per distinct id.

    ids_N ──group_ids──► IdGroups: ids_M, and the places in the batch of each
                             │
    rows of ids_M ───────────┼──spread──► rows_ND      each row goes straight to its places
    sums_MD ◄──sum_groups────┴─────────── grads_ND     each sum is complete when the next begins

For whoever holds the batch and the table in one process: see `EmbeddingTable.lookup_batch`.

Axes: N ids of a batch, M distinct ones, D numbers of a row, C slots.
"""

from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.embeddings.base.compiled import (
    LANES,
    add_lanes,
    copy_lanes,
    prefetch_once,
)
from rayrec.embeddings.base.threads import ROWS_PER_THREAD, in_given_parts, in_parts
from rayrec.platform.compiled import kernel_input, mix64

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]

_AHEAD = 24  # gradients asked for this many rows early
_PARTS = 2  # of the ids, each grouped by one thread; their places fill one array from both ends
_PART_BIT = 16  # of the hash, which says the part; those below say the shard, the highest ones the slot


@dataclass(frozen=True, eq=False)
class IdGroups:
    """The distinct ids of a batch, and where in it each of them is, as `group_ids` found it."""

    ids_M: Int64Array
    """In an order that depends on the batch alone."""
    starts_M1: Int32Array
    """[M + 1] where the places of each id begin; the last is N."""
    places_N: Int32Array
    """Places in the batch, those of one id together, in the order of the batch."""

    def inverse_N(self) -> Int64Array:
        """[N] which of ids_M each id of the batch is."""
        inverse_N = np.empty(len(self.places_N), dtype=np.int64)
        inverse_N[self.places_N] = np.repeat(np.arange(len(self.ids_M)), np.diff(self.starts_M1))
        return inverse_N

    def bounds(self, num_threads: int, first: int, last: int, id_cost: int) -> list[int]:
        """Bounds of parts of ids_M[first:last] that are as much work for one thread as for another.

        Args:
            id_cost: what an id costs by itself, where each of its places costs 1.
        """
        starts_M1 = self.starts_M1

        def cost(m: int) -> int:
            return int(starts_M1[m] - starts_M1[first]) + id_cost * (m - first)

        num_parts = max(1, min(num_threads, cost(last) // ((1 + id_cost) * ROWS_PER_THREAD)))
        ids, total = range(first, last), cost(last)
        inner = [
            first + bisect.bisect_left(ids, part * total // num_parts, key=cost)
            for part in range(1, num_parts)
        ]
        return [first, *inner, last]


def group_ids(ids_N: Int64Array, num_threads: int = 1) -> IdGroups:
    """Find the places of each distinct id. More than two threads are not faster than two."""
    if len(ids_N) >= 2**31:
        raise ValueError(f"a batch may have up to 2**31 - 1 ids, got {len(ids_N)}")
    ids_N = kernel_input(ids_N, np.int64)
    places_N = np.empty(len(ids_N), dtype=np.int32)

    def group(first: int, last: int) -> list[tuple[Int64Array, Int32Array]]:
        return [_group(ids_N, part, places_N) for part in range(first, last)]

    threads = num_threads if len(ids_N) >= _PARTS * ROWS_PER_THREAD else 1
    parts = [part for some in in_parts(threads, _PARTS, group, least=1) for part in some]
    ids_M = np.concatenate([ids for ids, _ in parts])
    starts_M1 = np.concatenate([*(starts for _, starts in parts), np.array([len(ids_N)], dtype=np.int32)])
    for array in (ids_M, starts_M1, places_N):
        array.flags.writeable = False
    return IdGroups(ids_M, starts_M1, places_N)


def sum_groups(
    groups: IdGroups, grads_ND: Float32Array, out_MD: Float32Array | None = None, num_threads: int = 1
) -> tuple[Float32Array, bool]:
    """Sums of the gradients of each distinct id, added in the order of the batch.

    Args:
        out_MD: where to write them: memory that was used before costs half of what new memory does.

    Returns:
        ([M, D] sums, whether all of them are finite)

    Raises:
        ValueError: the shape of the gradients or of out_MD does not fit.
    """
    grads_ND = kernel_input(grads_ND, np.float32)
    if grads_ND.ndim != 2 or len(grads_ND) != len(groups.places_N):
        raise ValueError(
            f"there are gradients of shape {grads_ND.shape} for a batch of {len(groups.places_N)} ids"
        )
    sums_MD = output(out_MD, (len(groups.ids_M), grads_ND.shape[1]))
    are_finite = in_given_parts(
        groups.bounds(num_threads, 0, len(groups.ids_M), id_cost=1),
        lambda first, last: _sum(grads_ND, groups.starts_M1, groups.places_N, first, last, sums_MD),
    )
    return sums_MD, all(are_finite)


def batch_memory(num_rows: int, dim: int) -> Float32Array:
    """[num_rows, dim] for rows of one batch after the other: whole cache lines, in huge pages."""
    memory = mmap.mmap(-1, max(1, num_rows * dim * 4), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32, count=num_rows * dim).reshape(num_rows, dim)


def output(given: Float32Array | None, shape: tuple[int, int]) -> Float32Array:
    """Where to write: memory of the caller's, if it fits, or new."""
    if given is None:
        return np.empty(shape, dtype=np.float32)
    if given.shape != shape or given.dtype != np.float32 or not given.flags.c_contiguous:
        raise ValueError(f"expected a contiguous float32 array of shape {shape} to write to")
    return given


def _group(ids_N: Int64Array, part: int, places_N: Int32Array) -> tuple[Int64Array, Int32Array]:
    num_ids = len(ids_N)
    slots_C = np.zeros(1 << (2 * num_ids // _PARTS).bit_length(), dtype=np.int32)
    distinct_N, starts_N = np.empty(num_ids, dtype=np.int64), np.empty(num_ids, dtype=np.int32)
    own_N, numbers_N = np.empty(num_ids + 1, dtype=np.int32), np.empty(num_ids + 1, dtype=np.int32)
    return _group_part(ids_N, part, slots_C, distinct_N, starts_N, own_N, numbers_N, places_N)


@njit(nogil=True, cache=True)
def _group_part(
    ids_N: Int64Array,
    part: int,
    slots_C: Int32Array,
    distinct_N: Int64Array,
    starts_N: Int32Array,
    own_N: Int32Array,
    numbers_N: Int32Array,
    places_N: Int32Array,
) -> tuple[Int64Array, Int32Array]:
    """([M] distinct ids of this part by first appearance, [M] where the places of each begin).

    Args:
        slots_C: zeros; more of them than ids. A slot will hold 1 + the number of its id, 0 if it is free.
        distinct_N, starts_N: of one element for every id.
        own_N, numbers_N: one more, since what does not belong to the part is written too, and overwritten.
        places_N: where to write the places.
    """
    mask = len(slots_C) - 1
    shift = np.uint64(64)
    while np.int64(1) << (np.int64(64) - np.int64(shift)) < len(slots_C):
        shift -= np.uint64(1)
    num_own = 0
    for n in range(len(ids_N)):  # without a branch, which would be as good as random
        hashed = mix64(np.uint64(ids_N[n]))
        own_N[num_own] = n
        numbers_N[num_own] = np.int32(hashed >> shift)
        num_own += np.int64((hashed >> np.uint64(_PART_BIT)) & np.uint64(1)) == part
    num_distinct = 0
    for k in range(num_own):
        id_, slot = ids_N[own_N[k]], np.int64(numbers_N[k])
        while slots_C[slot] != 0 and distinct_N[slots_C[slot] - 1] != id_:
            slot = (slot + 1) & mask
        if slots_C[slot] == 0:
            distinct_N[num_distinct] = id_
            starts_N[num_distinct] = 0
            num_distinct += 1
            slots_C[slot] = num_distinct
        number = slots_C[slot] - 1
        numbers_N[k] = number
        starts_N[number] += 1
    # From counts to where the places begin, and by filling them to where they end.
    start = 0 if part == 0 else len(ids_N) - num_own
    for m in range(num_distinct):
        count = starts_N[m]
        starts_N[m] = start
        start += count
    for k in range(num_own):
        m = numbers_N[k]
        places_N[starts_N[m]] = own_N[k]
        starts_N[m] += 1
    starts_M = np.empty(num_distinct, dtype=np.int32)
    for m in range(num_distinct):
        if m == 0:
            starts_M[m] = 0 if part == 0 else len(ids_N) - num_own
        else:
            starts_M[m] = starts_N[m - 1]
    return distinct_N[:num_distinct], starts_M


@njit(nogil=True, cache=True)
def _sum(
    grads_ND: Float32Array,
    starts_M1: Int32Array,
    places_N: Int32Array,
    first: int,
    last: int,
    out_MD: Float32Array,
) -> bool:
    """Sums of ids `first` to `last`; whether all of them are finite, seen by their exponents' bits."""
    dim, end = out_MD.shape[1], starts_M1[last]
    whole, row_bytes = dim - dim % LANES, np.uint64(4 * dim)
    grads, out = np.uint64(grads_ND.ctypes.data), np.uint64(out_MD.ctypes.data)
    bits_MD, all_ones = out_MD.view(np.int32), np.int32(0x7F800000)
    num_bad = 0
    for m in range(first, last):
        target = out + row_bytes * np.uint64(m)
        for i in range(starts_M1[m], starts_M1[m + 1]):
            if i + _AHEAD < end:
                # Once: so the rows that were looked up are still in the cache when they are to be changed.
                line = grads + row_bytes * np.uint64(places_N[i + _AHEAD])
                line_end = line + row_bytes
                while line < line_end:
                    prefetch_once(line)
                    line += np.uint64(64)
            n = places_N[i]
            source = grads + row_bytes * np.uint64(n)
            if i == starts_M1[m]:
                for d in range(0, whole, LANES):
                    copy_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
                for d in range(whole, dim):
                    out_MD[m, d] = grads_ND[n, d]
            else:
                for d in range(0, whole, LANES):
                    add_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
                for d in range(whole, dim):
                    out_MD[m, d] += grads_ND[n, d]
        largest = np.int32(0)
        for d in range(dim):
            largest = max(largest, bits_MD[m, d] & all_ones)
        num_bad += largest == all_ones
    return num_bad == 0
