"""Ranking models: samples per second of our pipeline, all five stages, against one loop in one process.

The model is DLRM in the shape of its authors' script for Criteo (13 numbers, 26 columns of ids, rows of 16
numbers, 13-512-256-64-16 and 512-256-1), batches of 4,096, tables of 5.2 M rows in all, each of which exists
on both sides before the first step. Bars:

* `ctr-torchrec`: against TorchRec's own DLRM on its `EmbeddingBagCollection`s, at its best setting: tables of
  fbgemm with the optimizer inside of backward, or its plain bags with sparse gradients, memory as the C
  library hands it out, or kept, or kept in huge pages. Ours starts from 64-bit ids in Parquet that is
  shuffled; the peer from numbers of rows in Parquet read in order, so it shuffles and hashes nothing.
* `ctr-keras`: against the same network of Keras layers on TensorFlow, an `Embedding` for each column.
* `ctr-dense`: against the dense part of our own step alone, on batches whose features and rows are there:
  what the rate would be if all other stages cost nothing. Where a bar of DLRM above is missed, its value over
  this one's says what is possible at most.
* `ctr-rechub`: against DCN-v2 of torch-rechub with its data loader and trainer's step, both with tables of
  52,000 rows, since it changes every row of its tables in every step.

How it is measured is as in `spine`: both sides are started and run a window that is thrown away, then windows
alternate, and the side that waits has no work. A window of ours ends when the servers have committed its last
step. A peer that is not installed is left out, and said.

`RAYREC_BENCH_ROWS` makes the tables smaller, for a look at the benchmark itself.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.ctr_data import NUM_COLUMNS, NUM_NUMBERS, CtrData, all_rows, make
from benchmarks.ctr_peers import CROSS_LAYERS, PEERS, PeerSettings
from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import MEMORY, SETTLE_S, PeerProcess, steps_per_second
from benchmarks.spine import PipelineWindows, running
from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.console import log
from rayrec.platform.devices import HOST
from rayrec.platform.processors import num_processors
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.impressions.dataset import ImpressionDataset

ROWS = 5_200_000
"""Of all tables together."""
FEW_ROWS = 52_000
"""The same for the peer that changes all of them in every step."""
SAMPLES = 1_000_000
BATCH, DIM = 4096, 16
BOTTOM, TOP = (512, 256, 64), (512, 256)
RATE, ROW_RATE = 1e-3, 0.02
THREADS = min(2, num_processors())


@dataclass(frozen=True)
class Against:
    """What a bar compares ours with: the fastest of some peers, each with each setting of memory."""

    module: str
    """Which has to be installed."""
    peers: tuple[str, ...]
    target: float


LARGE_TABLES = {
    "torchrec": Against("torchrec", ("torchrec, fused", "torchrec, plain"), 1.0),
    "keras": Against("tensorflow", ("keras",), 3.0),
}
DENSE_SHARE = 0.6
"""Of the rate of dense compute alone."""
BATCHES_AT_HAND = 16
SMALL_TABLES = {"rechub": Against("torch_rechub", ("torch-rechub",), 1.0)}

DLRM = {"name": "dlrm", "dim": DIM, "bottom_dims": BOTTOM, "hidden_dims": TOP}
DCN = {
    "name": "dcn_v2",
    "dim": DIM,
    "num_cross_layers": CROSS_LAYERS,
    "structure": "parallel",
    "hidden_dims": TOP,
}


def bench(options: BenchOptions) -> list[Bar]:
    large, small = _installed(LARGE_TABLES), _installed(SMALL_TABLES)
    num_rows = options.rows or ROWS
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        bars += _bars(Path(folder) / "large", num_rows, DLRM, options, large, dense=True)
        if small:
            bars += _bars(Path(folder) / "small", min(num_rows, FEW_ROWS), DCN, options, small)
    return bars


def _installed(bars: dict[str, Against]) -> dict[str, Against]:
    """The bars whose peers are there; of the others it is said."""
    there = {name: bar for name, bar in bars.items() if importlib.util.find_spec(bar.module) is not None}
    for name in bars.keys() - there.keys():
        log.print(f"ctr-{name}: {bars[name].module} is not installed; the bar is left out")
    return there


def _bars(
    folder: Path,
    num_rows: int,
    model: dict[str, Any],
    options: BenchOptions,
    wanted: dict[str, Against],
    dense: bool = False,
) -> list[Bar]:
    """
    Args:
        dense: whether ours is compared with its dense part as well.
    """
    log.print(f"ctr: drawing {SAMPLES:,} impressions with {num_rows:,} ids")
    data = make(folder, SAMPLES, num_rows // NUM_COLUMNS)
    assembly = assemble(_config(data, model))
    with _running(assembly, data, folder) as stages:
        ours = PipelineWindows(stages, assembly.config, options.steps)
        bars = [_bar(name, against, ours, data, options) for name, against in wanted.items()]
        if dense:
            args = (assembly.config.model_dump(mode="json", exclude_none=True),)
            alone = PeerProcess(_dense_windows, args, settle_s=SETTLE_S)
            ratios = ours.against(alone, options, partial(_show, "dense", "dense compute alone"))
            bars.append(Bar.of("ctr-dense", ratios, f"our dense compute, {THREADS} threads", DENSE_SHARE))
        return bars


WINDOWS_TO_CHOOSE_BY = 3


def _best_of(against: Against, data: CtrData, num_steps: int) -> tuple[str, str]:
    """(Peer, memory) of the highest rate."""
    candidates = [(name, memory) for name in against.peers for memory in MEMORY]
    rates: dict[tuple[str, str], float] = {}
    for name, memory in candidates:
        peer = _peer(name, memory, data)
        try:
            peer.rate(num_steps)  # thrown away
            rates[name, memory] = statistics.median(peer.rate(num_steps) for _ in range(WINDOWS_TO_CHOOSE_BY))
        finally:
            peer.stop()
        log.print(f"{name}, {memory}: {rates[name, memory] * BATCH:,.0f} samples/s", highlight=False)
    return max(rates, key=rates.__getitem__)


def _bar(bar: str, against: Against, ours: PipelineWindows, data: CtrData, options: BenchOptions) -> Bar:
    name, memory = _best_of(against, data, options.steps)
    ratios = ours.against(_peer(name, memory, data), options, partial(_show, bar, name))
    return Bar.of(f"ctr-{bar}", ratios, f"{name}, {memory}, {THREADS} threads", against.target)


def _show(bar: str, peer: str, ours: float, theirs: float) -> None:
    rates = f"{ours * BATCH:,.0f} samples/s, {peer} {theirs * BATCH:,.0f}"
    log.print(f"ctr-{bar}: {rates}, ratio {ours / theirs:.3f}", highlight=False)


def _peer(name: str, memory: str, data: CtrData) -> PeerProcess:
    args = (name, asdict(peer_settings(data)))
    return PeerProcess(_windows, args, MEMORY[memory], SETTLE_S)


def _windows(name: str, settings: dict[str, Any]) -> Callable[[int], float]:
    torch.set_num_threads(THREADS)
    return steps_per_second(PEERS[name](PeerSettings(**settings)))


def _dense_windows(config: dict[str, Any]) -> Callable[[int], float]:
    torch.set_num_threads(THREADS)
    return steps_per_second(_dense_losses(RunConfig.parse(config)))


def _dense_losses(config: RunConfig) -> Iterator[float]:
    """Forward, backward and the step of the optimizer; rows and their gradients go nowhere."""
    assembly = assemble(config, checksums=False)
    dims = {table.name: table.dim for table in assembly.tables}
    placement = ProgramPlacement(HOST.torch, config.seed)
    program = assembly.task.program(assembly.dense_optimizer()).build(placement)
    random = np.random.default_rng(config.seed)
    data = ImpressionDataset.open(config.data.path, checksums=False)
    file = pq.ParquetFile(data.root / data.train_files[0])
    at_hand = []
    some = islice(file.iter_batches(BATCH, columns=assembly.rows.columns.names), BATCHES_AT_HAND)
    for step, rows in enumerate(some):
        (batch,) = assembly.features.training(step, RowBatch(np.arange(len(rows)), rows))
        looked_up = {
            table: random.normal(scale=0.01, size=(len(ids.ids_M), dims[table])).astype(np.float32)
            for table, ids in batch.lookups.items()
        }
        at_hand.append((batch, looked_up))
    for batch, looked_up in cycle(at_hand):
        yield program.backward(batch, looked_up).loss_sum
        program.update()


def peer_settings(data: CtrData) -> PeerSettings:
    return PeerSettings(
        train=data.numbered / "train.parquet",
        num_columns=NUM_COLUMNS,
        num_numbers=NUM_NUMBERS,
        ids_per_column=data.ids_per_column,
        batch_size=BATCH,
        dim=DIM,
        bottom_dims=BOTTOM,
        hidden_dims=TOP,
        learning_rate=RATE,
        row_learning_rate=ROW_RATE,
    )


def _config(data: CtrData, model: dict[str, Any]) -> RunConfig:
    return RunConfig.parse(
        {
            "data": {"path": str(data.dataset.root)},
            "model": model,
            "sparse": {
                "num_servers": 1,
                "optimizer": {"kind": "rowwise_adagrad", "lr": ROW_RATE},
                "init_scale": 0.01,
            },
            "pipeline": {"trainer_threads": THREADS},
            "training": {
                "batch_size": BATCH,
                "epochs": 1000,
                "optimizer": {"learning_rate": RATE},
                "schedule": {"warmup_steps": 0},
            },
            "cluster": {"dashboard": False},
        }
    )


@contextmanager
def _running(assembly: Assembly, data: CtrData, folder: Path) -> Iterator[Stages]:
    """The actors of a run, whose servers have a row for every id."""
    (table,) = assembly.tables
    files = all_rows(data, table, folder)
    with running(assembly) as stages:
        # As rows that another run begins with: this one has committed no step.
        loading = [server.load.remote([files], -1, 1, weights_only=True) for server in stages.servers]
        stages.watch.get(loading, may_take_long=True)
        state = [(trainer.dense_weights.remote(), trainer) for trainer in stages.trainers]
        stages.watch.get([trainer.load.remote(weights, None, 1) for weights, trainer in state])
        yield stages
