"""What a user did before an event: strictly before, so that events of one time say nothing of each other.

Axes: E events, P those of them that histories are made of, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayrec.samples.batches import Int64Array
from rayrec.samples.jagged import list_rows


@dataclass(frozen=True)
class Histories:
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


def histories_before(
    users_E: Int64Array, times_E: Int64Array, items: pa.Array, kept_E: np.ndarray, most: int
) -> Histories:
    """
    Args:
        users_E: codes of users.
        items: [E] keys.
        kept_E: which events histories are made of.
        most: newest events of a history.
    """
    # Those of one user and time stand in the order of the source, which only they can tell apart.
    order_E = np.lexsort((times_E, users_E))
    users_S, times_S = users_E[order_E], times_E[order_E]
    places_S = np.arange(len(order_E))
    is_new_user_S = np.concatenate([[True], users_S[1:] != users_S[:-1]])[: len(order_E)]
    is_new_time_S = is_new_user_S | np.concatenate([[True], times_S[1:] != times_S[:-1]])[: len(order_E)]
    user_starts_S = np.maximum.accumulate(np.where(is_new_user_S, places_S, 0))
    time_starts_S = np.maximum.accumulate(np.where(is_new_time_S, places_S, 0))
    kept_before_S1 = np.concatenate([[0], np.cumsum(kept_E[order_E])]).astype(np.int64)
    firsts_S, stops_S = kept_before_S1[user_starts_S], kept_before_S1[time_starts_S]
    lengths_S = np.minimum(stops_S - firsts_S, most)

    def in_order_of_events(values_S: Int64Array) -> Int64Array:
        values_E = np.empty_like(values_S)
        values_E[order_E] = values_S
        return values_E

    return Histories(
        items=items.take(pa.array(order_E[kept_E[order_E]])),
        starts_E=in_order_of_events(stops_S - lengths_S),
        lengths_E=in_order_of_events(lengths_S),
        num_events_E=in_order_of_events(time_starts_S - user_starts_S),
        num_kept_E=in_order_of_events(stops_S - firsts_S),
    )
