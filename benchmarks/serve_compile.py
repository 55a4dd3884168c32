"""What compiled ranking saves, and that no request waits for a compiler.

The generative model of `configs/movielens-generative.yaml` with random weights, over a catalog of the same
size: 1,682 items, three levels of 64 codes, histories of up to 100 events, 100 beams, every item of a history
left out of its answer. One thread. Bars:

* `serve-compile-1`, `serve-compile-8`: batches per second of a compiled program over eager ranking of the
  same batches, of so many rows. The batches are of random lengths, so what padding costs is in the figure.
* `serve-compile-unstalled`: of 10,000 requests of random lengths, the share that did not wait for a compiler.
  They begin without any program beyond those above, and ever other numbers of beams are asked for, so that
  new shapes keep coming; a process of the lowest priority compiles them meanwhile. A request counts as
  stalled if torch compiled anything in the process that answers, or if it took longer than `STALL_S`, while
  a program takes ten seconds and more to compile. Lines tell of latencies while an order was being filled
  and without.

`RAYREC_BENCH_STEPS` is the number of batches in a window, `RAYREC_BENCH_ROWS` that of the requests.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.compiled_ranking.buckets import Bucket, Buckets
from rayrec.models.compiled_ranking.job import RankingModel
from rayrec.models.compiled_ranking.packages import PackageFolders
from rayrec.models.compiled_ranking.ranking import CompiledPrograms, CompiledRanking
from rayrec.models.generative.config import PrefixDecoderConfig
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import SequenceProgram, build_model
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.base.batches import FeatureBatch, SampleBatch
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.features.features import SequenceFeatures
from rayrec.serve.engine.compilation import Compiler

NUM_ITEMS, LEVEL_SIZES = 1_682, (64, 64, 64)
MAX_LENGTH, BEAMS, K = 100, 100, 10
SIZES = (1, 8)
"""Rows of the batches that are compared."""
REQUESTS, WINDOWS = 10_000, 10
STALL_S = 1.0
NEW_SHAPE_EVERY = 500
"""Requests, after which another number of beams is asked for."""
PEER = "eager ranking"


def bench(options: BenchOptions) -> list[Bar]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _bars(options, Path(folder))
    finally:
        torch.set_num_threads(before)


def _bars(options: BenchOptions, folder: Path) -> list[Bar]:
    compiler = Compiler(PackageFolders([folder]))
    try:
        side = Ranked(compiler)
        for size in SIZES:
            side.rank(batch(np.random.default_rng(size), size, MAX_LENGTH), BEAMS)
        log.print(f"compiling the programs of {SIZES} rows")
        compiler.wait()
        bars = [_speed(side, size, options) for size in SIZES]
        compiler.give_way()
        return [*bars, _stalls(side, compiler, options.rows or REQUESTS)]
    finally:
        compiler.close()


class Ranked:
    """The model with and without its programs."""

    def __init__(self, compiler: Compiler) -> None:
        codes_IL = np.random.default_rng(0).permutation(np.prod(LEVEL_SIZES))[:NUM_ITEMS]
        codes_IL = np.stack(np.unravel_index(codes_IL, LEVEL_SIZES), axis=1)
        config = PrefixDecoderConfig.parse(
            {
                "name": "prefix_decoder",
                "backbone": {"dim": 64, "num_layers": 2, "num_heads": 2, "max_length": MAX_LENGTH},
                "beam_width": BEAMS,
            }
        )
        catalog = Catalog(NUM_ITEMS, codes_IL, LEVEL_SIZES)
        model = build_model(config, catalog, seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        self.program = SequenceProgram(
            model,
            DenseOptimizerSettings(0.001, 0.0, RateSchedule(), max_grad_norm=None, fused=True),
            torch.device("cpu"),
            seed=0,
        )
        self.programs = CompiledPrograms(
            RankingModel(config.model_dump(mode="json"), catalog),
            Buckets([1, 2, 4, 8], [32, 64, MAX_LENGTH]),
            compiler.order,
            torch.device("cpu"),
            threads=1,
        )
        self.compiled = CompiledRanking(self.programs, model)

    def rank(
        self, asked: tuple[FeatureBatch, Int64Array], max_beams: int, compiled: bool = True
    ) -> np.ndarray:
        self.program.compiled = self.compiled if compiled else None
        return self.program.rank(asked[0], {}, K, asked[1], max_beams).items_BK


FEATURES = SequenceFeatures(np.arange(NUM_ITEMS), max_length=MAX_LENGTH, tables=())


def batch(draws: np.random.Generator, num_rows: int, longest: int) -> tuple[FeatureBatch, Int64Array]:
    """Rows of random lengths, the first of the longest; and what is left out of their answers."""
    lengths_B = draws.integers(1, longest + 1, num_rows)
    lengths_B[0] = longest
    offsets_B1 = offsets_from_lengths(lengths_B)
    samples = SampleBatch(
        step=0,
        row_keys_B=np.arange(num_rows),
        user_ids_B=np.arange(num_rows),
        item_ids_N=draws.integers(0, NUM_ITEMS, offsets_B1[-1]),
        offsets_B1=offsets_B1,
    )
    return FEATURES.ranking(samples), FEATURES.seen(samples)


def _speed(side: Ranked, size: int, options: BenchOptions) -> Bar:
    name, draws = f"serve-compile-{size}", np.random.default_rng(size)
    if side.programs.of(Bucket(size, MAX_LENGTH, BEAMS)) is None:
        return Bar.of(name, [], f"{PEER}; no program could be compiled", 1.0)
    batches = [batch(draws, size, MAX_LENGTH) for _ in range(options.steps)]
    same = [(side.rank(each, BEAMS) == side.rank(each, BEAMS, compiled=False)).mean() for each in batches]
    log.print(f"{name}: {100 * np.mean(same):.2f} % of places have the same item")

    def rate(compiled: bool) -> float:
        began = time.perf_counter()
        for each in batches:
            side.rank(each, BEAMS, compiled)
        return len(batches) / (time.perf_counter() - began)

    def show(ours: float, eager: float) -> None:
        log.print(f"{name}: {1e3 / ours:.2f} ms a batch, eager {1e3 / eager:.2f} ms")

    return Bar.of(name, interleaved(lambda: rate(True), lambda: rate(False), options.pairs, show), PEER, 1.0)


@dataclass(frozen=True)
class Request:
    """How one was answered."""

    seconds: float
    was_compiled: bool
    beside_compiler: bool


def _stalls(side: Ranked, compiler: Compiler, num_requests: int) -> Bar:
    draws, before = np.random.default_rng(7), compilations_here()
    asked: list[Request] = []
    beams = itertools.chain([BEAMS], (BEAMS - 1 - number for number in itertools.count()))
    max_beams, compiled_before = BEAMS, compiler.num_compiled
    for number in range(num_requests):
        if number % NEW_SHAPE_EVERY == 0:
            max_beams = max(next(beams), K)
        one = batch(draws, 1, int(draws.integers(1, MAX_LENGTH + 1)))
        num_compiled, beside = side.compiled.answered["compiled"], compiler.is_busy
        began = time.perf_counter()
        side.rank(one, BEAMS if number % 2 else max_beams)
        seconds = time.perf_counter() - began
        asked.append(Request(seconds, side.compiled.answered["compiled"] > num_compiled, beside))
    compiled_here = compilations_here() - before
    for name, some in (
        ("beside the compiler", [each.seconds for each in asked if each.beside_compiler]),
        ("without", [each.seconds for each in asked if not each.beside_compiler]),
    ):
        if some:
            p50, p99, most = 1e3 * np.array([np.median(some), np.percentile(some, 99), max(some)])
            log.print(f"{len(some)} requests {name}: p50 {p50:.2f}, p99 {p99:.2f}, most {most:.1f} ms")
    log.print(
        f"{sum(each.was_compiled for each in asked)} of {len(asked)} requests ranked by programs; meanwhile "
        f"{len(side.programs.ready)} programs in use, {compiler.num_compiled - compiled_before} of them new, "
        f"{compiled_here} compilations in this process"
    )
    windows = np.array_split([compiled_here == 0 and each.seconds < STALL_S for each in asked], WINDOWS)
    peer = f"none that waits {STALL_S:g} s for a compiler"
    return Bar.of("serve-compile-unstalled", [float(window.mean()) for window in windows], peer, 1.0)


def compilations_here() -> int:
    """What torch's compilers counted in this process."""
    counted = 0
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        counted += sum(sum(utils.counters[part].values()) for part in ("stats", "aot_autograd", "inductor"))
    if (metrics := sys.modules.get("torch._inductor.metrics")) is not None:
        counted += metrics.generated_kernel_count
    return counted
