"""Neighbors of events: what others met beside an item, until its event.

Axes: N events, J neighbors of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import BoolArray, Float64Array, Int64Array
from rayrec.samples.graph.candidates import CoVisitation, Histories, co_visited
from rayrec.samples.graph.temporal_graph import TemporalGraph
from rayrec.samples.graph.views import ANY_TIME
from rayrec.samples.stores.manifest import PER_SECOND

NO_TIME = np.iinfo(np.int64).min
"""Time of an event of which it is not known, in a history to rank for; no event has it."""


_LARGER = 8
"""Times as many as before are looked at, for rows of which the nearest are not in the catalog."""
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class NeighborFinder:
    """Items that are two hops from an event's item, over users who met both within a few events.

    Strictly before the event counts: so an event sees neither what follows it nor its own edge, and of a
    training row nothing of its targets, whatever the graph has by now. The more often and the nearer two
    items were met, the more a neighbor weighs: the importance pooling of PinSage, by counts instead of walks.
    """

    graph: Callable[[], TemporalGraph]
    """Asked for each batch; may have grown since the last one."""
    count: int
    """J, neighbors of an event at most."""
    window: int = 5
    """Items that a user met at most so many events apart are neighbors."""
    most_users: int = 200
    """Users of an item that are looked at, the newest."""
    most_events: int = 200
    """Events of a user that are looked at, the newest."""

    def find(
        self,
        item_ids_N: Int64Array,
        times_N: Int64Array,
        no_time: int | None = None,
        positions: Callable[[Int64Array], Int64Array] | None = None,
    ) -> tuple[Int64Array, Float64Array]:
        """([N, J] ids, the best first, -1 after the last; [N, J] weights, 0 after the last).

        Args:
            times_N: UNIX seconds of the events.
            no_time: the number among these that says that nothing is known. Such an event is taken as one of
                this moment: all that the graph has is before it. None: there is no such number.
            positions: of ids in a catalog, -1 for those that it has not: neighbors are of the catalog, and
                positions in place of ids.
        """
        graph = self.graph()
        before_N = times_N * PER_SECOND[graph.config.time_unit]
        if no_time is not None:
            before_N[times_N == no_time] = ANY_TIME
        ids_NJ, weights_NJ, lacks_N = self._nearest(graph, item_ids_N, before_N, self.count, positions)
        most, all_there_are = self.count, 2 * self.window * self.most_users
        while lacks_N.any() and most < all_there_are:  # of those whose nearest are not in the catalog, others
            most = min(_LARGER * most, all_there_are)
            rows_L = np.flatnonzero(lacks_N)
            for start in range(0, len(rows_L), _ROWS_AT_ONCE):
                rows = rows_L[start : start + _ROWS_AT_ONCE]
                ids_NJ[rows], weights_NJ[rows], lacks_N[rows] = self._nearest(
                    graph, item_ids_N[rows], before_N[rows], most, positions
                )
        return ids_NJ, weights_NJ

    def _nearest(
        self,
        graph: TemporalGraph,
        item_ids_N: Int64Array,
        before_N: Int64Array,
        most: int,
        positions: Callable[[Int64Array], Int64Array] | None,
    ) -> tuple[Int64Array, Float64Array, BoolArray]:
        """(ids and weights of the nearest that are in the catalog; [N] which rows others could fill).

        Args:
            most: the nearest that are looked at.
        """
        histories = Histories(item_ids_N, np.arange(len(item_ids_N) + 1), before_N)
        settings = CoVisitation(
            1, window=self.window, most_users=self.most_users, most_events=self.most_events
        )
        found = co_visited(graph, histories, most, settings)
        is_there_NK = found.scores_BK > -np.inf
        is_full_N = is_there_NK[:, -1].copy()
        ids_NK, weights_NK = found.ids_BK, np.where(is_there_NK, found.scores_BK, 0.0)
        if positions is not None:
            ids_NK = np.where(is_there_NK, positions(ids_NK.reshape(-1)).reshape(ids_NK.shape), -1)
            is_there_NK &= ids_NK >= 0
            order_NK = np.argsort(~is_there_NK, axis=1, kind="stable")[:, : self.count]
            weights_NK = np.take_along_axis(np.where(is_there_NK, weights_NK, 0.0), order_NK, axis=1)
            ids_NK = np.take_along_axis(ids_NK, order_NK, axis=1)
        return ids_NK, weights_NK, is_full_N & (weights_NK[:, -1] == 0)
