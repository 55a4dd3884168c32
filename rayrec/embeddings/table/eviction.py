"""Which rows of a table are given up, and what is remembered of them.

A victim is chosen by what committed steps have written into the records, bucket by bucket, so every mode
and every number of shards gives up the same rows.

Axes: R rows of a table, V victims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.embeddings.base.layout import NEVER
from rayrec.embeddings.base.routing import NUM_BUCKETS, bucket_of
from rayrec.embeddings.config import EvictionConfig, MostRows
from rayrec.embeddings.storage.consistent_snapshot import ABSENT, ConsistentSnapshot, SnapshotRecords
from rayrec.embeddings.storage.index import MISSING, IdMap
from rayrec.embeddings.storage.row_storage import RowReading, Wanted
from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array
from rayrec.platform.hashing import mix64

_LEAST_LISTED_BYTES = 2**14
"""Of ids by the step that gave them up, before they are looked through for those that have rows again."""


def choose_victims(
    config: EvictionConfig,
    most_rows: MostRows | None,
    ids_R: Int64Array,
    steps_R: Int32Array,
    counts_R: Int32Array,
    step: int,
    old_step: int = NEVER - 1,
) -> BoolArray:
    """[R] whether each row is given up when `step` commits.

    Age and score first; of what is left, every bucket keeps its `most_rows` best rows. Recent means the
    last step that changed the row, then the number of steps that did; frequent the other way round; after
    the score, the step comes second, too; ties go by mix64 of the id, the larger stays.

    Args:
        old_step: rows that were changed last in this step or before are too old by the clock.
    """
    victims_R = steps_R <= old_step
    if config.max_age_steps is not None:
        victims_R |= step - steps_R > config.max_age_steps
    if config.min_score is not None:
        victims_R |= _scores(config, steps_R, counts_R, step) < int(config.min_score * 2**_SCORE_BITS)
    if most_rows is not None:
        kept_K = np.flatnonzero(~victims_R)
        buckets_K = bucket_of(ids_R[kept_K])
        in_full_K = np.bincount(buckets_K)[buckets_K] > _most_of(most_rows, buckets_K)
        kept_K, buckets_K = kept_K[in_full_K], buckets_K[in_full_K]  # the rest needs no sorting
        best, second = _marks(config, steps_R[kept_K], counts_R[kept_K], step)
        order_K = np.lexsort((~mix64(ids_R[kept_K]), -second, -best, buckets_K))
        kept_K, buckets_K = kept_K[order_K], buckets_K[order_K]
        place_K = np.arange(len(kept_K)) - np.searchsorted(buckets_K, buckets_K)  # within its bucket
        victims_R[kept_K[place_K >= _most_of(most_rows, buckets_K)]] = True
    return victims_R


def _most_of(most_rows: MostRows, buckets_K: Int32Array) -> Int64Array:
    """[K] rows that each of some buckets keeps."""
    most_K: Int64Array = most_rows.rows + (buckets_K < most_rows.num_larger).astype(np.int64)
    return most_K


_SCORE_BITS = 31
"""Of a score that stand for less than a step."""


def _scores(config: EvictionConfig, steps_K: Int32Array, counts_K: Int32Array, step: int) -> Int64Array:
    """In parts of a step, as integers: every machine halves alike."""
    assert config.half_life_steps is not None, "the config has been checked"
    half_lives_K = np.minimum((step - steps_K.astype(np.int64)) // config.half_life_steps, 62)
    # Rows that a run begins with have been changed by no step of it: they count as wanted until a half life
    # has passed, or the first eviction would give up all that another run has learned.
    of_no_step = int(max(1.0, config.min_score or 0.0) * 2**_SCORE_BITS)
    scores_K = counts_K.astype(np.int64) << _SCORE_BITS
    scores_K[counts_K == 0] = of_no_step
    return scores_K >> half_lives_K


def _marks(
    config: EvictionConfig, steps_K: Int32Array, counts_K: Int32Array, step: int
) -> tuple[Int32Array | Int64Array, Int32Array]:
    """What rows are compared by, first and second; the larger the better."""
    if config.keep == "score":
        return _scores(config, steps_K, counts_K, step), steps_K
    return (counts_K, steps_K) if config.keep == "frequent" else (steps_K, counts_K)


@dataclass(frozen=True)
class Evicted:
    """Ids whose rows were given up: tombstones for caches that hold copies."""

    ids_V: Int64Array
    steps_V: Int32Array
    """Step whose commit gave the row up."""

    @classmethod
    def nothing(cls) -> Evicted:
        return cls(np.empty(0, np.int64), np.empty(0, np.int32))

    @classmethod
    def of(cls, part: SnapshotRecords) -> Evicted:
        """Of a snapshot of `Tombstones`."""
        return cls(part.ids_K, np.ascontiguousarray(part.records_KW[:, 0]))

    @classmethod
    def joined(cls, parts: Sequence[Evicted]) -> Evicted:
        parts = [cls.nothing(), *parts]
        return cls(
            np.concatenate([part.ids_V for part in parts]), np.concatenate([part.steps_V for part in parts])
        )

    def __len__(self) -> int:
        return len(self.ids_V)


class Tombstones:
    """The last eviction of every id that was evicted in the last `remember_steps` steps and has no row
    since. Not thread-safe.
    """

    def __init__(self, remember_steps: int) -> None:
        self._remember_steps = remember_steps
        self._steps: IdMap | None = None
        """Step by id; none where nothing was ever evicted."""
        self._by_step: deque[tuple[int, Int64Array]] = deque()
        """What each step gave up, the oldest first; some of it may have been forgotten since."""
        self.snapshot: ConsistentSnapshot | None = None
        """What is told of every change before it is made."""
        self.forgotten_step = NEVER
        """What this step gave up, and those before, is not remembered any more."""

    @property
    def ids(self) -> IdMap:
        return IdMap() if self._steps is None else self._steps

    @property
    def num_words(self) -> int:
        """Of a record for a snapshot: the step."""
        return 1

    @property
    def num_bytes(self) -> int:
        return self._listed_bytes + (0 if self._steps is None else self._steps.num_bytes)

    def add(self, ids_V: Int64Array, step: int) -> None:
        """Remember what this step gave up."""
        if len(ids_V):
            self._put(ids_V, step)
        if self._listed_bytes > _LEAST_LISTED_BYTES + self.ids.num_bytes:  # ids that come and go
            of_steps = [(of_step, self._still_of(ids_V, of_step)) for of_step, ids_V in self._by_step]
            self._by_step = deque((of_step, ids_V) for of_step, ids_V in of_steps if len(ids_V))

    def forget_old(self, step: int) -> None:
        """Forget what is too old at this step; to be called at every step, also where nothing goes.

        So what is remembered does not depend on what is listed by step: of ids that have rows again, a
        table that was resumed has none there.
        """
        last_step = step - self._remember_steps - 1
        if not self._by_step or self._by_step[0][0] > last_step:
            return
        self.forgotten_step = max(self.forgotten_step, last_step)
        if self._by_step[-1][0] <= last_step:  # all of them: an index does not shrink by itself
            self._keep(self.ids.items()[0])
            self._steps = None
            self._by_step.clear()
        while self._by_step and self._by_step[0][0] <= last_step:
            old_step, ids_V = self._by_step[0]
            if self.snapshot is not None:
                self._keep(self._still_of(ids_V, old_step))
            self._by_step.popleft()  # not before: a snapshot that is read meanwhile asks which there are
            self.ids.remove_those(ids_V, old_step)

    def forget(self, ids_M: Int64Array) -> None:
        """These ids have rows again."""
        if self._steps is not None:
            ids_M = ids_M[self._steps.find(ids_M) != MISSING]  # few or none, which is known sooner
            self._keep(ids_M)
            self._steps.remove(ids_M)

    def since(self, step: int) -> Evicted:
        """What commits after `step` gave up, by step and id."""
        found = []
        for of_step, ids_V in self._by_step:
            if of_step > step:
                ids_V = np.sort(self._still_of(ids_V, of_step))
                found.append(Evicted(ids_V, np.full(len(ids_V), of_step, dtype=np.int32)))
        return Evicted.joined(found)

    def named_since(self, step: int) -> list[Int64Array]:
        """In parts, ids that commits after `step` gave up, those of `since` among them."""
        return [ids_V for of_step, ids_V in self._by_step if of_step > step]

    def begin_reading(self, ids_M: Int64Array) -> None:
        return None

    def finish_reading(self, reading: RowReading | None, wanted: Wanted) -> tuple[Int64Array, Int32Array]:
        """Of those evicted after the one step and until the other: ([K] positions, [K, 1] records)."""
        steps_K = self.ids.find(wanted.ids_K)  # from 0, so that MISSING is none
        is_between_K = (steps_K != MISSING) & wanted.is_between(steps_K)
        return wanted.at_K[is_between_K], steps_K[is_between_K, None].astype(np.int32)

    def steps(self, records_KW: Int32Array) -> Int32Array:
        return records_KW[:, 0]

    def _keep(self, ids_M: Int64Array) -> None:
        if self.snapshot is not None:
            steps_M = self.ids.find(ids_M).astype(np.int32)
            steps_M[steps_M == MISSING] = ABSENT
            self.snapshot.keep(ids_M, steps_M, lambda at_K: steps_M[at_K, None])

    def put(self, evicted: Evicted) -> None:
        """Remember what later steps than those known gave up, or other ids of the same steps."""
        if not len(evicted):
            return
        order_V = np.argsort(evicted.steps_V, kind="stable")
        steps, starts = np.unique(evicted.steps_V[order_V], return_index=True)
        for step, ids_V in zip(steps.tolist(), np.split(evicted.ids_V[order_V], starts[1:]), strict=True):
            self._put(ids_V, step)

    def sort(self) -> None:
        """After `put` and `forget_until` of parts in any order: bring what is remembered in order."""
        by_step: dict[int, list[Int64Array]] = {}
        for step, ids_V in self._by_step:
            by_step.setdefault(step, []).append(self._still_of(ids_V, step))
        self._by_step = deque((step, np.concatenate(by_step[step])) for step in sorted(by_step))

    def forget_until(self, step: int, buckets: range = range(NUM_BUCKETS)) -> None:
        """Forget ids of these buckets that this step gave up, or one before."""
        self.forgotten_step = max(self.forgotten_step, step)
        if self._steps is not None:
            ids_V, steps_V = self._steps.items()
            ids_V = ids_V[steps_V <= step]
            if len(buckets) < NUM_BUCKETS:
                buckets_V = bucket_of(ids_V)
                ids_V = ids_V[(buckets_V >= buckets.start) & (buckets_V < buckets.stop)]
            self._steps.remove(ids_V)

    @property
    def _listed_bytes(self) -> int:
        return sum(ids_V.nbytes for _, ids_V in self._by_step)

    def _put(self, ids_V: Int64Array, step: int) -> None:
        self._by_step.append((step, ids_V))
        self._steps = self._steps or IdMap(len(ids_V))
        self._steps.assign(ids_V, np.full(len(ids_V), step, dtype=np.int64))

    def _still_of(self, ids_V: Int64Array, step: int) -> Int64Array:
        """Those of the ids that this step gave up last, and that have no row since."""
        return ids_V[self.ids.find(ids_V) == step]
