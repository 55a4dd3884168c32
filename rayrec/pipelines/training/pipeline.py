"""The five stages, joined: the loop that every training batch goes through.

    step t      reader.read ──► feature worker.compute ──► trainers.prefetch ───┐
                   stage 1              stage 2              stage 3, early     │
                                                                                ▼
    step t - 1                                                        trainers.train
                                                                        stages 3 to 5

The driver only submits calls and waits for reports; batches travel from actor
to actor. A trainer handles its calls in the order submitted, so while it
computes batch t - 1, the servers already work on the rows of batch t, and
reader and feature worker on later batches.

A trainer gets a batch only when its features are there: a batch that cannot be
read ends the run after the step before it, with nothing half trained.

Back-pressure: at most `queue_depth` batches are begun and not reported. The
driver waits for the oldest report before it begins another one; nothing else
in the pipeline can grow.

A snapshot after step t needs a barrier: servers are told of it before a trainer
can send them anything of step t + 1, and keep what step t left; trainers bring
them the rows they hold and hand over their dense state between the two steps.
Nobody waits for the snapshot to be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rayrec.actors.feature_worker import BatchSummary
from rayrec.actors.trainer import StepWork, TrainerReport
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.errors import InputError
from rayrec.platform.ray_errors import is_of_cluster, root_cause
from rayrec.samples.base.intervals import Intervals
from rayrec.samples.reading.read_plan import readings


class BatchError(RuntimeError):
    """A batch cannot be made; every step before it is committed."""

    def __init__(self, step: int, reason: BaseException) -> None:
        super().__init__(f"there is no batch for step {step}: {reason}")
        self.step = step
        self.reason = reason
        """The stage's own error."""


@dataclass(frozen=True)
class PendingSnapshot:
    """What a run is after a step: promises of it, since later steps go on meanwhile."""

    step: int
    drained: list[Any]
    """Kept when the servers have all rows of the step."""
    weights: Any
    optimizer_state: Any


@dataclass(frozen=True)
class StepResult:
    """One committed-to step, over all trainers."""

    step: int
    loss: float
    """Mean over the global batch's targets."""
    num_targets: int
    counts: dict[str, int]
    """Dropped work, by reason."""
    rows: Intervals = field(default_factory=Intervals)
    """Where the rows of the batch were read."""
    unreadable: Intervals = field(default_factory=Intervals)
    """Rows that should have been in it and cannot be read."""
    snapshot: PendingSnapshot | None = None
    """If one was asked for after this step."""
    work: tuple[StepWork, ...] = ()
    """Each trainer's own part of it."""


@dataclass(frozen=True)
class _Begun:
    """A batch that is being read and made into features."""

    step: int
    summary: Any
    features: list[Any]
    """Features, one object per group of trainers; none where groups get them from the worker."""


@dataclass(frozen=True)
class _Prefetched:
    """A batch whose features are there, and whose rows the trainers look up."""

    batch: _Begun
    summary: BatchSummary
    calls: list[Any]
    """Promises that the trainers have it."""


@dataclass(frozen=True)
class _Training:
    """A batch that the trainers have."""

    batch: _Prefetched
    reports: list[Any]
    snapshot: PendingSnapshot | None


def never(step: int) -> bool:
    return False


class TrainingPipeline:
    """Drives steps through the stages; one object per run."""

    def __init__(self, stages: Stages, queue_depth: int) -> None:
        self._stages = stages
        self._trainers = stages.trainer_calls
        self._queue_depth = queue_depth

    def run(
        self, first: int, stop: int, wants_snapshot: Callable[[int], bool] = never
    ) -> Iterator[StepResult]:
        """Train steps `first` to `stop` (exclusive); yields each as its report arrives.

        When the iterator ends, every step's update is committed on the servers.

        Args:
            wants_snapshot: asked before each step is trained whether there shall be one after it.

        Raises:
            Exception: a stage failed; the first error that any of the actors in flight reports.
            BatchError: the next batch cannot be made; all before it have been yielded.
            StageHungError: nothing comes of an actor for too long.
        """
        for actor in self._stages.beside_trainers:
            actor.start_clock.remote()
        self._trainers.each("start_clock")
        error: BatchError | None = None
        begun: deque[_Begun] = deque()
        prefetched: deque[_Prefetched] = deque()
        training: deque[_Training] = deque()
        following = first
        while True:
            while following < stop and len(begun) + len(prefetched) + len(training) < self._queue_depth:
                try:
                    begun.append(self._begin(following))
                except InputError as no_plan:
                    error, stop = BatchError(following, no_plan), following
                else:
                    following += 1
            if begun and self._comes_first(begun[0], training):
                try:
                    prefetched.append(self._prefetch(begun.popleft()))
                except BatchError as no_batch:  # before a step that there is no plan for
                    error, following = no_batch, stop
                    begun.clear()
            elif training:
                yield self._collect(training.popleft())
            elif not prefetched:
                break
            # The next batch's rows are asked for before this one is trained; the last has no next.
            while len(prefetched) > 1 or (prefetched and not begun and following == stop):
                training.append(self._train(prefetched.popleft(), wants_snapshot))
        self._stages.watch.get(self._trainers.each("drain"))
        others = [actor.stop_clock.remote() for actor in self._stages.beside_trainers]
        self._stages.watch.get([*others, *self._trainers.each("stop_clock")])
        if error is not None:
            raise error

    def _begin(self, step: int) -> _Begun:
        """Stages 1 and 2."""
        stages = self._stages
        batch = stages.plan.batch(step)
        assert batch is not None, "nobody asks for steps that are not there yet"
        parts: list[Any] = [
            stages.readers[reading.reader].read.remote(reading)
            for reading in readings(stages.plan, batch, len(stages.readers))
        ]
        worker = stages.feature_workers[step % len(stages.feature_workers)]
        num_objects = self._trainers.num_objects
        compute: Any = worker.compute.options(num_returns=1 + num_objects)
        made = compute.remote(step, *parts)
        summary, *batches = made if num_objects else [made]
        return _Begun(step, summary, batches)

    def _comes_first(self, batch: _Begun, training: deque[_Training]) -> bool:
        """Wait until the batch is there, or the oldest report; says whether it is the batch."""
        if not training:
            return True
        ready = self._stages.watch.wait([batch.summary, *training[0].reports])
        return batch.summary in ready

    def _prefetch(self, batch: _Begun) -> _Prefetched:
        """The early part of stage 3."""
        try:
            (summary,) = self._stages.watch.get([batch.summary])
        except Exception as error:
            # Of a worker that died and cannot start again, what its constructor says is the reason.
            cause = root_cause(error)
            if is_of_cluster(cause):
                raise
            raise BatchError(batch.step, cause) from error
        return _Prefetched(batch, summary, self._trainers.prefetch(batch.step, batch.features))

    def _train(self, prefetched: _Prefetched, wants_snapshot: Callable[[int], bool]) -> _Training:
        """Stages 3 to 5."""
        step = prefetched.batch.step
        is_wanted = wants_snapshot(step)
        if is_wanted:
            self._stages.watch.get([server.begin_snapshot.remote(step) for server in self._stages.servers])
        reports = self._trainers.train(step, prefetched.batch.features)
        return _Training(prefetched, reports, self._pending_snapshot(step) if is_wanted else None)

    def begin_snapshot(self, step: int) -> PendingSnapshot:
        """Between two runs: a snapshot after the last step."""
        self._stages.watch.get([server.begin_snapshot.remote(step) for server in self._stages.servers])
        return self._pending_snapshot(step)

    def _pending_snapshot(self, step: int) -> PendingSnapshot:
        ranks = range(len(self._stages.trainers))
        drained = self._trainers.ask("drain", ranks)
        # The first gives all: the others hold the same, or each sends it its part when asked as well.
        asked = ranks if self._stages.dense_is_split else ranks[:1]
        weights = self._trainers.ask("dense_weights", asked)
        optimizer_state = self._trainers.ask("dense_optimizer_state", asked)
        return PendingSnapshot(step, drained, weights[0], optimizer_state[0])

    def _collect(self, training: _Training) -> StepResult:
        """Wait for the oldest step; an error of any trainer ends the wait for the others."""
        batch = training.batch
        answers = self._stages.watch.get([*batch.calls, *training.reports])
        reports: list[TrainerReport] = self._trainers.answers(answers[len(batch.calls) :])
        num_targets = reports[0].num_targets
        counts: dict[str, int] = {}
        for report in reports:
            for reason, count in report.counts.items():
                counts[reason] = counts.get(reason, 0) + count
        loss = sum(report.loss_sum for report in reports) / max(num_targets, 1)
        summary = batch.summary
        if summary.unreadable:
            counts["unreadable_rows"] = summary.unreadable.num_rows
        return StepResult(
            reports[0].step,
            loss,
            num_targets,
            counts,
            summary.rows,
            summary.unreadable,
            training.snapshot,
            tuple(report.work for report in reports),
        )
