"""How fast rows are looked up and trained: our table, by any 64-bit ids, against tables of numbered rows.

One batch is 100,000 ids of a Zipf law over the rows of the table, about 37,000 of them distinct, and no
batch comes twice: repeated ones would sit in the processor's cache. Ours starts from 64-bit ids that look
random and takes the path of training, with trainer and server in one process: `deduplicate`, as a feature
batch is made; `SyncLookups.rows`, which asks the shard for the rows of the distinct ids; `rows_of_ids`, which
gives every id of the batch its row; backward of [100,000, 64] gradients, which sums them per distinct id;
`SyncLookups.update`, for which the shard checks them and applies row-wise Adagrad. The peers do the same
work on row numbers, which somebody else had to assign, and without a server. Popular rows lie scattered
over the table, at the same positions on both sides. Bars, all of them ratios of ids per second:

* `sparse-fbgemm`: against `SplitTableBatchedEmbeddingBagsCodegen` of fbgemm, static, on the CPU, with
  EXACT_ROWWISE_ADAGRAD, at its best setting: one thread or two, no pooling or bags of one id (which
  give the same rows and are several times faster), and memory as the C library hands it out, or kept for
  the next batch, or kept and in huge pages. `sparse-fbgemm-as-installed`: the same with the C
  library's memory only, which is what a process gets unless its environment says otherwise.
* `sparse-fbgemm-ids`: against fbgemm where it starts from the same 64-bit ids as ours: they are made distinct
  and mapped to row numbers by our own functions, the fastest that we know, and without a server.
* `sparse-torch`: against `nn.Embedding(sparse=True)` and `torch.optim.Adagrad`, likewise.
* `sparse-gather`: our reading of 64 numbers from records of known rows, against the fastest gather that
  could be written here: the same loop over bare rows of 256 bytes. Rows drawn uniformly, all cold.
* `sparse-40m`: our table of four times the rows against itself; needs 17 GB of free memory.

Each peer runs in a process of its own, since the settings of its memory are read when a process starts;
it is idle while the other side is measured. Ours runs in a process whose environment sets nothing, as a
trainer does.

fbgemm is an optional peer, fbgemm-gpu-cpu==1.8.0; the extra `bench` of this package brings it.
`RAYREC_BENCH_ROWS` makes the table smaller, for a look at the benchmark itself.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numba import njit
from torch import Tensor

from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.peer_process import MEMORY, PeerProcess
from rayrec.embeddings.base.compiled import LANES, copy_lanes, prefetch_words
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.base.threads import in_parts
from rayrec.embeddings.config import RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.lookup.lookups import SyncLookups, TrainerLink
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.storage.index import IdMap
from rayrec.embeddings.storage.records import Records
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.console import log
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.hashing import mix64
from rayrec.platform.processors import num_processors
from rayrec.samples.base.batches import TableLookup

DIM = 64
BATCH = 100_000
EXPONENT = 1.05
"""Of the Zipf law: 37 % of a batch's ids are distinct among 10 M rows."""
ROWS = 10_000_000
LARGE = 4
"""How many times the rows the large table has."""
TARGETS = {"fbgemm": 1.2, "torch": 3.5, "gather": 0.60, "large": 0.70}
INSTALL_FBGEMM = "pip install '.[bench]', or fbgemm-gpu-cpu==1.8.0"

LR, EPS = 0.05, 1e-8


def bench(options: BenchOptions) -> list[Bar]:
    num_rows = options.rows or ROWS
    batches = Batches(num_rows, BATCH)
    return [
        *_training_bars(batches, options),
        _gather_bar(num_rows, options),
        _large_bar(batches, options),
    ]


# ---------------------------------------------------------------------------------------------- batches


class Batches:
    """Zipf ids that are not reused: batch k of a seed is the same for everyone who asks.

    Popularity rank r has the row `r * stride mod num_rows`, so that popular rows lie scattered, and the id
    `mix64(row)`, which looks random.
    """

    def __init__(self, num_rows: int, size: int, exponent: float = EXPONENT) -> None:
        self.num_rows = num_rows
        self.size = size
        self._stride = _coprime_stride(num_rows)
        weights_R = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
        self._cumulative_R = np.cumsum(weights_R, out=weights_R)

    def rows_N(self, batch: int) -> Int64Array:
        """[N] row numbers of a batch."""
        uniform_N = np.random.default_rng([0, batch]).random(self.size)
        ranks_N = np.searchsorted(self._cumulative_R, uniform_N * self._cumulative_R[-1])
        return (ranks_N * self._stride) % self.num_rows


def ids_of_rows(rows_N: Int64Array) -> Int64Array:
    return mix64(rows_N).view(np.int64)


def _coprime_stride(num_rows: int) -> int:
    """About num_rows over the golden ratio, and without a common divisor: multiples of it visit every row."""
    stride = int(num_rows * 0.6180339887) | 1
    while math.gcd(stride, num_rows) != 1:
        stride += 2
    return stride


# ------------------------------------------------------------------------------------------ both sides


class Trainable(Protocol):
    """Rows that a batch reads and changes."""

    def inputs(self, rows_N: Int64Array) -> Any:
        """What `step` is given for these rows; not timed."""
        ...

    def step(self, inputs: Any, grads_ND: Float32Array) -> None:
        """Look up [N, D] rows, then take their gradients."""
        ...


class Windows:
    """Timed windows of new batches, one after the other."""

    def __init__(self, table: Trainable, batches: Batches, num_steps: int) -> None:
        self._table = table
        self._batches = batches
        self._num_steps = num_steps
        self._next = itertools.count()
        # Three of them, or the gradients would come out of the cache.
        random = np.random.default_rng(1)
        self._grads = [
            random.standard_normal((batches.size, DIM), dtype=np.float32) * np.float32(1e-3) for _ in range(3)
        ]

    def rate(self, num_steps: int | None = None) -> float:
        """Ids per second over the next window."""
        num_steps = num_steps or self._num_steps
        inputs = [self._table.inputs(self._batches.rows_N(next(self._next))) for _ in range(num_steps)]
        started = time.perf_counter()
        for step, given in enumerate(inputs):
            self._table.step(given, self._grads[step % 3])
        return num_steps * self._batches.size / (time.perf_counter() - started)


class OurTable:
    """A trainer in mode `sync` and the one shard that it trains, in one process."""

    def __init__(self, num_rows: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.shard = filled_shard(num_rows, num_threads=num_threads)
        link = TrainerLink([_table(DIM)], ShardMap(1), LocalTransport([self.shard]))
        self._lookups = SyncLookups(link)

    def inputs(self, rows_N: Int64Array) -> Int64Array:
        return ids_of_rows(rows_N)

    def step(self, inputs: Int64Array, grads_ND: Float32Array) -> None:
        step = self.shard.committed_step + 1
        ids_M, inverse_N = deduplicate(inputs)
        lookups = {"item": TableLookup(ids_M, inverse_N, ids_M)}
        rows_MD = torch.from_numpy(self._lookups.rows(step, lookups)["item"]).requires_grad_()
        rows_of_ids(rows_MD, torch.from_numpy(inverse_N)).backward(torch.from_numpy(grads_ND))
        assert rows_MD.grad is not None
        self._lookups.update(step, lookups, {"item": rows_MD.grad.numpy()})


def _table(dim: int) -> TableConfig:
    return TableConfig(name="item", dim=dim, optimizer=RowwiseAdagradConfig(lr=LR, eps=EPS))


def filled_shard(num_rows: int, dim: int = DIM, num_threads: int = 1) -> EmbeddingShard:
    """A shard with rows 0 to num_rows - 1 of `ids_of_rows`, each updated once."""
    shard = EmbeddingShard([_table(dim)], shard=0, num_trainers=1, num_threads=num_threads)
    for step, first in enumerate(range(0, num_rows, BATCH)):
        ids_M = ids_of_rows(np.arange(first, min(first + BATCH, num_rows)))
        grads_MD = np.zeros((len(ids_M), dim), dtype=np.float32)
        shard.apply(UpdateTag(0, step, rank=0), {"item": (ids_M, grads_MD)})
    return shard


class TorchTable:
    """`nn.Embedding(sparse=True)` and `torch.optim.Adagrad`."""

    def __init__(self, num_rows: int) -> None:
        self._embedding = torch.nn.Embedding(num_rows, DIM, sparse=True)
        self._optimizer = torch.optim.Adagrad(self._embedding.parameters(), lr=LR, eps=EPS)

    def inputs(self, rows_N: Int64Array) -> Tensor:
        return torch.from_numpy(rows_N)

    def step(self, inputs: Tensor, grads_ND: Float32Array) -> None:
        self._optimizer.zero_grad()
        self._embedding(inputs).backward(torch.from_numpy(grads_ND))
        self._optimizer.step()


class FbgemmTable:
    """fbgemm's table batched embedding on the CPU, one table."""

    def __init__(self, num_rows: int, pooling: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self._module = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            pooling_mode={"no pooling": PoolingMode.NONE, "bags of one": PoolingMode.SUM}[pooling],
            learning_rate=LR,
            eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self._module.init_embedding_weights_uniform(-0.05, 0.05)
        self._offsets_N1 = torch.arange(BATCH + 1)

    def inputs(self, rows_N: Int64Array) -> Tensor:
        return torch.from_numpy(rows_N)

    def step(self, inputs: Tensor, grads_ND: Float32Array) -> None:
        self._module(inputs, self._offsets_N1).backward(torch.from_numpy(grads_ND))


class FbgemmOfIds:
    """fbgemm's table, and the map that tells it the row of every id."""

    def __init__(self, num_rows: int, pooling: str) -> None:
        self._table = FbgemmTable(num_rows, pooling)
        self._map = IdMap(num_rows)
        for first in range(0, num_rows, BATCH):
            rows_M = np.arange(first, min(first + BATCH, num_rows))
            self._map.assign(ids_of_rows(rows_M), rows_M)

    def inputs(self, rows_N: Int64Array) -> Int64Array:
        return ids_of_rows(rows_N)

    def step(self, inputs: Int64Array, grads_ND: Float32Array) -> None:
        ids_M, inverse_N = deduplicate(inputs)
        self._table.step(torch.from_numpy(self._map.find(ids_M)[inverse_N]), grads_ND)


# --------------------------------------------------------------------------------------- training bars


@dataclass(frozen=True)
class Setting:
    """One way to run a peer."""

    peer: str
    threads: int
    memory: str
    pooling: str = ""
    of_ids: bool = False
    """fbgemm only: it maps 64-bit ids to rows itself."""

    @property
    def name(self) -> str:
        peer = f"{self.peer} of ids" if self.of_ids else self.peer
        return ", ".join(filter(None, (peer, self.pooling, _threads_name(self.threads), self.memory)))


def settings(peer: str, memories: Sequence[str], of_ids: bool = False) -> list[Setting]:
    poolings = ("no pooling", "bags of one") if peer == "fbgemm" else ("",)
    return [
        Setting(peer, num_threads, memory, pooling, of_ids)
        for memory in memories
        for num_threads in range(1, _threads() + 1)
        for pooling in poolings
    ]


def _windows(setting: Setting, num_rows: int, num_steps: int) -> Callable[[int | None], float]:
    torch.set_num_threads(setting.threads)
    return Windows(_peer_table(setting, num_rows), Batches(num_rows, BATCH), num_steps).rate


def _peer_table(setting: Setting, num_rows: int) -> Trainable:
    if setting.peer == "torch":
        return TorchTable(num_rows)
    if setting.of_ids:
        return FbgemmOfIds(num_rows, setting.pooling)
    return FbgemmTable(num_rows, setting.pooling)


@contextmanager
def running(setting: Setting, num_rows: int, num_steps: int) -> Iterator[PeerProcess]:
    peer = PeerProcess(_windows, (setting, num_rows, num_steps), MEMORY[setting.memory])
    try:
        peer.rate(2)  # start-up and the first touch of what it reuses
        yield peer
    finally:
        peer.stop()


def best_setting(candidates: Sequence[Setting], num_rows: int) -> Setting:
    """The fastest by the median of five short windows."""
    rates = {}
    for setting in candidates:
        with running(setting, num_rows, num_steps=5) as peer:
            rates[setting] = statistics.median(peer.rate() for _ in range(5))
        log.print(f"sparse: {setting.name}: {rates[setting] / 1e6:.2f} M ids/s", highlight=False)
    return max(rates, key=lambda setting: rates[setting])


def _training_bars(batches: Batches, options: BenchOptions) -> list[Bar]:
    ours = _ours(batches, options)
    fbgemm, torch_target = TARGETS["fbgemm"], TARGETS["torch"]
    if importlib.util.find_spec("fbgemm_gpu") is None:
        missing = f"not installed: {INSTALL_FBGEMM}"
        names = ("sparse-fbgemm", "sparse-fbgemm-as-installed", "sparse-fbgemm-ids")
        bars = [Bar.of(name, [], missing, fbgemm) for name in names]
    else:
        bars = [
            _peer_bar("sparse-fbgemm", ours, settings("fbgemm", list(MEMORY)[1:]), batches, options, fbgemm),
            _peer_bar(
                "sparse-fbgemm-as-installed",
                ours,
                settings("fbgemm", ["as installed"]),
                batches,
                options,
                fbgemm,
            ),
            _peer_bar(
                "sparse-fbgemm-ids",
                ours,
                settings("fbgemm", list(MEMORY)[1:], of_ids=True),
                batches,
                options,
                fbgemm,
            ),
        ]
    everything = settings("torch", list(MEMORY))
    return [*bars, _peer_bar("sparse-torch", ours, everything, batches, options, torch_target)]


def _ours(batches: Batches, options: BenchOptions) -> Windows:
    """Our side, at its best number of threads, likewise."""
    rates = {}
    for num_threads in range(1, _threads() + 1):
        windows = Windows(OurTable(batches.num_rows, num_threads), batches, num_steps=5)
        windows.rate(2)
        rates[num_threads] = statistics.median(windows.rate() for _ in range(5))
        log.print(f"sparse: ours, {_threads_name(num_threads)}: {rates[num_threads] / 1e6:.2f} M ids/s")
        del windows  # before the next one takes as much memory
    best = max(rates, key=lambda num_threads: rates[num_threads])
    return Windows(OurTable(batches.num_rows, best), batches, options.steps)


def _peer_bar(
    name: str,
    ours: Windows,
    candidates: Sequence[Setting],
    batches: Batches,
    options: BenchOptions,
    target: float,
) -> Bar:
    setting = best_setting(candidates, batches.num_rows)
    with running(setting, batches.num_rows, options.steps) as peer:
        ratios = _ratios(name, "M ids/s", ours.rate, peer.rate, options)
    return Bar.of(name, ratios, setting.name, target)


def _ratios(
    name: str, unit: str, ours: Callable[[], float], peer: Callable[[], float], options: BenchOptions
) -> list[float]:
    def show(a: float, b: float) -> None:
        log.print(f"{name}: {a / 1e6:.2f} {unit}, peer {b / 1e6:.2f}, ratio {a / b:.3f}", highlight=False)

    interleaved(ours, peer, repeats=1)  # thrown away
    return interleaved(ours, peer, options.pairs, show)


# ---------------------------------------------------------------------------------------------- gather


def _gather_bar(num_rows: int, options: BenchOptions) -> Bar:
    threads = _threads()
    ours, bare = RecordReader(num_rows, threads), BareReader(num_rows, threads)
    random = np.random.default_rng(2)

    def window(read: Callable[[Int64Array], None]) -> Callable[[], float]:
        def rate() -> float:
            draws = [random.integers(num_rows, size=BATCH) for _ in range(options.steps)]
            started = time.perf_counter()
            for rows_N in draws:
                read(rows_N)
            return options.steps * BATCH / (time.perf_counter() - started)

        return rate

    ratios = _ratios("sparse-gather", "M rows/s", window(ours.read), window(bare.read), options)
    peer = f"prefetching loop over bare rows in huge pages, {_threads_name(threads)}"
    return Bar.of("sparse-gather", ratios, peer, TARGETS["gather"])


class RecordReader:
    """Reads weights as a table does whose rows are known."""

    def __init__(self, num_rows: int, num_threads: int) -> None:
        self._operations = RowOperations(TableConfig(name="item", dim=DIM), num_threads)
        self._records = Records(self._operations.num_words)
        self._records.reserve(num_rows)
        # Pages that nobody has written to would all be the one page of zeros.
        for first in range(0, num_rows, BATCH):
            rows_M = np.arange(first, min(first + BATCH, num_rows))
            self._records.write(rows_M, 0, self._operations.new_records(rows_M))
        self._out_ND = batch_memory(BATCH, DIM)

    def read(self, rows_N: Int64Array) -> None:
        self._operations.gather(self._records, rows_N, rows_N, self._out_ND)


class BareReader:
    """What a gather could do at best: rows of 256 bytes in huge pages, asked for early, one output reused."""

    def __init__(self, num_rows: int, num_threads: int) -> None:
        self._num_threads = num_threads
        self._rows_RD = batch_memory(num_rows, DIM)
        self._rows_RD.fill(1.0)
        self._out_ND = batch_memory(BATCH, DIM)

    def read(self, rows_N: Int64Array) -> None:
        base = np.uint64(self._rows_RD.ctypes.data)
        in_parts(
            self._num_threads,
            len(rows_N),
            lambda first, last: _gather_bare(base, rows_N[first:last], self._out_ND[first:last]),
        )


def batch_memory(num_rows: int, dim: int) -> Float32Array:
    """[num_rows, dim] of whole cache lines, in huge pages."""
    memory = mmap.mmap(-1, max(1, num_rows * dim * 4), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32, count=num_rows * dim).reshape(num_rows, dim)


@njit(nogil=True, cache=True)
def _gather_bare(base: np.uint64, rows_N: Int64Array, out_ND: Float32Array) -> None:
    ahead, row_bytes = 24, 4 * DIM
    out = np.uint64(out_ND.ctypes.data)
    for n in range(len(rows_N)):
        if n + ahead < len(rows_N):
            prefetch_words(base + np.uint64(rows_N[n + ahead] * row_bytes), DIM)
        source, target = base + np.uint64(rows_N[n] * row_bytes), out + np.uint64(n * row_bytes)
        for offset in range(0, row_bytes, 4 * LANES):
            copy_lanes(target + np.uint64(offset), source + np.uint64(offset))


# --------------------------------------------------------------------------------------- a large table


def _large_bar(batches: Batches, options: BenchOptions) -> Bar:
    name, peer = "sparse-40m", f"our table of {batches.num_rows:,} rows"
    num_rows = LARGE * batches.num_rows
    if (needed := 420 * num_rows) > (free := _available_bytes()):
        log.print(f"{name}: needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free: not measured")
        return Bar.of(name, [], peer, TARGETS["large"])
    threads = _threads()
    small = Windows(OurTable(batches.num_rows, threads), batches, options.steps)
    large = Windows(OurTable(num_rows, threads), Batches(num_rows, BATCH), options.steps)
    return Bar.of(name, _ratios(name, "M ids/s", large.rate, small.rate, options), peer, TARGETS["large"])


def _threads() -> int:
    return min(2, num_processors())


def _threads_name(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
