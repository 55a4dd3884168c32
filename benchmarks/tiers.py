"""How fast does a table train that is four times the memory it was given?

5 million rows of 64 numbers with row-wise Adagrad, 1.25 GiB of records, in a server that may take 320 MiB
of memory for them, their index and everything that moves them; the rest is on disk. Batches are 100,000
ids of a Zipf law, about 37,000 of them distinct, none comes twice. A step looks up the distinct ids and
applies a gradient to each; the ids of the next batch are announced before, as the pipeline knows them.
Bars:

* `tiers-of-disk`: rows brought up from disk per second, against the disk's own random reads of 4 KiB with
  direct I/O. Rows that are found in memory come on top of that rate, and every row that is brought up
  sends another one down, which the peer does not do.
* `tiers-of-memory`: steps per second, against the same table with all rows in memory. It says how much
  slower such a table is; the target only keeps it from getting worse unnoticed.
* `tiers-memory`: the memory allowed, against the most that the table counted at any time since it was
  made, and `tiers-memory-resident`: against the most that the process had in memory, as the system counts
  it, without what it has with a small table: libraries, batches, gradients. Below 1 the limit was passed.

Each table is in a process of its own that is idle while the other side is measured.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.disk import RandomReads, scratch_folder
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.sparse import Batches, ids_of_rows
from rayrec.embeddings.config import DiskConfig, RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log

DIM = 64
RECORD_BYTES = 4 * (DIM + 1 + 2)
MEMORY = 320 * 2**20
ROWS = 4 * MEMORY // RECORD_BYTES
BATCH = 100_000
STEPS = 8
"""Of one measurement."""
TARGET, TARGET_OF_MEMORY = 0.5, 0.02


def bench(options: BenchOptions) -> list[Bar]:
    num_rows = options.rows or ROWS
    memory = num_rows * RECORD_BYTES // 4
    with scratch_folder(options.data) as folder:
        disk = RandomReads(folder, num_rows * RECORD_BYTES)
        try:
            with running(num_rows, DiskConfig(memory=memory, folder=str(folder))) as tiered:
                return _bars(tiered, disk, num_rows, memory, options.pairs)
        finally:
            disk.close()


def _bars(tiered: Server, disk: RandomReads, num_rows: int, memory: int, pairs: int) -> list[Bar]:
    windows: list[Window] = []

    def from_disk_rate() -> float:
        windows.append(tiered.window(STEPS))
        return windows[-1].num_from_disk / windows[-1].seconds

    for _ in range(3):  # thrown away: until memory holds what is asked for often
        tiered.window(STEPS)
    of_disk = interleaved(from_disk_rate, disk.measure, pairs, _show("rows from disk/s", "disk", windows))
    with running(num_rows, None) as in_memory:
        in_memory.window(STEPS)
        of_memory = interleaved(
            lambda: STEPS / tiered.window(STEPS).seconds,
            lambda: STEPS / in_memory.window(STEPS).seconds,
            pairs,
            _show("steps/s", "in memory", windows),
        )
    allowed = f"{memory / 2**20:.0f} MiB"
    return [
        Bar.of("tiers-of-disk", of_disk, f"direct reads, {disk.depth} at a time", TARGET),
        Bar.of("tiers-of-memory", of_memory, "the same table in memory", TARGET_OF_MEMORY),
        Bar.of("tiers-memory", [memory / window.most_counted for window in windows], allowed, 1.0),
        Bar.of("tiers-memory-resident", [memory / window.most_resident for window in windows], allowed, 1.0),
    ]


def _show(unit: str, peer: str, windows: list[Window]) -> Callable[[float, float], None]:
    def show(a: float, b: float) -> None:
        last = windows[-1]
        log.print(
            f"tiers: {a:,.1f} {unit}, {peer} {b:,.1f}, ratio {a / b:.3f}; rows of a step: "
            f"{last.num_distinct / STEPS:,.0f}, from disk {last.num_from_disk / STEPS:,.0f}; "
            f"MiB at most: {last.most_counted / 2**20:.0f}, resident {last.most_resident / 2**20:.0f}",
            highlight=False,
        )

    return show


@dataclass(frozen=True)
class Window:
    """What a server did in a few steps."""

    seconds: float
    num_distinct: int
    num_from_disk: int
    most_counted: int
    """Bytes that the tables counted at any time since they were made."""
    most_resident: int
    """Most bytes that the process had in memory since then, what is not the tables' aside."""


class Server:
    """A process with one shard and batches to train it on."""

    def __init__(
        self, num_rows: int, disk: DiskConfig | None, prepare: Callable[[], None] | None = None
    ) -> None:
        """Start the process and make its table.

        Args:
            num_rows: that the table has before the first window.
            prepare: called in the process before anything else.
        """
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, num_rows, disk, prepare), daemon=True)
        self._process.start()
        theirs.close()  # so that the server's end is the only one, and its death an EOFError here
        where = "memory" if disk is None else "memory and disk"
        rows_per_s = self._connection.recv()
        log.print(f"tiers: {num_rows:,} rows in {where}, {rows_per_s:,.0f} made per second", highlight=False)

    def window(self, num_steps: int) -> Window:
        """Train so many steps on new batches."""
        self._connection.send(num_steps)
        window: Window = self._connection.recv()
        return window

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


@contextmanager
def running(
    num_rows: int, disk: DiskConfig | None, prepare: Callable[[], None] | None = None
) -> Iterator[Server]:
    server = Server(num_rows, disk, prepare)
    try:
        yield server
    finally:
        server.stop()


def _serve(
    connection: Connection, num_rows: int, disk: DiskConfig | None, prepare: Callable[[], None] | None
) -> None:
    """The server's process: trains as many steps as it is told."""
    if prepare is not None:
        prepare()
    batches = Batches(num_rows, BATCH)
    # Compilers, libraries, and what a batch takes while it is there, beside the table: not the table's.
    rehearsal = Training(batches, None, num_rows=BATCH)
    rehearsal.window(STEPS)
    forget_most_resident()  # nor is what the C library keeps of memory that was freed before
    beside = rehearsal.window(STEPS).most_resident - rehearsal.num_bytes
    del rehearsal
    forget_most_resident()
    training = Training(batches, disk, num_rows, beside)
    connection.send(training.rows_per_s)
    while True:
        connection.send(training.window(connection.recv()))


class Training:
    """A shard, and steps on it."""

    def __init__(
        self, batches: Batches, disk: DiskConfig | None, num_rows: int, resident_beside: int = 0
    ) -> None:
        """Start the process and make its table.

        Args:
            num_rows: how many rows are made at once, before any window.
            resident_beside: bytes of this process that are not the table's.
        """
        self._batches = batches
        self._next = itertools.count()
        self._grads_MD = np.random.default_rng(1).standard_normal((BATCH, DIM), dtype=np.float32)
        self._resident_beside = resident_beside
        config = TableConfig(name="item", dim=DIM, optimizer=RowwiseAdagradConfig(), disk=disk)
        self._shard = EmbeddingShard([config], 0, 1)
        self._step = 0
        self._most_counted = 0
        started = time.perf_counter()
        for first in range(0, num_rows, BATCH):
            self._apply(ids_of_rows(np.arange(first, min(first + BATCH, num_rows))))
        self.rows_per_s = num_rows / (time.perf_counter() - started)

    def window(self, num_steps: int) -> Window:
        ids = [np.unique(ids_of_rows(self._batches.rows_N(next(self._next)))) for _ in range(num_steps + 1)]
        before = self._num_from_disk
        started = time.perf_counter()
        for ids_M, next_ids_M in itertools.pairwise(ids):
            self._shard.prefetch({"item": next_ids_M})
            self._shard.lookup({"item": ids_M})
            self._apply(ids_M)
        seconds = time.perf_counter() - started
        return Window(
            seconds=seconds,
            num_distinct=sum(map(len, ids[:-1])),
            num_from_disk=self._num_from_disk - before,
            most_counted=self._most_counted,
            most_resident=most_resident() - self._resident_beside,
        )

    @property
    def num_bytes(self) -> int:
        return self._shard.stats().num_bytes

    @property
    def _num_from_disk(self) -> int:
        return self._shard.stats().counts["item"].num_from_disk

    def _apply(self, ids_M: Int64Array) -> None:
        self._shard.apply(UpdateTag(0, self._step, 0), {"item": (ids_M, self._grads_MD[: len(ids_M)])})
        self._step += 1
        self._most_counted = max(self._most_counted, self.num_bytes)


def most_resident() -> int:
    """Bytes of this process that were in memory at most since `forget_most_resident`."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_most_resident() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
