"""What a user did before an event: strictly before, so that events of one time say nothing of each other.

Which events count is said by a `HistoryRule`, and applied here alone: to a log when impressions are made of
it, and to the histories of those who ask, which are a log too, in which asking is the last event.

Axes: E events, P those of them that histories are made of, R rows, B who asks, N events of their histories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.samples.base.jagged import list_rows
from rayrec.samples.impressions.history_rule import HistoryRule


@dataclass(frozen=True)
class PastEvents:
    """The history of every event, as a range of a common array."""

    items: pa.Array
    """[P] keys of items, by user, oldest first."""
    starts_E: Int64Array
    lengths_E: Int64Array
    """The newest ones, as many as were asked for."""
    num_events_E: Int64Array
    """Events of the user before, whether histories are made of them or not."""
    num_kept_E: Int64Array
    """Events of the user before that histories are made of, however many."""

    def of(self, events_R: Int64Array) -> pa.ListArray:
        return list_rows(self.items, self.starts_E[events_R], self.lengths_E[events_R])


def past_events_by_rule(
    rule: HistoryRule,
    users_E: Int64Array,
    times_E: Int64Array,
    items: pa.Array,
    liked_E: np.ndarray | None = None,
) -> PastEvents:
    """The history of each event's user before the event, by the rule.

    Args:
        users_E: codes of users.
        items: [E] keys.
        liked_E: for a rule that asks for it.
    """
    if rule.events == "liked":
        assert liked_E is not None, "asked only where it is known"
        kept_E = liked_E
    elif rule.events == "first":
        kept_E = is_first_of_item(users_E, times_E, items)
    else:
        kept_E = np.ones(len(users_E), dtype=bool)
    return past_events_before(users_E, times_E, items, kept_E, rule.length)


def histories_now(rule: HistoryRule, items: pa.Array, offsets_B1: Int64Array) -> PastEvents:
    """[B] what those who ask now did before, of histories that are ordered by time.

    Args:
        items: [N] whatever says which items they are.
    """
    lengths_B = np.diff(offsets_B1)
    num_asking = len(lengths_B)
    asking_B = np.arange(num_asking)
    users_E = np.concatenate([np.repeat(asking_B, lengths_B), asking_B])
    indices_N = np.arange(len(items)) - np.repeat(offsets_B1[:-1], lengths_B)
    histories = past_events_by_rule(
        rule,
        users_E,
        np.concatenate([indices_N, lengths_B]),
        pa.concat_arrays([items, pa.nulls(num_asking, items.type)]),
    )
    return PastEvents(
        items=histories.items,
        starts_E=histories.starts_E[len(items) :],
        lengths_E=histories.lengths_E[len(items) :],
        num_events_E=histories.num_events_E[len(items) :],
        num_kept_E=histories.num_kept_E[len(items) :],
    )


def is_first_of_item(users_E: Int64Array, times_E: Int64Array, items: pa.Array) -> np.ndarray:
    """[E] whether an event is the user's first one with its item; of events of one time the first given."""
    codes_E, keys = pd.factorize(items.to_pandas())
    pairs_E = users_E.astype(np.int64) * (len(keys) + 1) + codes_E  # without an item, the code is -1
    by_pair_E = np.lexsort((times_E, pairs_E))
    first_E = np.zeros(len(pairs_E), dtype=bool)
    first_E[by_pair_E] = np.diff(pairs_E[by_pair_E], prepend=np.iinfo(np.int64).min) != 0
    return first_E


def past_events_before(
    users_E: Int64Array, times_E: Int64Array, items: pa.Array, kept_E: np.ndarray, most: int
) -> PastEvents:
    """The newest of the kept events of each event's user that are before it in time.

    Args:
        users_E: codes of users.
        items: [E] keys.
        kept_E: which events histories are made of.
        most: newest events of a history.
    """
    # Those of one user and time stand in the order of the source, which only they can tell apart.
    order_E = np.lexsort((times_E, users_E))
    users_S, times_S = users_E[order_E], times_E[order_E]
    indices_S = np.arange(len(order_E))
    is_new_user_S = np.concatenate([[True], users_S[1:] != users_S[:-1]])[: len(order_E)]
    is_new_time_S = is_new_user_S | np.concatenate([[True], times_S[1:] != times_S[:-1]])[: len(order_E)]
    user_starts_S = np.maximum.accumulate(np.where(is_new_user_S, indices_S, 0))
    time_starts_S = np.maximum.accumulate(np.where(is_new_time_S, indices_S, 0))
    kept_before_S1 = np.concatenate([[0], np.cumsum(kept_E[order_E])]).astype(np.int64)
    firsts_S, stops_S = kept_before_S1[user_starts_S], kept_before_S1[time_starts_S]
    lengths_S = np.minimum(stops_S - firsts_S, most)

    def in_order_of_events(values_S: Int64Array) -> Int64Array:
        values_E = np.empty_like(values_S)
        values_E[order_E] = values_S
        return values_E

    return PastEvents(
        items=items.take(pa.array(order_E[kept_E[order_E]])),
        starts_E=in_order_of_events(stops_S - lengths_S),
        lengths_E=in_order_of_events(lengths_S),
        num_events_E=in_order_of_events(time_starts_S - user_starts_S),
        num_kept_E=in_order_of_events(stops_S - firsts_S),
    )
