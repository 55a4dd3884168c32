"""How much of the sparse work hides behind dense compute, without changing a bit of the result.

One trainer (this process) and two parameter server actors in processes of their own. A step looks up the
distinct ids of 100,000 Zipf ids in a table of 2 M rows of 64 numbers, computes, and updates the rows by
row-wise Adagrad. "Computes" is real matrix products on one thread, and gradients of the rows: together as
long as the sparse part of a step in mode `sync`, which is measured first. No batch comes twice. Deduplication
is the work of other actors and is done before the clock runs. Bars:

* `pipeline-near-...`: through shared memory, as a run reaches the servers of a trainer's node;
  `pipeline-far-...`: by Ray calls, as it reaches those of other nodes, though here they are on the same
  one and no network is in between. Dense compute is measured out for each of the two.
* `pipeline-...-rate`: steps per second against `sync`. Twice as many would be all that there is to gain.
* `pipeline-...-hidden`: share of the sparse time that is hidden: (sync - mode) / (sync - dense alone), in
  seconds per step, from the same windows.

The modes: `exact` is `exact_prefetch`. `parts` is what it does where there are several trainers: rows that
two batches share are not held, but come first. With `cache` the trainer holds up to 200,000 of the rows;
`stale` is `bounded_stale` with one update missing, which is what a naive prefetch does, and not exact. Each
mode has servers of its own, which wait for calls while another is measured, and which run at the priority of
this process: in a run, trainers and servers are both Ray's workers. A window's time ends when the servers
have every update and every changed row.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import ray
import torch
from ray.actor import ActorHandle

from benchmarks.harness import Bar, BenchOptions
from benchmarks.sparse import Batches, ids_of_rows
from rayrec.actors.parameter_server import ServerSpec, spawn_parameter_servers
from rayrec.actors.spawning import RayHost
from rayrec.actors.transport import TransportChoice, connect
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import LookupMode, TrainerLink
from rayrec.embeddings.lookup.modes import LookupSettings, make_lookups
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.transport.protocol import ApplyCall
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log

NUM_SERVERS, NUM_ROWS, DIM, BATCH = 2, 2_000_000, 64, 100_000
CACHE_ROWS = 200_000
MATRIX = 512
"""Products of some milliseconds each, as the parts of a network are that run outside of Python's lock."""
TABLE = TableConfig(name="item", dim=DIM, seed=1)
LOAD_ROWS = 100_000
"""Rows that are created at once before anything is measured."""

RATE_TARGET, HIDDEN_TARGET = 1.4, 0.6

MODES = {
    "sync": LookupSettings("sync"),
    "exact": LookupSettings("exact_prefetch"),
    "parts": LookupSettings("exact_prefetch"),
    "cache": LookupSettings("exact_prefetch", cache_rows=CACHE_ROWS),
    "stale": LookupSettings("bounded_stale", max_staleness=1),
}

PLACES: dict[str, TransportChoice] = {"near": "shared_memory", "far": "ray"}


@dataclass(frozen=True)
class BatchIds:
    """What the lookup stage is told of a batch of one trainer."""

    ids_M: np.ndarray

    @property
    def updated_ids(self) -> np.ndarray:
        return self.ids_M


def bench(options: BenchOptions) -> list[Bar]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15
    try:
        bars = []
        for place, transport in PLACES.items():
            with ExitStack() as stack:
                stack.enter_context(ray_cluster(ClusterConfig(dashboard=False), 2.0))
                windows = Windows(options.steps)
                sides = {
                    name: stack.enter_context(_side(name, settings, transport, windows))
                    for name, settings in MODES.items()
                }
                bars += _bars(place, sides, windows, options)
        return bars
    finally:
        torch.set_num_threads(threads)


class Windows:
    """The same steps for every mode, and the dense compute of a step."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._batches = Batches(NUM_ROWS, BATCH)
        self._next = 0
        self._matrix = torch.randn(MATRIX, MATRIX)
        self._any_rows = np.ones((BATCH, DIM), np.float32)
        self._num_products = self._num_more_rows = 0
        self.batches: list[dict[str, BatchIds]] = []

    def draw(self) -> None:
        """Batches for the next window of every side."""
        numbers = range(self._next, self._next + self.num_steps)
        self._next += self.num_steps
        self.batches = [
            {TABLE.name: BatchIds(ids_of_rows(np.unique(self._batches.rows_N(number))))} for number in numbers
        ]

    def set_dense(self, seconds: float) -> None:
        """Let the products of a step take so long."""
        self._num_products, self._num_more_rows = 200, 0
        self.dense({})  # the first time is slower
        took = statistics.median(_timed(lambda: self.dense({})) for _ in range(9)) / self._num_products
        self._num_products = int(seconds / took)
        self._num_more_rows = int(MATRIX * (seconds / took - self._num_products))

    def dense(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gradients of the rows, which are new memory as those of a network are."""
        for _ in range(self._num_products):
            torch.mm(self._matrix, self._matrix)
        torch.mm(self._matrix[: self._num_more_rows], self._matrix)
        return {name: rows_MD * np.float32(0.01) for name, rows_MD in rows.items()}

    def dense_seconds(self) -> float:
        """Of a step, without any lookup."""

        def compute() -> None:
            for batch in self.batches:
                self.dense({name: self._any_rows[: len(ids.ids_M)] for name, ids in batch.items()})

        return _timed(compute) / self.num_steps


class Side:
    """One mode with its own servers."""

    def __init__(self, mode: LookupMode, windows: Windows, first_step: int) -> None:
        self._mode = mode
        self._windows = windows
        self._step = first_step

    def seconds(self) -> float:
        """Of a step, over the windows' batches."""
        return _timed(self._train) / self._windows.num_steps

    def _train(self) -> None:
        mode, batches = self._mode, self._windows.batches
        mode.prefetch(self._step, batches[0])
        for number, batch in enumerate(batches):
            step = self._step + number
            if number + 1 < len(batches):
                mode.prefetch(step + 1, batches[number + 1])
            rows = mode.rows(step, batch)
            mode.update(step, batch, self._windows.dense(rows))
        mode.drain()
        self._step += len(batches)


@contextmanager
def _side(name: str, settings: LookupSettings, choice: TransportChoice, windows: Windows) -> Iterator[Side]:
    spec = ServerSpec(
        (TABLE,),
        num_shards=NUM_SERVERS,
        shard=0,
        num_trainers=1,
        wait_timeout_s=120,
        max_staleness=settings.max_staleness,
    )
    servers = spawn_parameter_servers(RayHost(f"bench-pipeline-{name}"), spec, num_cpus=0)
    try:
        first_step = _create_rows(servers)
        transport, shard_map = connect(servers, choice), ShardMap(NUM_SERVERS)
        link = TrainerLink((TABLE,), shard_map, transport)
        if name == "parts":
            mode: LookupMode = ThreadedLookups(ExactPrefetch(link))
        else:
            mode = make_lookups(settings, link, None)
        yield Side(mode, windows, first_step)
    finally:
        for server in servers:
            ray.kill(server)


def _create_rows(servers: Sequence[ActorHandle]) -> int:
    """Let every row exist; returns the next step."""
    shard_map = ShardMap(NUM_SERVERS)
    grads_MD = np.full((LOAD_ROWS, DIM), 1e-3, dtype=np.float32)
    num_steps = NUM_ROWS // LOAD_ROWS
    for step in range(num_steps):
        ids_M = ids_of_rows(np.arange(step * LOAD_ROWS, (step + 1) * LOAD_ROWS))
        parts = [ids_M[at] for at in shard_map.split(ids_M)]
        tag = UpdateTag(0, step, 0)
        ray.get(
            [
                server.answer.remote(ApplyCall(tag, {TABLE.name: (part, grads_MD[: len(part)])}))
                for server, part in zip(servers, parts, strict=True)
            ]
        )
    return num_steps


def _bars(place: str, sides: dict[str, Side], windows: Windows, options: BenchOptions) -> list[Bar]:
    windows.draw()
    for side in sides.values():
        side.seconds()  # thrown away: compilation, connections, a cold cache
    windows.draw()
    gradients = windows.dense_seconds()  # without products
    sparse = sides["sync"].seconds() - gradients
    windows.set_dense(sparse - gradients)
    seconds: dict[str, list[float]] = {name: [] for name in ("dense", *sides)}
    for _ in range(options.pairs):
        windows.draw()
        seconds["dense"].append(windows.dense_seconds())
        for name, side in sides.items():
            seconds[name].append(side.seconds())
        log.print(
            f"pipeline, {place}, ms a step: "
            + ", ".join(f"{name} {1000 * found[-1]:.1f}" for name, found in seconds.items()),
            highlight=False,
        )
    bars = []
    for name in sides:
        if name == "sync":
            continue
        together = list(zip(seconds["sync"], seconds[name], seconds["dense"], strict=True))
        rates = [sync / mode for sync, mode, _ in together]
        hidden = [(sync - mode) / (sync - dense) for sync, mode, dense in together]
        bars.append(Bar.of(f"pipeline-{place}-{name}-rate", rates, "mode sync", RATE_TARGET))
        bars.append(Bar.of(f"pipeline-{place}-{name}-hidden", hidden, "sparse time of sync", HIDDEN_TARGET))
    return bars


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
