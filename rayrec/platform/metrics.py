"""Busy and waiting time of each stage, and their way to Ray's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """Where one stage's wall time went since it started, in seconds."""

    busy_s: float
    waiting_s: float
    """Idle between two batches: for its input, or for room behind it."""
    num_batches: int


class StageClock:
    """Splits a stage's life into work on batches and waiting between them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._busy_s = 0.0
        self._waiting_s = 0.0
        self._num_batches = 0
        self._idle_since: float | None = None
        """None before the first batch: start-up is not waiting."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        start = self._clock()
        if self._idle_since is not None:
            self._waiting_s += start - self._idle_since
        try:
            yield
        finally:
            self._idle_since = self._clock()
            self._busy_s += self._idle_since - start
            self._num_batches += 1

    def times(self) -> StageTimes:
        return StageTimes(self._busy_s, self._waiting_s, self._num_batches)


class RayStageMetrics:
    """Publishes a stage's times where the Ray dashboard and Prometheus find them."""

    def __init__(self, run: str, stage: str, member: int) -> None:
        from ray.util import metrics

        self._tags = {"run": run, "stage": stage, "member": str(member)}
        keys = tuple(self._tags)
        self._busy = metrics.Gauge("rayrec_stage_busy_s", "Seconds spent on batches.", keys)
        self._waiting = metrics.Gauge("rayrec_stage_waiting_s", "Seconds idle between batches.", keys)
        self._batches = metrics.Gauge("rayrec_stage_batches", "Batches handled.", keys)

    def publish(self, times: StageTimes) -> None:
        self._busy.set(times.busy_s, self._tags)
        self._waiting.set(times.waiting_s, self._tags)
        self._batches.set(times.num_batches, self._tags)


class RayRunMetrics:
    """Publishes a run's figures, among them how far it has come."""

    def __init__(self, run: str) -> None:
        from ray.util import metrics

        self._tags = {"run": run}
        self._gauges: dict[str, metrics.Gauge] = {}
        self._new_gauge = lambda name: metrics.Gauge(f"rayrec_{name}", name.replace("_", " "), ("run",))

    def publish(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            if name not in self._gauges:
                self._gauges[name] = self._new_gauge(name)
            self._gauges[name].set(value, self._tags)
