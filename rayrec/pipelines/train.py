"""`rayrec train`: a config in, a run folder with snapshots out.

train ─► assemble ─► ray_cluster ─► running_stages ─► TrainingRun.run
                                                        └► TrainingPipeline.run   (the inner loop)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from rayrec.pipelines.assembly import Assembly, assemble, check_snapshot, check_split
from rayrec.pipelines.config import RunConfig
from rayrec.pipelines.ranking_metrics import Estimate, summarise
from rayrec.pipelines.run_folder import RunFolder
from rayrec.pipelines.snapshots import read_snapshot, write_snapshot
from rayrec.pipelines.stages import Stages, running_stages
from rayrec.pipelines.training_pipeline import TrainingPipeline
from rayrec.pipelines.validation import validate
from rayrec.platform.cluster import ray_cluster
from rayrec.platform.metrics import RayRunMetrics
from rayrec.platform.ray_errors import root_cause

logger = logging.getLogger(__name__)

OnStep = Callable[[int, int, float], None]
"""Called with (steps done, steps of the whole run, loss) after every step."""

METRICS_EVERY_STEPS = 20
NO_PROGRESS = {"best_value": None, "best_step": -1, "stale": 0, "loss": None}


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    run: str
    steps: int
    epochs: float
    final_loss: float
    """Loss of the last step; equal for equal seeds in mode `sync`."""
    best_metric: str
    best_value: float
    best_step: int
    training_s: float
    """Seconds spent in training steps of this call, validation and start-up left out."""
    steps_per_s: float
    stages: dict[str, float]


def train(
    config: RunConfig, run: str | Path, resume: bool = False, on_step: OnStep | None = None
) -> TrainingResult:
    """Train a model as the config says.

    Args:
        run: folder of the run; new or empty, unless it is resumed.
        resume: continue the run that the folder holds from its last snapshot.

    Raises:
        InputError: the config, the data or the folder cannot be used; nothing was started.
        Exception: a stage's own error, after every actor has been stopped.
    """
    config = config.with_absolute_paths()
    assembly = assemble(config)
    check_split(assembly.dataset, "valid")
    _ = assembly.plan  # footers are read before anything starts
    path = Path(run)
    folder = RunFolder.resume(path, config) if resume else RunFolder.create(path, config)
    try:
        with (
            ray_cluster(config.cluster, config.cpus_needed),
            running_stages(folder.name, assembly) as stages,
        ):
            result = TrainingRun(assembly, folder, stages, on_step).run()
    except KeyboardInterrupt:
        folder.update(state="stopped", error="interrupted")
        raise
    except Exception as error:
        cause = root_cause(error)
        folder.update(state="failed", error=f"{type(cause).__name__}: {cause}")
        if cause is error:
            raise
        raise cause from error
    folder.update(state="finished", error=None, result=asdict(result))
    return result


class TrainingRun:
    """Alternates between training and validation until epochs or patience run out."""

    def __init__(self, assembly: Assembly, folder: RunFolder, stages: Stages, on_step: OnStep | None) -> None:
        self._assembly = assembly
        self._config = assembly.config
        self._plan = assembly.plan
        self._folder = folder
        self._stages = stages
        self._on_step = on_step
        self._pipeline = TrainingPipeline(stages, self._config.pipeline.queue_depth)
        self._metrics = RayRunMetrics(folder.name)
        self._metric = f"{self._config.evaluation.metric}@10"
        self._total_steps = self._config.training.epochs * self._plan.steps_per_epoch
        self._training_s = 0.0
        self._counts: dict[str, int] = {}

    def run(self) -> TrainingResult:
        first_step = step = self._restore()
        progress = self._folder.state.get("progress") or dict(NO_PROGRESS)
        period = self._config.evaluation.every_epochs * self._plan.steps_per_epoch
        patience = self._config.evaluation.patience
        while step < self._total_steps and not (patience and progress["stale"] >= patience):
            stop = min(self._total_steps, (step // period + 1) * period)
            period_loss = self._train(step, stop)
            step = stop
            summary = summarise(validate(self._stages, self._assembly))
            progress = {**self._judge(progress, summary, step), "loss": self._loss}
            self._snapshot(step, progress)
            self._record(step, period_loss, summary)
        training_s = max(self._training_s, 1e-9)
        return TrainingResult(
            run=str(self._folder.path),
            steps=step,
            epochs=step / self._plan.steps_per_epoch,
            final_loss=progress["loss"],
            best_metric=self._metric,
            best_value=progress["best_value"],
            best_step=progress["best_step"],
            training_s=self._training_s,
            steps_per_s=(step - first_step) / training_s,
            stages=self._stages.stats().summary(),
        )

    def _train(self, first: int, stop: int) -> float:
        """Returns the mean loss per target over these steps."""
        started = time.perf_counter()
        loss_sum, num_targets = 0.0, 0
        for result in self._pipeline.run(first, stop):
            self._loss = result.loss
            loss_sum += result.loss * result.num_targets
            num_targets += result.num_targets
            for reason, count in result.counts.items():
                self._counts[reason] = self._counts.get(reason, 0) + count
            if self._on_step is not None:
                self._on_step(result.step + 1, self._total_steps, result.loss)
            if (result.step + 1) % METRICS_EVERY_STEPS == 0:
                self._metrics.publish(
                    {
                        "loss": result.loss,
                        "step": result.step + 1,
                        "progress_percent": 100.0 * (result.step + 1) / self._total_steps,
                    }
                )
        self._training_s += time.perf_counter() - started
        return loss_sum / max(num_targets, 1)

    def _judge(self, progress: dict[str, Any], summary: dict[str, Estimate], step: int) -> dict[str, Any]:
        value, best = summary[self._metric].value, progress["best_value"]
        if best is None or value > best:
            return {**progress, "best_value": value, "best_step": step, "stale": 0}
        return {**progress, "stale": progress["stale"] + 1}

    def _record(self, step: int, loss: float, summary: dict[str, Estimate]) -> None:
        stages = self._stages.stats().summary()
        figures = {name: estimate.value for name, estimate in summary.items()}
        epoch = step / self._plan.steps_per_epoch
        self._folder.log(
            {
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "training_s": self._training_s,
                "valid": figures,
                "stages": stages,
                "dropped": self._counts,
            }
        )
        self._metrics.publish(
            {"valid_" + name.replace("@", "_at_"): value for name, value in figures.items()}
        )
        logger.info(
            "epoch %g of %d: loss %.4f, valid recall@10 %.4f, ndcg@10 %.4f, %.0f s of training",
            epoch,
            self._config.training.epochs,
            loss,
            figures["recall@10"],
            figures["ndcg@10"],
            self._training_s,
        )

    def _snapshot(self, step: int, progress: dict[str, Any]) -> None:
        path = self._folder.snapshot_path(step)
        first_trainer = self._stages.trainers[0]  # all hold the same dense weights
        registry = self._assembly.registry
        dense: list[Any] = [
            first_trainer.dense_weights.remote(),
            first_trainer.dense_optimizer_state.remote(),
        ]
        weights, optimizer_state = ray.get(dense)
        write_snapshot(
            path,
            committed_step=step - 1,
            dataset_fingerprint=self._assembly.dataset.fingerprint,
            semantic_ids_version=None if registry is None else registry.version,
            weights=weights,
            optimizer_state=optimizer_state,
            save_sparse=self._save_sparse,
        )
        best = path.name if progress["best_step"] == step else self._folder.state["best"]
        # One write: a run that is killed here resumes with the progress that belongs to its snapshot.
        self._folder.update(last=path.name, best=best, progress=progress)
        self._folder.keep_only({path.name, best})

    def _save_sparse(self, folder: str) -> list[str]:
        names: list[list[str]] = ray.get([server.save.remote(folder) for server in self._stages.servers])
        return [name for names_of_server in names for name in names_of_server]

    def _restore(self) -> int:
        """Take over the last snapshot, if there is one; returns the first step to train."""
        if self._folder.state["last"] is None:
            return 0
        snapshot = read_snapshot(self._folder.chosen_snapshot("last"))
        check_snapshot(snapshot, self._assembly)
        files = [str(path.resolve()) for path in snapshot.sparse_files]
        incarnations: list[int] = ray.get(
            [server.load.remote(files, snapshot.committed_step) for server in self._stages.servers]
        )
        weights, optimizer_state = ray.put(snapshot.weights), ray.put(snapshot.optimizer_state)
        ray.get(
            [
                trainer.load.remote(weights, optimizer_state, incarnations[0])
                for trainer in self._stages.trainers
            ]
        )
        return snapshot.committed_step + 1
