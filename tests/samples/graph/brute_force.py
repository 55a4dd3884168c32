"""What operations of a graph should give, computed from its list of events, one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rayrec.platform.hashing import mix64
from rayrec.samples.graph.temporal_graph import GraphConfig, TemporalGraph
from rayrec.samples.graph.views import ANY_TIME


class Event(NamedTuple):
    user: int
    item: int
    time: int
    kind: int = -1


def graph_of(
    events: Iterable[Event],
    period: int | None = None,
    kinds: tuple[str, ...] = (),
    max_edges_per_node: int | None = None,
) -> TemporalGraph:
    graph = TemporalGraph(GraphConfig(period=period, kinds=kinds, max_edges_per_node=max_edges_per_node))
    append(graph, list(events))
    return graph


def append(graph: TemporalGraph, events: list[Event]) -> int:
    columns = [np.array([event[place] for event in events], dtype=np.int64) for place in range(4)]
    return graph.append(*columns)


def newest(events: Iterable[Event], of: str, node: int, before: int) -> list[Event]:
    """Events of a node strictly before a time, newest first; ties by a hash of the neighbor, then by kind."""
    other = "item" if of == "user" else "user"
    mine = {event for event in events if getattr(event, of) == node and event.time < before}
    return sorted(mine, key=lambda e: (e.time, int(mix64(getattr(e, other))), e.kind), reverse=True)


def co_visits(
    events: Iterable[Event], history: list[int], before: int, last: int, decay: float, window: int, most: int
) -> dict[int, float]:
    """The score of every item."""
    events, scores = list(events), defaultdict(float)
    for age, item in enumerate(history[::-1][:last]):
        for meeting in newest(events, "item", item, before)[:most]:
            walk = newest(events, "user", meeting.user, before)[:most]
            if meeting not in walk:
                continue
            at = walk.index(meeting)
            for place, event in enumerate(walk):
                if 0 < abs(place - at) <= window and event.item != item:
                    scores[event.item] += decay**age / abs(place - at)
    return dict(scores)


def swing(events: Iterable[Event], item: int, alpha: float) -> dict[int, float]:
    """Similarity of an item to every other, over all pairs of its users."""
    items_of = defaultdict(set)
    for event in events:
        items_of[event.user].add(event.item)
    users = sorted(user for user, items in items_of.items() if item in items)
    scores = defaultdict(float)
    for place, u in enumerate(users):
        for v in users[place + 1 :]:
            shared = items_of[u] & items_of[v]
            weight = 1 / np.sqrt(len(items_of[u]) * len(items_of[v])) / (alpha + len(shared))
            for other in shared - {item}:
                scores[other] += weight
    return dict(scores)


def bounded(events: Iterable[Event], of: str, most: int) -> list[Event]:
    """The newest edges of each user, or of each item."""
    nodes = {getattr(event, of) for event in events}
    return [event for node in nodes for event in newest(events, of, node, ANY_TIME)[:most]]
