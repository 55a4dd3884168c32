"""Which way a trainer's calls take, and that every way gives the same rows and the same errors."""

import os
import signal

import numpy as np
import pytest
import ray

from rayrec.actors.parameter_server import ServerSpec, spawn_parameter_servers
from rayrec.actors.spawning import RayHost
from rayrec.actors.transport import MixedTransport, RayTransport, ServerPlace, connect, reachable
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.embeddings.transport.narrow import over
from rayrec.embeddings.transport.protocol import ApplyCall, LookupCall
from rayrec.embeddings.transport.shared_blocks import why_unavailable
from rayrec.embeddings.transport.shared_calls import Endpoint, ServerLostError
from rayrec.embeddings.transport.shared_memory import SharedMemoryTransport
from rayrec.platform.errors import InputError

HERE, THERE = Endpoint("run/parameter_server-0", "here"), Endpoint("run/parameter_server-1", "there")
NEAR = ServerPlace(HERE.server, "node-a", HERE, None)
FAR = ServerPlace(THERE.server, "node-b", THERE, None)
WITHOUT = ServerPlace(THERE.server, "node-a", None, "shared memory needs Linux")


def test_servers_of_the_same_node_are_reached_through_shared_memory_and_others_are_not():
    assert reachable([NEAR, FAR, WITHOUT, NEAR], "node-a", "auto") == {0: HERE, 3: HERE}


@pytest.mark.parametrize(
    ("place", "why"),
    [(FAR, "it runs on Ray node node-b and the trainer on node-a"), (WITHOUT, "shared memory needs Linux")],
)
def test_shared_memory_is_not_promised_where_it_does_not_reach(place, why):
    with pytest.raises(InputError, match=rf"does not reach run/parameter_server-1: {why}; 'auto' takes Ray"):
        reachable([NEAR, place], "node-a", "shared_memory")


@pytest.mark.ray
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8_row"])
def test_every_way_to_the_servers_gives_the_same_rows_and_the_same_errors(ray_cluster, wire):
    table, ids_M = TableConfig(name="item", dim=4, seed=1), np.arange(50)
    spec = ServerSpec((table,), num_shards=2, shard=0, num_trainers=1, wait_timeout_s=60)
    servers = spawn_parameter_servers(RayHost("transport-test"), spec, num_cpus=0)
    try:
        plain = {choice: connect(servers, choice) for choice in ("ray", "auto", "shared_memory")}
        assert [type(way) for way in plain.values()] == [
            RayTransport,
            SharedMemoryTransport,
            SharedMemoryTransport,
        ]
        plain["mixed"] = MixedTransport([plain["auto"], plain["ray"]])
        ways = {name: over(way, wire, (table,)) for name, way in plain.items()}
        random, seen = np.random.default_rng(0), []
        for step, way in enumerate(ways.values()):
            update = {"item": (ids_M, random.normal(size=(50, 4)).astype(np.float32))}
            for shard in range(2):
                waiting = way.call(shard, LookupCall({"item": ids_M}, after_step=step))
                assert way.call(shard, ApplyCall(UpdateTag(0, step, 0), update)).result() == step
                found = [
                    other.call(shard, LookupCall({"item": ids_M}, None)).result() for other in ways.values()
                ]
                assert {rows["item"].tobytes() for rows in found} == {waiting.result()["item"].tobytes()}
                seen.append(found[0]["item"].tobytes())
        shards = [EmbeddingShard((table,), shard, num_trainers=1) for shard in range(2)]
        here = over(LocalTransport(shards), wire, (table,))
        random = np.random.default_rng(0)
        for step in range(len(ways)):
            update = {"item": (ids_M, random.normal(size=(50, 4)).astype(np.float32))}
            for shard in range(2):
                here.call(shard, ApplyCall(UpdateTag(0, step, 0), update)).result()
                rows = here.call(shard, LookupCall({"item": ids_M}, None)).result()
                assert rows["item"].tobytes() == seen.pop(0)
        for way in ways.values():
            with pytest.raises(ValueError, match="there is no embedding table 'nobody'"):
                way.call(0, LookupCall({"nobody": ids_M}, None)).result()

        os.kill(ray.get(servers[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)

        with pytest.raises(ServerLostError, match="transport-test/parameter_server-0 is gone"):
            ways["auto"].call(0, LookupCall({"item": ids_M}, None)).result()
        assert ways["auto"].call(1, LookupCall({"item": ids_M}, None)).result()["item"].shape == (50, 4)
    finally:
        for server in servers:
            ray.kill(server)
