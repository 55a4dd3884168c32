"""The five stages, joined: the loop that every training batch goes through.

    step t      reader.read ──► feature worker.compute ──► trainers.look_ahead ─┐
                   stage 1              stage 2              stage 3, early     │
                                                                                ▼
    step t - 1                                                        trainers.train
                                                                        stages 3 to 5

The driver only submits calls and waits for reports; batches travel from actor
to actor as objects of Ray's store. A trainer handles its calls in the order
submitted, so while it computes batch t - 1, the servers already work on the
rows of batch t, and reader and feature worker on later batches.

Back-pressure: at most `queue_depth` batches are begun and not reported. The
driver waits for the oldest report before it begins another one; nothing else
in the pipeline can grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from rayrec.actors.trainer import StepReport
from rayrec.pipelines.stages import Stages
from rayrec.samples.read_plan import readings


@dataclass(frozen=True)
class StepResult:
    """One committed-to step, over all trainers."""

    step: int
    loss: float
    """Mean over the global batch's targets."""
    num_targets: int
    counts: dict[str, int]
    """Dropped work, by reason."""


@dataclass(frozen=True)
class _Begun:
    """A batch that is read, made into features and announced, but not trained yet."""

    shares: list[Any]
    """Features, one object per trainer."""
    announced: list[Any]
    """What the trainers' `look_ahead` returns."""


class TrainingPipeline:
    """Drives steps through the stages; one object per run."""

    def __init__(self, stages: Stages, queue_depth: int) -> None:
        self._stages = stages
        self._queue_depth = queue_depth

    def run(self, first: int, stop: int) -> Iterator[StepResult]:
        """Train steps `first` to `stop` (exclusive); yields each as its report arrives.

        When the iterator ends, every step's update is committed on the servers.

        Raises:
            RayError: a stage failed; the first error that any of the actors in flight reports.
        """
        begun: deque[_Begun] = deque()
        training: deque[tuple[_Begun, list[Any]]] = deque()  # batches and their reports on their way
        for actor in self._stages.actors:
            actor.start_clock.remote()
        for step in range(first, stop):
            while len(begun) + len(training) >= self._queue_depth:
                yield self._collect(training)
            begun.append(self._begin(step))
            if len(begun) > 1:
                training.append(self._train(begun.popleft()))
        while begun:
            training.append(self._train(begun.popleft()))
        while training:
            yield self._collect(training)
        ray.get([trainer.drain.remote() for trainer in self._stages.trainers])
        ray.get([actor.stop_clock.remote() for actor in self._stages.actors])

    def _begin(self, step: int) -> _Begun:
        """Stages 1 and 2, and the early part of 3."""
        stages = self._stages
        batch = stages.plan.batch(step)
        assert batch is not None, "nobody asks for steps that are not there yet"
        parts: list[Any] = [
            stages.readers[reading.reader].read.remote(reading)
            for reading in readings(stages.plan, batch, len(stages.readers))
        ]
        worker = stages.feature_workers[step % len(stages.feature_workers)]
        shares: Any = worker.compute.options(num_returns=len(stages.trainers)).remote(step, *parts)
        if len(stages.trainers) == 1:
            shares = [shares]
        announced = [
            trainer.look_ahead.remote(share) for trainer, share in zip(stages.trainers, shares, strict=True)
        ]
        return _Begun(shares, announced)

    def _train(self, batch: _Begun) -> tuple[_Begun, list[Any]]:
        """Stages 3 to 5; returns one report per trainer."""
        pairs = zip(self._stages.trainers, batch.shares, strict=True)
        return batch, [trainer.train.remote(share) for trainer, share in pairs]

    def _collect(self, training: deque[tuple[_Begun, list[Any]]]) -> StepResult:
        """Wait for the oldest step; an error of any trainer ends the wait for the others."""
        batch, refs = training.popleft()
        waiting = [*batch.announced, *refs]
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            ray.get(ready)
        reports: list[StepReport] = ray.get(refs)
        num_targets = reports[0].num_targets
        counts: dict[str, int] = {}
        for report in reports:
            for reason, count in report.counts.items():
                counts[reason] = counts.get(reason, 0) + count
        loss = sum(report.loss_sum for report in reports) / max(num_targets, 1)
        return StepResult(reports[0].step, loss, num_targets, counts)
