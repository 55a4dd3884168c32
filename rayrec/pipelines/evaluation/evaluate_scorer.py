"""Evaluating a ranking model: every impression scored, beside the rate of training, with intervals."""

from __future__ import annotations

import numpy as np

from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport, OnBatch
from rayrec.pipelines.tasks.impressions import Scored, labeled_rows
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.impressions.dataset import ImpressionDataset

SCORED, TRAINING_RATE = "model", "rate of training"


def evaluate_scorer(
    scorer: Scorer,
    split: Split,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    on: ImpressionDataset | None = None,
) -> EvaluationReport:
    """Every impression of a split scored; `rate of training` says of each label how frequent it was there.

    Of several labels, each has a row of its own in the report: `model, like`.

    Args:
        on: a later data set of the same columns, whose split is taken instead of that of the run's own.

    Raises:
        InputError: the split has no impressions, or `on` is not such a data set.
    """
    manifest = scorer.task.dataset.manifest
    task = scorer.task if on is None else scorer.task.with_rows_of(on, split, scorer.run)
    task.check_split(split)
    rates_T = np.array(
        [
            manifest.positives[label]["train"] / max(manifest.known[label]["train"], 1)
            for label in scorer.labels
        ]
    )
    scored, constant = Scored(scorer.labels), Scored(scorer.labels)
    count, done = task.dataset.manifest.rows[split], 0
    for labeled in labeled_rows(task.dataset, task.schema, scorer.features, split, batch_size):
        predicted_BT = scorer.score(labeled.rows)
        scored.add(labeled, predicted_BT)
        constant.add(labeled, np.broadcast_to(rates_T, predicted_BT.shape))
        done += len(predicted_BT)
        if on_batch is not None:
            on_batch(done, count)
    return EvaluationReport(
        run=scorer.run,
        split=split,
        snapshot_step=scorer.committed_step + 1,
        count=count,
        results={
            name if len(scorer.labels) == 1 else f"{name}, {label}": figures
            for name, predictions in ((SCORED, scored), (TRAINING_RATE, constant))
            for label, figures in predictions.by_label().items()
        },
        unit="impressions",
    )
