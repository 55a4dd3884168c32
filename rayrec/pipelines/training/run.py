"""One attempt at a run: training and validation in turn, and snapshots, until it is over or fails."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict

from rayrec.pipelines.cluster.leaving import NodeLeftError
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.stragglers import StragglerWatch, WindowScores
from rayrec.pipelines.runs.accepted_files import AcceptedFiles
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshot_schedule import SnapshotSchedule
from rayrec.pipelines.runs.snapshots import RunState, Snapshot
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.training.arrivals import Arrivals
from rayrec.pipelines.training.pipeline import BatchError, PendingSnapshot, StepResult, TrainingPipeline
from rayrec.pipelines.training.progress import RunProgress, TrainingResult, is_over
from rayrec.pipelines.training.snapshot_writer import Shown, SnapshotWriter
from rayrec.pipelines.training.stages import Stages
from rayrec.pipelines.training.trackers import Trackers
from rayrec.pipelines.training.validation import validate
from rayrec.platform.errors import InputError
from rayrec.platform.metrics import RayMetrics
from rayrec.samples.reading.consumed_segments import take
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.followed_plan import FollowedPlan

logger = logging.getLogger(__name__)

_STEPS_WITHOUT_TARGET = 200
"""After so many steps without a single target, none is expected any more."""
_KINDS = {"integer": "integers", "string": "hashes of texts, since not all of them are integers"}

OnStep = Callable[[int, int, float], None]
"""Called with (steps done, steps of the whole run, loss) after every step."""
OnValidation = Callable[[int, dict[str, float]], None]
"""Called with (steps done, figures by name) after every validation. A `StoppedError` that it raises ends the
run there."""

METRICS_EVERY_STEPS = 20
PROGRESS_EVERY_S = 10.0
"""Between two writes of how far the run is, for `rayrec runs`."""


class Attempt:
    """Alternates between training and validation until epochs or patience run out."""

    def __init__(
        self,
        assembly: Assembly,
        folder: RunFolder,
        stages: Stages,
        on_step: OnStep | None,
        snapshot: Snapshot | None = None,
        initial: Snapshot | None = None,
        on_validation: OnValidation | None = None,
    ) -> None:
        """
        Args:
            snapshot: the one to go on from.
            initial: of another run, whose weights and rows this one begins with where it has no snapshot.
        """
        self._assembly = assembly
        self._config = assembly.config
        self._plan = assembly.plan
        self._folder = folder
        self._stages = stages
        self._on_step = on_step
        self._on_validation = on_validation
        self._snapshot = snapshot
        self._initial = initial
        self._flops_at_record = (0.0, 0.0)
        """Model FLOPs, and seconds of training, when validation was recorded last."""
        self._since = 0.0
        """When the last step was reported, or training began."""
        self._pipeline = TrainingPipeline(stages, self._config.pipeline.queue_depth)
        self._writer = SnapshotWriter(folder, stages, self._config.snapshots, snapshot)
        self._schedule = SnapshotSchedule(
            self._config.snapshots,
            lambda: self._writer.is_asked or self._leaves is not None,
            lambda: self._writer.is_writing,
            time.monotonic,
        )
        self._leaves: str | None = None
        """Which node has to be left, and why, as soon as there is a snapshot of now."""
        self._leaves_after = 0
        """Steps that it is to have at least."""
        self._metrics = RayMetrics({"run": folder.name})
        self._stragglers = StragglerWatch(len(stages.trainers))
        self._trainer_metrics = [
            RayMetrics({"run": folder.name, "member": str(member)}) for member in range(len(stages.trainers))
        ]
        self._valid: dict[str, float] = {}
        """Figures of the last validation, as Ray's dashboard shows them."""
        self._progress_written_s = -PROGRESS_EVERY_S
        self._metric = assembly.task.metric
        self._shown_metrics = tuple(dict.fromkeys([*assembly.task.shown_metrics, self._metric]))
        self._arrivals = Arrivals(
            assembly.rows,
            self._config.data,
            assembly.total_steps,
            on_wait=self._while_waiting,
            on_arrival=self._keep_accepted,
        )
        self._accepted = AcceptedFiles(folder.path)
        self._total_steps = assembly.total_steps
        """None where a folder is followed that grows."""
        self._progress = RunProgress()
        self._cursor = Cursor(assembly.rows.fingerprint)
        self._first_segment = 0
        """Of a growing folder: what was consumed of those before it was handed to the writer of snapshots."""
        self._incarnation = 0
        """Of the servers: raised by every recovery, so that nothing of the time before is taken for new."""
        # Last: who makes an attempt closes it, and closes nothing where that fails.
        self._trackers = Trackers(
            folder, self._config, 0 if snapshot is None else snapshot.committed_step + 1
        )

    def run(self) -> TrainingResult:
        """Train until the run is over; its last snapshot is written then.

        Raises:
            Exception: what a stage failed with. Of batches that cannot be made, after a snapshot of the step
                before.
        """
        try:
            self._check_folder_is_seen()
            self._folder.update(metric=self._metric)
            step = self._restore()
            self._keep_accepted()
            more = True
            while more and not is_over(self._assembly, step, self._progress):
                validation, begun = self._assembly.next_validation(step), step
                while step < validation and (there := self._rows_until(step, validation)) > step:
                    try:
                        for result in self._pipeline.run(
                            step, there, self._wants_snapshot_before(validation)
                        ):
                            self._take(result)
                    except BatchError as error:
                        self._save_before(error.step, error)
                        raise error.reason from None
                    step = there
                if step > begun:
                    self._validate(step)
                more = step == validation  # else the folder that grows has come to its end
            self._writer.wait()
        except BaseException:
            # A snapshot that is being written need not be lost with the attempt.
            try:
                self._writer.wait()
            except Exception as lost:
                logger.warning("the snapshot that was being written is lost, too: %s", lost)
            raise
        return self._result(step)

    def close(self) -> None:
        """When the actors are gone: return when nothing writes to the folder any more."""
        self._writer.close()
        self._trackers.close()

    def _check_folder_is_seen(self) -> None:
        file = str(self._folder.path / "run.json")
        self._stages.watch.get([server.check_sees.remote(file) for server in self._stages.servers])

    def _rows_until(self, step: int, stop: int) -> int:
        """How far there are rows to train on, at most to `stop`; `step` if none will come any more."""
        try:
            return min(stop, self._arrivals.after(step))
        except InputError as error:
            self._save_before(step, error)
            raise

    def _wants_snapshot_before(self, validation: int) -> Callable[[int], bool]:
        self._since = time.perf_counter()
        # After the last step before a validation there will be one anyway.
        return lambda step: step + 1 < validation and self._schedule(step)

    def _validate(self, step: int) -> None:
        """Validate the model as it is after the steps before this one, and keep it in a snapshot."""
        loss = self._progress.mean_loss
        self._refuse_to_learn_nothing()
        if self._progress.best_value is None and self._progress.dropped_shares:
            logger.info("not trained on so far: %s", self._progress.described_drops())
        summary = validate(self._stages, self._assembly.task.validation(self._assembly.features))
        self._progress = self._progress.validated(summary[self._metric].value, step)
        # First the record: a run that goes on after the snapshot does not validate there again, and one that
        # goes on before it forgets the record.
        self._record(step, loss, summary)
        self._snapshot_now(step)
        if self._on_validation is not None:
            self._on_validation(step, {name: estimate.value for name, estimate in summary.items()})

    def _refuse_to_learn_nothing(self) -> None:
        """End a run that has read rows and found nothing to learn from: its loss would be 0 for ever.

        Raises:
            InputError: no row had a target.
        """
        progress = self._progress
        if progress.loss is None or progress.all_targets:
            return
        kinds = self._assembly.task.id_kinds
        ids = "" if kinds is None else f" (there, item ids are {_KINDS[kinds['item']]})"
        raise InputError(
            f"nothing to learn from: no training row has a target; {progress.described_drops()}{ids}; train "
            "on rows of the log that the data set was prepared from, with at least two known items each"
        )

    def _result(self, step: int) -> TrainingResult:
        progress = self._progress
        if progress.loss is None or progress.best_value is None:
            raise InputError(f"{self._config.data.samples}: no row has come to train on")
        return TrainingResult(
            run=str(self._folder.path),
            steps=step,
            epochs=self._assembly.epochs_at(step),
            final_loss=progress.loss,
            best_metric=self._metric,
            best_value=progress.best_value,
            best_step=progress.best_step,
            training_s=progress.training_s,
            steps_per_s=step / max(progress.training_s, 1e-9),
            dropped=progress.dropped_shares,
            described_drops=progress.described_drops(),
            stages=self._stages.stats().summary(),
        )

    def _save_before(self, step: int, error: Exception) -> None:
        """There is no batch for this step; those before it shall not be trained again."""
        self._writer.wait()
        if step > self._writer.saved_steps:
            logger.error("%s; a snapshot of the steps before it is written", error)
            self._snapshot_now(step)
            self._writer.wait()

    def _keep_accepted(self) -> None:
        if isinstance(self._plan, FollowedPlan):
            self._accepted.keep(self._plan)

    def _while_waiting(self, step: int) -> None:
        """Nothing is there to train on, and all steps before this one are committed."""
        self._writer.check()
        if step == 0 or self._writer.is_writing:
            return
        if step == self._writer.saved_steps:
            if self._writer.is_asked:
                self._snapshot_now(step)  # the one that there is answers the request
        elif self._schedule(step - 1):
            self._snapshot_now(step)
            self._schedule.taken()
        self._leave_if_saved(step)

    def _take(self, result: StepResult) -> None:
        """Note that a step is committed."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        epoch, _ = self._plan.locate(result.step)
        self._cursor.commit(epoch, result.rows, result.unreadable)
        for file, start, stop in result.unreadable:
            logger.warning("%s: rows %d to %d cannot be decoded and are left out", file, start, stop - 1)
        self._progress = self._progress.trained(result, seconds)
        if result.snapshot is not None:
            self._write(result.snapshot)
            self._schedule.taken()
            if self._leaves is not None:
                self._writer.wait()  # what is trained meanwhile would be trained again elsewhere
        self._writer.check()
        done = result.step + 1
        if done == _STEPS_WITHOUT_TARGET:
            self._refuse_to_learn_nothing()
        if self._on_step is not None:
            self._on_step(done, self._known_steps, result.loss)
        if done % METRICS_EVERY_STEPS == 0:
            percent = 100.0 * done / self._known_steps
            figures = {"loss": result.loss, "step": done, "progress_percent": percent}
            self._metrics.publish(figures | self._valid)
        if (scores := self._stragglers.add(result.work)) is not None:
            self._tell_stragglers(scores, result)
        if done % self._config.tracking.every_steps == 0:
            self._record_loss(done, result.loss, seconds)
        if now - self._progress_written_s >= PROGRESS_EVERY_S:
            self._progress_written_s = now
            self._write_progress(done)
        self._leave_if_saved(done)

    def _leave_if_saved(self, done: int) -> None:
        """End the attempt if a node has to be left and what was done until then is saved.

        Raises:
            NodeLeftError: it has to, and is.
        """
        if self._leaves is None:
            self._leaves, self._leaves_after = self._stages.must_leave(), done
            if self._leaves is not None:
                logger.warning("%s; a snapshot is written, and the run goes on elsewhere", self._leaves)
        elif self._writer.saved_steps >= self._leaves_after and not self._writer.is_writing:
            raise NodeLeftError(self._leaves)

    def _tell_stragglers(self, scores: WindowScores, result: StepResult) -> None:
        """Publish how fast each trainer is, and say once of a slow one where it runs."""
        slow = {straggler.member for straggler in scores.slow}
        for member, metrics in enumerate(self._trainer_metrics):
            score, own = scores.relative[member], scores.individual[member]
            metrics.publish(
                {
                    "trainer_relative_score": score,
                    "trainer_individual_score": own,
                    "straggler": member in slow,
                }
            )
        for straggler in scores.found:
            logger.warning(
                "trainer %d on %s is slow: its own work takes %.2f times as long as that of the others; "
                "see `rayrec health --burn-in`",
                straggler.member,
                result.work[straggler.member].node,
                straggler.slowdown,
            )

    def _record_loss(self, done: int, loss: float, seconds: float) -> None:
        record = {"step": done, "epoch": self._assembly.epochs_at(done), "training_loss": loss}
        self._folder.log(record | {"training_s": self._progress.training_s})
        self._trackers.log(
            done, {"training/loss": loss, "training/epoch": record["epoch"], "training/step_s": seconds}
        )

    def _write_progress(self, done: int) -> None:
        """For those who look at the run from outside."""
        self._folder.update(
            now={"step": done, "steps": self._known_steps, "is_total": self._total_steps is not None}
        )

    @property
    def _known_steps(self) -> int:
        """Of the whole run, as far as it is known."""
        if self._total_steps is not None:
            return self._total_steps
        assert isinstance(self._plan, FollowedPlan)
        return self._plan.known_steps

    def _snapshot_now(self, step: int) -> None:
        """A snapshot of the steps before this one, which are all committed."""
        self._writer.wait()  # servers keep one at a time
        if step == self._writer.saved_steps:
            self._writer.restate(*self._description(step - 1))
        else:
            self._write(self._pipeline.begin_snapshot(step - 1))

    def _write(self, pending: PendingSnapshot) -> None:
        state, shown = self._description(pending.step)
        consumed = None
        if isinstance(self._plan, FollowedPlan):
            first, self._first_segment = self._first_segment, state.read_position.epoch
            consumed = take(self._plan, self._cursor, first, self._first_segment)
        self._writer.begin(pending, state, self._cursor.to_table(), shown, consumed)

    def _description(self, step: int) -> tuple[RunState, Shown]:
        """What a snapshot after this step says of the run."""
        task = self._assembly.task
        progress = asdict(self._progress)
        position = self._plan.position(step + 1)
        state = RunState(
            committed_step=step,
            incarnation=self._incarnation,
            dataset_fingerprint=task.fingerprint,
            semantic_ids_version=task.semantic_ids_version,
            read_position=position,
            progress=progress,
            followed=self._assembly.rows.state(position.epoch),
            labels=task.labels,
            content_items=task.content_items,
        )
        return state, Shown(progress, is_best=self._progress.best_step == step + 1)

    def _record(self, step: int, loss: float, summary: dict[str, Estimate]) -> None:
        stages = self._stages.stats().summary()
        figures = {name: estimate.value for name, estimate in summary.items()}
        epoch = self._assembly.epochs_at(step)
        mfu = self._mfu_since_record(stages)
        self._folder.log(
            {
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "training_s": self._progress.training_s,
                "mfu": mfu,
                "valid": figures,
                "stages": stages,
                "read": self._progress.read,
                "dropped": self._progress.dropped,
            }
        )
        self._valid = {"valid_" + _metric_name(name): value for name, value in figures.items()}
        self._metrics.publish(self._valid)
        shown = {f"valid/{name}": value for name, value in figures.items()}
        self._trackers.log(step, shown | {"training/mean_loss": loss})
        self._write_progress(step)
        logger.info(
            "epoch %g: loss %.4f, valid %s, %.0f s of training, mfu %s",
            epoch,
            loss,
            ", ".join(f"{name} {figures[name]:.4f}" for name in self._shown_metrics if name in figures),
            self._progress.training_s,
            f"{mfu:.2%}" if mfu else "not counted",
        )

    def _mfu_since_record(self, stages: dict[str, float]) -> float:
        """Model FLOPs over what the trainers' devices could have multiplied in the time that passed."""
        flops_before, before_s = self._flops_at_record
        self._flops_at_record = stages["model_flops"], self._progress.training_s
        seconds = self._progress.training_s - before_s
        return (stages["model_flops"] - flops_before) / max(seconds * stages["matrix_flops_per_s"], 1e-9)

    def _restore(self) -> int:
        """Give servers and trainers what the snapshot holds; returns the step to go on with."""
        # A run that died before its next snapshot has recovered from this one before.
        incarnation: int = self._folder.state.get("incarnation", 0)
        if self._snapshot is None:
            self._folder.forget_after(0)
            if self._initial is not None:
                self._incarnation = incarnation + 1
                self._folder.update(incarnation=self._incarnation)
                self._stages.load(self._initial, -1, self._incarnation, weights_only=True)
            return 0
        snapshot = self._snapshot
        self._incarnation = max(snapshot.state.incarnation, incarnation) + 1
        # Also what run.json says of snapshots: of those behind this one nothing is to be used any more.
        best = self._folder.snapshot_path(snapshot.state.progress["best_step"])
        self._folder.update(
            incarnation=self._incarnation,
            last=snapshot.path.name,
            best=best.name if best.exists() else None,
            progress=snapshot.state.progress,
        )
        self._folder.forget_after(snapshot.committed_step + 1)
        self._progress = RunProgress(**snapshot.state.progress)
        self._cursor = snapshot.cursor
        # Trainers that have stayed have counted those of the steps that are undone, too.
        flops = self._stages.stats().summary()["model_flops"]
        self._flops_at_record = (flops, self._progress.training_s)
        self._stages.load(snapshot, snapshot.committed_step, self._incarnation)
        return snapshot.committed_step + 1


def _metric_name(figure: str) -> str:
    """Prometheus allows no others: `recall@10` is `recall_at_10`, and `auc of click` `auc_of_click`."""
    return re.sub(r"\W", "_", figure.replace("@", "_at_"))
