"""Validating with the actors of a run that is training: the same loop for every task."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ray.actor import ActorHandle

if TYPE_CHECKING:
    from rayrec.pipelines.training.stages import Stages

Batch = TypeVar("Batch")


def answers(
    stages: Stages, batches: Iterable[Batch], ask: Callable[[ActorHandle, ActorHandle, Batch], Any]
) -> Iterator[tuple[Batch, Any]]:
    """Every batch with what a trainer says of it, in order; few are on their way at a time.

    Args:
        ask: (feature worker, trainer, batch) -> promise of the answer.
    """
    beginning = [trainer.begin_validation.remote() for trainer in stages.trainers]
    stages.watch.get(beginning, may_take_long=True)
    in_flight: deque[tuple[Batch, Any]] = deque()

    def oldest() -> tuple[Batch, Any]:
        batch, promise = in_flight.popleft()
        (answer,) = stages.watch.get([promise])
        return batch, answer

    for number, batch in enumerate(batches):
        worker = stages.feature_workers[number % len(stages.feature_workers)]
        trainer = stages.trainers[number % len(stages.trainers)]
        in_flight.append((batch, ask(worker, trainer, batch)))
        if len(in_flight) > 2 * len(stages.trainers):
            yield oldest()
    while in_flight:
        yield oldest()
