"""Items that resemble an item, by who met both: co-visitation, Swing and RP3, computed for a whole catalog.

Each gives every item its most similar items with their scores, from which a history is answered by a sum.
They are made ahead (offline or near-line); at the time of a question, `candidates.co_visited` needs no table.

Axes: I items and U users as numbers from 0, E distinct pairs of them, K similar items.

Sources: Swing is the item-to-item score of Yang et al., arXiv:2010.05525, eq. 1, with the weights of users
that Alibaba's PAI documents; RP3beta is Paudel et al., ACM TiiS 2016, doi:10.1145/2955101.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numba import njit

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.hashing import mix64
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.graph.candidates import Candidates, CoVisitation, Histories, co_visited, left_out_of
from rayrec.samples.graph.counting import add, best, clear, table
from rayrec.samples.graph.temporal_graph import TemporalGraph
from rayrec.samples.graph.views import ANY_TIME

Method = Literal["co_visitation", "swing", "rp3"]


@dataclass(frozen=True)
class SimilarityConfig:
    """How similar items are found. The defaults are those of all tables here, untuned."""

    method: Method = "swing"
    k: int = 400
    """Similar items that are kept of each."""
    most_users: int = 200
    """Of an item, the newest: Swing looks at all pairs of them."""
    alpha: float = 1.0
    """Swing: what is added to the items that two users share."""
    beta: float = 0.6
    """RP3: how much popular items are held back."""


@dataclass(frozen=True)
class SimilarItems:
    """The most similar items of each item, most similar first."""

    item_ids_I: Int64Array
    """Ascending."""
    ids_IK: Int64Array
    """-1 after the last."""
    scores_IK: Float64Array

    def answer(
        self,
        histories: Histories,
        k: int,
        last: int = 20,
        decay: float = 0.8,
        left_out_BE: Int64Array | None = None,
    ) -> Candidates:
        """The k items with the largest sum of decay^age times their similarity to an item of the history."""
        num_rows = len(histories.before_B)
        found = Candidates.nothing(num_rows, k)
        _sum_similar(
            kernel_input(histories.items_N, np.int64),
            kernel_input(histories.offsets_B1, np.int64),
            self.item_ids_I,
            self.ids_IK,
            self.scores_IK,
            last,
            decay,
            left_out_of(left_out_BE, num_rows),
            *table(last * self.ids_IK.shape[1]),
            found.ids_BK,
            found.scores_BK,
        )
        return found


def similar_items(
    graph: TemporalGraph,
    item_ids_I: Int64Array,
    config: SimilarityConfig = SimilarityConfig(),
    before: int = ANY_TIME,
) -> SimilarItems:
    """The most similar items of each of some items, from edges strictly before a time."""
    item_ids_I = kernel_input(np.unique(np.asarray(item_ids_I, np.int64)), np.int64)
    if config.method == "co_visitation":
        ones_I = np.arange(len(item_ids_I) + 1)
        each = Histories(item_ids_I, ones_I, np.full(len(item_ids_I), before))
        settings = CoVisitation(most_users=config.most_users)
        near = co_visited(graph, each, config.k, settings)
        return SimilarItems(item_ids_I, near.ids_BK, near.scores_BK)
    users_E, items_E, times_E, hashes_E = _pairs(graph, item_ids_I, before)
    num_users = int(users_E.max(initial=-1)) + 1
    found = Candidates.nothing(len(item_ids_I), config.k)
    by_user = np.lexsort((items_E, users_E))
    # The newest users of an item first; in what order those of one time come, a hash says.
    by_item = np.lexsort((hashes_E, -times_E, items_E))
    compute = _swing if config.method == "swing" else _rp3
    compute(
        offsets_from_lengths(np.bincount(users_E, minlength=num_users)),
        items_E[by_user],
        offsets_from_lengths(np.bincount(items_E, minlength=len(item_ids_I))),
        users_E[by_item],
        config.most_users,
        config.alpha if config.method == "swing" else config.beta,
        item_ids_I,
        *table(len(item_ids_I)),
        found.ids_BK,
        found.scores_BK,
    )
    return SimilarItems(item_ids_I, found.ids_BK, found.scores_BK)


def _pairs(
    graph: TemporalGraph, item_ids_I: Int64Array, before: int
) -> tuple[Int64Array, Int64Array, Int64Array, Any]:
    """Numbers of the users and items that an edge joins, each pair once, the time of its newest edge, and a
    hash of the user."""
    users_E, items_E, times_E, _ = graph.state.edges()
    number_E = np.searchsorted(item_ids_I, items_E)
    number_E[number_E == len(item_ids_I)] = 0
    kept_E = times_E < before
    if len(item_ids_I):
        kept_E &= item_ids_I[number_E] == items_E
    ids_U, users_E = deduplicate(users_E[kept_E])
    items_E, times_E = number_E[kept_E], times_E[kept_E]
    order_E = np.lexsort((-times_E, items_E, users_E))
    users_E, items_E, times_E = users_E[order_E], items_E[order_E], times_E[order_E]
    is_first_E = np.ones(len(users_E), np.bool_)
    is_first_E[1:] = (users_E[1:] != users_E[:-1]) | (items_E[1:] != items_E[:-1])
    users_E = users_E[is_first_E]
    # Numbers follow the order of the appends; ids do not.
    return users_E, items_E[is_first_E], times_E[is_first_E], mix64(ids_U)[users_E]


@njit(nogil=True, cache=True)
def _swing(
    offsets_U1: Any,
    items_E: Any,
    offsets_I1: Any,
    users_E: Any,
    most_users: int,
    alpha: float,
    item_ids_I: Any,
    keys_C: Any,
    sums_C: Any,
    used: Any,
    ids_IK: Any,
    scores_IK: Any,
) -> None:
    """Sum over all pairs of an item's users, of the weight of the pair by all that the two share."""
    shared = np.empty(len(item_ids_I), np.int64)
    left_out = np.empty(1, np.int64)
    for i in range(len(item_ids_I)):
        start, stop = offsets_I1[i], min(offsets_I1[i + 1], offsets_I1[i] + most_users)
        for first in range(start, stop):
            u_start, u_stop = offsets_U1[users_E[first]], offsets_U1[users_E[first] + 1]
            for second in range(first + 1, stop):
                v, v_stop = offsets_U1[users_E[second]], offsets_U1[users_E[second] + 1]
                weight = 1.0 / np.sqrt((u_stop - u_start) * (v_stop - v))
                u, count = u_start, 0
                while u < u_stop and v < v_stop:
                    if items_E[u] == items_E[v]:
                        shared[count] = items_E[u]
                        count += 1
                        u += 1
                        v += 1
                    elif items_E[u] < items_E[v]:
                        u += 1
                    else:
                        v += 1
                for n in range(count):
                    add(keys_C, sums_C, used, item_ids_I[shared[n]], weight / (alpha + count))
        left_out[0] = item_ids_I[i]
        best(keys_C, sums_C, used, left_out, ids_IK[i], scores_IK[i])
        clear(keys_C, sums_C, used)


@njit(nogil=True, cache=True)
def _rp3(
    offsets_U1: Any,
    items_E: Any,
    offsets_I1: Any,
    users_E: Any,
    most_users: int,
    beta: float,
    item_ids_I: Any,
    keys_C: Any,
    sums_C: Any,
    used: Any,
    ids_IK: Any,
    scores_IK: Any,
) -> None:
    """Probability of going from an item to one of its users and on to an item, popular items held back."""
    left_out = np.empty(1, np.int64)
    for i in range(len(item_ids_I)):
        start, stop = offsets_I1[i], min(offsets_I1[i + 1], offsets_I1[i] + most_users)
        for place in range(start, stop):
            u_start, u_stop = offsets_U1[users_E[place]], offsets_U1[users_E[place] + 1]
            step = 1.0 / ((stop - start) * (u_stop - u_start))
            for u in range(u_start, u_stop):
                degree = offsets_I1[items_E[u] + 1] - offsets_I1[items_E[u]]
                add(keys_C, sums_C, used, item_ids_I[items_E[u]], step / degree**beta)
        left_out[0] = item_ids_I[i]
        best(keys_C, sums_C, used, left_out, ids_IK[i], scores_IK[i])
        clear(keys_C, sums_C, used)


@njit(nogil=True, cache=True)
def _sum_similar(
    items_N: Any,
    offsets_B1: Any,
    item_ids_I: Any,
    ids_IK: Any,
    scores_IK: Any,
    last: int,
    decay: float,
    left_out_BE: Any,
    keys_C: Any,
    sums_C: Any,
    used: Any,
    ids_BK: Any,
    scores_BK: Any,
) -> None:
    for b in range(len(ids_BK)):
        weight = 1.0
        for n in range(offsets_B1[b + 1] - 1, max(offsets_B1[b], offsets_B1[b + 1] - last) - 1, -1):
            place = np.searchsorted(item_ids_I, items_N[n])
            if place < len(item_ids_I) and item_ids_I[place] == items_N[n]:
                for j in range(ids_IK.shape[1]):
                    if ids_IK[place, j] == -1 and scores_IK[place, j] == -np.inf:
                        break
                    add(keys_C, sums_C, used, ids_IK[place, j], weight * scores_IK[place, j])
            weight *= decay
        best(keys_C, sums_C, used, left_out_BE[b], ids_BK[b], scores_BK[b])
        clear(keys_C, sums_C, used)
