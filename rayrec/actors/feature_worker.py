"""Turns rows into features; all arithmetic is in `RowFeatures`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayrec.actors.read_ahead import ReadAhead
from rayrec.actors.spawning import ActorRole, Host
from rayrec.actors.stage_actor import StageActor
from rayrec.platform.metrics import StageClock, StageTimes
from rayrec.samples.base.batches import BatchShare, FeatureBatch, RowBatch, SampleBatch, TrainingFeatures
from rayrec.samples.base.intervals import Intervals
from rayrec.samples.features.row_features import RowFeatures
from rayrec.samples.features.text_features import TextFeatures
from rayrec.samples.impressions.batches import ImpressionBatch
from rayrec.samples.impressions.features import ImpressionFeatures
from rayrec.samples.text.batches import TextBatch


@dataclass(frozen=True)
class BatchSummary:
    """What the driver has to know of a batch; the batch itself goes to the trainers."""

    rows: Intervals
    """Where its rows were read."""
    unreadable: Intervals = field(default_factory=Intervals)
    """Rows that should have been in it and cannot be read."""


RankBatches = tuple[BatchShare, ...]
"""Features of the trainers of a group, in the order of their ranks."""


class FeatureWorker(StageActor[StageClock]):
    """Stateless: any worker can take any batch."""

    def __init__(
        self,
        role: ActorRole,
        make_features: Callable[[], TrainingFeatures],
        read_ahead: ReadAhead | None = None,
        group_size: int = 1,
        leaders: Sequence[Any] = (),
    ) -> None:
        """
        Args:
            leaders: of the groups, which get their trainers' batches from here. Without any, `compute`
                returns them.
        """
        super().__init__(role, StageClock())
        self._leaders = leaders
        self._features = make_features()
        self._group_size = group_size
        self._read_ahead = read_ahead

    def compute(self, step: int, *parts: RowBatch) -> BatchSummary | tuple[BatchSummary | RankBatches, ...]:
        """A summary, and the per-rank batches of every group of trainers, each an object of its own; or the
        summary alone, when all leaders of groups have theirs."""
        with self._heartbeats.during("compute", step), self._clock.busy():
            rows = RowBatch.concatenate(parts)
            batches: Sequence[BatchShare] = self._features.training(step, rows)
            if self._read_ahead is not None:
                self._read_ahead(batches)
        self._metrics.after_batch(self._clock.times())
        starts = range(0, len(batches), self._group_size)
        groups = [tuple(batches[first : first + self._group_size]) for first in starts]
        summary = BatchSummary(rows.cursor, rows.unreadable)
        if self._leaders:
            hand_over(step, groups, self._leaders)
            return summary
        return summary, *groups

    def reach(self, servers: Sequence[Any]) -> None:
        """Announce batches to these servers. A worker that starts again knows the first ones only: then those
        that have been replaced bring rows up when they are looked up."""
        if self._read_ahead is not None:
            self._read_ahead = self._read_ahead.to(servers)

    def ranking(self, samples: SampleBatch) -> tuple[FeatureBatch, np.ndarray]:
        """Features to rank what comes next, and the items each row has seen ([B, E], padded with -1)."""
        assert isinstance(self._features, RowFeatures), "runs ask for what their task does"
        with self._heartbeats.during("ranking", samples.step):
            return self._features.ranking(samples), self._features.seen(samples)

    def scoring(self, step: int, rows: RowBatch) -> ImpressionBatch:
        """Features of impressions to be scored."""
        assert isinstance(self._features, ImpressionFeatures), "runs ask for what their task does"
        with self._heartbeats.during("scoring", step):
            return self._features.scoring(step, rows)

    def judged(self, step: int, rows: RowBatch) -> TextBatch:
        """Records of text with their answers, whose likelihood is to be known."""
        assert isinstance(self._features, TextFeatures), "runs ask for what their task does"
        with self._heartbeats.during("judged", step):
            return self._features.judged(step, rows)

    def options(self, step: int, rows: RowBatch) -> TextBatch:
        """The same of each option of records that have some."""
        assert isinstance(self._features, TextFeatures), "runs ask for what their task does"
        with self._heartbeats.during("options", step):
            return self._features.options(step, rows)

    def prompts(self, step: int, rows: RowBatch) -> TextBatch:
        """What records ask, to be answered."""
        assert isinstance(self._features, TextFeatures), "runs ask for what their task does"
        with self._heartbeats.during("prompts", step):
            return self._features.prompts(step, rows)

    def stats(self) -> StageTimes:
        times = self._clock.times()
        self._metrics.publish(times)
        return times


def hand_over(step: int, groups: Sequence[Any], leaders: Sequence[Any]) -> None:
    """Bring the batches of a step to the leaders of their groups; returns when all have them."""
    import ray

    ray.get([leader.take.remote(step, batches) for leader, batches in zip(leaders, groups, strict=True)])


def spawn_feature_workers(
    host: Host,
    make_features: Callable[[], TrainingFeatures],
    num_workers: int,
    num_cpus: float,
    read_ahead: ReadAhead | None = None,
    restarts: int = 0,
    group_size: int = 1,
    leaders: Sequence[Any] = (),
) -> list[Any]:
    """Start the feature workers of a run.

    Args:
        group_size: trainers whose per-rank batches are one object.
        leaders: of these groups, if they get the objects from the workers and not by the driver.
        make_features: called in every worker's process. Objects of Ray's as arguments would be gone for one
            that starts again.
    """
    return [
        host.spawn(
            FeatureWorker,
            "feature_worker",
            member,
            (make_features, read_ahead, group_size, leaders),
            {"num_cpus": num_cpus},
            restarts,
        )
        for member in range(num_workers)
    ]
