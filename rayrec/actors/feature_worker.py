"""Turns rows into features; all arithmetic is in `SequenceFeatures`."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from rayrec.actors.read_ahead import ReadAhead
from rayrec.actors.spawning import ActorRole, spawn
from rayrec.platform.metrics import RayStageMetrics, StageClock, StageTimes
from rayrec.samples.batches import FeatureBatch, RowBatch, SampleBatch
from rayrec.samples.features import SequenceFeatures


class FeatureWorker:
    """Stateless: any worker can take any batch."""

    def __init__(
        self, role: ActorRole, features: SequenceFeatures, read_ahead: ReadAhead | None = None
    ) -> None:
        self._role = role
        self._features = features
        self._read_ahead = read_ahead
        self._clock = StageClock()
        self._metrics = RayStageMetrics(role.run, role.stage, role.member)

    def __repr__(self) -> str:
        return self._role.actor_name

    def compute(self, step: int, *parts: RowBatch) -> FeatureBatch | tuple[FeatureBatch, ...]:
        """One share per trainer, each an object of its own."""
        with self._clock.busy():
            shares = self._features(SampleBatch.of(step, RowBatch.concatenate(parts)))
            if self._read_ahead is not None:
                self._read_ahead(shares)
        self._metrics.after_batch(self._clock.times())
        return shares[0] if len(shares) == 1 else tuple(shares)

    def ranking(self, samples: SampleBatch) -> tuple[FeatureBatch, np.ndarray]:
        """Features to rank what comes next, and the items each row has seen ([B, E], padded with -1)."""
        return self._features.ranking(samples), self._features.seen(samples)

    def start_clock(self) -> None:
        """Training goes on: from now on, time between batches is waiting."""
        self._clock.start()

    def stop_clock(self) -> None:
        """Until the next start nothing is trained."""
        self._clock.stop()

    def stats(self) -> StageTimes:
        times = self._clock.times()
        self._metrics.publish(times)
        return times


def spawn_feature_workers(
    run: str,
    features: SequenceFeatures,
    num_workers: int,
    num_cpus: float,
    read_ahead: ReadAhead | None = None,
) -> list[ActorHandle]:
    shared: Any = ray.put(features)  # the catalogue's arrays travel once
    options = {"num_cpus": num_cpus}
    return [
        spawn(FeatureWorker, ActorRole(run, "feature_worker", member), options, shared, read_ahead)
        for member in range(num_workers)
    ]
