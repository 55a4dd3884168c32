"""How rows and gradients should travel between a trainer and servers of its node: measured, not assumed.

Two parameter server actors in processes of their own hold half of a million rows of 64 numbers each. A
pull asks both for 10,000 rows, waits, and copies them into memory of its own, where a trainer wants them;
an update sends both 10,000 gradients and waits until they are committed. Three ways, to the same servers:

* shared memory: `rayrec.embeddings.transport.shared_memory`, what a run takes on one node;
* Ray calls: `rayrec.actors.transport.RayTransport`, what it takes between nodes;
* a Ray compiled graph over the same two actors, whose channels keep their buffers.

The bars are named by what is measured and, unless it is Ray calls, against what; `transport-graph-itself`
is the compiled graph against Ray calls.

How it is measured. Ids are drawn anew for every call, before the clock runs, so no row is in a cache
because it was asked for before. A rate is one over the median of 30 calls. The servers' own work (finding,
reading and changing rows) is in every figure but those of `calls`, which ask each server for one row.
The compiled graph is made for the measurements of one bar and torn down after them, since it occupies its
actors. It could not carry a run: only the process that compiled it may call it, an actor takes
part in one graph at a time, and calls are answered in turn, so that a lookup that waits for a step would
hold up the update that it waits for.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.dag import InputNode, MultiOutputNode

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.actors.parameter_server import spawn_parameter_servers
from rayrec.actors.transport import RayTransport, connect
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.transport.protocol import Apply, Lookup, ShardTransport
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log

NUM_SERVERS, ROWS_PER_SERVER, DIM = 2, 500_000, 64
NUM_IDS = 10_000
"""Of one call to one server: 20,000 of a step."""
CALLS_PER_RATE = 30

TABLE = TableConfig(name="item", dim=DIM, seed=1)


def bench(options: BenchOptions) -> list[Bar]:
    with _servers() as servers:
        steps = Steps(servers)
        ways: dict[str, Way] = {
            "shared memory": TransportWay(connect(servers, "shared_memory"), steps),
            "Ray calls": TransportWay(RayTransport(servers), steps),
            "compiled graph": CompiledGraphWay(servers, steps),
        }
        return [
            _bar(name, ways, options, *of_what)
            for name, *of_what in (
                ("transport-pull", "pull", "shared memory", "Ray calls", 3.0),
                ("transport-update", "update", "shared memory", "Ray calls", 3.0),
                ("transport-calls", "calls", "shared memory", "Ray calls", 3.0),
                ("transport-pull-graph", "pull", "shared memory", "compiled graph", 1.0),
                ("transport-update-graph", "update", "shared memory", "compiled graph", 1.0),
                ("transport-graph-itself", "pull", "compiled graph", "Ray calls", 1.0),
            )
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
            ray.get([server.answer.remote(Apply(tag, {TABLE.name: (ids_M, grads_MD)})) for server in servers])

    def ids(self, num_ids: int) -> list[np.ndarray]:
        """[M] distinct ids for each server."""
        return [self._random.choice(ROWS_PER_SERVER, size=num_ids, replace=False) for _ in range(NUM_SERVERS)]

    def grads(self) -> np.ndarray:
        return self._random.normal(size=(NUM_IDS, DIM)).astype(np.float32)

    def tag(self) -> UpdateTag:
        tag = UpdateTag(0, self._next, rank=0)
        self._next += 1
        return tag


class Way(ABC):
    """One way to the servers: rates of calls per second."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._rows_MD = np.empty((NUM_SERVERS, NUM_IDS, DIM), dtype=np.float32)

    @contextmanager
    def ready(self) -> Iterator[None]:
        yield

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

    @abstractmethod
    def _lookup(self, requests: list[dict[str, np.ndarray]]) -> Iterator[np.ndarray]:
        """Each server's rows, in the order of the servers."""

    @abstractmethod
    def _apply(self, tag: UpdateTag, updates: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> None:
        """Returns when every server has committed the step."""


class TransportWay(Way):
    def __init__(self, transport: ShardTransport, steps: Steps) -> None:
        super().__init__(steps)
        self._transport = transport

    def _lookup(self, requests: list[dict[str, np.ndarray]]) -> Iterator[np.ndarray]:
        replies = [
            self._transport.lookup(shard, request, after_step=None) for shard, request in enumerate(requests)
        ]
        for reply in replies:
            yield reply.result()[TABLE.name]

    def _apply(self, tag: UpdateTag, updates: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> None:
        replies = [self._transport.apply(shard, tag, update) for shard, update in enumerate(updates)]
        for reply in replies:
            reply.result()


class CompiledGraphWay(Way):
    """Both servers in one compiled graph."""

    def __init__(self, servers: Sequence[ActorHandle], steps: Steps) -> None:
        super().__init__(steps)
        self._servers = servers
        self._graph: Any = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        yield
        self._tear_down()

    def _lookup(self, requests: list[dict[str, np.ndarray]]) -> Iterator[np.ndarray]:
        for rows in ray.get(self._compiled().execute(*map(Lookup, requests))):
            yield rows[TABLE.name]

    def _apply(self, tag: UpdateTag, updates: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> None:
        ray.get(self._compiled().execute(*(Apply(tag, update) for update in updates)))

    def _compiled(self) -> Any:
        if self._graph is None:
            with InputNode() as calls:
                nodes = [server.answer.bind(calls[shard]) for shard, server in enumerate(self._servers)]
                outputs = MultiOutputNode(nodes)
            self._graph = outputs.experimental_compile(_buffer_size_bytes=16 * 2**20)
        return self._graph

    def _tear_down(self) -> None:
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None


def _bar(
    name: str, ways: dict[str, Way], options: BenchOptions, what: str, ours: str, peer: str, target: float
) -> Bar:
    def show(a: float, b: float) -> None:
        log.print(
            f"{name}: {ours} {1e3 / a:.2f} ms, {peer} {1e3 / b:.2f} ms, ratio {a / b:.2f}", highlight=False
        )

    measured: list[Callable[[], float]] = [getattr(ways[way], what) for way in (ours, peer)]
    with ways[ours].ready(), ways[peer].ready():
        interleaved(*measured, repeats=1)  # thrown away: start-up, compilation, first touch of every page
        ratios = interleaved(*measured, options.pairs, show)
    return Bar.of(name, ratios, peer, target)


@contextmanager
def _servers() -> Iterator[list[ActorHandle]]:
    with ray_cluster(ClusterConfig(dashboard=False), cpus_needed=0):
        servers = spawn_parameter_servers(
            "bench-transport", (TABLE,), NUM_SERVERS, num_trainers=1, wait_timeout_s=60.0, num_cpus=0
        )
        try:
            yield servers
        finally:
            for server in servers:
                ray.kill(server)
