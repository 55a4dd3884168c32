"""What a lookup and an update cost as the work grows: with the ids of a table, its width, the shards.

Rows per second of one thread, through the client that trainers use, with all shards in this process. A
batch is 20,000 uniform draws of ids, each id once, so that nearly every row comes from memory; an update is
row-wise Adagrad. One axis moves at a time, from 1 M ids of 64 numbers on one shard. The points of an
axis are measured in turns, and each figure is the median of its windows.

    rayrec bench scaling        # writes benchmarks/scaling.csv, and with matplotlib benchmarks/scaling.svg

There is no bar: nothing is compared but a table with itself. `RAYREC_BENCH_ROWS` bounds the ids of the
tables, for a look at the benchmark itself; the files then go to a temporary folder.
"""

from __future__ import annotations

import csv
import gc
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Bar, BenchOptions
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.transport.client import LocalTransport, ShardClient
from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.hashing import mix64

BATCH = 20_000
FILL = 100_000
AXES: dict[str, tuple[int, ...]] = {
    "ids": (10_000, 100_000, 1_000_000, 10_000_000, 20_000_000),
    "dim": (8, 16, 32, 64, 128, 256, 512),
    "shards": (1, 2, 4, 8, 16),
}
LABELS = {"ids": "ids in the table", "dim": "numbers in a row", "shards": "shards, in one process"}


@dataclass(frozen=True)
class Point:
    """Size of what is measured."""

    ids: int = 1_000_000
    dim: int = 64
    shards: int = 1


@dataclass(frozen=True)
class Figure:
    """What was measured at a point of an axis, in rows per second; low and high of its windows."""

    axis: str
    value: int
    operation: str
    rows_per_s: float
    low: float
    high: float


def bench(options: BenchOptions) -> list[Bar]:
    figures = [figure for axis in AXES for figure in measure_axis(axis, points(axis, options.rows), options)]
    if options.rows is None:
        folder = CHECKOUT / "benchmarks"
    else:
        folder = Path(tempfile.mkdtemp(prefix="rayrec-bench-"))
    write_csv(folder / "scaling.csv", figures)
    log.print(f"scaling: wrote {folder / 'scaling.csv'}")
    if importlib.util.find_spec("matplotlib") is None:
        log.print("scaling: no plot without matplotlib; pip install '.[bench]' brings it")
    else:
        plot(folder / "scaling.svg", figures)
        log.print(f"scaling: wrote {folder / 'scaling.svg'}")
    return []


def points(axis: str, most_ids: int | None) -> list[Point]:
    """The sizes of an axis; tables of no more than `most_ids`."""
    start = Point() if most_ids is None else Point(ids=min(most_ids, Point.ids))
    sizes = [replace(start, **{axis: value}) for value in AXES[axis]]
    return [point for point in sizes if most_ids is None or point.ids <= most_ids]


def measure_axis(axis: str, sizes: Sequence[Point], options: BenchOptions) -> list[Figure]:
    gc.collect()  # the tables of the axis before
    tables = [ShardedTable(point) for point in sizes]
    rates: dict[tuple[int, str], list[float]] = {}
    for measured in range(-1, options.pairs):
        for point, table in zip(sizes, tables, strict=True):
            found = table.rates(options.steps)
            if measured >= 0:  # the first round is thrown away
                for operation, rate in found.items():
                    rates.setdefault((getattr(point, axis), operation), []).append(rate)
    figures = [
        Figure(axis, value, operation, statistics.median(windows), min(windows), max(windows))
        for (value, operation), windows in rates.items()
    ]
    for figure in figures:
        log.print(
            f"scaling: {figure.value:>10,} {LABELS[axis]}: {figure.operation} {figure.rows_per_s / 1e6:.2f} "
            f"M rows/s ({figure.low / 1e6:.2f} to {figure.high / 1e6:.2f})",
            highlight=False,
        )
    return figures


class ShardedTable:
    """A table over shards in this process, filled, and read and changed by batches that do not come twice."""

    def __init__(self, point: Point) -> None:
        self._point = point
        config = TableConfig(name="item", dim=point.dim)
        shards = [EmbeddingShard([config], shard, num_trainers=1) for shard in range(point.shards)]
        self._client = ShardClient([config], ShardMap(point.shards), LocalTransport(shards))
        self._steps = itertools.count()
        self._batches = itertools.count()
        for first in range(0, point.ids, FILL):
            ids_M = mix64(np.arange(first, min(first + FILL, point.ids))).view(np.int64)
            self._update(ids_M, np.zeros((len(ids_M), point.dim), dtype=np.float32))

    def rates(self, num_steps: int) -> dict[str, float]:
        """Rows per second of lookups and of updates over the next window."""
        batches = [self._batch() for _ in range(num_steps)]
        grads_MD = np.full((BATCH, self._point.dim), 1e-3, dtype=np.float32)
        num_rows = sum(map(len, batches))
        started = time.perf_counter()
        for ids_M in batches:
            self._client.read({"item": ids_M})
        looked_up = time.perf_counter()
        batches = [self._batch() for _ in range(num_steps)]  # the others are in the cache by now
        num_changed = sum(map(len, batches))
        began = time.perf_counter()
        for ids_M in batches:
            self._update(ids_M, grads_MD[: len(ids_M)])
        return {
            "lookup": num_rows / (looked_up - started),
            "update": num_changed / (time.perf_counter() - began),
        }

    def _batch(self) -> Int64Array:
        random = np.random.default_rng([0, next(self._batches)])
        distinct_M, _ = deduplicate(random.integers(self._point.ids, size=BATCH))
        return mix64(distinct_M).view(np.int64)

    def _update(self, ids_M: Int64Array, grads_MD: Float32Array) -> None:
        tag = UpdateTag(incarnation=0, step=next(self._steps), rank=0)
        for reply in self._client.send(tag, {"item": ids_M}, {"item": grads_MD}):
            reply.result()


def write_csv(path: Path, figures: Sequence[Figure]) -> None:
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("axis", "value", "operation", "rows_per_s", "low", "high"))
        for figure in figures:
            rates = (f"{rate:.0f}" for rate in (figure.rows_per_s, figure.low, figure.high))
            rows.writerow((figure.axis, figure.value, figure.operation, *rates))


def plot(path: Path, figures: Sequence[Figure]) -> None:
    """One panel per axis, rows per second of both operations, with the range of the windows."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    matplotlib.rcParams["svg.hashsalt"] = "rayrec"  # the same figures, the same file
    canvas = Canvas(figsize=(12, 3.6), layout="constrained")
    panels = canvas.subplots(1, len(AXES), sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        for operation in ("lookup", "update"):
            line = [figure for figure in figures if (figure.axis, figure.operation) == (axis, operation)]
            values = [figure.value for figure in line]
            panel.plot(values, [figure.rows_per_s / 1e6 for figure in line], marker="o", label=operation)
            panel.fill_between(
                values,
                [figure.low / 1e6 for figure in line],
                [figure.high / 1e6 for figure in line],
                alpha=0.2,
            )
        panel.set_xscale("log", base=10 if axis == "ids" else 2)
        panel.set_yscale("log")
        panel.set_xlabel(LABELS[axis])
        panel.grid(True, which="both", alpha=0.3)
    panels[0].set_ylabel("M rows/s, one thread")
    panels[0].legend()
    canvas.savefig(path, metadata={"Date": None})
