"""Items near a history, computed at the time of the question: co-visitation and random walks.

    co_visited   items that others met within a few events of an item of the history
    walked       items that random walks from the history come by

Both read the views of `rayrec.samples.graph.views`, so nothing at or after the time of the question counts,
and an event that was appended a moment ago does.

Axes: B questions, N items of their histories, K candidates, C slots of a table.

Sources: co-visitation counts are those of Linden et al., IEEE Internet Computing 2003, weighted by distance;
walks with several start items, their boost and early stop are Pixie's, Eksombatchai et al., WWW 2018,
arXiv:1711.07601, Algorithms 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.compiled import extend64, kernel_input
from rayrec.samples.graph.counting import FREE, add, best, clear, table
from rayrec.samples.graph.temporal_graph import TemporalGraph
from rayrec.samples.graph.views import nth_newest, ranges_before, view

_MOST_KEYS = 1 << 17
"""Of a table of sums; see `counting.add`."""


@dataclass(frozen=True)
class Histories:
    """What each question begins from."""

    items_N: Int64Array
    """Oldest first, question after question."""
    offsets_B1: Int64Array
    before_B: Int64Array
    """Time of each question, in the graph's unit; `ANY_TIME` is after everything."""

    def padded(self) -> Int64Array:
        """[B, E] the ids of each history, filled up with an id of nobody."""
        lengths_B = np.diff(self.offsets_B1)
        ids_BE = np.full((len(lengths_B), int(lengths_B.max(initial=0))), FREE, np.int64)
        ids_BE[np.arange(ids_BE.shape[1]) < lengths_B[:, None]] = self.items_N
        return ids_BE


@dataclass(frozen=True)
class Candidates:
    """The best items for each question, best first."""

    ids_BK: Int64Array
    """-1 after the last."""
    scores_BK: Float64Array
    """-inf after the last."""

    @classmethod
    def nothing(cls, num_rows: int, k: int) -> Candidates:
        return cls(np.full((num_rows, k), -1, np.int64), np.full((num_rows, k), -np.inf))


@dataclass(frozen=True)
class CoVisitation:
    """How co-visited items are counted.

    An item that somebody met `d` events before or after an item of the history counts decay^age / d, where
    age is 0 for the newest item of the history. The defaults are those of all tables here, untuned.
    """

    last: int = 20
    """Items of the history that are looked at, the newest."""
    decay: float = 0.8
    window: int = 5
    """Largest distance d."""
    most_users: int = 200
    """Users of an item that are looked at, the newest."""
    most_events: int = 200
    """Events of a user that are looked at, the newest."""


@dataclass(frozen=True)
class Walks:
    """How random walks go: from an item to one of its users, to one of that user's items, and so on."""

    last: int = 20
    """Items of the history that walks begin at, the newest."""
    decay: float = 0.8
    """Steps are shared out by decay^age."""
    steps: int = 10_000
    """Visits of items, over all walks of a question."""
    restart: float = 0.5
    """Probability of beginning again after each visit."""
    most: int = 200
    """Edges of a node that a step chooses from, its newest."""
    enough_items: int = 0
    """Walks from an item end as soon as so many items have `enough_visits`; 0: never early."""
    enough_visits: int = 4
    seed: int = 0


def co_visited(
    graph: TemporalGraph,
    histories: Histories,
    k: int,
    settings: CoVisitation = CoVisitation(),
    left_out_BE: Int64Array | None = None,
) -> Candidates:
    """The k items that were met most beside those of each history.

    Args:
        left_out_BE: ids that are not wanted, padded with -1 (such as what a user has seen).
    """
    state, found = graph.state, Candidates.nothing(len(histories.before_B), k)
    most_keys = min(settings.last * settings.most_users * 2 * settings.window, _MOST_KEYS)
    _co_visit(
        state.users.table_S8,
        state.items.table_S8,
        state.floor,
        *_inputs(histories),
        settings.last,
        settings.decay,
        settings.window,
        settings.most_users,
        settings.most_events,
        left_out_of(left_out_BE, len(histories.before_B)),
        *table(most_keys),
        found.ids_BK,
        found.scores_BK,
    )
    return found


def walked(
    graph: TemporalGraph,
    histories: Histories,
    k: int,
    settings: Walks = Walks(),
    left_out_BE: Int64Array | None = None,
) -> Candidates:
    """The k items that random walks from each history visit most.

    Visits from several items of a history count more than as many from one: the score of an item is
    (sum of the square roots of its visits from each)^2.
    """
    state, found = graph.state, Candidates.nothing(len(histories.before_B), k)
    most_keys = min(settings.steps, _MOST_KEYS)
    _walk(
        state.users.table_S8,
        state.items.table_S8,
        state.floor,
        *_inputs(histories),
        settings.last,
        settings.decay,
        settings.steps,
        settings.restart,
        settings.most,
        settings.enough_items,
        settings.enough_visits,
        np.uint64(settings.seed % 2**64),
        left_out_of(left_out_BE, len(histories.before_B)),
        *table(most_keys),
        *table(most_keys),
        found.ids_BK,
        found.scores_BK,
    )
    return found


def _inputs(histories: Histories) -> tuple[Any, Any, Any]:
    if len(histories.offsets_B1) != len(histories.before_B) + 1:
        raise ValueError(f"{len(histories.before_B)} questions have {len(histories.offsets_B1)} offsets")
    columns = (histories.items_N, histories.offsets_B1, histories.before_B)
    items_N, offsets_B1, before_B = (kernel_input(column, np.int64) for column in columns)
    return items_N, offsets_B1, before_B


def left_out_of(left_out_BE: Int64Array | None, num_rows: int) -> Any:
    """Ids that are not wanted, as kernels look them up; nothing for None."""
    if left_out_BE is None:
        left_out_BE = np.zeros((num_rows, 0), np.int64)
    return kernel_input(np.sort(left_out_BE, axis=1), np.int64)


@njit(nogil=True, cache=True)
def _co_visit(
    users_S8: Any,
    items_S8: Any,
    floor: int,
    items_N: Any,
    offsets_B1: Any,
    before_B: Any,
    last: int,
    decay: float,
    window: int,
    most_users: int,
    most_events: int,
    left_out_BE: Any,
    keys_C: Any,
    sums_C: Any,
    used: Any,
    ids_BK: Any,
    scores_BK: Any,
) -> None:
    low_S, high_S = np.empty(len(users_S8), np.int64), np.empty(len(users_S8), np.int64)
    users_E, times_E = np.empty(most_users, np.int64), np.empty(most_users, np.int64)
    events_E, event_times_E = np.empty(most_events, np.int64), np.empty(most_events, np.int64)
    kinds_E, event_kinds_E = np.empty(most_users, np.int16), np.empty(most_events, np.int16)
    for b in range(len(before_B)):
        weight = 1.0
        for n in range(offsets_B1[b + 1] - 1, max(offsets_B1[b], offsets_B1[b + 1] - last) - 1, -1):
            item = items_N[n]
            num_users = view(items_S8, floor, item, before_B[b], low_S, high_S, users_E, times_E, kinds_E)
            for e in range(num_users):
                count = view(
                    users_S8,
                    floor,
                    users_E[e],
                    before_B[b],
                    low_S,
                    high_S,
                    events_E,
                    event_times_E,
                    event_kinds_E,
                )
                at = _event(events_E, event_times_E, event_kinds_E, count, item, times_E[e], kinds_E[e])
                if at < 0:
                    continue
                for other in range(max(0, at - window), min(count, at + window + 1)):
                    if events_E[other] != item:
                        add(keys_C, sums_C, used, events_E[other], weight / abs(other - at))
            weight *= decay
        best(keys_C, sums_C, used, left_out_BE[b], ids_BK[b], scores_BK[b])
        clear(keys_C, sums_C, used)


@njit(nogil=True, cache=True)
def _event(events_E: Any, times_E: Any, kinds_E: Any, count: int, item: int, time: int, kind: int) -> int:
    """Where an event stands among a user's, newest first; -1 if it is older than they are."""
    low, high = 0, count  # the first place whose time is not later
    while low < high:
        middle = (low + high) // 2
        if times_E[middle] > time:
            low = middle + 1
        else:
            high = middle
    while low < count and times_E[low] == time:
        if events_E[low] == item and kinds_E[low] == kind:
            return low
        low += 1
    return -1


@njit(nogil=True, cache=True)
def _walk(
    users_S8: Any,
    items_S8: Any,
    floor: int,
    items_N: Any,
    offsets_B1: Any,
    before_B: Any,
    last: int,
    decay: float,
    steps: int,
    restart: float,
    most: int,
    enough_items: int,
    enough_visits: int,
    seed: Any,
    left_out_BE: Any,
    keys_C: Any,
    sums_C: Any,
    used: Any,
    own_keys_C: Any,
    own_sums_C: Any,
    own_used: Any,
    ids_BK: Any,
    scores_BK: Any,
) -> None:
    low_S, high_S = np.empty(len(users_S8), np.int64), np.empty(len(users_S8), np.int64)
    restart_below = np.uint64(restart * 2.0**53)
    for b in range(len(before_B)):
        first = max(offsets_B1[b], offsets_B1[b + 1] - last)
        total = 0.0
        for age in range(offsets_B1[b + 1] - first):
            total += decay**age
        for n in range(first, offsets_B1[b + 1]):
            share, comes_again = 0.0, False
            for other in range(first, offsets_B1[b + 1]):
                if items_N[other] == items_N[n]:  # several times in the history is one place to begin at
                    share += decay ** (offsets_B1[b + 1] - 1 - other) / total
                    comes_again |= other > n
            if comes_again:
                continue
            prefix = extend64(extend64(extend64(np.uint64(0), seed), before_B[b]), items_N[n])
            at: Any = items_N[n]
            num_enough = 0
            for step in range(np.int64(np.ceil(share * steps))):
                user = _step(
                    items_S8, floor, at, before_B[b], most, extend64(prefix, 3 * step), low_S, high_S
                )
                if user == FREE and at == items_N[n]:
                    break  # nobody met the item that the walk began at
                draw = extend64(prefix, 3 * step + 1)
                at = (
                    FREE
                    if user == FREE
                    else _step(users_S8, floor, user, before_B[b], most, draw, low_S, high_S)
                )
                if at == FREE:  # of a bounded graph: the edges of this node that are left are later
                    at = items_N[n]
                    continue
                if at != items_N[n]:
                    slot = add(own_keys_C, own_sums_C, own_used, at, 1.0)
                    if enough_items and slot >= 0 and own_sums_C[slot] == enough_visits:
                        num_enough += 1
                        if num_enough >= enough_items:
                            break
                if (extend64(prefix, 3 * step + 2) >> np.uint64(11)) < restart_below:
                    at = items_N[n]
            for place in range(1, own_used[0] + 1):
                slot = own_used[place]
                add(keys_C, sums_C, used, own_keys_C[slot], np.sqrt(own_sums_C[slot]))
            clear(own_keys_C, own_sums_C, own_used)
        for place in range(1, used[0] + 1):
            sums_C[used[place]] **= 2
        best(keys_C, sums_C, used, left_out_BE[b], ids_BK[b], scores_BK[b])
        clear(keys_C, sums_C, used)


@njit(nogil=True, cache=True)
def _step(
    table_S8: Any, floor: int, node: int, before: int, most: int, draw: Any, low_S: Any, high_S: Any
) -> int:
    """One of the newest neighbors of a node, each as likely; FREE where there is none."""
    count = min(ranges_before(table_S8, floor, node, before, low_S, high_S), most)
    if count == 0:
        return FREE
    chosen: Any = np.int64(draw % np.uint64(count))
    return nth_newest(table_S8, low_S, high_S, chosen)
