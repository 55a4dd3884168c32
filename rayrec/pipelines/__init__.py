"""Runs: settings and searches for them, training loop, snapshots, recovery, evaluation; models that answer.

    from rayrec.pipelines import RunConfig, train, in_process

May import `actors`, `samples`, `embeddings`, `models`, `platform`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.platform.lazy_names import lazy_names

if TYPE_CHECKING:
    from rayrec.pipelines.config.run import RunConfig as RunConfig
    from rayrec.pipelines.evaluation.evaluate import evaluate as evaluate
    from rayrec.pipelines.evaluation.lists import MODEL as MODEL
    from rayrec.pipelines.evaluation.lists import POPULARITY as POPULARITY
    from rayrec.pipelines.inference.answers import Query as Query
    from rayrec.pipelines.inference.recommender import Recommender as Recommender
    from rayrec.pipelines.inference.scorer import Scorer as Scorer
    from rayrec.pipelines.metrics.estimate import Estimate as Estimate
    from rayrec.pipelines.metrics.evaluation_report import EvaluationReport as EvaluationReport
    from rayrec.pipelines.runs.run_folder import RunFolder as RunFolder
    from rayrec.pipelines.runs.snapshots import read_snapshot as read_snapshot
    from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig as TokenizeConfig
    from rayrec.pipelines.semantic_ids.tokenization import tokenize as tokenize
    from rayrec.pipelines.tasks.features import registry_folder as registry_folder
    from rayrec.pipelines.training.placements import in_process as in_process
    from rayrec.pipelines.training.placements import on_ray as on_ray
    from rayrec.pipelines.training.progress import TrainingResult as TrainingResult
    from rayrec.pipelines.training.train import train as train
    from rayrec.pipelines.tuning.config import TuningConfig as TuningConfig
    from rayrec.pipelines.tuning.running import trials_here as trials_here
    from rayrec.pipelines.tuning.running import trials_on_ray as trials_on_ray
    from rayrec.pipelines.tuning.tune import TuningResult as TuningResult
    from rayrec.pipelines.tuning.tune import tune as tune

__all__, __getattr__ = lazy_names(__name__, __file__)
