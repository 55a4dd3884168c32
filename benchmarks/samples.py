"""What shuffling, resuming and feature operations cost: our stream against a bare scan and Ray Data.

Twenty million rows in twenty Parquet files, as a service logs them: a user, about ten items that he or she
has seen (lists of skewed length), a time, a price, a category; ids are 64-bit hashes, and pages are packed by
zstd, as `rayrec prepare` writes them, too. Every side ends with torch tensors of the same
columns, in batches of 16,384 rows, lists as values and offsets. Bars:

* `samples-scan`: `SampleStream` against `pyarrow.dataset`'s scanner, which reads files in order and does
  nothing else. Ours reads every row once, in windows of two row groups that are shuffled, knows where to go
  on after any step, and runs the six operations of `OPERATIONS` on every batch.
* `samples-parts`: decoding, which a scan does as well, over all that our stream does (decoding, moving rows
  to their places, operations, arrays), in processor time of one thread that does one after the other: what
  `samples-scan` could be if threads lost nothing.
* `samples-ray-data`: the same job by Ray Data: `iter_torch_batches` with a shuffle buffer of as many rows as
  our windows, after `map_batches` with the same operations.
* `samples-ray-data-bare`: `ray.data.read_parquet(...).iter_torch_batches` that neither shuffles nor computes.
  In both its batches are handed over as Arrow tables, which is the fastest way that it has; the one it
  takes by itself cannot turn lists into tensors.
* `samples-first-batch`: half a second over the time from a folder's name to the first tensors: listing,
  footers, plan, first window; of windows that are to grow to a million rows.
* `samples-slow-consumer`: peak memory of a process that reads as fast as it can over that of one whose
  consumer rests after every batch.

How it is measured. A rate is rows per second from the first batch to the end of the files, of the same rows
on every side. Files are in the page cache, and kernels are compiled, by a pass that is thrown away.
RAYREC_BENCH_ROWS makes another number of rows. The files stay in the folder for temporary files.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from torch import Tensor

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log
from rayrec.platform.hashing import mix64
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.operations.arithmetic import BucketizeConfig, ClipConfig, LogarithmConfig
from rayrec.samples.operations.hashing import CrossConfig, HashConfig
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.operations.times import TimeFeaturesConfig
from rayrec.samples.prepare.writer import whole_folder
from rayrec.samples.reading.decoding import GroupDecoder
from rayrec.samples.reading.read_plan import Batching, ReadPlan, ReadSettings, Window
from rayrec.samples.reading.reader import WindowDecoder
from rayrec.samples.reading.stream import Arrays, Jagged, SampleStream, arrays

NUM_ROWS, NUM_FILES, ROWS_PER_GROUP = 20_000_000, 20, 65_536
BATCH, WINDOW_ROWS, LARGE_WINDOW_ROWS = 16_384, 131_072, 1_048_576
SCAN_TARGET, RAY_DATA_TARGET, FIRST_BATCH_S, MEMORY_TARGET = 0.70, 2.5, 0.5, 0.9
SLOW_BATCHES, REST_S = 200, 0.02
PARTS_ROWS = 4_000_000

OPERATIONS = [
    HashConfig(op="hash", input="user_id", output="user", buckets=1_000_000),
    CrossConfig(op="cross", inputs=("user_id", "category"), output="user_category", buckets=1_000_000),
    ClipConfig(op="clip", input="price", output="usual_price", low=0.0, high=100.0),
    BucketizeConfig(op="bucketize", input="price", output="price_level", boundaries=(1.0, 5.0, 20.0, 100.0)),
    LogarithmConfig(op="log", input="price", output="log_price", negatives="zero"),
    TimeFeaturesConfig(
        op="time_features",
        input="timestamp",
        unit="s",
        zone="UTC",
        outputs={"hour": "hour", "weekday": "weekday"},
    ),
]

SETTINGS = ReadSettings(Batching(BATCH), window_rows=WINDOW_ROWS)

Tensors = dict[str, Tensor | tuple[Tensor, Tensor]]


def bench(options: BenchOptions) -> list[Bar]:
    folder = _files(options.rows or NUM_ROWS)
    return [
        _against_scan(folder, options.pairs),
        _parts(folder, options.pairs),
        *_against_ray_data(folder, options.pairs),
        _first_batch(folder, options.pairs),
        _slow_consumer(folder, options.pairs),
    ]


def _against_scan(folder: Path, pairs: int) -> Bar:
    def show(ours: float, scan: float) -> None:
        log.print(f"samples: {ours:.2f} M rows/s, bare scan {scan:.2f}, ratio {ours / scan:.3f}")

    interleaved(lambda: _rate(_ours(folder)), lambda: _rate(_scan(folder)), repeats=1)  # thrown away
    ratios = interleaved(lambda: _rate(_ours(folder)), lambda: _rate(_scan(folder)), pairs, show)
    return Bar.of("samples-scan", ratios, "pyarrow.dataset scan to tensors", SCAN_TARGET)


def _parts(folder: Path, repeats: int) -> Bar:
    _processor_seconds(folder)  # thrown away
    ratios = []
    for _ in range(repeats):
        parts = _processor_seconds(folder)
        ratios.append(parts["decode"] / sum(parts.values()))
        said = ", ".join(f"{name} {1e9 * seconds:.0f}" for name, seconds in parts.items())
        log.print(f"samples: ns of a thread per row: {said}", highlight=False)
    return Bar.of("samples-parts", ratios, "all parts of our stream", SCAN_TARGET)


def _processor_seconds(folder: Path) -> dict[str, float]:
    """Per row, of each part of what our stream does, over the first rows."""
    plan = ReadPlan.over(folder, SETTINGS)
    decoder, windows = GroupDecoder(plan.spec), WindowDecoder(plan.spec)
    features = FeatureProgram.compile(OPERATIONS, plan.spec.schema)
    spent, num_rows = dict.fromkeys(("decode", "move", "operations", "arrays"), 0.0), 0

    @contextmanager
    def noted(part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        spent[part] += time.process_time() - began

    first = plan.batch(0)
    window: Window | None = None if first is None else first.parts[0].window
    while window is not None and num_rows < PARTS_ROWS:
        with noted("decode"):
            decoded = [decoder.decode(group) for group in window.groups]
        del decoded
        with noted("move"):
            shuffled = windows.submit(window).result()
        for start in range(0, shuffled.num_rows, BATCH):
            batch = shuffled.slice(start, min(start + BATCH, shuffled.num_rows))
            with noted("operations"):
                rows = features(batch.rows, RowContext(batch.row_keys_B, 0, 0))
            with noted("arrays"):
                _tensors(arrays(rows))
        num_rows += shuffled.num_rows
        window = plan.window_after(window, 1)
    windows.close()
    spent["move"] -= spent["decode"]  # a window decodes its rows, too
    return {part: seconds / num_rows for part, seconds in spent.items()}


def _against_ray_data(folder: Path, pairs: int) -> list[Bar]:
    def show(ours: float, ray_data: float) -> None:
        log.print(f"samples: {ours:.2f} M rows/s, Ray Data {ray_data:.2f}, ratio {ours / ray_data:.3f}")

    jobs = {
        "samples-ray-data": ("Ray Data, shuffled, same operations", True),
        "samples-ray-data-bare": ("Ray Data's iter_torch_batches", False),
    }
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15
    bars = []
    with ray_cluster(ClusterConfig(dashboard=False), 0.0):
        for name, (peer, same_job) in jobs.items():
            sides = lambda: _rate(_ours(folder)), lambda same=same_job: _rate(_ray_data(folder, same))
            interleaved(*sides, repeats=1)  # thrown away: workers are started
            bars.append(Bar.of(name, interleaved(*sides, pairs, show), peer, RAY_DATA_TARGET))
    return bars


def _first_batch(folder: Path, repeats: int) -> Bar:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        batches = _ours(folder, LARGE_WINDOW_ROWS)
        next(batches)
        seconds.append(time.perf_counter() - started)
        batches.close()
    log.print(f"samples: first batch after {', '.join(f'{1000 * one:.0f}' for one in seconds)} ms")
    return Bar.of("samples-first-batch", [FIRST_BATCH_S / one for one in seconds], "half a second", 1.0)


def _slow_consumer(folder: Path, repeats: int) -> Bar:
    ratios = []
    for _ in range(repeats):
        fast, slow = (_in_process(folder, rest_s) for rest_s in (0.0, REST_S))
        log.print(f"samples: peak memory {fast / 2**20:.0f} MiB, with a slow consumer {slow / 2**20:.0f} MiB")
        ratios.append(fast / slow)
    return Bar.of("samples-slow-consumer", ratios, "peak memory of a fast consumer", MEMORY_TARGET)


def _ours(folder: Path, window_rows: int = WINDOW_ROWS) -> Generator[Tensors]:
    plan = ReadPlan.over(folder, replace(SETTINGS, window_rows=window_rows))
    features = FeatureProgram.compile(OPERATIONS, plan.spec.schema)

    def program(step: int, batch: RowBatch) -> RowBatch:
        return replace(batch, rows=features(batch.rows, RowContext(batch.row_keys_B, 0, step)))

    with SampleStream(plan, stop_step=plan.steps_per_epoch, program=program) as stream:
        for batch in stream:
            yield _tensors(batch.columns)


def _scan(folder: Path) -> Generator[Tensors]:
    for rows in ds.dataset(folder).scanner(batch_size=BATCH).to_batches():
        yield _tensors(arrays(rows))


def _ray_data(folder: Path, same_job: bool) -> Generator[Tensors]:
    import ray
    from ray.data.collate_fn import ArrowBatchCollateFn

    class Collate(ArrowBatchCollateFn):
        def __call__(self, batch: pa.Table) -> Any:
            return _tensors(arrays(batch.combine_chunks().to_batches()[0]))

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_parquet(str(folder))
    if same_job:
        features = FeatureProgram.compile(OPERATIONS, ReadPlan.over(folder, SETTINGS).spec.schema)

        def program(table: pa.Table) -> pa.Table:
            (batch,) = table.combine_chunks().to_batches()
            keys_B = np.zeros(batch.num_rows, dtype=np.int64)  # none of the operations draws anything
            return pa.Table.from_batches([features(batch, RowContext(keys_B, 0, 0))])

        rows = rows.map_batches(program, batch_format="pyarrow", batch_size=BATCH)
    batches: Any = rows.iter_torch_batches(
        batch_size=BATCH,
        collate_fn=Collate(),
        prefetch_batches=4,
        local_shuffle_buffer_size=WINDOW_ROWS if same_job else None,
    )
    yield from batches


def _tensors(columns: Arrays) -> Tensors:
    found: Tensors = {}
    for name, values in columns.items():
        if isinstance(values, Jagged):
            found[name] = (torch.from_numpy(values.values_N), torch.from_numpy(values.offsets_B1))
        else:
            found[name] = torch.from_numpy(values)
    return found


def _rate(batches: Iterable[Tensors]) -> float:
    """Million rows per second after the first batch."""
    batches = iter(batches)
    next(batches)
    started, rows = time.perf_counter(), 0
    for batch in batches:
        price = batch["price"]
        assert isinstance(price, Tensor)
        rows += len(price)
    return rows / (time.perf_counter() - started) / 1e6


def _in_process(folder: Path, rest_s: float) -> int:
    """Bytes of memory that a process of its own has taken at most, beyond what it had before it read."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_consume, args=(theirs, folder, rest_s), daemon=True)
    process.start()
    theirs.close()
    peak: int = ours.recv()
    process.join()
    return peak


def _consume(connection: Any, folder: Path, rest_s: float) -> None:
    batches = _ours(folder)
    next(batches)
    before = _peak_memory()
    for _, _ in zip(range(SLOW_BATCHES), batches, strict=False):
        time.sleep(rest_s)
    connection.send(_peak_memory() - before)
    batches.close()


def _peak_memory() -> int:
    """Bytes; `getrusage` would tell of the process that started this one, too."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def _files(num_rows: int) -> Path:
    """The files, made if they are not there: their folder is named by what makes them."""
    content = f"{num_rows} {inspect.getsource(_write_file)}"
    folder = (
        Path(tempfile.gettempdir()) / f"rayrec-samples-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    )
    if not folder.is_dir():
        log.print(f"samples: writing {num_rows:,} rows to {folder}")
        with whole_folder(folder) as draft:
            for number in range(NUM_FILES):
                rows = num_rows * (number + 1) // NUM_FILES - num_rows * number // NUM_FILES
                _write_file(draft / f"part-{number:05}.parquet", number, rows)
    return folder


def _write_file(path: Path, number: int, num_rows: int) -> None:
    random = np.random.default_rng([0, number])
    lengths = np.minimum(random.geometric(0.25, num_rows) * random.integers(1, 5, num_rows), 100)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    items = mix64((1000 * random.pareto(1.2, offsets[-1])).astype(np.int64) % 1_000_000).view(np.int64)
    columns = {
        "user_id": mix64(random.integers(0, 5_000_000, num_rows)).view(np.int64),
        "item_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(items)),
        "timestamp": np.sort(1_700_000_000 + 3600 * number + random.integers(0, 3600, num_rows)),
        "price": random.gamma(2.0, 10.0, num_rows).astype(np.float32),
        "category": random.integers(0, 40, num_rows).astype(np.int32),
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP, compression="zstd")
