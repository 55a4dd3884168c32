"""Graphs of what is there: a prepared data set, or an event store.

Axes: E events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import pyarrow.parquet as pq

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.event_times import TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import HISTORY_FILE
from rayrec.samples.graph.runs import NO_KIND, Edges
from rayrec.samples.graph.temporal_graph import GraphConfig, TemporalGraph
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS, StoreManifest
from rayrec.samples.stores.store import KeyValueEvents

_KEYS_AT_ONCE = 10_000
_LEAST_SHARE = 0.01
"""Of the smaller of two sets of items; two logs with fewer in common are not of one catalog."""
logger = logging.getLogger(__name__)


def check_data(graph: TemporalGraph, dataset: Dataset, where: str) -> None:
    """Refuse a graph whose users and items are not those of a data set.

    A graph without events is taken: it may grow.

    Args:
        where: folder of the graph.

    Raises:
        InputError: its ids are of another kind, or it has hardly any of the data set's items.
    """
    another = f"{where}: this graph is of another log than the data set {dataset.manifest.name!r}: "
    kinds = dataset.manifest.id_kinds
    if graph.config.id_kinds != kinds:
        raise InputError(f"{another}its ids are {graph.config.id_kinds}, those of the data set {kinds}")
    segments, nothing = graph.state.segments, np.zeros(0, np.int64)
    items = np.unique(np.concatenate([nothing, *(one.items.nodes_V for one in segments)]))
    users = np.unique(np.concatenate([nothing, *(one.users.nodes_V for one in segments)]))
    if not len(items):
        return
    num_items, num_users = len(dataset.items), len(dataset.users)
    shared_items = int((dataset.item_positions(items) >= 0).sum())
    shared_users = int(np.isin(dataset.users["user_id"].to_numpy(), users).sum())
    if shared_items < _LEAST_SHARE * min(num_items, len(items)):
        raise InputError(
            f"{another}it has {shared_items:,} of the {num_items:,} items of the data set, and "
            f"{len(items):,} of its own; make a graph of the same log"
        )
    logger.log(
        logging.INFO if shared_users else logging.WARNING,
        "%s: this graph has %.1f %% of the items of the data set, and %.1f %% of the users",
        where,
        100 * shared_items / num_items,
        100 * shared_users / max(num_users, 1),
    )


def graph_of_dataset(
    dataset: Dataset,
    events: Literal["train", "all"] = "train",
    period: int | None = None,
    max_edges_per_node: int | None = None,
) -> TemporalGraph:
    """The events of a data set.

    Args:
        events: those that models are trained on, or all, targets of evaluation included: for questions that
            are asked at a time.

    Where the data set has no times, the place of an event in its history stands for it: such a graph is for
    questions after everything (`ANY_TIME`).
    """
    names = dataset.train_files if events == "train" else (HISTORY_FILE,)
    graph = TemporalGraph(
        GraphConfig(
            log=dataset.fingerprint,
            id_kinds=dict(dataset.manifest.id_kinds),
            period=period,
            max_edges_per_node=max_edges_per_node,
        )
    )
    has_times = dataset.has_times()
    users = None if events == "train" else dataset.users["user_id"].to_numpy()
    for name in names:
        columns = ["item_ids", *([TIMES] if has_times else []), *(["user_id"] if users is None else [])]
        table = pq.read_table(dataset.root / name, columns=columns)
        items_E, offsets_R1 = list_values(table["item_ids"])
        users_R = table["user_id"].to_numpy() if users is None else users
        lengths_R = np.diff(offsets_R1)
        if has_times:
            times_E = list_values(table[TIMES])[0]
        else:
            times_E = np.arange(len(items_E)) - np.repeat(offsets_R1[:-1], lengths_R)
        graph.append(np.repeat(users_R, lengths_R), items_E, times_E)
    return graph


def graph_bytes(dataset: Dataset) -> int:
    """Memory that the graph of the training events of a data set takes, about."""
    num_edges = dataset.manifest.counts["train_events"]
    num_nodes = len(dataset.items) + len(dataset.users)
    # In both directions a neighbor, a time and a kind of an edge; id and offset of a node, which a smaller
    # run has again.
    return 2 * num_edges * (8 + 8 + 2) + 2 * num_nodes * (8 + 8)


def graph_of_store(
    store: KeyValueEvents, period: int | None = None, max_edges_per_node: int | None = None
) -> TemporalGraph:
    """The events of a store, by user or by item.

    Raises:
        StoreUnavailableError: the store did not answer.
    """
    graph = TemporalGraph(config_of_store(store.manifest, period, max_edges_per_node))
    for edges in edges_of_store(store):
        graph.append(*(edges if store.manifest.by == "user" else edges.reversed()))
    return graph


def config_of_store(
    manifest: StoreManifest, period: int | None = None, max_edges_per_node: int | None = None
) -> GraphConfig:
    return GraphConfig(
        log=manifest.log_fingerprint,
        time_unit=manifest.time_unit,
        kinds=manifest.behaviors,
        id_kinds=dict(manifest.id_kinds),
        period=period,
        max_edges_per_node=max_edges_per_node,
    )


def edges_of_store(
    store: KeyValueEvents, wanted: Callable[[Int64Array], BoolArray] | None = None
) -> Iterator[Edges]:
    """Edges from the keys of a store, many keys at a time.

    Args:
        wanted: which of some keys; None: all.
    """
    has_kinds = BEHAVIORS in store.manifest.types
    for keys_K in store.key_batches(_KEYS_AT_ONCE):
        if wanted is not None:
            keys_K = keys_K[wanted(keys_K)]
        found = store.get_many(keys_K, [ITEMS, *([BEHAVIORS] if has_kinds else [])])
        others_E = found.columns[ITEMS]
        kinds_E = found.columns[BEHAVIORS] if has_kinds else np.full(len(others_E), NO_KIND)
        keys_E = np.repeat(keys_K, np.diff(found.offsets_K1))
        yield Edges(keys_E, others_E, found.times_N, kinds_E.astype(np.int16))
