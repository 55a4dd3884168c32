"""Graphs of data sets, and whether a graph is one of a data set's log."""

import logging

import numpy as np
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.graph import GraphConfig, TemporalGraph, check_data, sources
from tests.helpers.data import small_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("data"))


def graph_with(dataset, items, users=None) -> TemporalGraph:
    graph = TemporalGraph(GraphConfig(id_kinds=dict(dataset.manifest.id_kinds)))
    items = np.asarray(items, np.int64)
    graph.append(np.ones(len(items)) if users is None else users, items, np.arange(len(items)))
    return graph


def test_a_graph_with_hardly_any_of_the_items_is_of_another_log(dataset):
    ids_I, others = dataset.items.ids_I, 10**15 + np.arange(2000)
    almost_none = graph_with(dataset, others)

    with pytest.raises(InputError, match=r"graph: .*another log.*it has 0 of the .* items of the data set"):
        check_data(almost_none, dataset, "graph")
    check_data(graph_with(dataset, [*others, *ids_I[: len(ids_I) // 2]]), dataset, "graph")
    check_data(graph_with(dataset, []), dataset, "graph")


def test_one_item_in_common_is_not_enough_where_there_are_many(dataset, monkeypatch):
    monkeypatch.setattr(sources, "_LEAST_SHARE", 1.5 / len(dataset.items))
    one, few = ([*dataset.items.ids_I[:shared], *(10**15 + np.arange(2000))] for shared in (1, 2))

    with pytest.raises(InputError, match="it has 1 of the"):
        check_data(graph_with(dataset, one), dataset, "graph")
    check_data(graph_with(dataset, few), dataset, "graph")


def test_the_share_is_said_and_a_graph_of_other_users_warned_of(dataset, caplog):
    ids_I, users = dataset.items.ids_I, dataset.users["user_id"].to_numpy()
    with caplog.at_level(logging.INFO):
        check_data(graph_with(dataset, ids_I, np.resize(users, len(ids_I))), dataset, "mine")
        check_data(graph_with(dataset, ids_I, np.full(len(ids_I), 10**15)), dataset, "strange")

    mine, strange = caplog.records
    assert (mine.levelno, strange.levelno) == (logging.INFO, logging.WARNING)
    assert "mine: this graph has 100.0 % of the items" in mine.getMessage()
    assert "0.0 % of the users" in strange.getMessage()
