"""Neighbors of events: what others met beside an item, until its event.

Axes: N events, J neighbors of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.samples.graph.candidates import CoVisitation, Histories, co_visited
from rayrec.samples.graph.temporal_graph import TemporalGraph
from rayrec.samples.graph.views import ANY_TIME
from rayrec.samples.stores.manifest import PER_SECOND

NO_TIME = 0
"""Time of an event of which it is not known, in a history to rank for."""


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
        self, item_ids_N: Int64Array, times_N: Int64Array, no_time: int | None = None
    ) -> tuple[Int64Array, Float64Array]:
        """([N, J] ids, the best first, -1 after the last; [N, J] weights, 0 after the last).

        Args:
            times_N: UNIX seconds of the events.
            no_time: the number among these that says that nothing is known. Such an event is taken as one of
                this moment: all that the graph has is before it. None: there is no such number.
        """
        graph = self.graph()
        before_N = times_N * PER_SECOND[graph.config.time_unit]
        if no_time is not None:
            before_N[times_N == no_time] = ANY_TIME
        histories = Histories(item_ids_N, np.arange(len(item_ids_N) + 1), before_N)
        settings = CoVisitation(
            1, window=self.window, most_users=self.most_users, most_events=self.most_events
        )
        found = co_visited(graph, histories, self.count, settings)
        return found.ids_BK, np.where(found.scores_BK > -np.inf, found.scores_BK, 0.0)
