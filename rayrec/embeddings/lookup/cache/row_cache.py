"""Rows of one table that a trainer holds: read, changed and kept where the dense compute is.

A row in the cache is the row: the server's copy is older until the record comes back. Who uses a cache
sees to it that no other cache has the same id.

Room is made by the clock algorithm (Corbató, "A Paging Experiment with the Multics System", 1968), which
is close to least recently used and costs a bit per row.

What is said of slots here is on the host; the records are where `cached_records` says.

Axes: M ids of one call, W words of a record, C slots of the cache, V rows that leave it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.lookup.cache.cached_records import CachedRecords, HostRecords, Rows
from rayrec.embeddings.storage.index import MISSING, IdIndex
from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array

NOT_CACHED = MISSING
"""Slot of an id that is not in the cache."""


class RowCache:
    """At most `capacity` rows. Not thread-safe."""

    def __init__(
        self,
        config: TableConfig,
        capacity: int,
        make_records: Callable[[TableConfig, int], CachedRecords] = HostRecords,
    ) -> None:
        """Make an empty cache.

        Args:
            make_records: given table and capacity, where the records are.
        """
        self._capacity = capacity
        self._index = IdIndex()
        self._records = make_records(config, capacity)
        self._ids_C = np.zeros(capacity, dtype=np.int64)
        self._pins_C = np.zeros(capacity, dtype=np.int32)
        self._is_used_C = np.zeros(capacity, dtype=np.bool_)
        self._is_recent_C = np.zeros(capacity, dtype=np.bool_)
        self._is_dirty_C = np.zeros(capacity, dtype=np.bool_)
        self._hand = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        slots = (self._ids_C, self._pins_C, self._is_used_C, self._is_recent_C, self._is_dirty_C)
        return self._records.num_bytes + self._index.num_bytes + sum(array.nbytes for array in slots)

    def find(self, ids_M: Int64Array) -> Int64Array:
        """[M] slot of each id, NOT_CACHED where there is none."""
        return self._index.find(ids_M)

    def pin(self, slots_M: Int64Array) -> None:
        """Keep distinct slots until as many calls of `unpin`."""
        self._pins_C[slots_M] += 1
        self._is_recent_C[slots_M] = True

    def unpin(self, slots_M: Int64Array) -> None:
        self._pins_C[slots_M] -= 1

    def insert(
        self, ids_M: Int64Array, records_MW: Int32Array, changed: bool = False
    ) -> tuple[Int64Array, tuple[Int64Array, Int32Array]]:
        """Take rows, as far as there is room among the pinned ones; pins them.

        Args:
            ids_M: distinct, none of them in the cache.
            changed: whether the rows differ from the server's.

        Returns:
            [M] slots, NOT_CACHED where there was no room; and the changed rows that had to leave:
            (ids [V], records [V, W]), which are the caller's to bring to the server.
        """
        too_many = len(self._index) + len(ids_M) - self._capacity
        victims_V = np.empty(0, dtype=np.int64)
        if too_many > 0:
            victims_V, self._hand = _victims(
                self._pins_C, self._is_used_C, self._is_recent_C, self._hand, too_many
            )
        changed_V = victims_V[self._is_dirty_C[victims_V]]
        leaving = self._ids_C[changed_V], self._records.read(changed_V)
        self._drop(victims_V)
        num_fit = min(len(ids_M), self._capacity - len(self._index))
        slots_M = np.full(len(ids_M), NOT_CACHED, dtype=np.int64)
        slots_M[:num_fit] = slots = self._index.find_or_add(ids_M[:num_fit])
        self._records.reserve(self._index.num_rows)
        self._records.write(slots, records_MW[:num_fit])
        self._ids_C[slots] = ids_M[:num_fit]
        self._is_used_C[slots] = True
        self._is_dirty_C[slots] = changed
        self.pin(slots)
        return slots_M, leaving

    def gather(self, slots_M: Int64Array, ids_M: Int64Array) -> Rows:
        """[M, D] weights of rows in the cache; first values of ids whose slot is NOT_CACHED."""
        return self._records.gather(slots_M, ids_M)

    def weights(self, records_MW: Int32Array) -> Rows:
        """[M, D] weights of records that are not in the cache."""
        return self._records.weights(records_MW)

    def check_gradients(self, ids_M: Int64Array, grads_MD: Rows) -> None:
        """Raises the ValueError with which a server would refuse them."""
        self._records.check_gradients(ids_M, grads_MD)

    def apply(self, slots_M: Int64Array, ids_M: Int64Array, grads_MD: Rows, step: int) -> None:
        """Let the optimizer change distinct rows, as the server would."""
        self._records.apply(slots_M, ids_M, grads_MD, step)
        self._is_dirty_C[slots_M] = True
        self._is_recent_C[slots_M] = True

    def take_changed(self) -> tuple[Int64Array, Int32Array]:
        """(ids [V], records [V, W]) of the rows that differ from the server's; from now on they do not."""
        changed_V = np.flatnonzero(self._is_dirty_C)
        self._is_dirty_C[changed_V] = False
        return self._ids_C[changed_V], self._records.read(changed_V)

    def forget(self, ids_M: Int64Array) -> None:
        """Drop rows that the server has no more; those that are not here are skipped."""
        slots_M = self._index.find(ids_M)
        self._drop(slots_M[slots_M != MISSING])

    def _drop(self, slots_V: Int64Array) -> None:
        assert not self._pins_C[slots_V].any(), "a row that a batch works with may not leave the cache"
        self._index.remove(self._ids_C[slots_V])
        self._is_used_C[slots_V] = False
        self._is_dirty_C[slots_V] = False


MakeCache = Callable[[TableConfig, int], RowCache]
"""Given table and capacity, a cache."""


@njit(nogil=True, cache=True)
def _victims(
    pins_C: Int32Array,
    is_used_C: BoolArray,
    is_recent_C: BoolArray,
    hand: int,
    num_wanted: int,
) -> tuple[Int64Array, int]:
    """([V] slots to empty, where the hand stops); fewer than wanted where the rest is pinned."""
    victims_V = np.empty(num_wanted, dtype=np.int64)
    num_found = 0
    for _ in range(2 * len(pins_C)):  # the first time round may only clear the marks
        if num_found == num_wanted:
            break
        if is_used_C[hand] and pins_C[hand] == 0:
            if is_recent_C[hand]:
                is_recent_C[hand] = False
            else:
                # Marked, so that the second time round does not find it again.
                is_recent_C[hand] = True
                is_used_C[hand] = False
                victims_V[num_found] = hand
                num_found += 1
        hand = hand + 1 if hand + 1 < len(pins_C) else 0
    return victims_V[:num_found], hand
