"""What is posted to one service is in the next answer of another, by the feed of their store."""

import time

import pytest
from fastapi.testclient import TestClient

from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import TemporalGraph
from rayrec.samples.graph.sources import config_of_store
from rayrec.samples.stores import StoreManifest, StoreUnavailableError, open_store
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.neighbors import NeighborsConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.live_graph import FORGET_EVERY_S, LiveGraph
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("live"))


@pytest.fixture
def store(run, tmp_path):
    """Empty, with both sides, and a graph of it."""
    data = Dataset.open(run.parent / "data").manifest
    made = StoreManifest(name=data.name, id_kinds=data.id_kinds)
    address = str(tmp_path / "events")
    store = open_store(address, create=made)
    open_store(address, create=made.model_copy(update={"by": "item"}), by="item").close()
    TemporalGraph(config_of_store(made)).save(tmp_path / "graph")
    yield store
    store.close()


def test_a_post_to_one_service_is_in_the_next_answer_of_another(run, store, tmp_path):
    graph = str(tmp_path / "graph")
    takes = {"events": {"store": store.name, "by_item": True}, "neighbors": {"graph": graph}}
    answers = {"neighbors": {"graph": graph, "store": store.name, "poll_s": 0.01}}
    apis = [
        load_api(run, ServeConfig.parse({"page": False, **each}), PrometheusMeter())
        for each in (takes, answers)
    ]
    with TestClient(apis[0]) as one, TestClient(apis[1]) as other:
        asked = {"user_id": "cold", "k": 5}
        assert other.post("/v1/recommend", json=asked).json()["source"] == "popular"
        began = time.time() - 10
        events = [("v", "i1", 0), ("v", "i2", 1), ("cold", "i1", 2)]
        told = [{"user_id": user, "item_id": item, "timestamp": began + n} for user, item, n in events]
        assert one.post("/v1/events", json=told).status_code == 200
        until = time.monotonic() + 30
        while (found := other.post("/v1/recommend", json=asked).json())["source"] == "popular":
            assert time.monotonic() < until
        assert (found["source"], [item["item_id"] for item in found["items"]]) == ("neighbors", ["i2"])
        assert "rayrec_graph_events_total 3.0" in other.get("/metrics").text


def test_a_graph_says_what_it_has_and_follows(store, tmp_path, caplog):
    caplog.set_level("INFO")
    graph = str(tmp_path / "graph")
    for followed in (None, store.name):
        live = LiveGraph(NeighborsConfig(graph=graph), followed)
        live.start()
        live.stop()
    still, following = (record.message for record in caplog.records)
    assert still == f"neighbors of the graph {graph}, 0 edges; it stays as it is: no event store is named"
    assert following == f"neighbors of the graph {graph}, 0 edges; it follows {store.name} every 0.2 s"


def test_a_store_that_does_not_answer_leaves_the_graph_as_it_is(store, tmp_path, monkeypatch, caplog):
    now = 1000.0
    live = LiveGraph(NeighborsConfig(graph=str(tmp_path / "graph")), store.name, lambda: now)
    live.look()

    def failing(*arguments):
        raise StoreUnavailableError("events", 2, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "feed_after", failing)
        now += 5
        live.look()
        live.look()
    metrics = live.metrics()
    assert (metrics["graph_errors_total"], metrics["graph_lag_seconds"]) == (2, 5)
    assert caplog.text.count("neighbors stay as they are") == 1
    live.look()
    assert live.metrics()["graph_lag_seconds"] == 0
    live.stop()


def test_a_clock_that_is_put_back_changes_neither_the_lag_nor_when_edges_are_forgotten(
    store, tmp_path, monkeypatch
):
    now, wall, forgotten = [1000.0], [2e9], []
    live = LiveGraph(
        NeighborsConfig(graph=str(tmp_path / "graph")), store.name, lambda: now[0], lambda: wall[0]
    )
    monkeypatch.setattr(live.graph, "forget", forgotten.append)
    live.look()
    now[0], wall[0] = now[0] + 5, wall[0] - 86_400
    assert live.metrics()["graph_lag_seconds"] == 5
    now[0] += FORGET_EVERY_S
    live.look()
    assert forgotten == [2e9 - 86_400]
    live.stop()


def test_stores_that_cannot_be_followed_are_refused(store, tmp_path):
    config = NeighborsConfig(graph=str(tmp_path / "graph"))
    other = open_store(str(tmp_path / "other"), create=store.manifest.model_copy(update={"name": "other"}))
    with pytest.raises(InputError, match="another log"):
        LiveGraph(config, other.name)
    other.close()
    one_side = open_store(str(tmp_path / "one"), create=store.manifest)
    with pytest.raises(InputError, match="has one side"):
        LiveGraph(config, one_side.name)
    one_side.close()
