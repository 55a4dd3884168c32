"""How long a run takes to go back to its last snapshot.

* `scale-rollback`: a table of 10 million rows comes back from a snapshot. One process that verifies every
  file and loads every row, over a driver that verifies on threads and two servers that load their own parts
  at once, as a run does it. Processes are there and have loaded another table before.
* `scale-rollback-survivor`: a server that lost none of its rows, of which a hundredth has changed since the
  snapshot. All of its part loaded, as by a new process, over what `ParameterServer.load` does.
* `scale-rollback-step`: a run on Ray whose server is killed: time until the next step is done where all
  actors start again, over that where the server is replaced alone.

`RAYREC_BENCH_ROWS` sets the number of rows, `RAYREC_BENCH_PAIRS` the number of pairs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.chaos import ring_of_items, small_run
from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.actors.heartbeats import Account, kill_process
from rayrec.actors.parameter_server import ParameterServer, ServerSpec
from rayrec.actors.spawning import ActorRole
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.snapshot.saved_files import checksum_file
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import RunState, read_snapshot, write_snapshot
from rayrec.pipelines.training.train import train
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.read_plan import ReadPosition

NUM_ROWS, DIM, SERVERS = 10_000_000, 64, 2
STEP_ROWS, CHANGED_SHARE = 100_000, 100
ROLLBACK, SURVIVOR, STEP = 1.6, 2.0, 1.5
KILL_AFTER, STEPS = 12, 40
TABLE = TableConfig(name="items", dim=DIM, optimizer=RowwiseAdagradConfig())


def bench(options: BenchOptions) -> list[Bar]:
    num_rows = options.rows or NUM_ROWS
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder) / "step-000000001"
        _write(snapshot, num_rows)
        bars = [_rollback_bar(snapshot, options.pairs), _survivor_bar(snapshot, num_rows, options.pairs)]
    return [*bars, _step_bar(options.pairs)]


class ServerProcess:
    """One server in a process of its own, called through a pipe."""

    def __init__(self, num_servers: int, shard: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, num_servers, shard), daemon=True)
        self._process.start()

    def call(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


class _Server(ParameterServer):
    """Also does what a trainer would ask for, here."""

    def __init__(self, num_servers: int, shard: int) -> None:
        spec = ServerSpec((TABLE,), num_servers, shard, num_trainers=1, wait_timeout_s=600.0)
        super().__init__(ActorRole("bench", "parameter_server", shard), spec)

    def change(self, ids_M: np.ndarray, step: int) -> None:
        grads_MD = np.full((len(ids_M), DIM), 1e-3, np.float32)
        self._shard.apply(UpdateTag(self._shard.incarnation, step, 0), {TABLE.name: (ids_M, grads_MD)})

    def empty(self) -> None:
        """Hold nothing, as a new process."""
        self._shard.restore({TABLE.name: []})

    def timed_load(self, *arguments: Any) -> float:
        """Seconds."""
        started = time.perf_counter()
        self.load(*arguments)
        return time.perf_counter() - started


def _serve(pipe: Connection, num_servers: int, shard: int) -> None:
    server = _Server(num_servers, shard)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(server, method)(*arguments)
        except Exception as error:
            answer = error
        pipe.send(answer)


@contextmanager
def _servers(number: int) -> Iterator[list[ServerProcess]]:
    servers = [ServerProcess(number, shard) for shard in range(number)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def _all(servers: Sequence[ServerProcess], method: str, *arguments: Any) -> list[Any]:
    for server in servers:
        server.call(method, *arguments)
    return [server.answer() for server in servers]


def _write(path: Path, num_rows: int) -> None:
    """A snapshot of two servers."""
    with _servers(SERVERS) as servers:
        step = -1
        for first in range(0, num_rows, STEP_ROWS):
            step += 1
            ids = np.arange(first, min(first + STEP_ROWS, num_rows))
            for server, at in zip(servers, ShardMap(SERVERS).split(ids), strict=True):
                server.call("change", ids[at], step)
            for server in servers:
                server.answer()
        _all(servers, "begin_snapshot", step)
        state = RunState(step, 0, "bench", None, ReadPosition(0, 0, "bench"))
        write_snapshot(
            path,
            state,
            weights={},
            optimizer_state={},
            cursor=Cursor("bench").to_table(),
            save_sparse=lambda folder: [
                file for files in _all(servers, "save", folder, step) for file in files
            ],
        )


def _chain(path: Path) -> tuple[list[list[str]], int]:
    snapshot = read_snapshot(path, checksums=False)
    return [[str(file) for file in files] for files in snapshot.sparse_chain], snapshot.committed_step


def _rollback_bar(path: Path, pairs: int) -> Bar:
    chain, step = _chain(path)
    incarnation = iter(range(1, 10**6))

    def rate(servers: Sequence[ServerProcess], verify: Callable[[], object]) -> float:
        _all(servers, "empty")
        started = time.perf_counter()
        verify()
        _all(servers, "load", chain, step, next(incarnation))
        seconds = time.perf_counter() - started
        _all(servers, "empty")
        return 1.0 / seconds

    def verify_alone() -> None:
        for file in sorted(path.iterdir()):
            checksum_file(file)

    with _servers(1) as one, _servers(SERVERS) as each:

        def by_one() -> float:
            return rate(one, verify_alone)

        def by_each() -> float:
            return rate(each, partial(read_snapshot, path))

        by_one(), by_each()  # kernels are loaded
        ratios = interleaved(by_each, by_one, pairs)
    log.print(f"back by {SERVERS} servers: {statistics.median(ratios):.2f} of the rate of one process")
    return Bar.of("scale-rollback", ratios, "one process that verifies and loads everything", ROLLBACK)


def _survivor_bar(path: Path, num_rows: int, pairs: int) -> Bar:
    """Of the first of two servers."""
    chain, step = _chain(path)
    ids = np.random.default_rng(33).choice(num_rows, num_rows // CHANGED_SHARE, replace=False)
    own = ids[ShardMap(SERVERS).split(ids)[0]]
    incarnation = iter(range(1, 10**6))
    server = ServerProcess(SERVERS, 0)

    def ask(method: str, *arguments: Any) -> Any:
        server.call(method, *arguments)
        return server.answer()

    def load_all() -> float:
        ask("empty")
        return 1.0 / ask("timed_load", chain, step, next(incarnation))

    def roll_back() -> float:
        ask("change", own, step + 1)
        return 1.0 / ask("timed_load", chain, step, next(incarnation))

    try:
        load_all()
        roll_back()
        ratios = interleaved(roll_back, load_all, pairs)
    finally:
        server.close()
    log.print(f"a server that stayed, {len(own):,} rows changed: {statistics.median(ratios):.2f} of a load")
    return Bar.of("scale-rollback-survivor", ratios, "a load of all its rows", SURVIVOR)


def _step_bar(pairs: int) -> Bar:
    with tempfile.TemporaryDirectory() as name, ray_cluster(ClusterConfig(dashboard=False), 1.0):
        folder = Path(name)
        data = ring_of_items(folder, STEPS)
        number = iter(range(10**6))

        def rate(alone: bool) -> float:
            return 1.0 / _seconds_to_next_step(data, folder / f"run-{next(number)}", alone)

        rate(True)  # modules are read from disk
        ratios = interleaved(lambda: rate(True), lambda: rate(False), pairs)
    log.print(f"next step after a server's death: {statistics.median(ratios):.2f} of the rate of a new start")
    return Bar.of("scale-rollback-step", ratios, "all actors start again", STEP)


class _EndError(Exception):
    """What was to be measured has been."""


def _seconds_to_next_step(data: Path, run: Path, alone: bool) -> float:
    """From a server's death until a step of those that were undone is done again."""
    config = small_run(data, (2, 1, 1), num_trainers=1, hang_timeout_s=60.0, replace_lost_server=alone)
    killed_s = took_s = 0.0

    def on_step(done: int, total: int, loss: float) -> None:
        nonlocal killed_s, took_s
        if killed_s:
            if done <= KILL_AFTER:  # others were on their way
                took_s = time.perf_counter() - killed_s
                raise _EndError
        elif done == KILL_AFTER:
            while RunFolder.open(run).state["last"] is None:
                time.sleep(0.01)
            monitor = ray.get_actor(f"{run.name}/heartbeats")
            accounts: dict[str, Account] = ray.get(monitor.accounts.remote())
            kill_process(accounts[f"{run.name}/parameter_server-1"].heartbeat.process)
            killed_s = time.perf_counter()

    with suppress(_EndError):
        train(config, run, on_step=on_step)
    assert took_s, "the run has gone back"
    return took_s
