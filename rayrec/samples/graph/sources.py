"""Graphs of what is there: a prepared data set, or an event store.

Axes: E events.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow.parquet as pq

from rayrec.samples.base.event_times import TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import HISTORY_FILE
from rayrec.samples.graph.temporal_graph import GraphConfig, TemporalGraph
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS
from rayrec.samples.stores.store import KeyValueEvents

_KEYS_AT_ONCE = 10_000


def graph_of_dataset(
    dataset: Dataset, events: Literal["train", "all"] = "train", period: int | None = None
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
        GraphConfig(log=dataset.fingerprint, id_kinds=dict(dataset.manifest.id_kinds), period=period)
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


def graph_of_store(store: KeyValueEvents, period: int | None = None) -> TemporalGraph:
    """The events of a store, by user or by item.

    Raises:
        StoreUnavailableError: the store did not answer.
    """
    manifest = store.manifest
    has_kinds = BEHAVIORS in manifest.types
    graph = TemporalGraph(
        GraphConfig(
            log=manifest.log_fingerprint,
            time_unit=manifest.time_unit,
            kinds=manifest.behaviors,
            id_kinds=dict(manifest.id_kinds),
            period=period,
        )
    )
    for keys_K in store.key_batches(_KEYS_AT_ONCE):
        found = store.get_many(keys_K, [ITEMS, *([BEHAVIORS] if has_kinds else [])])
        keys_E = np.repeat(keys_K, np.diff(found.offsets_K1))
        others_E = found.columns[ITEMS]
        users_E, items_E = (keys_E, others_E) if manifest.by == "user" else (others_E, keys_E)
        graph.append(users_E, items_E, found.times_N, found.columns[BEHAVIORS] if has_kinds else None)
    return graph
