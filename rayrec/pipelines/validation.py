"""Ranking an evaluation split with the actors of a run that is training."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from rayrec.models.program import RankedItems
from rayrec.pipelines.assembly import Assembly
from rayrec.pipelines.ranking_metrics import LIST_LENGTH, target_places
from rayrec.pipelines.stages import Stages
from rayrec.samples.reader import evaluation_batches


def validate(stages: Stages, assembly: Assembly) -> np.ndarray:
    """[U] place of each validation user's target among all items, seen ones masked.

    The users are in an order that hashes their ids, so the first `max_users` are a random sample.
    """
    config = assembly.config.evaluation
    reading = [trainer.read_catalogue.remote() for trainer in stages.trainers]
    stages.watch.get(reading, may_take_long=True)
    in_flight: deque[tuple[Any, np.ndarray]] = deque()
    places: list[np.ndarray] = []
    features = assembly.features
    batches = evaluation_batches(
        assembly.dataset,
        "valid",
        config.batch_size,
        config.max_users,
        with_times=features.needs_history_times,
        labels=features.history_labels,
    )
    for number, samples in enumerate(batches):
        assert samples.targets_B is not None
        worker = stages.feature_workers[number % len(stages.feature_workers)]
        trainer = stages.trainers[number % len(stages.trainers)]
        asked: Any = worker.ranking.remote(samples.instructed(assembly.instruction))
        ranked: Any = trainer.rank.remote(asked, LIST_LENGTH, exclude_seen=True)
        in_flight.append((ranked, assembly.dataset.item_positions(samples.targets_B)))
        if len(in_flight) > 2 * len(stages.trainers):
            places.append(_collect(stages, *in_flight.popleft()))
    places.extend(_collect(stages, *entry) for entry in in_flight)
    return np.concatenate(places)


def _collect(stages: Stages, ranked: Any, targets_B: np.ndarray) -> np.ndarray:
    result: RankedItems
    (result,) = stages.watch.get([ranked])
    return target_places(result.items_BK, targets_B)
