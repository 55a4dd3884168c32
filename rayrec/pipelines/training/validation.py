"""Validation with the actors of a run that is training: one loop for every task."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.tasks.task import Validation
from rayrec.pipelines.training.stages import Stages


def validate(stages: Stages, validation: Validation) -> dict[str, Estimate]:
    """Metrics of the split `valid` by name, with the weights and rows as they are now."""
    return validation.report(_answers(stages, validation))


def _answers(stages: Stages, validation: Validation) -> Iterator[tuple[Any, Any]]:
    """Every batch with what a trainer says of it, in order; few are in flight at a time."""
    beginning = [trainer.begin_validation.remote() for trainer in stages.trainers]
    stages.watch.get(beginning, may_take_long=True)
    in_flight: deque[tuple[Any, Any]] = deque()

    def oldest() -> tuple[Any, Any]:
        batch, promise = in_flight.popleft()
        (answer,) = stages.watch.get([promise])
        return batch, answer

    for number, batch in enumerate(validation.batches()):
        worker = stages.feature_workers[number % len(stages.feature_workers)]
        trainer = stages.trainers[number % len(stages.trainers)]
        in_flight.append((batch, validation.ask(worker, trainer, batch)))
        if len(in_flight) > 2 * len(stages.trainers):
            yield oldest()
    while in_flight:
        yield oldest()
