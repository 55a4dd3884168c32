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
from numba import njit

from rayrec.embeddings.config import EvictionConfig
from rayrec.embeddings.storage.index import MISSING, IdMap
from rayrec.embeddings.table.id_lists import IdLists
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input

_SAMPLE = 65_536
"""Ids that are looked at ahead before it is said that most of them are old."""
LISTED_BYTES = 10
"""Most memory of an id, where a list has many."""
_TAKEN = 65_536
"""Ids that are taken at once."""
_LIST_BYTES = 256
"""Of a list beside its blocks."""
_MOST_DUES = 65_536
"""Between the first and the last list that ids of one call go to, before these are sorted."""


class AgeCalendar:
    """Ids of all rows of a table by the step at which to look at them. Not thread-safe.

    Args:
        max_age_steps: that a row may have. -1 for the step of its last change itself, or rather of the
            eviction that follows, where somebody else says which lists are due.
    """

    def __init__(self, max_age_steps: int, every_steps: int) -> None:
        self._max_age, self._every = max_age_steps, every_steps
        self._ids = IdLists()
        self._lists: dict[int, int] = {}
        """Numbers of lists by the step they are due at."""
        self._dues: list[int] = []
        """Of the lists, as a heap."""
        self._old = self._ids.make()
        """Of the list that is due next, those whose record was found to be old ahead of its step."""
        self._num_moved = 0
        """Of that list, those that were found to have a newer one."""

    @property
    def num_bytes(self) -> int:
        return self._ids.num_bytes + _LIST_BYTES * len(self._lists)

    def ids(self) -> Int64Array:
        """[K] all ids, in no order."""
        return np.concatenate([self._ids.ids(each) for each in (self._old, *self._lists.values())])

    def add(self, ids_M: Int64Array, steps_M: Int32Array) -> None:
        """Put ids that are in no list into those of their rows' last changes."""
        if not len(ids_M):
            return
        which_M, first, last = _due_numbers(kernel_input(steps_M, np.int32), self._max_age, self._every)
        if last - first < _MOST_DUES:
            numbers_L = at_L = np.flatnonzero(np.bincount(which_M))
        else:
            numbers_L, which_M = np.unique(which_M, return_inverse=True)
            at_L = np.arange(len(numbers_L))
        lists_L = np.zeros(at_L[-1] + 1, dtype=np.int64)
        lists_L[at_L] = [self._list_of(first + number) for number in numbers_L.tolist()]
        self._ids.add(ids_M, lists_L, which_M)

    def add_new(self, ids_M: Int64Array, step: int) -> None:
        """`add` ids whose rows this step has made."""
        if len(ids_M):
            self._ids.put(self._list_of((step + self._max_age + 1 + self._every) // self._every), ids_M)

    def ahead(self, step: int) -> Iterator[Int64Array]:
        """A share of the ids that are due next, so that their step finds fewer; `add_ahead` must follow.

        Args:
            step: that is committed. The shares of all steps until the eviction leave it as much as one more.
        """
        due = self._next(step)
        listed, wanted = self._lists.get(due), 0
        # Where most rows go, they would be looked at twice for nothing.
        if listed is not None and self._ids.count(self._old) <= max(_SAMPLE, self._num_moved):
            wanted = -(-self._ids.count(listed) // (due - step + 1))
        while listed is not None and wanted > 0:
            ids_K = self._ids.take(listed, min(wanted, _TAKEN))
            wanted -= len(ids_K)
            yield ids_K

    def add_ahead(self, ids_K: Int64Array, steps_K: Int32Array, step: int) -> None:
        """Put back those ids of a share that have rows."""
        # A row is as old as the list that it was taken from, or has changed since.
        is_old_K = steps_K <= self._next(step) - self._max_age - 1
        self._ids.put(self._old, ids_K[is_old_K])
        self._num_moved += int(np.count_nonzero(~is_old_K))
        self.add(ids_K[~is_old_K], steps_K[~is_old_K])

    def take(self, step: int) -> Iterator[Int64Array]:
        """Ids in parts, among them those of all rows that are too old when this step commits.

        `add` those whose rows stay.
        """
        taken, self._old, self._num_moved = [self._old], self._ids.make(), 0
        while self._dues and self._dues[0] <= step:  # all of them first: `add` may make such a list again
            taken.append(self._lists.pop(heapq.heappop(self._dues)))
        for listed in taken:
            while self._ids.count(listed):
                yield self._ids.take(listed, _TAKEN)
            self._ids.drop(listed)

    def discard(self, ids: IdMap) -> None:
        """Take ids out of whatever list they are in: a pass over all lists."""
        for listed in (self._old, *self._lists.values()):
            kept_K = self._ids.ids(listed)
            kept_K = kept_K[ids.find(kept_K) == MISSING]
            self._ids.take(listed, self._ids.count(listed))
            self._ids.put(listed, kept_K)

    def _list_of(self, number: int) -> int:
        """The list of the eviction of this number, from 1."""
        due = number * self._every - 1
        if due not in self._lists:
            self._lists[due] = self._ids.make()
            heapq.heappush(self._dues, due)
        return self._lists[due]

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


@njit(nogil=True, cache=True)
def _due_numbers(steps_M: Int32Array, max_age: int, every: int) -> tuple[Int64Array, int, int]:
    """Of the first eviction, counted from 1, that finds rows too old which these steps have changed last.

    Returns:
        ([M] how far behind the first one of all, the first one, the last one).
    """
    numbers_M = np.empty(len(steps_M), dtype=np.int64)
    for m in range(len(steps_M)):
        # Step s is too old for an eviction at step number * every - 1 if that is more than max_age behind.
        numbers_M[m] = (np.int64(steps_M[m]) + max_age + 1 + every) // every
    first, last = numbers_M.min(), numbers_M.max()
    return numbers_M - first, first, last
