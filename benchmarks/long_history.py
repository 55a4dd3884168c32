"""What users with thousands of events cost, with summaries of the old ones and without.

Untrained networks with equal beams; whole answers of `Recommender`, one at a time on one thread. Bars,
of the encoder-decoder and the lazy decoder:

* `nearline-long-p50`: the median time of a user with as many events as are read one by one at least, over
  that of a user with 5,000 events whose summaries are there. The target is 1 / 1.15.
* `nearline-all-events`: how many times as long a user takes, of whom all 5,000 events are read, as one of
  whom the newest are.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.untrained import untrained_run
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.console import log

MANY, NEWEST = 5_000, 256
K, BEAMS, CALLS = 10, 20, 40
BACKBONE: dict[str, Any] = {"dim": 128, "num_layers": 2, "num_heads": 2, "feedforward_dim": 512}
MODELS: dict[str, dict[str, Any]] = {
    # Its encoder is most of the work, and reads up to a chunk more than the newest events: short chunks.
    "encoder_decoder": {"chunk_events": 64, "summary_tokens": 2, "max_chunks": 128},
    "lazy_decoder": {"chunk_events": 256, "summary_tokens": 8},
}
"""And how they read long histories."""


def bench(options: BenchOptions) -> list[Bar]:
    torch.set_num_threads(1)
    with (
        beauty_sized(options.data) as data,
        tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder,
    ):
        return [bar for name in MODELS for bar in _bars(name, data, Path(folder), options)]


def _bars(name: str, data: Path, folder: Path, options: BenchOptions) -> list[Bar]:
    model = {"name": name, "beam_width": BEAMS, "backbone": BACKBONE}
    long = model | {"long_history": MODELS[name] | {"newest": NEWEST}}
    whole = model | {"backbone": BACKBONE | {"max_length": MANY}}
    summarizing = Recommender.load(untrained_run(folder / f"{name}-long", data, long), "last")
    reading_all = Recommender.load(untrained_run(folder / f"{name}-all", data, whole), "last")
    random, ids_I = np.random.default_rng(0), summarizing.dataset.items.ids_I
    many = [Query(random.choice(ids_I, MANY, replace=True)) for _ in range(CALLS)]
    newest = [replace(query, history_ids=query.history_ids[-NEWEST:]) for query in many]
    known = [
        replace(query, summaries=summaries)
        for query, summaries in zip(many, summarizing.summarize(many), strict=True)
    ]
    measured: dict[str, tuple[Recommender, Sequence[Query]]] = {
        "the newest events": (summarizing, newest),
        "all, old ones summarized before": (summarizing, known),
        "all, old ones summarized for it": (summarizing, many),
        "all, one by one": (reading_all, many[:2]),
    }
    found: dict[str, list[float]] = {what: [] for what in measured}
    for _ in range(options.pairs):
        for what, (recommender, queries) in measured.items():
            found[what].append(_p50(recommender, queries))
    for what, seconds in found.items():
        log.print(f"{name}: {what}: {1e3 * statistics.median(seconds):.2f} ms an answer", highlight=False)
    newest_s, known_s, _, all_s = found.values()
    return [
        _bar(f"nearline-long-p50-{name}", newest_s, known_s, f"{NEWEST} events", 1 / 1.15),
        _bar(f"nearline-all-events-{name}", all_s, newest_s, f"{NEWEST} events", 5.0),
    ]


def _bar(name: str, ours: Sequence[float], peer: Sequence[float], what: str, target: float) -> Bar:
    return Bar.of(name, [a / b for a, b in zip(ours, peer, strict=True)], what, target)


def _p50(recommender: Recommender, queries: Sequence[Query]) -> float:
    took = []
    for query in queries:
        began = time.perf_counter()
        recommender.answer([query], K)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
