"""What users with thousands of events cost, with summaries of the old ones and without.

One network in three configs, untrained, for users of one data set; whole answers of `Recommender`, one request
at a time on one thread, with equal beams. Bars:

* `nearline-long-p50`: the median time of a user with as many events as are read one by one at least, over that
  of a user with 5,000 events whose summaries are there. The target is 1 / 1.15.
* `nearline-all-events`: how many times as long a user takes, of whom all 5,000 events are read, as one of whom
  the newest are.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.untrained import untrained_run
from rayrec.pipelines.inference.recommender import Query, Recommender
from rayrec.platform.console import log

MANY, NEWEST, CHUNK = 5_000, 256, 256
K, BEAMS, CALLS = 10, 20, 40
BACKBONE: dict[str, Any] = {"dim": 128, "num_layers": 2, "num_heads": 2, "feedforward_dim": 512}
LAZY: dict[str, Any] = {"name": "lazy_decoder", "beam_width": BEAMS}
LONG: dict[str, Any] = {"chunk_events": CHUNK, "summary_tokens": 8, "newest": NEWEST}


def bench(options: BenchOptions) -> list[Bar]:
    torch.set_num_threads(1)
    with (
        beauty_sized(options.data) as data,
        tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder,
    ):
        long = LAZY | {"backbone": BACKBONE, "long_history": LONG}
        whole = LAZY | {"backbone": BACKBONE | {"max_length": MANY}}
        summarizing = Recommender.load(untrained_run(Path(folder) / "long", data, long), "last")
        reading_all = Recommender.load(untrained_run(Path(folder) / "all", data, whole), "last")
        random, ids_I = np.random.default_rng(0), summarizing.dataset.items.ids_I
        many = [Query(random.choice(ids_I, MANY, replace=True)) for _ in range(CALLS)]
        newest = [replace(query, history_ids=query.history_ids[-NEWEST:]) for query in many]
        known = [
            replace(query, summaries=summaries)
            for query, summaries in zip(many, summarizing.summarize(many), strict=True)
        ]
        times = {
            "newest": lambda: _p50(summarizing, newest),
            "known": lambda: _p50(summarizing, known),
            "computed": lambda: _p50(summarizing, many),
            "all": lambda: _p50(reading_all, many[: CALLS // 8]),
        }
        found: dict[str, list[float]] = {name: [] for name in times}
        for _ in range(options.pairs):
            for name, measure in times.items():
                found[name].append(measure())
    for name, seconds in found.items():
        log.print(f"{name}: {1e3 * statistics.median(seconds):.2f} ms an answer", highlight=False)
    return [
        _bar("nearline-long-p50", found["newest"], found["known"], f"{NEWEST} events", 1 / 1.15),
        _bar("nearline-all-events", found["all"], found["newest"], f"{NEWEST} events", 5.0),
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
