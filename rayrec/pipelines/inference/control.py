"""Lists that a request has a say in: quotas of categories, diversity, given candidates.

    wanted ─► searches: the best of all, the best of categories that need some ─► pool ─► selection ─► list
                 ▲                                                                           │
                 └────────── again without the categories that are full, if the list is not ◄┘

Candidates and quotas become masks of the search. A beam as wide as the set of candidates finds all of it, so
each has the model's own score. Quotas that share no item are bounds on parts of the catalog: taking the best
item that leaves room for what is still needed then finds the list with the highest sum of scores, and no item
outside of the pool would be in it. That is exact as far as the search is. Where an item counts for several
quotas, behind a ranking stage, which sees some candidates alone, and with diversity, the list is chosen among
what was found: it is reranked, and the answer says so.

Diversity is maximal marginal relevance: (1 - d) · relevance - d · likeness to the most alike item before it.
Relevance is the score, scaled to 0 to 1 within the pool; two items are as alike as the share of leading codes
of their semantic IDs that they have in common.

Axes: I items of the catalog, N items of a pool, L levels of codes.

Source: Carbonell & Goldstein, The use of MMR, SIGIR 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rayrec.pipelines.inference.answers import (
    Answer,
    Control,
    ControlReport,
    Mode,
    Query,
    Quota,
    Recommendation,
    Wanted,
)
from rayrec.platform.arrays import BoolArray, Float64Array, Int64Array

Find = Callable[[Sequence[Query], Sequence[Wanted]], list[Answer]]
"""Answers to queries without control."""

POOL_TIMES, MOST_POOL = 5, 500
"""Items that diversity chooses among, of each that is given; and at most, or as many as are given."""


def num_searched(k: int, diversity: float, num_candidates: int | None) -> int:
    """Items that are looked for, to give k of them."""
    found = max(k, num_candidates or 0)
    return max(found, min(POOL_TIMES * k, MOST_POOL)) if diversity else found


def controlled(
    find: Find,
    queries: Sequence[Query],
    wanted: Sequence[Wanted],
    codes_IL: NDArray[np.integer] | None = None,
    reranks: bool = False,
) -> list[Answer]:
    """Answers with what control asks for; all searches of a round are one call.

    Args:
        codes_IL: semantic IDs of the catalog, where diversity is wanted.
        reranks: whether `find` orders candidates of a search, and not the catalog.
    """
    if all(each.control is None for each in wanted):
        return find(queries, wanted)
    lists = [_List(query, each, codes_IL, reranks) for query, each in zip(queries, wanted, strict=True)]
    waiting = lists
    while waiting:
        asked = [search for each in waiting for search in each.searches]
        found = iter(find([query for query, _ in asked], [each for _, each in asked]))
        for each in waiting:
            each.take([next(found) for _ in each.searches])
        waiting = [each for each in waiting if each.searches]
    answers = [each.answer for each in lists]
    assert all(answers), "each had a search"
    return [answer for answer in answers if answer is not None]


class _List:
    """One answer, and what is searched for it."""

    def __init__(
        self, query: Query, wanted: Wanted, codes_IL: NDArray[np.integer] | None, reranks: bool
    ) -> None:
        self._query, self._wanted, self._codes_IL, self._reranks = query, wanted, codes_IL, reranks
        control = self._control = wanted.control or Control()
        assert not control.diversity or codes_IL is not None, "asked before"
        self._search_k = num_searched(wanted.k, control.diversity, control.num_candidates)
        self._pool: dict[int, Recommendation] = {}
        self._full = frozenset(place for place, each in enumerate(control.quotas) if each.at_most == 0)
        """Quotas whose items are not searched for any more."""
        self._is_complete = False
        """All that may be recommended is in the pool."""
        self.answer: Answer | None = None
        self._needy = [each for each in control.quotas if each.at_least]
        self.searches = [self._search(self._not_full_I), *(self._search(each.mask_I) for each in self._needy)]

    @property
    def _not_full_I(self) -> BoolArray | None:
        masks = [self._control.quotas[place].mask_I for place in self._full]
        return ~np.logical_or.reduce(masks) if masks else None

    def _search(self, mask_I: BoolArray | None) -> tuple[Query, Wanted]:
        """
        Args:
            mask_I: what is searched for, of all that the query allows; None: all of it.
        """
        query = self._query
        if mask_I is not None:
            allowed_I = mask_I if query.allowed_I is None else query.allowed_I & mask_I
            query = replace(query, allowed_I=allowed_I)
        return query, replace(self._wanted, k=self._search_k, control=None)

    def take(self, found: Sequence[Answer]) -> None:
        """What the searches found; `searches` are then those of the next round."""
        rest, *of_quotas = found
        self.searches = []
        is_exhausted = len(rest.items) < self._search_k
        if self.answer is None:
            self.answer, self._is_complete = rest, is_exhausted
        if self._wanted.control is None:
            return
        self._add(rest.items)
        for quota, each in zip(self._needy, of_quotas, strict=True):
            # No more than are needed: others would take the places of better items that were not found.
            self._add(each.items if self._control.diversity else each.items[: quota.at_least])
        self._needy = []
        chosen = self._selected()
        full = self._full | {
            place
            for place, quota in enumerate(self._control.quotas)
            if quota.at_most is not None and self._count(chosen, quota) >= quota.at_most
        }
        if len(chosen) < self._wanted.k and full > self._full and not is_exhausted:
            self._full = full
            self.searches = [self._search(self._not_full_I)]
            return
        self.answer = replace(self.answer, items=chosen, control=self._report(chosen))

    def _add(self, items: Sequence[Recommendation]) -> None:
        for item in items:
            self._pool.setdefault(item.position, item)

    def _selected(self) -> list[Recommendation]:
        items = sorted(self._pool.values(), key=_score, reverse=True)
        if not items:
            return []
        places = np.array([item.position for item in items], dtype=np.int64)
        scores_N = np.array([_score(item) for item in items])
        room = _Room(self._control.quotas, places, self._wanted.k)
        if not self._control.diversity:
            return [items[place] for place in range(len(items)) if room.takes(place)]
        assert self._codes_IL is not None, "asked before"
        order = _diverse(scores_N, self._codes_IL[places], self._control.diversity, room)
        return [items[place] for place in order]

    @staticmethod
    def _count(chosen: Sequence[Recommendation], quota: Quota) -> int:
        return sum(bool(quota.mask_I[item.position]) for item in chosen)

    def _report(self, chosen: Sequence[Recommendation]) -> ControlReport:
        control = self._control
        sees_all = self._is_complete or control.num_candidates is not None
        counts = [self._count(chosen, quota) for quota in control.quotas]
        quotas: Mode | None = None
        if control.quotas:
            is_exact = _share_nothing(control.quotas) and not control.diversity
            quotas = "exact" if is_exact and (sees_all or not self._reranks) else "reranked"
        diversity: Mode | None = None
        if control.diversity:
            diversity = "exact" if sees_all else "reranked"
        return ControlReport(
            None if control.num_candidates is None else "exact",
            quotas,
            diversity,
            tuple(
                place
                for place, (count, quota) in enumerate(zip(counts, control.quotas, strict=True))
                if count < quota.at_least
            ),
        )


class _Room:
    """Which items of a pool a list still has room for."""

    def __init__(self, quotas: Sequence[Quota], positions_N: Int64Array, k: int) -> None:
        self._is_of_QN = np.array([quota.mask_I[positions_N] for quota in quotas], dtype=np.bool_).reshape(
            len(quotas), len(positions_N)
        )
        self._left_Q = np.array(
            [len(positions_N) if each.at_most is None else each.at_most for each in quotas], dtype=np.int64
        )
        # What may not be recommended at all is no reason to leave places free.
        there_Q = self._is_of_QN.sum(axis=1)
        self._needs_Q = np.minimum([each.at_least for each in quotas], there_Q).astype(np.int64)
        self._num_free = k

    def admits_N(self) -> BoolArray:
        """[N] whether each item may come next."""
        is_full_N = (self._is_of_QN & (self._left_Q <= 0)[:, None]).any(axis=0)
        helps_N = (self._is_of_QN & (self._needs_Q > 0)[:, None]).sum(axis=0)
        has_room_N = self._num_free - 1 >= self._needs_Q.sum() - helps_N
        found: BoolArray = ~is_full_N & has_room_N & (self._num_free > 0)
        return found

    def takes(self, place: int) -> bool:
        """Take an item, if there is room for it."""
        if self._num_free <= 0:
            return False
        is_of_Q = self._is_of_QN[:, place]
        if (is_of_Q & (self._left_Q <= 0)).any():
            return False
        helped_Q = is_of_Q & (self._needs_Q > 0)
        if self._num_free - 1 < self._needs_Q.sum() - helped_Q.sum():
            return False
        self._num_free -= 1
        self._left_Q -= is_of_Q
        self._needs_Q -= helped_Q
        return True


def _diverse(
    scores_N: Float64Array, codes_NL: NDArray[np.integer], diversity: float, room: _Room
) -> list[int]:
    """Places of a pool in the order of maximal marginal relevance."""
    spread = float(scores_N.max() - scores_N.min())
    relevance_N = (scores_N - scores_N.min()) / spread if spread else np.ones(len(scores_N))
    alike_N = np.zeros(len(scores_N))
    is_left_N = np.ones(len(scores_N), dtype=np.bool_)
    order: list[int] = []
    while True:
        may_N = is_left_N & room.admits_N()
        if not may_N.any():
            return order
        value_N = np.where(may_N, (1.0 - diversity) * relevance_N - diversity * alike_N, -np.inf)
        place = int(np.argmax(value_N))
        took = room.takes(place)
        assert took, "it was admitted"
        order.append(place)
        is_left_N[place] = False
        leading_NL = np.cumprod(codes_NL == codes_NL[place], axis=1)
        alike_N = np.maximum(alike_N, leading_NL.mean(axis=1))


def _share_nothing(quotas: Sequence[Quota]) -> bool:
    """Whether no item counts for two quotas."""
    return bool((np.sum([each.mask_I for each in quotas], axis=0, dtype=np.int64) <= 1).all())


def _score(item: Recommendation) -> float:
    return item.score if item.ranking is None else item.ranking.score
