"""A graph over several shards answers as one graph does, whatever their number, and after a death."""

import os
import signal

import numpy as np
import pytest

from rayrec.actors.graph_shard import GraphShard, ShardedGraph, spawn_graph_shards
from rayrec.actors.in_process import InProcessCalls, InProcessHost
from rayrec.actors.spawning import RayCalls, RayHost
from rayrec.platform.errors import InputError
from rayrec.samples.graph import Sampling, TemporalGraph, graph_of_store, hops
from rayrec.samples.stores import EventBatch, StoreManifest, open_store
from rayrec.samples.stores.store import append_sides

MANIFEST = StoreManifest(columns={"behaviors": "int8"}, behaviors=("view", "buy"), time_unit="s")


def events(number: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    return tuple(random.integers(0, most, number) for most in (40, 25, 500, 2))


def batch(users_E, items_E, times_E, kinds_E) -> EventBatch:
    return EventBatch(users_E, times_E, items_E, {"behaviors": kinds_E})


@pytest.fixture
def store(tmp_path):
    address = str(tmp_path / "store")
    sides = [
        open_store(address, create=MANIFEST.model_copy(update={"by": by}), by=by) for by in ("user", "item")
    ]
    first = batch(*events(600))
    append_sides([(sides[0], [first]), (sides[1], [first.reversed()])])
    yield address
    for side in sides:
        side.close()


def same(sharded: ShardedGraph, graph: TemporalGraph) -> bool:
    items_B, before_B = np.arange(-1, 27), np.full(28, 430)
    for by in ("newest", "uniform", "weight"):
        sampling = Sampling(by, most=9, weights={"view": 1.0, "buy": 2.0}, seed=5)
        ours = sharded.hops("item", items_B, before_B, (4, 3), sampling)
        theirs = hops(graph, "item", items_B, before_B, (4, 3), sampling)
        for one, other in zip(ours, theirs, strict=True):
            for name in ("ids_FK", "times_FK", "kinds_FK", "counts_F"):
                if not np.array_equal(getattr(one, name), getattr(other, name)):
                    return False
    return True


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_answers_are_those_of_one_graph(store, num_shards):
    shards = spawn_graph_shards(InProcessHost("graph"), store, num_shards)
    sharded = ShardedGraph(shards, InProcessCalls())
    opened = open_store(store)
    graph = graph_of_store(opened)
    opened.close()
    assert same(sharded, graph)
    assert sum(shard.instance.num_edges() for shard in shards) == 2 * graph.state.num_edges

    later = events(200, seed=1)
    new = graph.append(*later)

    assert sharded.append(*later) == new
    assert sharded.append(*later) == 0
    assert same(sharded, graph)


def test_a_store_without_a_side_by_item_is_refused(tmp_path):
    open_store(tmp_path / "store", create=MANIFEST).close()

    with pytest.raises(InputError, match="no event store by item"):
        spawn_graph_shards(InProcessHost("graph"), str(tmp_path / "store"), 1)


class Mortal(GraphShard):
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_shard_that_dies_reads_its_part_again(store, ray_cluster, monkeypatch):
    monkeypatch.setattr("rayrec.actors.graph_shard.GraphShard", Mortal)
    host = RayHost("graph-test")
    try:
        shards = spawn_graph_shards(host, store, 2, num_cpus=0)
        sharded = ShardedGraph(shards, RayCalls())
        opened = open_store(store)
        graph = graph_of_store(opened)
        opened.close()
        assert same(sharded, graph)

        shards[1].die.options(max_task_retries=0).remote()

        assert same(sharded, graph)
    finally:
        host.close()
