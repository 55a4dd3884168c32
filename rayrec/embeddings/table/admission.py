"""How often ids without a row have been seen: what their admission depends on.

Counts are exact, one per id; a sketch would let two ids share a count.

Axes: M ids of one call, K ids that wait for admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayrec.embeddings.base.layout import NEVER
from rayrec.embeddings.base.routing import NUM_BUCKETS, bucket_of
from rayrec.embeddings.config import IdAdmissionConfig
from rayrec.embeddings.storage.consistent_snapshot import ABSENT, ConsistentSnapshot, SnapshotRecords
from rayrec.embeddings.storage.index import MISSING, IdIndex
from rayrec.embeddings.storage.row_storage import RowReading, Wanted
from rayrec.embeddings.table.ids_since import IdsSince
from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array

_MOST = np.iinfo(np.uint16).max
_CHANGED_SHARE = 16
"""Ids are known that were named since the last snapshot, up to one for so many that wait."""


@dataclass(frozen=True)
class Sighted:
    """Ids that wait for admission."""

    ids_K: Int64Array
    counts_K: NDArray[np.uint16]
    """Steps that named the id; stays at 65,535."""
    steps_K: Int32Array
    """Last step that named it."""

    @classmethod
    def nothing(cls) -> Sighted:
        return cls(np.empty(0, np.int64), np.empty(0, np.uint16), np.empty(0, np.int32))

    @classmethod
    def of(cls, part: SnapshotRecords) -> Sighted:
        """Of a snapshot of `SightingCounters`."""
        steps_K, counts_K = part.records_KW.T
        return cls(part.ids_K, counts_K.astype(np.uint16), np.ascontiguousarray(steps_K))

    @classmethod
    def joined(cls, parts: Sequence[Sighted]) -> Sighted:
        parts = [cls.nothing(), *parts]
        return cls(
            np.concatenate([part.ids_K for part in parts]),
            np.concatenate([part.counts_K for part in parts]),
            np.concatenate([part.steps_K for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.ids_K)


class SightingCounters:
    """Not thread-safe."""

    def __init__(self, config: IdAdmissionConfig) -> None:
        self._config = config
        self._index = IdIndex()
        self._counts = np.zeros(0, dtype=np.uint16)
        self._steps = np.zeros(0, dtype=np.int32)
        self.snapshot: ConsistentSnapshot | None = None
        """What is told of every change before it is made."""
        self.changed = IdsSince(_CHANGED_SHARE)
        """Ids by the first step that named them after the last snapshot began."""
        self.forgotten_step = NEVER
        """Ids that were named last in this step or before have been dropped."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> IdIndex:
        return self._index

    @property
    def num_words(self) -> int:
        """Of a record for a snapshot: last step and count."""
        return 2

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes + self._counts.nbytes + self._steps.nbytes + self.changed.num_bytes

    def growth_bytes(self, num_more: int) -> int:
        """What `reserve` takes for so many more ids, what it will release again included."""
        size = 1 << (max(1, self._index.rows_after(num_more)) - 1).bit_length()
        positions = size if size > len(self._counts) else 0
        counters = positions * (self._counts.itemsize + self._steps.itemsize)
        # Ids that are admitted leave free rows.
        return self._index.growth_bytes(num_more) + counters + self._index.free_growth_bytes(num_more)

    def reserve(self, num_more: int) -> None:
        """Make room for so many more ids, so that counting them cannot fail for memory."""
        self._index.reserve(num_more)
        needed = self._index.rows_after(num_more)
        if needed > len(self._counts):
            size = 1 << (needed - 1).bit_length()
            self._counts = np.concatenate((self._counts, np.zeros(size - len(self._counts), np.uint16)))
            self._steps = np.concatenate((self._steps, np.zeros(size - len(self._steps), np.int32)))

    def admit(self, ids_M: Int64Array, step: int) -> BoolArray:
        """Count one more sighting of each of these distinct ids.

        Returns:
            [M] whether the id has been seen often enough; those are no longer counted here.
        """
        if self._config.min_sightings == 1:
            return np.ones(len(ids_M), dtype=np.bool_)
        self.reserve(len(ids_M))
        self._keep(ids_M)
        is_new_M = self._index.find(ids_M) < 0
        rows_M = self._index.find_or_add(ids_M)
        self._counts[rows_M[is_new_M]] = 0  # a row that another id had
        self._steps[rows_M[is_new_M]] = NEVER
        counts_M = np.minimum(self._counts[rows_M].astype(np.int64) + 1, _MOST)
        admitted_M = counts_M >= self._config.min_sightings
        if self.changed.is_on:
            is_first_M = is_new_M | (self._steps[rows_M] <= self.changed.newest)
            self.changed.add(ids_M[is_first_M & ~admitted_M], step, len(self._index))
        self._counts[rows_M] = counts_M
        self._steps[rows_M] = step
        self._index.remove(ids_M[admitted_M])
        return admitted_M

    def forget(self, step: int) -> int:
        """Drop ids that have not been seen for long, where that is due at this step; returns how many."""
        config = self._config
        if config.forget_after_steps is None or (step + 1) % config.every_steps:
            return 0
        return self.forget_until(step - config.forget_after_steps - 1)

    def forget_until(self, step: int, buckets: range = range(NUM_BUCKETS)) -> int:
        """Drop ids of these buckets that were named last in this step or before; returns how many."""
        self.forgotten_step = max(self.forgotten_step, step)
        ids_K, rows_K = self._index.items()
        ids_K = ids_K[self._steps[rows_K] <= step]
        if len(buckets) < NUM_BUCKETS:
            buckets_K = bucket_of(ids_K)
            ids_K = ids_K[(buckets_K >= buckets.start) & (buckets_K < buckets.stop)]
        self._keep(ids_K)
        self._index.remove(ids_K)
        return len(ids_K)

    def export(self) -> Sighted:
        """A copy, ordered by id."""
        ids_K, rows_K = self._index.items()
        order_K = np.argsort(ids_K)
        ids_K, rows_K = ids_K[order_K], rows_K[order_K]
        return Sighted(ids_K, self._counts[rows_K], self._steps[rows_K])

    def begin_reading(self, ids_M: Int64Array) -> None:
        return None

    def finish_reading(self, reading: RowReading | None, wanted: Wanted) -> tuple[Int64Array, Int32Array]:
        """Of those named last after the one step and until the other: ([K] positions, [K, 2] records)."""
        rows_K = self._index.find(wanted.ids_K)
        is_found_K = rows_K != MISSING
        at_K, rows_K = wanted.at_K[is_found_K], rows_K[is_found_K]
        is_between_K = wanted.is_between(self._steps[rows_K])
        return at_K[is_between_K], self._records(rows_K[is_between_K])

    def steps(self, records_KW: Int32Array) -> Int32Array:
        return records_KW[:, 0]

    def _records(self, rows_K: Int64Array) -> Int32Array:
        return np.column_stack((self._steps[rows_K], self._counts[rows_K].astype(np.int32)))

    def _keep(self, ids_M: Int64Array) -> None:
        if self.snapshot is not None:
            rows_M = self._index.find(ids_M)
            steps_M = np.full(len(ids_M), ABSENT, dtype=np.int32)
            steps_M[rows_M != MISSING] = self._steps[rows_M[rows_M != MISSING]]
            self.snapshot.keep(ids_M, steps_M, lambda at_K: self._records(rows_M[at_K]))

    def put(self, sighted: Sighted) -> None:
        """Set what is known of distinct ids."""
        if not len(sighted):
            return
        self.reserve(len(sighted))
        rows_K = self._index.find_or_add(sighted.ids_K)
        self._counts[rows_K] = sighted.counts_K
        self._steps[rows_K] = sighted.steps_K

    def drop(self, ids_K: Int64Array) -> None:
        """These distinct ids do not wait any more."""
        if len(self._index):
            self._index.remove(ids_K)
