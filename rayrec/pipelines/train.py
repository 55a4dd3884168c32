"""`rayrec train`: a config in, a run folder with snapshots out.

train ─► assemble ─► RunFolder ─► ray_cluster ─► running_stages ─► TrainingRun.run
                                                                   TrainingPipeline.run: the inner loop ◄┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from rayrec.embeddings.saved_files import SavedFile
from rayrec.models.program import DivergedError
from rayrec.pipelines.assembly import Assembly, assemble, check_continues, check_snapshot, check_split
from rayrec.pipelines.config import RunConfig
from rayrec.pipelines.memory_plan import plan_memory
from rayrec.pipelines.ranking_metrics import Estimate, summarise
from rayrec.pipelines.run_folder import RunFolder
from rayrec.pipelines.snapshots import Snapshot, read_snapshot, write_snapshot
from rayrec.pipelines.stages import Stages, running_stages
from rayrec.pipelines.training_pipeline import TrainingPipeline
from rayrec.pipelines.validation import validate
from rayrec.platform.cluster import check_accelerators, ray_cluster, starts_cluster
from rayrec.platform.devices import get_device, ray_claim
from rayrec.platform.metrics import RayFigures
from rayrec.platform.ray_errors import root_cause
from rayrec.samples.reader import SampleReader

logger = logging.getLogger(__name__)

OnStep = Callable[[int, int, float], None]
"""Called with (steps done, steps of the whole run, loss) after every step."""

METRICS_EVERY_STEPS = 20
SHOWN_INTERVALS = 8
"""Places of a batch's rows that an error message names."""


@dataclass(frozen=True)
class Progress:
    """What a run has to know of itself to go on, as of its last snapshot; kept in `run.json`."""

    best_value: float | None = None
    best_step: int = -1
    stale: int = 0
    """Validations since the best one."""
    loss: float | None = None
    """Of the last step."""
    training_s: float = 0.0
    dropped: dict[str, int] = field(default_factory=dict)
    """Dropped work, by reason."""

    def judged(self, value: float, step: int) -> Progress:
        """After a validation; of equal values the first is the best."""
        if self.best_value is None or value > self.best_value:
            return replace(self, best_value=value, best_step=step, stale=0)
        return replace(self, stale=self.stale + 1)


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
    """Seconds spent in the training steps of the whole run, validation and start-up left out.

    Of a run that was resumed, steps that were lost after a snapshot and trained again count once.
    """
    steps_per_s: float
    stages: dict[str, float]
    """Where the time of the actors went since they were last started."""


def train(
    config: RunConfig, run: str | Path, resume: bool = False, on_step: OnStep | None = None
) -> TrainingResult:
    """Train a model as the config says.

    Args:
        run: folder of the run; new or empty, unless it is resumed.
        resume: continue the run that the folder holds from its last snapshot.

    Raises:
        InputError: the config, the data, the device or the folder cannot be used, or a run is alive in it:
            nothing was started, and no run was changed. Or the cluster has too little of something, which
            shows when it has been joined; `run.json` says so.
        Exception: a stage's own error, after every actor has been stopped.
    """
    config = config.with_absolute_paths()
    assembly = assemble(config)
    check_split(assembly.dataset, "valid")
    unread = sorted(set(config.sparse.tables) - {table.name for table in assembly.tables})
    if unread:
        logger.warning("the model does not read %s, which sparse.tables has settings of", ", ".join(unread))
    _ = assembly.plan  # footers are read before anything starts
    if starts_cluster(config.cluster):
        get_device(config.device)  # trainers will run on this machine; elsewhere they may have what it lacks
    memory = plan_memory(assembly)
    memory.check()
    memory.log()
    path = Path(run)
    with RunFolder.locked(path, resume):
        folder = RunFolder.resume(path, config) if resume else RunFolder.create(path, config)
        snapshot = _snapshot_to_resume(folder, assembly)
        if snapshot is not None and _is_finished(folder, assembly, snapshot):
            return replace(TrainingResult(**folder.state["result"]), run=str(folder.path))
        folder.begin(config)
        return _train_in(folder, assembly, snapshot, on_step)


def _snapshot_to_resume(folder: RunFolder, assembly: Assembly) -> Snapshot | None:
    """The last snapshot, checked; None for a run that has none yet.

    Raises:
        InputError: it is damaged, or does not continue with this data or order.
    """
    if folder.state["last"] is None:
        return None
    snapshot = read_snapshot(folder.chosen_snapshot("last"))
    check_snapshot(snapshot, assembly)
    check_continues(snapshot, assembly)
    return snapshot


def _is_finished(folder: RunFolder, assembly: Assembly, snapshot: Snapshot) -> bool:
    """Whether the run ended by itself, and these settings leave nothing to train."""
    state = folder.state
    return state["state"] == "finished" and _is_over(
        assembly, snapshot.committed_step + 1, Progress(**state["progress"])
    )


def _is_over(assembly: Assembly, step: int, progress: Progress) -> bool:
    patience = assembly.config.evaluation.patience
    return step >= assembly.total_steps or (patience is not None and progress.stale >= patience)


def _train_in(
    folder: RunFolder, assembly: Assembly, snapshot: Snapshot | None, on_step: OnStep | None
) -> TrainingResult:
    """Everything that Ray takes part in; how it ends is left in the folder."""
    config = assembly.config
    try:
        with ray_cluster(config.cluster, config.cpus_needed):
            check_accelerators(
                ray_claim(config.device),
                config.pipeline.num_trainers,
                "trainers",
                "set another device, lower pipeline.num_trainers, or join a larger cluster",
            )
            with running_stages(folder.name, assembly) as stages:
                result = TrainingRun(assembly, folder, stages, on_step).run(snapshot)
    except KeyboardInterrupt:
        folder.update(state="stopped", error="interrupted")
        if folder.state["last"] is not None:
            logger.info("stopped; --resume continues from %s", folder.chosen_snapshot("last"))
        raise
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, DivergedError):
            cause = cause.with_note(f"Rows of the batch: {rows_of_step(assembly, cause.step)}")
            folder.update(refused_steps=folder.state.get("refused_steps", 0) + 1)
        folder.update(state="failed", error=f"{type(cause).__name__}: {cause}")
        if cause is error:
            raise
        raise cause from error
    folder.update(state="finished", error=None, result=asdict(result))
    return result


def rows_of_step(assembly: Assembly, step: int) -> str:
    """Which rows of which files a step trains on; the reader gives the same ones every time."""
    cursor = SampleReader(assembly.plan).read(step).cursor
    shown = [f"{part.file} {part.start} to {part.stop - 1}" for part in cursor[:SHOWN_INTERVALS]]
    more = len(cursor) - len(shown)
    return "; ".join(shown) + (f"; and {more} more places" if more else "")


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
        self._metrics = RayFigures({"run": folder.name})
        self._metric = f"{self._config.evaluation.metric}@10"
        self._total_steps = assembly.total_steps
        self._progress = Progress()
        self._incarnation = 0
        """Of the servers: raised by every recovery, so that nothing of the time before is taken for new."""

    def run(self, snapshot: Snapshot | None = None) -> TrainingResult:
        """
        Args:
            snapshot: the one to go on from; its progress is in the folder.
        """
        step = 0
        if snapshot is not None:
            self._restore(snapshot)
            step = snapshot.committed_step + 1
            self._progress = Progress(**self._folder.state["progress"])
        period = self._config.evaluation.every_epochs * self._plan.steps_per_epoch
        while not _is_over(self._assembly, step, self._progress):
            stop = min(self._total_steps, (step // period + 1) * period)
            period_loss = self._train(step, stop)
            step = stop
            summary = summarise(validate(self._stages, self._assembly))
            self._progress = self._progress.judged(summary[self._metric].value, step)
            self._snapshot(step)
            self._record(step, period_loss, summary)
        progress = self._progress
        assert progress.loss is not None, "a run has a step"
        assert progress.best_value is not None, "and a validation"
        return TrainingResult(
            run=str(self._folder.path),
            steps=step,
            epochs=step / self._plan.steps_per_epoch,
            final_loss=progress.loss,
            best_metric=self._metric,
            best_value=progress.best_value,
            best_step=progress.best_step,
            training_s=progress.training_s,
            steps_per_s=step / max(progress.training_s, 1e-9),
            stages=self._stages.stats().summary(),
        )

    def _train(self, first: int, stop: int) -> float:
        """Returns the mean loss per target over these steps."""
        started = time.perf_counter()
        loss_sum, num_targets, last_loss = 0.0, 0, None
        dropped = dict(self._progress.dropped)
        for result in self._pipeline.run(first, stop):
            last_loss = result.loss
            loss_sum += result.loss * result.num_targets
            num_targets += result.num_targets
            for reason, count in result.counts.items():
                dropped[reason] = dropped.get(reason, 0) + count
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
        self._progress = replace(
            self._progress,
            loss=last_loss,
            training_s=self._progress.training_s + time.perf_counter() - started,
            dropped=dropped,
        )
        return loss_sum / max(num_targets, 1)

    def _record(self, step: int, loss: float, summary: dict[str, Estimate]) -> None:
        stages = self._stages.stats().summary()
        figures = {name: estimate.value for name, estimate in summary.items()}
        epoch = step / self._plan.steps_per_epoch
        self._folder.log(
            {
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "training_s": self._progress.training_s,
                "valid": figures,
                "stages": stages,
                "dropped": self._progress.dropped,
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
            self._progress.training_s,
        )

    def _snapshot(self, step: int) -> None:
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
            incarnation=self._incarnation,
            dataset_fingerprint=self._assembly.dataset.fingerprint,
            semantic_ids_version=None if registry is None else registry.version,
            read_position=self._plan.position(step),
            weights=weights,
            optimizer_state=optimizer_state,
            save_sparse=lambda folder: self._save_sparse(folder, step - 1),
        )
        best = path.name if self._progress.best_step == step else self._folder.state["best"]
        # One write: a run that is killed here resumes with the progress that belongs to its snapshot.
        self._folder.update(last=path.name, best=best, progress=asdict(self._progress))
        self._folder.keep_only({path.name, best})

    def _save_sparse(self, folder: str, step: int) -> list[str]:
        servers = self._stages.servers
        ray.get([server.freeze.remote(step) for server in servers])
        files: list[list[SavedFile]] = ray.get([server.save.remote(folder, step) for server in servers])
        return [file.name for of_server in files for file in of_server]

    def _restore(self, snapshot: Snapshot) -> None:
        """Give servers and trainers what the snapshot holds."""
        files = [str(path.resolve()) for path in snapshot.sparse_files]
        # A run that died before its next snapshot has recovered from this one before.
        self._incarnation = max(snapshot.incarnation, self._folder.state.get("incarnation", 0)) + 1
        self._folder.update(incarnation=self._incarnation)
        ray.get(
            [
                server.load.remote([files], snapshot.committed_step, self._incarnation)
                for server in self._stages.servers
            ]
        )
        weights, optimizer_state = ray.put(snapshot.weights), ray.put(snapshot.optimizer_state)
        ray.get(
            [
                trainer.load.remote(weights, optimizer_state, self._incarnation)
                for trainer in self._stages.trainers
            ]
        )
