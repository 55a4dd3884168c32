"""Does what is trained recommend well? Whole runs on Amazon Beauty, evaluated on every user.

Leave-one-out, the whole catalogue ranked, items of the history left out (nobody has one twice there).
The data set is prepared and, for the generative model, tokenized beforehand, as the head of each config
says. A bar's value is a metric of the test split, its lower bound that of the bootstrap over users; its
target is a published figure, or one that a plain program reaches, so there is nothing to take turns with.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness import Bar, BenchOptions
from rayrec.pipelines.config import RunConfig
from rayrec.pipelines.evaluate import MODEL, POPULARITY, evaluate
from rayrec.pipelines.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log, progress_bar

METRIC = "recall@10"
POPULAR_ITEMS = "the most popular items"


def sasrec(options: BenchOptions) -> list[Bar]:
    return _bars(
        "beauty-sasrec", options, "SASRec with cross-entropy, a good run of a plain program", target=0.083
    )


def generative(options: BenchOptions) -> list[Bar]:
    return _bars("beauty-generative", options, "TIGER as published (0.0648)", target=0.065)


def _bars(name: str, options: BenchOptions, peer: str, target: float) -> list[Bar]:
    bar, over_popularity = f"{name}-{METRIC}", f"{name}-over-popularity"
    data = options.data or CHECKOUT / "data" / "beauty"
    if not data.is_dir():
        log.print(f"{name}: {data} is missing; configs/{name}.yaml says how to make it")
        return [Bar.of(bar, [], peer, target), Bar.of(over_popularity, [], POPULAR_ITEMS, 1.0)]
    overrides = [f"data.path={data}", "cluster.dashboard=false"]
    config = RunConfig.load(CHECKOUT / "configs" / f"{name}.yaml", overrides)
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        run = Path(folder) / "run"
        with progress_bar("train") as progress:
            result = train(config, run, on_step=lambda done, total, _: progress(done, total))
        log.print(f"{name}: {result.steps:,} steps in {result.training_s / 60:.1f} minutes of training")
        with progress_bar("evaluate") as progress:
            report = evaluate(run, on_batch=progress)
    ours, popularity = report.results[MODEL][METRIC], report.results[POPULARITY][METRIC]
    return [
        Bar(bar, ours.value, ours.low, peer, target, ours.low >= target),
        # The least favourable ratio of the two intervals, which is a bound below theirs.
        Bar(
            over_popularity,
            ours.value / popularity.value,
            ours.low / popularity.high,
            POPULAR_ITEMS,
            1.0,
            ours.low > popularity.high,
        ),
    ]
