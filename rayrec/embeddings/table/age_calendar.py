"""When rows are given up for their age, without a look at all of them.

    created at step t ──► list of the first step at which a row that t changed last is too old
    a step looks at its list only: a row that has changed since goes to the list of its last change, the
    others are given up

An id is in one list, no later than that of its row's last change, so no row that is too old is missed. A
change moves nothing: a row is looked at once in the steps that it may live, and not at every eviction.

Axes: M ids of one call, K ids of a part.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from rayrec.embeddings.config import EvictionConfig
from rayrec.embeddings.storage.index import MISSING, IdMap
from rayrec.platform.arrays import Int32Array, Int64Array

_SAMPLE = 65_536
"""Ids that are looked at ahead before it is said that most of them are old."""
LISTED_BYTES = 10
"""Most memory of an id, where a list has many."""
_LEAST_BLOCK, _MOST_BLOCK = 16, 65_536
"""Ids of a block: a quarter of those before it, within these."""
_LIST_BYTES = 512
"""Of the objects of a list."""


class _IdList:
    """Ids in blocks, taken out from the last block on."""

    def __init__(self) -> None:
        self._blocks: list[Int64Array] = []
        self._num_last = 0
        """Ids in the last block."""
        self._num_ids = 0
        self.num_bytes = 0

    def all(self) -> Int64Array:
        *full, last = self._blocks or [np.empty(0, dtype=np.int64)]
        return np.concatenate([*full, last[: self._num_last]])

    def __len__(self) -> int:
        return self._num_ids

    def add(self, ids_M: Int64Array) -> None:
        while len(ids_M):
            if not self._blocks or self._num_last == len(self._blocks[-1]):
                size = min(max(self._num_ids // 4, len(ids_M), _LEAST_BLOCK), _MOST_BLOCK)
                self._blocks.append(np.empty(size, dtype=np.int64))
                self.num_bytes += 8 * size
                self._num_last = 0
            block = self._blocks[-1]
            some = ids_M[: len(block) - self._num_last]
            block[self._num_last : self._num_last + len(some)] = some
            self._num_last += len(some)
            self._num_ids += len(some)
            ids_M = ids_M[len(some) :]

    def take(self, most: int = _MOST_BLOCK) -> Int64Array:
        """[K] ids out of the last block, so many at most; there must be some."""
        left = max(0, self._num_last - most)
        ids_K = self._blocks[-1][left : self._num_last].copy()
        self._num_ids -= len(ids_K)
        self._num_last = left
        if not left:
            self.num_bytes -= self._blocks.pop().nbytes
            self._num_last = len(self._blocks[-1]) if self._blocks else 0
        return ids_K


class AgeCalendar:
    """Ids of all rows of a table by the step at which to look at them. Not thread-safe.

    Args:
        max_age_steps: that a row may have. -1 for the step of its last change itself, or rather of the
            eviction that follows, where somebody else says which lists are due.
    """

    def __init__(self, max_age_steps: int, every_steps: int) -> None:
        self._max_age, self._every = max_age_steps, every_steps
        self._lists: dict[int, _IdList] = {}
        self._dues: list[int] = []
        """Of the lists, as a heap."""
        self._old = _IdList()
        """Of the list that is due next, those whose record was found to be old ahead of its step."""
        self._num_moved = 0
        """Of that list, those that were found to have a newer one."""
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def ids(self) -> Int64Array:
        """[K] all ids, in no order."""
        return np.concatenate([ids.all() for ids in (self._old, *self._lists.values())])

    def add(self, ids_M: Int64Array, steps_M: Int32Array) -> None:
        """Put ids that are in no list into those of their rows' last changes."""
        if not len(ids_M):
            return
        dues_M = self._due(steps_M.astype(np.int64))
        if (dues_M == dues_M[0]).all():
            self._put(int(dues_M[0]), ids_M)
            return
        order_M = np.argsort(dues_M, kind="stable")
        ids_M, dues_M = ids_M[order_M], dues_M[order_M]
        starts = np.flatnonzero(np.diff(dues_M, prepend=dues_M[0] - 1))
        for start, end in zip(starts, [*starts[1:], len(ids_M)], strict=True):
            self._put(int(dues_M[start]), ids_M[start:end])

    def ahead(self, step: int) -> Iterator[Int64Array]:
        """A share of the ids that are due next, so that their step finds fewer; `add_ahead` must follow.

        Args:
            step: that is committed. The shares of all steps until the eviction leave it as much as one more.
        """
        due = self._next(step)
        ids, wanted = self._lists.get(due), 0
        # Where most rows go, they would be looked at twice for nothing.
        if ids is not None and len(self._old) <= max(_SAMPLE, self._num_moved):
            wanted = -(-len(ids) // (due - step + 1))
        while ids is not None and len(ids) and wanted > 0:
            ids_K = self._take(ids, wanted)
            wanted -= len(ids_K)
            yield ids_K

    def add_ahead(self, ids_K: Int64Array, steps_K: Int32Array, step: int) -> None:
        """Put back those ids of a share that have rows."""
        is_old_K = self._due(steps_K.astype(np.int64)) <= self._next(step)
        self._add_to(self._old, ids_K[is_old_K])
        self._num_moved += int(np.count_nonzero(~is_old_K))
        self.add(ids_K[~is_old_K], steps_K[~is_old_K])

    def take(self, step: int) -> Iterator[Int64Array]:
        """Ids in parts, among them those of all rows that are too old when this step commits.

        `add` those whose rows stay.
        """
        taken, self._old, self._num_moved = [self._old], _IdList(), 0
        while self._dues and self._dues[0] <= step:  # all of them first: `add` may make such a list again
            taken.append(self._lists.pop(heapq.heappop(self._dues)))
            self._num_bytes -= _LIST_BYTES
        for ids in taken:
            while len(ids):
                yield self._take(ids)

    def discard(self, ids: IdMap) -> None:
        """Take ids out of whatever list they are in: a pass over all lists."""
        for due, listed in self._lists.items():
            self._lists[due] = self._without(listed, ids)
        self._old = self._without(self._old, ids)

    def _without(self, listed: _IdList, ids: IdMap) -> _IdList:
        listed_K = listed.all()
        kept = _IdList()
        kept.add(listed_K[ids.find(listed_K) == MISSING])
        self._num_bytes += kept.num_bytes - listed.num_bytes
        return kept

    def _put(self, due: int, ids_M: Int64Array) -> None:
        if due not in self._lists:
            self._lists[due] = _IdList()
            heapq.heappush(self._dues, due)
            self._num_bytes += _LIST_BYTES
        self._add_to(self._lists[due], ids_M)

    def _add_to(self, ids: _IdList, ids_M: Int64Array) -> None:
        before = ids.num_bytes
        ids.add(ids_M)
        self._num_bytes += ids.num_bytes - before

    def _take(self, ids: _IdList, most: int = _MOST_BLOCK) -> Int64Array:
        before = ids.num_bytes
        ids_K = ids.take(most)
        self._num_bytes += ids.num_bytes - before
        return ids_K

    def _due(self, steps_M: Int64Array) -> Int64Array:
        """[M] first step at whose commit rows that these steps have changed last are too old."""
        return -(-(steps_M + self._max_age + 2) // self._every) * self._every - 1

    def _next(self, step: int) -> int:
        """First step from this one on at which rows are given up."""
        return -(-(step + 1) // self._every) * self._every - 1


def calendar_of(eviction: EvictionConfig | None) -> AgeCalendar | None:
    """The calendar of a table without rows; none where age alone does not say which rows go."""
    if eviction is None or eviction.has_most_rows or eviction.min_score is not None:
        return None
    if eviction.ttl_hours is not None:
        # Which step makes a row too old is not known before the clock has come there. So ids are in the list
        # of the next eviction behind their last change, and lists are taken until the one that is too old.
        return AgeCalendar(-1, eviction.every_steps)
    assert eviction.max_age_steps is not None, "there is a reason"
    return AgeCalendar(eviction.max_age_steps, eviction.every_steps)
