"""A graph that follows an event store: by its feed where that has what came since, else by the store."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayrec.platform.errors import InputError
from rayrec.samples.graph.counting import FREE
from rayrec.samples.graph.sources import edges_of_store
from rayrec.samples.graph.temporal_graph import TemporalGraph
from rayrec.samples.stores.feed import FeedGoneError
from rayrec.samples.stores.store import KeyValueEvents


def check_store(graph: TemporalGraph, store: KeyValueEvents, where: str) -> None:
    """Refuse a store of another log than the graph's, or with other codes of behaviors.

    Args:
        where: of the graph, for messages.

    Raises:
        InputError: says what is different.
    """
    known, kinds = graph.config.kinds, store.manifest.behaviors
    graph.check_log(store.manifest.log_fingerprint, store.name)
    if known != kinds[: len(known)]:
        raise InputError(f"{where}: the kinds of this graph have other codes than those of {store.name}")


class CaughtUp(NamedTuple):
    """What came of catching up."""

    added: int
    """Events that were new to the graph."""
    by_feed: bool
    """Not by reading all of the store."""


def catch_up(graph: TemporalGraph, store: KeyValueEvents) -> CaughtUp:
    """Add what a store has since the graph read it last.

    The position in the feed is taken before the store is read, so that nothing falls between. A store with
    one side has no feed, and is read each time.

    Raises:
        StoreUnavailableError: it did not answer; the graph has a part of it, and goes on from there.
    """
    if graph.feed_position is not None:
        try:
            return CaughtUp(read_feed(graph, store), by_feed=True)
        except FeedGoneError:
            pass
    position, added = store.feed_position(), 0
    graph.name_kinds(store.read_manifest_again().behaviors)
    for edges in edges_of_store(store):
        added += graph.append(*(edges if store.manifest.by == "user" else edges.reversed()))
    graph.feed_position = position
    return CaughtUp(added, by_feed=False)


def read_feed(graph: TemporalGraph, store: KeyValueEvents) -> int:
    """Add all that the feed has since the graph read it last; how many events were new.

    Raises:
        FeedGoneError: the feed does not have all of it any more.
        StoreUnavailableError: it did not answer; the graph goes on from where it is.
    """
    assert graph.feed_position is not None, "it has read the store"
    added = 0
    while True:
        events, position = store.feed_after(graph.feed_position)
        if not len(events.users_E):
            return added
        if events.kinds_E.max() >= len(graph.config.kinds):
            graph.name_kinds(store.read_manifest_again().behaviors)
        is_node_E = (events.users_E != FREE) & (events.items_E != FREE)
        added += graph.append(*(np.asarray(column)[is_node_E] for column in events))
        graph.feed_position = position
