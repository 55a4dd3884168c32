"""What changes of a large table cost: the change, or the table.

One server's part of a table in this process, called as its actor calls it. Bars:

* `scale-increment`: 0.05 s over the processor's seconds of an increment of 1,000 changed rows out of 10
  million: the step that changes and notes them, the snapshot's beginning, its files, and its end.
* `scale-eviction`: the time of a step over that of one which gives up rows by their age, of 20 million rows.
  From the table without eviction the same rows are taken between the steps, so that both are as large.
  Each step creates 42,000 rows, changes as many others of the last 200 steps, and gives up those that no step
  has changed for 400 steps. What is measured begins when these are as many as are created, and as many ids
  are remembered as there will ever be: 600 steps and those of `remember_steps` later.
  A ratio is that of ten steps to ten, as single ones differ by page faults.
* `scale-eviction-seldom`: the same for the mean of 50 steps, when rows are given up once in them.

`RAYREC_BENCH_ROWS` sets the number of rows of the increment's table; twice as many have ages.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import EvictionConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot.snapshot import write_table
from rayrec.platform.console import log

NUM_ROWS, DIM = 10_000_000, 64
CHANGED, INCREMENT_S = 1_000, 0.05
AGES_DIM, MAX_AGE, CHANGE_STEPS, SELDOM, WINDOW = 32, 400, 200, 50, 10
STEPS_OF_ROW = MAX_AGE + round(CHANGE_STEPS / math.e)
"""That a row lives: it is changed once on average while it may be, at random, or not at all."""
LOAD_ROWS = 100_000
"""Rows that are created at once."""
EVICTION = 1.5


def bench(options: BenchOptions) -> list[Bar]:
    num_rows = options.rows or NUM_ROWS
    bars = []
    for measure in (
        lambda: _increment_bar(num_rows, options.pairs),
        lambda: _eviction_bar(num_rows, options.pairs, every=1),
        lambda: _eviction_bar(num_rows, options.pairs, every=SELDOM),
    ):
        bars.append(measure())
        gc.collect()  # a shard has cycles, and the next tables need its gigabytes
    return bars


class Table:
    """A table on one server, one step after the other."""

    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self.shard = EmbeddingShard([config], 0, 1, wait_timeout_s=600.0)
        self.step = -1

    def apply(self, ids_M: np.ndarray) -> float:
        """Change rows of distinct ids; returns the processor's seconds."""
        grads_MD = np.full((len(ids_M), self.config.dim), 1e-3, np.float32)
        self.step += 1
        with _processor() as seconds:
            self.shard.apply(UpdateTag(0, self.step, 0), {self.config.name: (ids_M, grads_MD)})
        return seconds()

    def take(self, ids_M: np.ndarray) -> None:
        """Remove rows, as nobody can who calls a server."""
        self.shard._table(self.config.name)._rows.remove(ids_M)

    def snapshot(self, folder: Path, since: int | None) -> float:
        """Write what has changed since a step; returns the processor's seconds."""
        with _processor() as seconds:
            self.shard.begin_snapshot(self.step)
            parts = self.shard.export_snapshot(self.config.name, self.step, since)
            write_table(folder, self.config, ShardMap(1), 0, self.step, parts)
            self.shard.release(self.step)
        return seconds()


def _increment_bar(num_rows: int, repeats: int) -> Bar:
    table = Table(TableConfig(name="items", dim=DIM))
    for first in range(0, num_rows, LOAD_ROWS):
        table.apply(np.arange(first, min(first + LOAD_ROWS, num_rows)))
    since, times = table.step, list[float]()
    # The first one says from when on changes have to be known.
    table.shard.begin_snapshot(since)
    for _ in table.shard.export_snapshot(table.config.name, since):
        pass
    table.shard.release(since)
    for number in range(1 + repeats):  # kernels are compiled by the first
        step_s = table.apply(np.arange(CHANGED) * (num_rows // CHANGED) + number)
        with tempfile.TemporaryDirectory() as folder:
            times.append(step_s + table.snapshot(Path(folder), since))
        since = table.step
    del times[0]
    log.print(f"increments of {CHANGED:,} of {num_rows:,} rows: median {statistics.median(times):.3f} s")
    return Bar.of(
        "scale-increment", [INCREMENT_S / time_s for time_s in times], f"{INCREMENT_S:g} s of processor", 1.0
    )


class _Ages:
    """A table that gives up rows at every step, and one from which they are taken beside what is measured."""

    def __init__(self, num_rows: int, every: int) -> None:
        eviction = EvictionConfig(max_age_steps=MAX_AGE, every_steps=every)
        self.new = num_rows // STEPS_OF_ROW
        self.tables = {
            name: Table(TableConfig(name=name, dim=AGES_DIM, eviction=config))
            for name, config in (("go", eviction), ("stay", None))
        }
        self._given_up: dict[int, np.ndarray] = {}
        """By step, ids that the one has given up and the other still has."""
        self._random = {name: np.random.default_rng(33) for name in self.tables}
        for _ in range(MAX_AGE + CHANGE_STEPS + eviction.remember_steps + every):
            for name in self.tables:
                self.apply(name)

    def apply(self, name: str) -> float:
        table = self.tables[name]
        next_id = self.new * (table.step + 1)
        first = max(0, next_id - self.new * CHANGE_STEPS)
        named = [np.arange(next_id, next_id + self.new)]
        if next_id:
            named.append(np.unique(self._random[name].integers(first, next_id, self.new)))
        seconds = table.apply(np.concatenate(named))
        if name == "go":
            nothing = np.empty(0, dtype=np.int64)
            self._given_up[table.step] = table.shard.evicted(table.step - 1).get(name, nothing)
        else:
            table.take(self._given_up.pop(table.step))
        return seconds

    def check_sizes(self) -> None:
        held = {name: table.shard.stats().num_rows[name] for name, table in self.tables.items()}
        assert held["go"] == held["stay"], f"the tables differ: {held}"

    def rate(self, name: str, num_steps: int) -> float:
        return num_steps / sum(self.apply(name) for _ in range(num_steps))


def _eviction_bar(num_rows: int, repeats: int, every: int) -> Bar:
    ages = _Ages(2 * num_rows, every)
    steps = max(every, WINDOW)
    ratios = interleaved(lambda: ages.rate("go", steps), lambda: ages.rate("stay", steps), repeats)
    ages.check_sizes()
    held = ages.tables["go"].shard.stats().num_rows["go"]
    log.print(f"eviction at every {every}. step, {held:,} rows: {statistics.median(ratios):.2f} of the rate")
    name = "scale-eviction" if every == 1 else "scale-eviction-seldom"
    return Bar.of(name, ratios, "a step without eviction", 1 / EVICTION)


@contextmanager
def _processor() -> Iterator[Callable[[], float]]:
    started = time.process_time()
    yield lambda: time.process_time() - started
