"""Does what is trained recommend well? Whole runs of our configs, evaluated on every user of the test split.

Leave-one-out, the whole catalog ranked, items of the history left out. The data set is prepared and, for
generative models, tokenized beforehand, as the head of each config says. A bar's value is a metric, its
lower bound that of the bootstrap over users, its target a published figure or one that a plain program
reaches: there is nothing to take turns with. A second bar is the ratio to the most popular items.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness import Bar, BenchOptions
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL, POPULARITY
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log, progress_bar

METRIC = "recall@10"
POPULAR_ITEMS = "the most popular items"

TARGETS = {
    "beauty-sasrec": ("SASRec with cross-entropy, a good run of a plain program", 0.085),
    "beauty-hstu": ("HSTU as published: 0.065 to 0.071", 0.070),
    "beauty-generative": ("the best generative model that a plain program reached: 0.069", 0.078),
    "beauty-light": ("TIGER as published: 0.0648", 0.065),
}
"""By config, where there is one: whose recall it is held against, and what ours has to reach."""


def bench(name: str, options: BenchOptions) -> list[Bar]:
    """Train `configs/NAME.yaml` and evaluate it."""
    config = RunConfig.load(CHECKOUT / "configs" / f"{name}.yaml", ["cluster.dashboard=false"])
    data = options.data or CHECKOUT / config.data.path
    if not data.is_dir():
        log.print(f"{name}: {data} is missing; configs/{name}.yaml says how to make it")
        return _bars(name, None)
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(data)})})
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        run = Path(folder) / "run"
        with progress_bar("train") as progress:
            result = train(config, run, on_step=lambda done, total, _: progress(done, total))
        log.print(f"{name}: {result.steps:,} steps in {result.training_s / 60:.1f} minutes of training")
        with progress_bar("evaluate") as progress:
            return _bars(name, evaluate(run, on_batch=progress))


def _bars(name: str, report: EvaluationReport | None) -> list[Bar]:
    recall, ratio = f"{name}-{METRIC}", f"{name}-over-popularity"
    peer, target = TARGETS.get(name, (None, None))
    if report is None:
        missing = [Bar.of(ratio, [], POPULAR_ITEMS, 1.0)]
        return missing if peer is None else [Bar.of(recall, [], peer, target), *missing]
    ours, popular = report.results[MODEL][METRIC], report.results[POPULARITY][METRIC]
    # The worst that both intervals allow, hence a bound below that of the ratio.
    low = ours.low / popular.high
    bars = [Bar(ratio, ours.value / popular.value, low, POPULAR_ITEMS, 1.0, low >= 1.0)]
    if peer is not None:
        bars.insert(0, Bar(recall, ours.value, ours.low, peer, target, ours.low >= target))
    return bars
