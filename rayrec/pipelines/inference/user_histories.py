"""A user's history: what the data set has, and what the state has besides, in the order of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.event_labels import UNKNOWN
from rayrec.samples.stores.recent import UserEvents


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
    at_S = np.flatnonzero(np.isin(stored_times, times_E))
    codes_S = stored.labels["behavior"][at_S] if "behavior" in stored.labels else np.full(len(at_S), UNKNOWN)
    left: dict[tuple[int, int], list[int]] = {}
    """Codes of what is stored of an item at a second, without those that were found in the state."""
    for item, time, code in zip(
        stored.history_ids[at_S].tolist(), stored_times[at_S].tolist(), codes_S.tolist(), strict=True
    ):
        left.setdefault((item, time), []).append(code)
    is_new_E = np.ones(len(items_E), dtype=np.bool_)
    events = list(zip(items_E.tolist(), times_E.tolist(), codes_E.tolist(), strict=True))
    for is_alike in (_are_equal, _may_be_equal):  # what is equal first, or another one would take its place
        for row, (item, time, code) in enumerate(events):
            codes = left.get((item, time), []) if is_new_E[row] else []
            for place, other in enumerate(codes):
                if is_alike(code, other):
                    del codes[place]
                    is_new_E[row] = False
                    break
    return is_new_E


def _are_equal(code: int, other: int) -> bool:
    return code == other


def _may_be_equal(code: int, other: int) -> bool:
    return UNKNOWN in (code, other)


def _translated(codes_E: Int64Array, names: Sequence[str], to: Sequence[str]) -> Int64Array:
    # One more entry at the end, where -1 finds itself.
    table = [to.index(name) if name in to else UNKNOWN for name in names]
    return np.array([*table, UNKNOWN], dtype=np.int64)[codes_E]
