"""A user's history: what the data set has, and what the state has besides, in the order of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.event_labels import UNKNOWN
from rayrec.samples.stores.recent import UserEvents

_Left = Counter[tuple[int, ...]]
"""How many events there still are, by what tells them apart."""


def with_events(
    recommender: Recommender,
    key: str | None,
    stored: Query | None,
    events: UserEvents,
    behaviors: Sequence[str],
) -> Query:
    """The query of a user with the events of a store, as far as the catalog knows their items.

    Args:
        key: of the user; None: of nobody in the data set.
        stored: what the data set has of the user; None: nothing.
        behaviors: names of the store's codes.
    """
    dataset = recommender.dataset
    times = None if stored is None or key is None else dataset.history_times_of(key)
    if stored is None:
        none = np.zeros(0, dtype=np.int64)
        stored = Query(none, labels=dict.fromkeys(recommender.needs_labels, none))
    stored_times = np.zeros(0, dtype=np.int64) if times is None else times
    known_E = dataset.item_positions(events.items_E) >= 0
    known = UserEvents(events.times_us_E[known_E], events.items_E[known_E], events.behaviors_E[known_E])
    return with_recent(stored, stored_times, known, behaviors, dataset.manifest.behaviors)


def with_recent(
    stored: Query,
    stored_times: Int64Array,
    recent: UserEvents,
    state_behaviors: Sequence[str],
    data_behaviors: Sequence[str],
) -> Query:
    """The query with the events of the state, of items that the catalog knows.

    The data set has seconds, and the state microseconds. So an event of the state is that of the data set
    with its item and second, and its behavior where both are known, and each of the data set stands for one.
    What a user did again within a second counts again, as in the state and in the data set, which have events
    of one time and behavior once. Of equal times, what is stored comes first.

    Args:
        stored: of the data set; empty for a user who is in none.
        stored_times: UNIX seconds of its events.
        recent: in order of time.
    """
    times_E = recent.times_us_E // 1_000_000
    codes_E = _translated(recent.behaviors_E, state_behaviors, data_behaviors)
    is_new_E = _are_new(stored, stored_times, recent.items_E, times_E, codes_E)
    if not is_new_E.any():
        return stored
    times, codes_E = np.concatenate([stored_times, times_E[is_new_E]]), codes_E[is_new_E]
    order = np.argsort(times, kind="stable")
    labels = {
        label: np.concatenate([codes, codes_E if label == "behavior" else np.full(len(codes_E), UNKNOWN)])[
            order
        ]
        for label, codes in stored.labels.items()
    }
    ids = np.concatenate([stored.history_ids, recent.items_E[is_new_E]])
    return replace(stored, history_ids=ids[order], times=times[order], labels=labels)


def _are_new(
    stored: Query, stored_times: Int64Array, items_E: Int64Array, times_E: Int64Array, codes_E: Int64Array
) -> BoolArray:
    """[E] whether each event is none of those that are stored."""
    is_new_E = np.ones(len(items_E), dtype=np.bool_)
    # Most users have done something since, and little of it is looked at one by one.
    at_N = np.flatnonzero(np.isin(times_E, stored_times))
    if not len(at_N):
        return is_new_E
    at_S = np.flatnonzero(np.isin(stored_times, times_E[at_N]))
    codes_S = stored.labels["behavior"][at_S] if "behavior" in stored.labels else np.full(len(at_S), UNKNOWN)
    left: _Left = Counter(_rows(stored.history_ids[at_S], stored_times[at_S], codes_S))
    # What is equal first, or another one would take its place.
    is_new_E[at_N] = ~_found(_rows(items_E[at_N], times_E[at_N], codes_E[at_N]), left)
    is_unknown = np.concatenate([codes_S, codes_E[at_N]]) == UNKNOWN
    if is_unknown.any() and not is_unknown.all():
        # Of an item at a second, only one side can have events of unknown behavior left: others are equal.
        alike: _Left = Counter()
        for (item, time, code), number in left.items():
            alike[item, time, code == UNKNOWN] += number
        at_N = at_N[is_new_E[at_N]]
        is_new_E[at_N] = ~_found(_rows(items_E[at_N], times_E[at_N], codes_E[at_N] != UNKNOWN), alike)
    return is_new_E


def _rows(*columns: np.ndarray) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _found(events: Iterable[tuple[int, ...]], left: _Left) -> BoolArray:
    """[E] whether there is still one of each event; each is found once, and is gone then."""
    found = list[bool]()
    for event in events:
        number = left.get(event, 0)
        found.append(number > 0)
        if number:
            left[event] = number - 1
    return np.array(found, dtype=np.bool_)


def _translated(codes_E: Int64Array, names: Sequence[str], to: Sequence[str]) -> Int64Array:
    # One more entry at the end, where -1 finds itself.
    table = [to.index(name) if name in to else UNKNOWN for name in names]
    return np.array([*table, UNKNOWN], dtype=np.int64)[codes_E]
