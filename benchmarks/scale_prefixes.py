"""What a step of the prefix decoder costs a trainer where vectors of prefixes are rows of servers.

Codes are those of `scale-catalog`: three learned levels of 256, ten million items and some eight million
prefixes. Histories are drawn evenly, 32 rows of 50 events; 16 siblings of each prefix are sampled. Bars:

* `scale-prefixes-memory`: what vectors of the prefixes would take as weights of a trainer, with their
  gradients and AdamW's moments (16 bytes a number), over the memory by which a trainer's process grew while
  it built the network for ten million items and trained it.
* `scale-prefixes-step`: the processor's time of a step over a million items, over that of ten million:
  features, lookup, forward, backward and update, with one server in the process, one thread.

`RAYREC_BENCH_ROWS` sets the number of items, `RAYREC_BENCH_STEPS` the steps of a window.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode import LEVEL_SIZES
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.processes import resident_bytes
from benchmarks.scale_catalog import NUM_ITEMS, even_codes
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import AdamConfig, TableConfig
from rayrec.embeddings.lookup.lookups import SyncLookups, TrainerLink
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.generative.prefix_decoder_config import PrefixDecoderConfig
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.config import BackboneConfig
from rayrec.models.sequence.sequence_program import SequenceProgram, build_model
from rayrec.platform.arrays import Int64Array
from rayrec.platform.code_tree import CodeTree
from rayrec.platform.console import log
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.base.batches import FeatureBatch, SampleBatch
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.prefix_paths import PrefixPaths

NUM_ROWS, NUM_EVENTS, DIM, NUM_SIBLINGS, NUM_LEVELS = 32, 50, 64, 16, 3
LESS_MEMORY, SLOWER, SMALLER = 4.0, 1.5, 10
MEMORY_STEPS = 5


def bench(options: BenchOptions) -> list[Bar]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        num_items = options.rows or NUM_ITEMS
        return [_memory_bar(num_items), _step_bar(num_items, options)]
    finally:
        torch.set_num_threads(before)


def _memory_bar(num_items: int) -> Bar:
    codes_IL = even_codes(num_items).astype(np.int16)
    features = _features(codes_IL)
    batches = [features(_histories(num_items, step))[0] for step in range(MEMORY_STEPS)]
    num_prefixes = sum(len(codes) for codes in CodeTree.of(codes_IL[:, :NUM_LEVELS]).codes)
    del features
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
        np.save(Path(folder) / "codes.npy", codes_IL)
        taken = pool.apply(_trainer_memory, (Path(folder) / "codes.npy", batches))
    as_weights = 16 * DIM * num_prefixes
    log.print(
        f"{num_items:,} items, {num_prefixes:,} prefixes: {taken / 2**30:.2f} GiB in a trainer, "
        f"{as_weights / 2**30:.1f} GiB as its weights"
    )
    return Bar.once("scale-prefixes-memory", as_weights / taken, "vectors as weights", LESS_MEMORY)


def _trainer_memory(codes: Path, batches: list[FeatureBatch]) -> int:
    """Bytes that the process grew by at its peak; features are made elsewhere, rows come from servers."""
    torch.set_num_threads(1)
    before = resident_bytes(os.getpid())
    program = _program(np.load(codes))
    for batch in batches:
        rows_MD = np.zeros((len(batch.lookups["prefix"].ids_M), DIM), dtype=np.float32)
        program.backward(batch, {"prefix": rows_MD})
        program.update()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def _step_bar(num_items: int, options: BenchOptions) -> Bar:
    large, small = _step_of(num_items), _step_of(max(num_items // SMALLER, 1000))

    def rate(step: Callable[[], None]) -> float:
        started = time.process_time()
        for _ in range(options.steps):
            step()
        return options.steps / (time.process_time() - started)

    def show(large_rate: float, small_rate: float) -> None:
        log.print(
            f"a step: {1e3 / large_rate:.0f} ms of processor, {1e3 / small_rate:.0f} of the small catalog"
        )

    interleaved(lambda: rate(large), lambda: rate(small), 1)  # thrown away
    ratios = interleaved(lambda: rate(large), lambda: rate(small), options.pairs, show)
    return Bar.of("scale-prefixes-step", ratios, "a catalog of a tenth", 1 / SLOWER)


def _step_of(num_items: int) -> Callable[[], None]:
    codes_IL = even_codes(num_items).astype(np.int16)
    features, program = _features(codes_IL), _program(codes_IL)
    table = TableConfig(name="prefix", dim=DIM, init_scale=0.0, optimizer=AdamConfig())
    shard = EmbeddingShard((table,), shard=0, num_trainers=1)
    shard.begin(committed_step=-1, incarnation=0)
    lookups = SyncLookups(TrainerLink((table,), ShardMap(1), LocalTransport([shard])))
    numbers = iter(range(1 << 30))

    def step() -> None:
        number = next(numbers)
        (batch,) = features(_histories(num_items, number))
        gradients = program.backward(batch, lookups.rows(number, batch.lookups))
        lookups.update(number, batch.lookups, gradients.row_grads)
        program.update()

    return step


def _features(codes_IL: np.ndarray) -> SequenceFeatures:
    paths = PrefixPaths(codes_IL[:, :NUM_LEVELS], NUM_SIBLINGS, None, seed=0)
    return SequenceFeatures(np.arange(len(codes_IL)), max_length=NUM_EVENTS, tables=("prefix",), paths=paths)


def _program(codes_IL: np.ndarray) -> SequenceProgram:
    config = PrefixDecoderConfig(
        name="prefix_decoder",
        prefix_matrix="sparse",
        num_siblings=NUM_SIBLINGS,
        backbone=BackboneConfig(dim=DIM, max_length=NUM_EVENTS),
    )
    catalog = Catalog(len(codes_IL), codes_IL, LEVEL_SIZES[:NUM_LEVELS])
    settings = DenseOptimizerSettings(0.001, 0.0, RateSchedule(), max_grad_norm=None, fused=True)
    return SequenceProgram(build_model(config, catalog, seed=0), settings, torch.device("cpu"), seed=0)


def _histories(num_items: int, step: int) -> SampleBatch:
    items_N: Int64Array = np.random.default_rng([1, step]).integers(0, num_items, NUM_ROWS * (NUM_EVENTS + 1))
    return SampleBatch(
        step, np.arange(NUM_ROWS), np.arange(NUM_ROWS), items_N, np.arange(NUM_ROWS + 1) * (NUM_EVENTS + 1)
    )
