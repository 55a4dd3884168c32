"""What a snapshot costs the training that goes on meanwhile.

One trainer (this process) and one parameter server actor in a process of its own, on the same machine. The
server has a table of 4 M rows of 64 numbers, 1.07 GB of records with what row-wise Adagrad keeps; its file
has 1.12 GB. A step looks up the distinct ids of 100,000 Zipf ids through shared memory, computes, and
updates the rows, all of it as a run in mode `exact_prefetch` does: lookups are on a thread of their own,
beside dense compute. That is real matrix products on one thread, as long as the sparse part of a step, so
that on two cores the writer of a snapshot has no core to itself. No batch comes twice.

Steps are timed one by one, for some seconds without a snapshot, then from the cut until the files are on
disk, then without one again, and so on. Nothing else is done meanwhile. The driver's part at the cut is in
the times: the servers hear of it, and rows that caches hold go to them. Bars:

* `snapshot-rate`: steps per second while a snapshot of all rows is written, against those right before and
  after it.
* `snapshot-pause`: 100 ms over the longest pause at a cut, which is how much longer than the median step one
  of the steps around it takes; 1 is a pause of 100 ms.
* `snapshot-time`: the time of a bare write and fsync of as many bytes, while the steps go on likewise, over
  that of a snapshot. `snapshot-time-idle`: over the same of a bare write with nothing else going on.
* `snapshot-increment-rate`: `snapshot-rate` for what has changed since the snapshot before, a few seconds
  before; how large it is and what it takes is printed.

`RAYREC_BENCH_ROWS` sets the number of rows, `RAYREC_BENCH_PAIRS` how many snapshots are written, and
`RAYREC_BENCH_DATA` the folder they are written to.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ray
import torch
from ray.actor import ActorHandle

from benchmarks.harness import Bar, BenchOptions
from benchmarks.pipeline import BatchIds
from benchmarks.sparse import Batches, ids_of_rows
from rayrec.actors.parameter_server import ServerSpec, spawn_parameter_servers
from rayrec.actors.spawning import RayHost
from rayrec.actors.transport import connect
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.lookup.lookups import TrainerLink
from rayrec.embeddings.lookup.modes import LookupSettings, make_lookups
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.snapshot.saved_files import SavedFile
from rayrec.embeddings.transport.protocol import ApplyCall
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log

NUM_ROWS, DIM, BATCH = 4_000_000, 64, 100_000
TABLE = TableConfig(name="item", dim=DIM, seed=1)
LOAD_ROWS = 100_000
"""Rows that are created at once before anything is measured."""
MATRIX = 512
WINDOW_S = 2.5
"""Without a snapshot, between two of them."""
AROUND = 3
"""Steps from the cut on that belong to it."""
STEPS_PER_S = 50
WRITING_S = 6.0
"""About: batches for so long are drawn before it is timed, those beyond between two steps."""
TARGETS = {"rate": 0.80, "pause": 1.0, "time": 1 / 3}
PAUSE_S = 0.1


def bench(options: BenchOptions) -> list[Bar]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15
    try:
        with (
            ray_cluster(ClusterConfig(dashboard=False), 2.0),
            _server(options.rows or NUM_ROWS) as training,
            tempfile.TemporaryDirectory(dir=options.data) as folder,
        ):
            return _bars(training, Path(folder), options.pairs)
    finally:
        torch.set_num_threads(threads)


class Training:
    """A trainer's loop, one step at a time, and its server."""

    def __init__(self, server: ActorHandle, num_rows: int, first_step: int) -> None:
        self.server = server
        self._batches = Batches(num_rows, BATCH)
        self._drawn: dict[int, dict[str, BatchIds]] = {}
        self._mode = make_lookups(
            LookupSettings("exact_prefetch"),
            TrainerLink((TABLE,), ShardMap(1), connect([server], "shared_memory")),
            None,
        )
        self._matrix = torch.randn(MATRIX, MATRIX)
        self._num_products = 0
        self._is_announced = False
        self.next_step = first_step

    def draw(self, num_steps: int) -> None:
        """Batches for so many steps, which is the work of other actors."""
        for step in range(self.next_step, self.next_step + num_steps):
            if step not in self._drawn:
                ids_M = ids_of_rows(np.unique(self._batches.rows_N(step)))
                self._drawn[step] = {TABLE.name: BatchIds(ids_M)}

    def step(self) -> float:
        """Train a step; returns its seconds."""
        self.draw(2)
        step, started = self.next_step, time.perf_counter()
        batch = self._drawn.pop(step)
        if not self._is_announced:
            self._mode.prefetch(step, batch)
        self._is_announced = step + 1 in self._drawn
        if self._is_announced:
            self._mode.prefetch(step + 1, self._drawn[step + 1])
        rows = self._mode.rows(step, batch)
        self._mode.update(step, batch, self._dense(rows))
        self.next_step += 1
        return time.perf_counter() - started

    def drain(self) -> None:
        """Let the server have every update so far."""
        self._mode.drain()

    def balance(self) -> None:
        """Let the products of a step take as long as its sparse part does."""
        self.draw(40)
        for _ in range(20):
            self.step()
        sparse_s = statistics.median(self.step() for _ in range(20))
        self._num_products = 50
        product_s = statistics.median(_timed(lambda: self._dense({})) for _ in range(9)) / 50
        self._num_products = max(1, round(sparse_s / product_s))
        log.print(f"snapshot: sparse part of a step {1000 * sparse_s:.1f} ms, dense likewise")

    def _dense(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for _ in range(self._num_products):
            torch.mm(self._matrix, self._matrix)
        return {name: rows_MD * np.float32(0.01) for name, rows_MD in rows.items()}


@dataclass
class Window:
    """Steps of some time, and what was done meanwhile."""

    steps_s: list[float] = field(default_factory=list)
    took_s: float = 0.0
    """Time of what was done meanwhile."""
    num_bytes: int = 0

    @property
    def rate(self) -> float:
        return len(self.steps_s) / sum(self.steps_s)

    @property
    def described(self) -> str:
        return f"{self.num_bytes / 1e9:.2f} GB in {self.took_s:.2f} s"


class Snapshots:
    """Cuts of the server's table, written one after the other to a folder that is emptied again."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._folder = folder
        self.last_step: int | None = None

    def write(self, since: int | None) -> Window:
        """Let steps go on while a snapshot is written; the first of them has the cut before it."""
        training, window = self._training, Window()
        training.draw(int(WRITING_S * STEPS_PER_S))
        started = time.perf_counter()
        training.drain()
        cut = training.next_step - 1
        ray.get(training.server.begin_snapshot.remote(cut))
        saving = training.server.save.remote(str(self._folder), cut, since)
        at_cut_s = time.perf_counter() - started
        while not ray.wait([saving], timeout=0)[0]:
            window.steps_s.append(training.step())
        window.took_s = time.perf_counter() - started
        window.steps_s[0] += at_cut_s
        files: list[SavedFile] = ray.get(saving)
        window.num_bytes = sum(file.bytes for file in files)
        self.last_step = cut
        self._empty()
        return window

    def write_bare(self, num_bytes: int, with_steps: bool) -> float:
        """Seconds in which another process writes as many bytes, as simply as can be."""
        self._training.draw(int(WRITING_S * STEPS_PER_S))
        writing = _write_bare.remote(str(self._folder / "bare"), num_bytes)
        while with_steps and not ray.wait([writing], timeout=0)[0]:
            self._training.step()
        took_s: float = ray.get(writing)
        self._empty()
        return took_s

    def _empty(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        os.sync()


@ray.remote(num_cpus=0)
def _write_bare(path: str, num_bytes: int) -> float:
    content = np.random.default_rng(0).bytes(2**20)
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for first in range(0, num_bytes, len(content)):
            file.write(content[: num_bytes - first])
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _bars(training: Training, folder: Path, num_pairs: int) -> list[Bar]:
    training.balance()
    snapshots = Snapshots(training, folder)
    snapshots.write(None)  # thrown away: compilation and imports
    rates, pauses, times, idle_times, increment_rates = [], [], [], [], []
    for _ in range(num_pairs):
        before = _steps_alone(training)
        full = snapshots.write(None)
        between = _steps_alone(training)
        increment = snapshots.write(snapshots.last_step)
        after = _steps_alone(training)
        bare_s = snapshots.write_bare(full.num_bytes, with_steps=True)
        idle_s = snapshots.write_bare(full.num_bytes, with_steps=False)
        training.drain()
        pause_s = max(window_pause_s(full, before), window_pause_s(increment, between))
        rates.append(full.rate / statistics.mean([before.rate, between.rate]))
        increment_rates.append(increment.rate / statistics.mean([between.rate, after.rate]))
        pauses.append(PAUSE_S / pause_s)
        times.append(bare_s / full.took_s)
        idle_times.append(idle_s / full.took_s)
        log.print(
            f"snapshot: {before.rate:.1f} steps/s alone, {full.rate:.1f} beside {full.described} (bare "
            f"write {bare_s:.2f} s, idle {idle_s:.2f} s); {between.rate:.1f} alone, {increment.rate:.1f} "
            f"beside an increment, {increment.described}; {after.rate:.1f} alone. Longest pause at a cut "
            f"{1000 * pause_s:.0f} ms; longest step {1000 * max(full.steps_s):.0f} ms beside, "
            f"{1000 * max(before.steps_s):.0f} ms alone",
            highlight=False,
        )
    return [
        Bar.of("snapshot-rate", rates, "steps/s without one", TARGETS["rate"]),
        Bar.of("snapshot-pause", pauses, "100 ms over the longest pause at a cut", TARGETS["pause"]),
        Bar.of("snapshot-time", times, "bare write + fsync beside training", TARGETS["time"]),
        Bar.of("snapshot-time-idle", idle_times, "bare write + fsync, idle", TARGETS["time"]),
        Bar.of("snapshot-increment-rate", increment_rates, "steps/s without one", TARGETS["rate"]),
    ]


def _steps_alone(training: Training) -> Window:
    training.draw(int(WINDOW_S * STEPS_PER_S))
    window, ends = Window(), time.perf_counter() + WINDOW_S
    while time.perf_counter() < ends:
        window.steps_s.append(training.step())
    return window


def window_pause_s(window: Window, alone: Window) -> float:
    """How much longer than others the longest step at the cut took."""
    return max(1e-3, max(window.steps_s[:AROUND]) - statistics.median(alone.steps_s))


@contextmanager
def _server(num_rows: int) -> Iterator[Training]:
    spec = ServerSpec((TABLE,), num_shards=1, shard=0, num_trainers=1, wait_timeout_s=120)
    (server,) = spawn_parameter_servers(RayHost("bench-snapshot"), spec, num_cpus=0)
    try:
        yield Training(server, num_rows, _create_rows(server, num_rows))
    finally:
        ray.kill(server)


def _create_rows(server: ActorHandle, num_rows: int) -> int:
    """Let every row exist; returns the next step."""
    grads_MD = np.full((LOAD_ROWS, DIM), 1e-3, dtype=np.float32)
    firsts = range(0, num_rows, LOAD_ROWS)
    for step, first in enumerate(firsts):
        ids_M = ids_of_rows(np.arange(first, min(first + LOAD_ROWS, num_rows)))
        update = {TABLE.name: (ids_M, grads_MD[: len(ids_M)])}
        ray.get(server.answer.remote(ApplyCall(UpdateTag(0, step, 0), update)))
    return len(firsts)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
