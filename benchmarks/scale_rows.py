"""What rows on disk take of memory, and many of them under a limit.

* `scale-rows-bytes`: memory of the map of ids as it is for tables in memory, over that of tables on disk:
  what each process takes more when five million ids have come, 100,000 at a time, as the system counts it.
  It is the size at which the map in memory is densest (27 bytes an id; 54 just after it has grown).
* `scale-rows-speed`: steps per second of a table on disk, over those of one with the map of tables in memory,
  each in a process of its own; the table of the bench `tiers`, with a fifth of its rows.
* `scale-rows-20m`: 4 GiB over the most that a server's whole process takes, Python and libraries included:
  20 million rows of 64 numbers with row-wise Adagrad are created, then read and updated at random.
  Some of the rows are compared, bit by bit, with a table in memory that had the same updates.

`RAYREC_BENCH_ROWS` sets the number of rows of all of them.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.disk import scratch_folder
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.sparse import ids_of_rows
from benchmarks.tiers import DIM, RECORD_BYTES, STEPS, forget_most_resident, most_resident, running
from rayrec.embeddings.config import DiskConfig, RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.storage.disk import tiered_rows
from rayrec.embeddings.storage.disk.packed_map import PackedMap
from rayrec.embeddings.storage.index import IdMap
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.platform.console import log

NUM_IDS, NUM_SPEED, NUM_ROWS = 5_000_000, 1_000_000, 20_000_000
AT_ONCE = 100_000
TARGET_BYTES, TARGET_SPEED = 2.0, 0.95
LIMIT, TABLE_MEMORY = 4 * 2**30, 3 * 2**30
UPDATES, COMPARED = 60, 20_000


def bench(options: BenchOptions) -> list[Bar]:
    return [
        _bytes_bar(options.rows or NUM_IDS),
        _speed_bar(options, options.rows or NUM_SPEED),
        _limit_bar(options, options.rows or NUM_ROWS),
    ]


def _bytes_bar(num_ids: int) -> Bar:
    in_memory, packed = (_in_process(_map_bytes, kind, num_ids) for kind in (IdMap, PackedMap))
    log.print(
        f"scale-rows: {num_ids:,} ids: {in_memory / num_ids:.1f} bytes each in memory, "
        f"{packed / num_ids:.1f} where rows are on disk"
    )
    return Bar.once("scale-rows-bytes", in_memory / packed, "the map of a table in memory", TARGET_BYTES)


def _map_bytes(kind: type[IdMap] | type[PackedMap], num_ids: int) -> int:
    rehearsal = kind()  # compiles
    rehearsal.reserve(AT_ONCE)
    rehearsal.assign(np.arange(AT_ONCE), np.arange(AT_ONCE))
    del rehearsal
    forget_most_resident()
    before = most_resident()
    index = kind()
    for first in range(0, num_ids, AT_ONCE):
        ids_M = ids_of_rows(np.arange(first, min(first + AT_ONCE, num_ids)))
        index.reserve(len(ids_M))
        index.assign(ids_M, np.arange(len(ids_M)))
    gc.collect()
    forget_most_resident()  # what is there at the end, not what growing took
    return most_resident() - before


def _speed_bar(options: BenchOptions, num_rows: int) -> Bar:
    memory = max(num_rows * RECORD_BYTES // 3, 48 * 2**20)
    with scratch_folder(options.data) as folder:
        disk = DiskConfig(memory=memory, folder=str(folder))
        with running(num_rows, disk) as ours, running(num_rows, disk, _use_map_of_memory) as before:
            for _ in range(3):  # until memory holds what is asked for often
                ours.window(STEPS)
                before.window(STEPS)
            ratios = interleaved(
                lambda: STEPS / ours.window(STEPS).seconds,
                lambda: STEPS / before.window(STEPS).seconds,
                options.pairs,
                lambda a, b: log.print(f"scale-rows: {a:.2f} steps/s, with the other map {b:.2f}"),
            )
    return Bar.of("scale-rows-speed", ratios, "the map of a table in memory", TARGET_SPEED)


def _use_map_of_memory() -> None:
    tiered_rows.PackedMap = IdMap  # type: ignore[misc, assignment]


def _limit_bar(options: BenchOptions, num_rows: int) -> Bar:
    with scratch_folder(options.data) as folder:
        disk = DiskConfig(memory=TABLE_MEMORY, folder=str(folder))
        resident = _in_process(_train_many, disk, num_rows)
    return Bar.once("scale-rows-20m", LIMIT / resident, f"{LIMIT // 2**30} GiB", 1.0)


def _train_many(disk: DiskConfig, num_rows: int) -> int:
    """The most that this process had in memory."""
    config = TableConfig(name="items", dim=DIM, optimizer=RowwiseAdagradConfig(), disk=disk)
    table = _Checked(config, np.random.default_rng(1).choice(num_rows, min(COMPARED, num_rows), False))
    started = time.perf_counter()
    for first in range(0, num_rows, AT_ONCE):
        table.apply(np.arange(first, min(first + AT_ONCE, num_rows)))
    created_s, started = time.perf_counter() - started, time.perf_counter()
    random = np.random.default_rng(2)
    for _ in range(UPDATES):
        rows_M = np.unique(random.integers(0, num_rows, AT_ONCE))
        table.lookup(rows_M)
        table.apply(rows_M)
    updated_s = time.perf_counter() - started
    table.compare()
    stats = table.shard.stats()
    log.print(
        f"scale-rows: {stats.num_rows['items']:,} rows: {num_rows / created_s:,.0f} created/s, "
        f"{UPDATES * AT_ONCE / updated_s:,.0f} read and updated/s, "
        f"{stats.num_bytes / 2**20:,.0f} MiB counted, {most_resident() / 2**20:,.0f} resident, "
        f"{stats.disk_bytes / 2**30:.1f} GiB of disk"
    )
    return most_resident()


class _Checked:
    """A table on one server, and another one in memory with some of its rows."""

    def __init__(self, config: TableConfig, compared: np.ndarray) -> None:
        self.shard = EmbeddingShard([config], 0, 1, wait_timeout_s=600.0)
        self._sample = EmbeddingTable(config.model_copy(update={"disk": None}))
        self._compared = np.sort(compared)
        self._grads_MD = np.random.default_rng(1).standard_normal((AT_ONCE, config.dim), dtype=np.float32)
        self._step = -1

    def lookup(self, rows_M: np.ndarray) -> None:
        self.shard.lookup({"items": ids_of_rows(rows_M)})

    def apply(self, rows_M: np.ndarray) -> None:
        self._step += 1
        grads_MD = np.roll(self._grads_MD, self._step, axis=0)[: len(rows_M)]
        self.shard.apply(UpdateTag(0, self._step, 0), {"items": (ids_of_rows(rows_M), grads_MD)})
        of_sample = np.flatnonzero(np.isin(rows_M, self._compared, assume_unique=True))
        self._sample.apply(ids_of_rows(rows_M[of_sample]), grads_MD[of_sample], self._step)

    def compare(self) -> None:
        ids_M = ids_of_rows(self._compared)
        found_MD = self.shard.lookup({"items": ids_M})["items"]
        assert np.array_equal(found_MD, self._sample.lookup(ids_M)), "rows on disk differ from rows in memory"


def _in_process(work: Callable[..., int], *arguments: Any) -> int:
    """What a process of its own finds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_result, args=(theirs, partial(work, *arguments)), daemon=True)
    process.start()
    theirs.close()  # so that the death of the process is an EOFError here
    try:
        return int(ours.recv())
    finally:
        process.join()


def _send_result(connection: Connection, work: Callable[[], int]) -> None:
    connection.send(work())
