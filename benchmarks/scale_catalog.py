"""What a catalog of ten million items costs who serves it: until it is there, and for each request.

Codes are three levels of 256 and a digit, drawn evenly: 16.8 million tuples, of which a third have an item,
and some several. Bars:

* `scale-catalog-load`: 5 s over the processor's seconds to read and verify the saved registry, whose ids
  ascend as those of a data set do, and to make the trie of it; the files are in the page cache.
* `scale-catalog-beam`: the time of a beam of 50 over a catalog of 12,101 items, over that of ten million: the
  same network (4 layers of width 256, random weights), the same lengths of histories, one thread, one
  history at a time.

`RAYREC_BENCH_ROWS` sets the number of items, `RAYREC_BENCH_STEPS` the histories of a window.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode import LEVEL_SIZES, HistoryDraws, Ours, recommender, synthetic_codes
from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log

NUM_ITEMS, LOAD_S, SLOWER = 10_000_000, 5.0, 1.5


def bench(options: BenchOptions) -> list[Bar]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        codes_IL = even_codes(options.rows or NUM_ITEMS)
        return [_load_bar(codes_IL, options.pairs), _beam_bar(codes_IL, options)]
    finally:
        torch.set_num_threads(before)


def even_codes(num_items: int) -> Int64Array:
    """[I, L] codes in the order of the catalog, which is not theirs."""
    random = np.random.default_rng(0)
    tuple_I = np.sort(random.integers(0, 256**3, num_items))
    starts_I = np.flatnonzero(np.diff(tuple_I, prepend=-1))
    digit_I = np.arange(num_items) - np.repeat(starts_I, np.diff(starts_I, append=num_items))
    assert digit_I.max() < LEVEL_SIZES[-1]
    codes_IL = np.stack([tuple_I >> 16, tuple_I >> 8 & 255, tuple_I & 255, digit_I], axis=1)
    return codes_IL[random.permutation(num_items)]


def _load_bar(codes_IL: Int64Array, repeats: int) -> Bar:
    CodeTrie.from_codes(codes_IL[:100])  # kernels are loaded
    item_ids_I = 7 * np.arange(len(codes_IL)) + 1
    registry = SemanticIdRegistry(
        item_ids_I, codes_IL.astype(np.int16), LEVEL_SIZES, 3, "append_digit", "drawn", "none"
    )
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        registry.save(Path(folder))
        for _ in range(repeats):
            started = time.process_time()
            CodeTrie.from_codes(SemanticIdRegistry.load(Path(folder)).codes_IL)
            ratios.append(LOAD_S / (time.process_time() - started))
            log.print(f"{len(codes_IL):,} items take {LOAD_S / ratios[-1]:.1f} s of processor")
    return Bar.of("scale-catalog-load", ratios, f"{LOAD_S:g} s of processor", 1.0)


def _beam_bar(codes_IL: Int64Array, options: BenchOptions) -> Bar:
    small_IL = synthetic_codes()
    large, small = (Ours(recommender(codes, LEVEL_SIZES), codes) for codes in (codes_IL, small_IL))
    draws = {id(large): HistoryDraws(len(codes_IL), 1), id(small): HistoryDraws(len(small_IL), 1)}

    def rate(side: Ours) -> float:
        histories = [draws[id(side)].draw(1) for _ in range(options.steps)]
        started = time.perf_counter()
        for history in histories:
            side.decode(history)
        return options.steps / (time.perf_counter() - started)

    def show(large_rate: float, small_rate: float) -> None:
        log.print(f"a beam: {1e3 / large_rate:.1f} ms, of the small catalog {1e3 / small_rate:.1f} ms")

    interleaved(lambda: rate(large), lambda: rate(small), 1)  # thrown away
    ratios = interleaved(lambda: rate(large), lambda: rate(small), options.pairs, show)
    return Bar.of("scale-catalog-beam", ratios, "a catalog of 12,101 items", 1 / SLOWER)
