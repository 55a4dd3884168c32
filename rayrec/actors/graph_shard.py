"""A graph over several actors: a call to each shard and hop, with the nodes of the frontier that it has.

    hops ─► frontier by shard ─► GraphShard.neighbors of each ─► put together ─► next frontier

Storage and compute are apart: shards hold their part of the edges in memory, and make it again from the event
store whenever they start.

Axes: F nodes of a frontier, K neighbors of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayrec.actors.spawning import ActorRole, Calls, Host
from rayrec.platform.arrays import Int64Array
from rayrec.samples.graph.parts import GraphPart, part_of
from rayrec.samples.graph.sampling import NEWEST, Neighbors, Node, Sampling, hops_by


class GraphShard:
    """Serves one part of the graph of an event store."""

    def __init__(self, role: ActorRole, part: int, num_parts: int, store: str) -> None:
        self._role = role
        self._part = GraphPart.of_store(part, num_parts, store)

    def __repr__(self) -> str:
        return self._role.actor_name

    def append(
        self, side: Node, nodes_E: Int64Array, others_E: Int64Array, times_E: Int64Array, kinds_E: Any = None
    ) -> int:
        """Add edges that are in the store; a shard that was started since has them already."""
        return self._part.append(side, nodes_E, others_E, times_E, kinds_E)

    def neighbors(
        self,
        side: Node,
        nodes_F: Int64Array,
        before_F: Int64Array,
        fan_out: int,
        sampling: Sampling,
        hop: int,
    ) -> Neighbors:
        return self._part.neighbors(side, nodes_F, before_F, fan_out, sampling, hop)

    def num_edges(self) -> int:
        return self._part.num_edges


def spawn_graph_shards(host: Host, store: str, num_shards: int, num_cpus: float = 1.0) -> list[Any]:
    """Start the shards of a store that every node reaches.

    A shard that dies is started again, reads its part of the store, and answers the calls that waited: what
    it knew was all in the store.
    """
    options = {"num_cpus": num_cpus}
    return [
        host.spawn(GraphShard, "graph_shard", shard, (shard, num_shards, store), options, restarts=-1)
        for shard in range(num_shards)
    ]


class ShardedGraph:
    """Asks and appends to shards; answers are those of one graph, for any number of shards."""

    def __init__(self, shards: Sequence[Any], calls: Calls) -> None:
        """
        Args:
            shards: as `spawn_graph_shards` gives them, in order.
        """
        self._shards, self._calls = shards, calls

    def append(
        self, users_E: Int64Array, items_E: Int64Array, times_E: Int64Array, kinds_E: Any = None
    ) -> int:
        """Add events that are in the store; returns how many were new."""
        promises, new_of_users = [], 0
        sides: tuple[tuple[Node, Int64Array, Int64Array], ...] = (
            ("user", users_E, items_E),
            ("item", items_E, users_E),
        )
        for side, nodes_E, others_E in sides:
            shard_E = part_of(nodes_E, len(self._shards))
            for shard in np.unique(shard_E).tolist():
                mine_E = shard_E == shard
                kinds = None if kinds_E is None else np.asarray(kinds_E)[mine_E]
                promises.append(
                    self._shards[shard].append.remote(
                        side, nodes_E[mine_E], others_E[mine_E], times_E[mine_E], kinds
                    )
                )
            if side == "user":
                new_of_users = len(promises)
        return sum(self._calls.get(promises)[:new_of_users])

    def neighbors(
        self,
        of: Node,
        nodes_F: Int64Array,
        before_F: Int64Array,
        fan_out: int,
        sampling: Sampling = NEWEST,
        hop: int = 0,
    ) -> Neighbors:
        """As `rayrec.samples.graph.neighbors`."""
        # Nothing is before the beginning of time: a place of a frontier without a node asks nobody.
        is_asked_F = before_F > np.iinfo(np.int64).min
        shard_F = np.where(is_asked_F, part_of(nodes_F, len(self._shards)), -1)
        places = [np.flatnonzero(shard_F == shard) for shard in range(len(self._shards))]
        promises = [
            shard.neighbors.remote(of, nodes_F[mine], before_F[mine], fan_out, sampling, hop)
            for shard, mine in zip(self._shards, places, strict=True)
            if len(mine)
        ]
        found = Neighbors.nothing(len(nodes_F), fan_out)
        answers = self._calls.get(promises)
        for mine, answer in zip([mine for mine in places if len(mine)], answers, strict=True):
            found.ids_FK[mine], found.times_FK[mine] = answer.ids_FK, answer.times_FK
            found.kinds_FK[mine], found.counts_F[mine] = answer.kinds_FK, answer.counts_F
        return found

    def hops(
        self,
        of: Node,
        nodes_B: Int64Array,
        before_B: Int64Array,
        fan_outs: Sequence[int],
        sampling: Sampling = NEWEST,
    ) -> list[Neighbors]:
        """As `rayrec.samples.graph.hops`, with one call per shard and hop."""

        def ask(of: Node, nodes_F: Int64Array, before_F: Int64Array, fan_out: int, hop: int) -> Neighbors:
            return self.neighbors(of, nodes_F, before_F, fan_out, sampling, hop)

        return hops_by(ask, of, nodes_B, before_B, fan_outs)
