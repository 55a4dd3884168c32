"""Neighbors of many nodes at once: the newest, by weight, or uniform; over one hop or several.

A draw is a hash of (seed, node, time, hop, index): a sample repeats to the bit, on any number of machines,
and the graph keeps no state of it. Edges are drawn from a node's view (`rayrec.samples.graph.views`), none
twice.

Axes: F nodes of a frontier, K neighbors of each at most, B kinds of edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numba import njit

from rayrec.platform.arrays import Float64Array, Int16Array, Int64Array
from rayrec.platform.compiled import extend64, kernel_input
from rayrec.platform.errors import InputError
from rayrec.samples.graph.temporal_graph import TemporalGraph
from rayrec.samples.graph.views import ranges_before, view

By = Literal["newest", "weight", "uniform"]
Node = Literal["user", "item"]
_NEWEST, _WEIGHT, _UNIFORM = 0, 1, 2
_EARLIEST = np.iinfo(np.int64).min
_EVER = -1
_CODES: dict[By, int] = {"newest": _NEWEST, "weight": _WEIGHT, "uniform": _UNIFORM}


@dataclass(frozen=True)
class Neighbors:
    """Neighbors of each node of a frontier."""

    ids_FK: Int64Array
    """-1 after the last."""
    times_FK: Int64Array
    kinds_FK: Int16Array
    counts_F: Int64Array

    @classmethod
    def nothing(cls, num_nodes: int, fan_out: int) -> Neighbors:
        shape = (num_nodes, fan_out)
        return cls(
            np.full(shape, -1, np.int64),
            np.zeros(shape, np.int64),
            np.full(shape, -1, np.int16),
            np.zeros(num_nodes, np.int64),
        )


@dataclass(frozen=True)
class Sampling:
    """How neighbors are chosen."""

    by: By = "newest"
    most: int = 256
    """Edges of a node that are looked at: its newest."""
    weights: Mapping[str, float] | None = None
    """Of edges by kind, where they are drawn by weight; kinds that are not named have none. Edges without a
    kind weigh 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most must be at least 1, got {self.most}")
        if any(not 0.0 <= weight < np.inf for weight in (self.weights or {}).values()):
            raise ValueError("weights of kinds must not be negative or infinite")


NEWEST = Sampling()


def neighbors(
    graph: TemporalGraph,
    of: Node,
    nodes_F: Int64Array,
    before_F: Int64Array,
    fan_out: int,
    sampling: Sampling = NEWEST,
    hop: int = 0,
) -> Neighbors:
    """Neighbors of users (items) or of items (users), by edges strictly before each node's time.

    A node that the graph does not know has none.

    Args:
        before_F: in the graph's unit of time.
        hop: part of every draw.

    Raises:
        InputError: a weight of a kind that the graph does not have.
    """
    return _neighbors_of(graph, graph.state, of, nodes_F, before_F, fan_out, sampling, hop)


def hops(
    graph: TemporalGraph,
    of: Node,
    nodes_B: Int64Array,
    before_B: Int64Array,
    fan_outs: Sequence[int],
    sampling: Sampling = NEWEST,
) -> list[Neighbors]:
    """Neighbors, their neighbors, and so on: hop h has as many rows as hop h - 1 has places.

    Every hop is strictly before the time of the node that was asked about, so nothing of the future comes in
    by a detour. Rows of places without a node are empty.
    """
    state = graph.state  # one moment for all hops

    def ask(of: Node, nodes_F: Int64Array, before_F: Int64Array, fan_out: int, hop: int) -> Neighbors:
        return _neighbors_of(graph, state, of, nodes_F, before_F, fan_out, sampling, hop)

    return hops_by(ask, of, nodes_B, before_B, fan_outs)


Ask = Callable[[Node, Int64Array, Int64Array, int, int], Neighbors]
"""(of what, [F] nodes, [F] times, neighbors of each, hop) -> their neighbors."""


def hops_by(
    ask: Ask, of: Node, nodes_B: Int64Array, before_B: Int64Array, fan_outs: Sequence[int]
) -> list[Neighbors]:
    """`hops`, by anything that knows neighbors."""
    found = []
    frontier_F, before_F = np.asarray(nodes_B, np.int64), np.asarray(before_B, np.int64)
    for hop, fan_out in enumerate(fan_outs):
        result = ask(of, frontier_F, before_F, fan_out, hop)
        found.append(result)
        frontier_F = result.ids_FK.reshape(-1)
        is_node_F = (np.arange(fan_out) < result.counts_F[:, None]).reshape(-1)
        # Before the beginning of time there is nothing: so a place without a node has no neighbors.
        before_F = np.where(is_node_F, np.repeat(before_F, fan_out), _EARLIEST)
        of = "item" if of == "user" else "user"
    return found


def _neighbors_of(
    graph: TemporalGraph,
    state: Any,
    of: Node,
    nodes_F: Int64Array,
    before_F: Int64Array,
    fan_out: int,
    sampling: Sampling,
    hop: int,
) -> Neighbors:
    _check_lengths(nodes_F, before_F)
    result = Neighbors.nothing(len(nodes_F), fan_out)
    side = state.users if of == "user" else state.items
    _sample(
        side.table_S8,
        side.floor,
        kernel_input(nodes_F, np.int64),
        kernel_input(before_F, np.int64),
        _CODES[sampling.by],
        fan_out if sampling.by == "newest" else sampling.most,
        kind_weights(graph, sampling.weights),
        np.uint64(sampling.seed % 2**64),
        hop,
        result.ids_FK,
        result.times_FK,
        result.kinds_FK,
        result.counts_F,
    )
    return result


def kind_weights(graph: TemporalGraph, weights: Mapping[str, float] | None) -> Float64Array:
    """[B + 1] weight of each kind; the last one is that of edges without.

    Raises:
        InputError: the graph has no such kind.
    """
    names = graph.config.kinds
    if weights is None:
        return np.ones(len(names) + 1)
    if unknown := set(weights) - set(names):
        raise InputError(
            f"no event of the graph is a {sorted(unknown)[0]!r}; its kinds are {', '.join(names) or 'none'}"
        )
    return np.array([*(weights.get(name, 0.0) for name in names), 1.0])


def degrees(
    graph: TemporalGraph, of: Node, nodes_F: Int64Array, before_F: Int64Array, within: int | None = None
) -> Int64Array:
    """[F] how many edges each node has before its time, and not longer ago than `within`: of an item, its
    popularity at that time."""
    _check_lengths(nodes_F, before_F)
    state, counts_F = graph.state, np.zeros(len(nodes_F), np.int64)
    side = state.users if of == "user" else state.items
    _count(
        side.table_S8,
        side.floor,
        kernel_input(nodes_F, np.int64),
        kernel_input(before_F, np.int64),
        _EVER if within is None else within,
        counts_F,
    )
    return counts_F


def _check_lengths(nodes_F: Int64Array, before_F: Int64Array) -> None:
    if len(nodes_F) != len(before_F):
        raise ValueError(f"{len(nodes_F)} nodes have {len(before_F)} times; give each node its own")


@njit(nogil=True, cache=True)
def _count(table_S8: Any, floor: int, nodes_F: Any, before_F: Any, within: int, counts_F: Any) -> None:
    low_S, high_S = np.empty(len(table_S8), np.int64), np.empty(len(table_S8), np.int64)
    for f in range(len(nodes_F)):
        count = ranges_before(table_S8, floor, nodes_F[f], before_F[f], low_S, high_S)
        if count and within != _EVER and before_F[f] > _EARLIEST + within:
            count -= ranges_before(table_S8, floor, nodes_F[f], before_F[f] - within, low_S, high_S)
        counts_F[f] = count


@njit(nogil=True, cache=True)
def _sample(
    table_S8: Any,
    floor: int,
    nodes_F: Any,
    before_F: Any,
    by: int,
    most: int,
    weights_B1: Any,
    seed: Any,
    hop: int,
    ids_FK: Any,
    times_FK: Any,
    kinds_FK: Any,
    counts_F: Any,
) -> None:
    low_S, high_S = np.empty(len(table_S8), np.int64), np.empty(len(table_S8), np.int64)
    others_E, times_E = np.empty(most, np.int64), np.empty(most, np.int64)
    kinds_E, weights_E = np.empty(most, np.int16), np.empty(most, np.float64)
    fan_out = ids_FK.shape[1]
    for f in range(len(nodes_F)):
        count = view(table_S8, floor, nodes_F[f], before_F[f], low_S, high_S, others_E, times_E, kinds_E)
        total = 0.0
        if by == _WEIGHT:
            kept = 0
            for e in range(count):  # what weighs nothing is not drawn
                weight = weights_B1[kinds_E[e]]
                if weight > 0.0:
                    others_E[kept], times_E[kept], kinds_E[kept] = others_E[e], times_E[e], kinds_E[e]
                    weights_E[kept] = weight
                    total += weight
                    kept += 1
            count = kept
        number = min(count, fan_out)
        prefix = extend64(extend64(extend64(extend64(np.uint64(0), seed), nodes_F[f]), before_F[f]), hop)
        for k in range(number):
            chosen: Any = k
            if by == _UNIFORM:
                left = np.uint64(count - k)
                chosen = k + np.int64(extend64(prefix, k) % left)
            elif by == _WEIGHT:
                # 53 bits of the hash: a uniform number below 1.
                aim = np.float64(extend64(prefix, k) >> np.uint64(11)) * 2.0**-53 * total
                while chosen < count - 1 and aim >= weights_E[chosen]:
                    aim -= weights_E[chosen]
                    chosen += 1
                total -= weights_E[chosen]
                weights_E[chosen] = weights_E[k]
            ids_FK[f, k], times_FK[f, k], kinds_FK[f, k] = others_E[chosen], times_E[chosen], kinds_E[chosen]
            others_E[chosen], times_E[chosen], kinds_E[chosen] = others_E[k], times_E[k], kinds_E[k]
        counts_F[f] = number
