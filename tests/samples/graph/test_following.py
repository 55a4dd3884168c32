"""A graph that follows an event store by its feed."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.graph import build, following
from rayrec.samples.graph.build import build_graph
from rayrec.samples.graph.following import catch_up, read_feed
from rayrec.samples.graph.sources import config_of_store, graph_of_store
from rayrec.samples.graph.temporal_graph import MANIFEST, TemporalGraph
from rayrec.samples.stores import EventBatch, StoreManifest, feed, lmdb_store, open_store
from rayrec.samples.stores.store import append_sides

NOW = 1_700_000_000
DAY = 86_400
LOG = StoreManifest(name="log", time_unit="s", columns={"behaviors": "int16"}, behaviors=("view",))


@pytest.fixture
def sides(tmp_path):
    address = str(tmp_path / "events")
    store = open_store(address, create=LOG)
    by_item = open_store(address, create=LOG.model_copy(update={"by": "item"}), by="item")
    yield store, by_item
    store.close()
    by_item.close()


def post(sides, *visits, kind=0):
    """(user, item, seconds after NOW) of each."""
    users, items, times = (np.array(column) for column in zip(*visits, strict=True))
    batch = EventBatch(users, NOW + times, items, {"behaviors": np.full(len(users), kind)})
    append_sides([(sides[0], [batch]), (sides[1], [batch.reversed()])])


def edges_of(graph):
    found = []
    for segment in graph.state.segments:
        found += zip(*(column.tolist() for column in segment.users.edges()), strict=True)
    return sorted(found)


def new_graph(store):
    return TemporalGraph(config_of_store(store.manifest))


def test_a_graph_reads_the_store_once_and_then_its_feed(sides, monkeypatch):
    store, _ = sides
    post(sides, (1, 10, 0), (2, 10, 5))
    graph = new_graph(store)
    assert not catch_up(graph, store).by_feed
    monkeypatch.setattr(following, "edges_of_store", lambda store: pytest.fail("reads all of the store"))

    post(sides, (3, 11, 6), (1, 10, 0))  # one of them is there already
    assert read_feed(graph, store) == 1
    assert catch_up(graph, store).by_feed

    assert edges_of(graph) == edges_of(graph_of_store(store))


def test_what_comes_while_the_store_is_read_is_read_again_from_the_feed(sides, monkeypatch):
    store, _ = sides
    post(sides, (1, 10, 0))
    graph = new_graph(store)
    read = following.edges_of_store

    def read_slowly(store):
        yield from read(store)
        post(sides, (2, 11, 1))

    monkeypatch.setattr(following, "edges_of_store", read_slowly)
    catch_up(graph, store)
    catch_up(graph, store)

    assert edges_of(graph) == edges_of(graph_of_store(store))


def test_a_graph_that_fell_behind_reads_the_store_again(sides, monkeypatch):
    store, _ = sides
    monkeypatch.setattr(lmdb_store, "MOST_ENTRIES", 2)
    graph = new_graph(store)
    catch_up(graph, store)
    for time in range(5):
        post(sides, (time, 10, time))

    with pytest.raises(feed.FeedGoneError):
        read_feed(graph, store)
    assert not catch_up(graph, store).by_feed
    assert catch_up(graph, store).by_feed
    assert edges_of(graph) == edges_of(graph_of_store(store))


def test_behaviors_that_were_named_meanwhile_and_ids_that_stand_for_none(sides):
    store, _ = sides
    graph = new_graph(store)
    catch_up(graph, store)
    elsewhere = open_store(store.name)
    elsewhere.take_behaviors(("view", "buy"))
    post(sides, (1, 10, 0), kind=1)
    post(sides, (np.iinfo(np.int64).min, 10, 0))

    assert read_feed(graph, store) == 1
    assert graph.config.kinds == ("view", "buy")
    elsewhere.close()


def test_a_saved_graph_goes_on_where_it_was(sides, tmp_path, monkeypatch):
    store, _ = sides
    post(sides, (1, 10, 0))
    report = build_graph(store.name, tmp_path / "graph")
    assert (report.edges, report.added) == (1, 1)
    post(sides, (2, 10, 1))
    monkeypatch.setattr(following, "edges_of_store", lambda store: pytest.fail("reads all of the store"))

    report = build_graph(store.name, tmp_path / "graph")

    assert (report.edges, report.added) == (2, 1)
    saved = json.loads((tmp_path / "graph" / MANIFEST).read_text())
    assert saved["feed_position"] == store.feed_position()


def test_a_store_with_one_side_is_read_each_time(tmp_path):
    store = open_store(str(tmp_path / "events"), create=LOG)
    for user in range(3):
        events = EventBatch(np.array([user]), np.array([NOW]), np.array([7]), {"behaviors": np.array([0])})
        store.append(events)
        assert build_graph(store.name, tmp_path / "graph").edges == user + 1
    store.close()


def test_days_to_keep_are_remembered_and_the_length_of_segments_stays(sides, tmp_path, monkeypatch):
    store, _ = sides
    monkeypatch.setattr(build, "time", SimpleNamespace(time=lambda: NOW + 100 * DAY))
    post(sides, (1, 10, 0), (1, 11, 5 * DAY))
    build_graph(store.name, tmp_path / "graph", period_days=1, keep_days=10)
    post(sides, (1, 12, 12 * DAY))

    assert build_graph(store.name, tmp_path / "graph", period_days=1).edges == 2  # without being told again
    assert TemporalGraph.open(tmp_path / "graph").keep_days == 10
    with pytest.raises(InputError, match=r"--period-days 7: the graph .* was made with segments of 1 days"):
        build_graph(store.name, tmp_path / "graph", period_days=7)


def test_a_store_of_another_log_is_refused(sides, tmp_path):
    store, _ = sides
    post(sides, (1, 10, 0))
    build_graph(store.name, tmp_path / "graph")
    other = open_store(str(tmp_path / "other"), create=LOG.model_copy(update={"name": "other"}))

    with pytest.raises(InputError, match="another log"):
        build_graph(other.name, tmp_path / "graph")
    other.close()
