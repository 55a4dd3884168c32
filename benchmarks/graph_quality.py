"""Neighbors without training on public data: recall, and what it costs on one core.

RAYREC_BENCH_DATA is a folder with the sources `amazon14-beauty` and `amazon14-sports`. They are prepared with
leave-one-out and shuffled ties; seen items are masked. Bars, of one setting for both:

* `graph-NAME-co-visitation`, `graph-NAME-swing`: recall@10 from training events alone, over its target.
* `graph-NAME-in-time`: that of co-visitation which knows all that was before each event, over its target.
* `graph-NAME-seconds`: 60 s over the CPU seconds of all of them, tables included.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Bar, BenchOptions
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_neighbors
from rayrec.pipelines.evaluation.lists import CO_VISITATION, CO_VISITATION_IN_TIME, SWING
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH
from rayrec.platform.console import log
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare

TARGETS = {
    "amazon14-beauty": {CO_VISITATION: 0.078, SWING: 0.075, CO_VISITATION_IN_TIME: 0.075},
    "amazon14-sports": {CO_VISITATION: 0.046, SWING: 0.057, CO_VISITATION_IN_TIME: 0.046},
}
SHORT = {CO_VISITATION: "co-visitation", SWING: "swing", CO_VISITATION_IN_TIME: "in-time"}


def bench(options: BenchOptions) -> list[Bar]:
    if options.data is None:
        raise InputError(f"set RAYREC_BENCH_DATA to the folder with {' and '.join(TARGETS)}")
    bars = []
    for name, targets in TARGETS.items():
        with TemporaryDirectory(prefix="rayrec-bench-") as folder:
            data = Path(folder) / "data"
            prepare(options.data / name, data, PrepareConfig(allow=frozenset({"duplicates"})))
            dataset = Dataset.open(data)
            evaluate_neighbors(dataset, "valid")  # compiles
            started = time.process_time()
            report = evaluate_neighbors(dataset, "test", depth=LIST_LENGTH)
            seconds = time.process_time() - started
        short = name.removeprefix("amazon14-")
        for method, target in targets.items():
            figures = report.results[method]
            recall, gain = figures["recall@10"].value, figures["ndcg@10"].value
            log.print(f"{short}, {method}: recall@10 {recall:.4f}, NDCG@10 {gain:.4f}", highlight=False)
            bars.append(
                Bar.once(f"graph-{short}-{SHORT[method]}", recall / target, f"recall@10 {target}", 1.0)
            )
        log.print(f"{short}: {seconds:.0f} CPU s", highlight=False)
        bars.append(Bar.once(f"graph-{short}-seconds", 60 / seconds, "60 s of one core", 1.0))
    return bars
