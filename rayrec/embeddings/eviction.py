"""Which rows of a table are given up, and what is remembered of them.

A victim is chosen by what committed steps have written into the records, bucket by bucket, so every mode
and every number of shards gives up the same rows.

Axes: R rows of a table, V victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayrec.embeddings.config import EvictionConfig
from rayrec.embeddings.routing import Int64Array, bucket_of
from rayrec.platform.hashing import mix64


def choose_victims(
    config: EvictionConfig,
    ids_R: Int64Array,
    steps_R: NDArray[np.int32],
    counts_R: NDArray[np.int32],
    step: int,
) -> NDArray[np.bool_]:
    """[R] whether each row is given up when `step` commits.

    Age first; of what is left, every bucket keeps its `max_rows_per_bucket` best rows. Recent means the
    last step that changed the row, then the number of steps that did; frequent the other way round; ties
    go by mix64 of the id, the larger stays.
    """
    victims_R = np.zeros(len(ids_R), dtype=np.bool_)
    if config.max_age_steps is not None:
        victims_R |= step - steps_R > config.max_age_steps
    if config.max_rows_per_bucket is not None:
        kept_K = np.flatnonzero(~victims_R)
        buckets_K = bucket_of(ids_R[kept_K])
        in_full_K = np.bincount(buckets_K)[buckets_K] > config.max_rows_per_bucket
        kept_K, buckets_K = kept_K[in_full_K], buckets_K[in_full_K]  # the rest needs no sorting
        best, second = steps_R[kept_K], counts_R[kept_K]
        if config.keep == "frequent":
            best, second = second, best
        order_K = np.lexsort((~mix64(ids_R[kept_K]), -second, -best, buckets_K))
        kept_K, buckets_K = kept_K[order_K], buckets_K[order_K]
        place_K = np.arange(len(kept_K)) - np.searchsorted(buckets_K, buckets_K)  # within its bucket
        victims_R[kept_K[place_K >= config.max_rows_per_bucket]] = True
    return victims_R


@dataclass(frozen=True)
class Evicted:
    """Ids whose rows were given up: tombstones for whoever holds copies."""

    ids_V: Int64Array
    steps_V: NDArray[np.int32]
    """Step whose commit gave the row up."""

    @classmethod
    def nothing(cls) -> Evicted:
        return cls(np.empty(0, np.int64), np.empty(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Evicted]) -> Evicted:
        parts = [cls.nothing(), *parts]
        return cls(
            np.concatenate([part.ids_V for part in parts]), np.concatenate([part.steps_V for part in parts])
        )

    def __len__(self) -> int:
        return len(self.ids_V)


class Tombstones:
    """Evictions of the last `remember_steps` steps, oldest first. Not thread-safe."""

    def __init__(self, remember_steps: int) -> None:
        self._remember_steps = remember_steps
        self._by_step: list[Evicted] = []

    @property
    def num_bytes(self) -> int:
        return sum(evicted.ids_V.nbytes + evicted.steps_V.nbytes for evicted in self._by_step)

    def add(self, ids_V: Int64Array, step: int) -> None:
        """Remember what this step gave up, and no longer what is too old."""
        self._by_step = [
            evicted for evicted in self._by_step if step - evicted.steps_V[0] <= self._remember_steps
        ]
        if len(ids_V):
            self._by_step.append(Evicted(ids_V, np.full(len(ids_V), step, dtype=np.int32)))

    def since(self, step: int) -> Evicted:
        """What commits after `step` gave up, the latest eviction of each id, whether or not it is back."""
        found = [evicted for evicted in self._by_step if evicted.steps_V[0] > step]
        if not found:
            return Evicted.nothing()
        ids_V = np.concatenate([evicted.ids_V for evicted in found])
        steps_V = np.concatenate([evicted.steps_V for evicted in found])
        _, last = np.unique(ids_V[::-1], return_index=True)
        chosen = np.sort(len(ids_V) - 1 - last)
        return Evicted(ids_V[chosen], steps_V[chosen])

    def load(self, evicted: Evicted) -> None:
        """Replace everything remembered so far."""
        self._by_step = []
        for step in np.unique(evicted.steps_V):
            of_step = evicted.steps_V == step
            self._by_step.append(Evicted(evicted.ids_V[of_step], evicted.steps_V[of_step]))
