"""How rows and gradients travel between a trainer and servers of its node: shared memory against Ray calls.

Two parameter server actors in processes of their own hold half of a million rows of 64 numbers each. A
pull asks both for 10,000 rows, waits, and copies them into memory of its own, where a trainer wants them;
an update sends both 10,000 gradients and waits until they are committed. Two ways, to the same servers:

* shared memory: `rayrec.embeddings.transport.shared_memory`, what a run takes on one node;
* Ray calls: `rayrec.actors.transport.RayTransport`, what it takes between nodes.

How it is measured. Ids are drawn for every call before the clock runs, so no row is in a cache because it
was asked for before. A rate is one over the median of 30 calls. The servers' own work (finding, reading and
changing rows) is in every figure but those of `calls`, which ask each server for one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import ray
from ray.actor import ActorHandle

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.actors.parameter_server import ServerSpec, spawn_parameter_servers
from rayrec.actors.spawning import RayHost
from rayrec.actors.transport import RayTransport, connect
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.transport.protocol import ApplyCall, LookupCall, ShardTransport
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log

NUM_SERVERS, ROWS_PER_SERVER, DIM = 2, 500_000, 64
NUM_IDS = 10_000
"""Of one call to one server: 20,000 of a step."""
CALLS_PER_RATE = 30
TARGET = 3.0

TABLE = TableConfig(name="item", dim=DIM, seed=1)


def bench(options: BenchOptions) -> list[Bar]:
    with _servers() as servers:
        steps = Steps(servers)
        ours, peer = Way(connect(servers, "shared_memory"), steps), Way(RayTransport(servers), steps)
        return [
            _bar("transport-pull", ours.pull, peer.pull, options),
            _bar("transport-update", ours.update, peer.update, options),
            _bar("transport-calls", ours.calls, peer.calls, options),
        ]


class Steps:
    """Ids and gradients that were not used before, and the numbers of the updates."""

    def __init__(self, servers: Sequence[ActorHandle]) -> None:
        self._random = np.random.default_rng(0)
        self._next = 0
        chunks = np.array_split(np.arange(ROWS_PER_SERVER), 20)
        grads_MD = self._random.normal(size=(len(chunks[0]), DIM)).astype(np.float32)
        for ids_M in chunks:
            tag = self.tag()
            ray.get(
                [server.answer.remote(ApplyCall(tag, {TABLE.name: (ids_M, grads_MD)})) for server in servers]
            )

    def ids(self, num_ids: int) -> list[np.ndarray]:
        """[M] distinct ids for each server."""
        return [self._random.choice(ROWS_PER_SERVER, size=num_ids, replace=False) for _ in range(NUM_SERVERS)]

    def grads(self) -> np.ndarray:
        return self._random.normal(size=(NUM_IDS, DIM)).astype(np.float32)

    def tag(self) -> UpdateTag:
        tag = UpdateTag(0, self._next, rank=0)
        self._next += 1
        return tag


class Way:
    """One transport to the servers: rates of calls per second."""

    def __init__(self, transport: ShardTransport, steps: Steps) -> None:
        self._transport = transport
        self._steps = steps
        self._rows_MD = np.empty((NUM_SERVERS, NUM_IDS, DIM), dtype=np.float32)

    def pull(self) -> float:
        return self._pull(NUM_IDS)

    def calls(self) -> float:
        return self._pull(1)

    def update(self) -> float:
        ids = [self._steps.ids(NUM_IDS) for _ in range(CALLS_PER_RATE)]
        grads = [self._steps.grads() for _ in range(NUM_SERVERS)]
        seconds = []
        for ids_of_step in ids:
            tag = self._steps.tag()
            updates = [
                {TABLE.name: (ids_M, grads_MD)} for ids_M, grads_MD in zip(ids_of_step, grads, strict=True)
            ]
            started = time.perf_counter()
            self._apply(tag, updates)
            seconds.append(time.perf_counter() - started)
        return 1 / float(np.median(seconds))

    def _pull(self, num_ids: int) -> float:
        requests = [
            [{TABLE.name: ids_M} for ids_M in self._steps.ids(num_ids)] for _ in range(CALLS_PER_RATE)
        ]
        seconds = []
        for requests_of_step in requests:
            started = time.perf_counter()
            for server, rows_MD in enumerate(self._lookup(requests_of_step)):
                self._rows_MD[server, :num_ids] = rows_MD
            seconds.append(time.perf_counter() - started)
        return 1 / float(np.median(seconds))

    def _lookup(self, requests: list[dict[str, np.ndarray]]) -> Iterator[np.ndarray]:
        replies = [
            self._transport.call(shard, LookupCall(request, after_step=None))
            for shard, request in enumerate(requests)
        ]
        for reply in replies:
            yield reply.result()[TABLE.name]

    def _apply(self, tag: UpdateTag, updates: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> None:
        replies = [
            self._transport.call(shard, ApplyCall(tag, update)) for shard, update in enumerate(updates)
        ]
        for reply in replies:
            reply.result()


def _bar(name: str, ours: Callable[[], float], peer: Callable[[], float], options: BenchOptions) -> Bar:
    def show(a: float, b: float) -> None:
        log.print(
            f"{name}: shared memory {1e3 / a:.2f} ms, Ray calls {1e3 / b:.2f} ms, ratio {a / b:.2f}",
            highlight=False,
        )

    interleaved(ours, peer, repeats=1)  # thrown away: start-up, compilation, first touch of every page
    return Bar.of(name, interleaved(ours, peer, options.pairs, show), "Ray calls", TARGET)


@contextmanager
def _servers() -> Iterator[list[ActorHandle]]:
    with ray_cluster(ClusterConfig(dashboard=False), cpus_needed=0):
        spec = ServerSpec((TABLE,), num_shards=NUM_SERVERS, shard=0, num_trainers=1, wait_timeout_s=60.0)
        servers = spawn_parameter_servers(RayHost("bench-transport"), spec, num_cpus=0)
        try:
            yield servers
        finally:
            for server in servers:
                ray.kill(server)
