"""`rayrec evaluate`: a trained model judged on a split that it was not trained on."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_neighbors, evaluate_recommender
from rayrec.pipelines.evaluation.evaluate_scorer import evaluate_scorer
from rayrec.pipelines.evaluation.lists import evaluation_name, neighbor_positions_path, positions_path
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.inference.writer import TextWriter
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport, OnBatch
from rayrec.pipelines.tasks.impressions import ImpressionTask
from rayrec.pipelines.tasks.language import LanguageTask
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_json
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.impressions.dataset import ImpressionDataset

logger = logging.getLogger(__name__)


def evaluate(
    run: str | Path,
    split: Split = "test",
    which: str = "best",
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    data: str | Path | None = None,
    ranking: RankingConfig | None = None,
    baselines: bool = True,
    max_users: int | None = None,
    depth: int | None = None,
    on: str | Path | None = None,
) -> EvaluationReport:
    """Rank the whole catalog for every user of a split, or score every impression, or judge every record of
    text; also written to the run's folder, beside the positions of each user's target.

    Args:
        data: where the run's data set lies now, if it was moved; or a later one, see `TrainedModel.load`.
        ranking: of recommenders, a ranking stage that is judged beside the model.
        baselines: of recommenders, judge neighbors as well.
        max_users: of recommenders, judge only so many users, a fixed sample; see `evaluate_recommender`.
        depth: of recommenders, items of each list; see `model_rankers`.
        on: of recommenders and ranking models, a later data set of the same log whose split is taken; see
            `evaluate_recommender` and `evaluate_scorer`.

    Raises:
        InputError: the run has no usable snapshot, the split has no users or impressions, the ranking model
            cannot rank for the run, or may have learned what is to be predicted, or `on` does not fit.
    """
    model = TrainedModel.load(run, which, data=data)
    fingerprint = None
    if isinstance(model.assembly.task, LanguageTask):
        if ranking is not None or max_users is not None or depth is not None or on is not None:
            raise InputError(
                f"{model.run} is a language model, which is judged on all its own records; leave a ranking "
                "stage, --max-users, --depth and --on out"
            )
        report = _of_writer(TextWriter(model), split, on_batch)
    elif isinstance(model.assembly.task, ImpressionTask):
        if ranking is not None:
            raise InputError(
                f"{model.run} is a ranking model itself; a ranking stage goes with a recommender"
            )
        if max_users is not None or depth is not None:
            raise InputError(
                f"{model.run} is a ranking model, which is judged on impressions; leave --max-users and "
                "--depth out"
            )
        later = None if on is None else ImpressionDataset.open(on)
        fingerprint = None if later is None else later.fingerprint
        report = evaluate_scorer(Scorer(model), split, batch_size, on_batch, later)
    else:
        if ranking is not None and on is not None:
            raise InputError(
                "a ranking stage is judged on the events of its own data set; leave it or --on out, or judge "
                "the ranking model alone on impressions of the later log"
            )
        events = None if on is None else Dataset.open(on)
        fingerprint = None if events is None else events.fingerprint
        if fingerprint == model.assembly.task.fingerprint != model.state.dataset_fingerprint:
            raise InputError(
                f"{model.run}: --data and --on both name {on}; leave --data out, to judge what the run "
                "answers without these events, or --on, to judge it with the new items, on all users"
            )
        recommender = Recommender(model)
        stage = None if ranking is None else RankingStage.load(recommender, ranking)
        report = evaluate_recommender(
            recommender, split, batch_size, on_batch, stage, baselines, max_users, depth, events
        )
    own, known = model.state.dataset_fingerprint, model.assembly.task.fingerprint
    if fingerprint == own:
        logger.warning("%s: was trained on %s itself; all users of the split are judged", model.run, on)
    grown = None if known == own else known
    if on is not None or grown is not None:
        report = replace(report, on=str(data if on is None else on))
    if report.ranking is not None and model.snapshot is not None:
        path = positions_path(run, split, model.snapshot.name, max_users, fingerprint, grown)
        report.ranking.positions.write(path)
        report = replace(report, positions_file=path.name)
    name = evaluation_name(split, max_users, fingerprint, grown)
    write_json(Path(run) / f"{name}.json", report.to_json())
    return report


def evaluate_data(
    data: str | Path,
    split: Split = "test",
    on_batch: OnBatch | None = None,
    max_users: int | None = None,
    depth: int | None = None,
) -> EvaluationReport:
    """Judge neighbors and popularity, which need no run; the positions are written into the data set's
    folder.

    Raises:
        InputError: there is no data set, or the split has no users.
    """
    dataset = Dataset.open(data)
    report = evaluate_neighbors(dataset, split, on_batch=on_batch, max_users=max_users, depth=depth)
    assert report.ranking is not None, "these rank items"
    path = neighbor_positions_path(dataset.root, split, max_users)
    try:
        report.ranking.positions.write(path)
    except OSError as error:  # data may be there to read alone, and the metrics are none the worse
        logger.warning("%s: the positions are not written: %s", path, error)
        return report
    return replace(report, positions_file=str(path.resolve()))


def _of_writer(writer: TextWriter, split: Split, on_batch: OnBatch | None) -> EvaluationReport:
    writer.task.check_split(split)
    count = writer.task.dataset.manifest.rows[split]
    figures, judged = writer.figures(split, None if on_batch is None else lambda done: on_batch(done, count))
    return EvaluationReport(
        writer.run,
        split,
        writer.committed_step + 1,
        count,
        {"model": figures},
        unit="records",
        not_whole=dict(judged.counts),
        num_judged=judged.num_judged,
    )
