"""A part of a graph that is spread over several machines.

A node belongs to the part that a hash of its id says, with all of its edges: users with edges to items, items
with edges to users. So a question about a node is answered by one part, alike for any number of parts, and an
event goes to two of them: that of its user, and that of its item.

Axes: E edges, F nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.hashing import mix64
from rayrec.samples.graph.sampling import Neighbors, Node, Sampling, neighbors
from rayrec.samples.graph.sources import config_of_store, edges_of_store
from rayrec.samples.graph.temporal_graph import GraphConfig, TemporalGraph
from rayrec.samples.stores import open_store
from rayrec.samples.stores.store import check_sides

_SIDES: tuple[Node, Node] = ("user", "item")


def part_of(ids_F: Int64Array, num_parts: int) -> Int64Array:
    """[F] to which part each node belongs."""
    high_bits_F = mix64(ids_F) >> np.uint64(32)
    return ((high_bits_F * np.uint64(num_parts)) >> np.uint64(32)).astype(np.int64)


class GraphPart:
    """One of several parts; it keeps no edge of a node that belongs to another."""

    def __init__(self, part: int, num_parts: int, config: GraphConfig | None = None) -> None:
        self._part, self._num_parts = part, num_parts
        # Edges from nodes of each side, in one direction: the other one belongs to other parts.
        self._sides = {side: TemporalGraph(config, both_ways=False) for side in _SIDES}

    @classmethod
    def of_store(cls, part: int, num_parts: int, address: str) -> GraphPart:
        """Its part of an event store with both sides; after a death, too.

        Raises:
            InputError: the store has no side by item.
            StoreUnavailableError: it does not answer.
        """
        stores = {side: open_store(address, by=side) for side in _SIDES}
        try:
            check_sides(stores["user"], stores["item"])
            longest = max((store.manifest for store in stores.values()), key=lambda one: len(one.behaviors))
            made = cls(part, num_parts, config_of_store(longest))
            for side, store in stores.items():
                for edges in edges_of_store(store, lambda keys_K: part_of(keys_K, num_parts) == part):
                    made.append(side, *edges)
        finally:
            for store in stores.values():
                store.close()
        return made

    @property
    def num_edges(self) -> int:
        """Each event counts once for its user and once for its item, where they belong here."""
        return sum(graph.state.num_edges for graph in self._sides.values())

    def append(
        self, side: Node, nodes_E: Int64Array, others_E: Int64Array, times_E: Int64Array, kinds_E: Any = None
    ) -> int:
        """Add the edges of nodes that belong here; returns how many were new."""
        mine_E = part_of(nodes_E, self._num_parts) == self._part
        kinds_E = None if kinds_E is None else np.asarray(kinds_E)[mine_E]
        return self._sides[side].append(nodes_E[mine_E], others_E[mine_E], times_E[mine_E], kinds_E)

    def neighbors(
        self,
        side: Node,
        nodes_F: Int64Array,
        before_F: Int64Array,
        fan_out: int,
        sampling: Sampling,
        hop: int,
    ) -> Neighbors:
        """As `sampling.neighbors`, of nodes that belong here."""
        return neighbors(self._sides[side], "user", nodes_F, before_F, fan_out, sampling, hop)
