"""Which server holds an id: id -> virtual bucket -> shard.

Buckets never change, the map from buckets to shards does; so any number of shards can load what any
other number saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input, mix64

NUM_BUCKETS = 65_536


def bucket_of(ids_M: Int64Array) -> Int32Array:
    """[M] virtual bucket of each id: `mix64(id) mod 65,536`."""
    return _buckets(kernel_input(ids_M, np.int64))


class ShardMap:
    """Contiguous ranges of virtual buckets, one per shard, of equal size up to one bucket."""

    def __init__(self, num_shards: int, holders: Sequence[int] | None = None) -> None:
        """
        Args:
            holders: distinct shards, ascending, that hold something; None: all.

        Raises:
            ValueError: there are fewer shards than one or more than buckets, or a holder is none of them.
        """
        if not 1 <= num_shards <= NUM_BUCKETS:
            raise ValueError(
                f"the number of shards must be from 1 to {NUM_BUCKETS}, the virtual buckets, got {num_shards}"
            )
        held = range(num_shards) if holders is None else holders
        if not held or list(held) != sorted(set(held)) or not 0 <= held[0] <= held[-1] < num_shards:
            raise ValueError(
                f"holders must be distinct shards from 0 to {num_shards - 1}, ascending, got {list(held)}"
            )
        self.num_shards = num_shards
        # Of shards below each one that hold something.
        num_below = np.searchsorted(held, np.arange(num_shards + 1)).tolist()
        self._first_bucket = [below * NUM_BUCKETS // len(held) for below in num_below]
        self._shard_of_bucket = np.repeat(np.arange(num_shards, dtype=np.int32), np.diff(self._first_bucket))

    def among(self, holders: Sequence[int] | None) -> ShardMap:
        """The map of a table that lies on some of the shards; None: on all.

        One that is read by a single shard is all there, wherever its parts lay.
        """
        return self if holders is None or self.num_shards == 1 else ShardMap(self.num_shards, holders)

    def buckets(self, shard: int) -> range:
        """The virtual buckets that `shard` holds."""
        return range(self._first_bucket[shard], self._first_bucket[shard + 1])

    def shard_of(self, ids_M: Int64Array) -> Int32Array:
        """[M] shard of each id."""
        return self._shard_of_bucket[bucket_of(ids_M)]

    def split(self, ids_M: Int64Array) -> list[Int64Array]:
        """For each shard, the ascending positions within ids_M of the ids it holds."""
        if self.num_shards == 1:
            return [np.arange(len(ids_M))]
        order_M, ends = _positions_by_shard(
            kernel_input(ids_M, np.int64), self._shard_of_bucket, self.num_shards
        )
        return np.split(order_M, ends[:-1])


@njit(nogil=True, cache=True)
def _buckets(ids_M: Int64Array) -> Int32Array:
    buckets_M = np.empty(len(ids_M), dtype=np.int32)
    for m in range(len(ids_M)):
        buckets_M[m] = mix64(np.uint64(ids_M[m])) % np.uint64(NUM_BUCKETS)
    return buckets_M


@njit(nogil=True, cache=True)
def _positions_by_shard(
    ids_M: Int64Array, shard_of_bucket: Int32Array, num_shards: int
) -> tuple[Int64Array, Int64Array]:
    """Counting sort of the positions by shard, stable; with each shard's end in the result."""
    shards_M = np.empty(len(ids_M), dtype=np.int32)
    counts = np.zeros(num_shards, dtype=np.int64)
    for m in range(len(ids_M)):
        shards_M[m] = shard_of_bucket[mix64(np.uint64(ids_M[m])) % np.uint64(NUM_BUCKETS)]
        counts[shards_M[m]] += 1
    ends = np.cumsum(counts)
    free = ends - counts
    order_M = np.empty(len(ids_M), dtype=np.int64)
    for m in range(len(ids_M)):
        order_M[free[shards_M[m]]] = m
        free[shards_M[m]] += 1
    return order_M, ends
