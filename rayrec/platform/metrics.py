"""Busy and waiting time of each stage, published as Ray metrics."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

PUBLISH_EVERY_BATCHES = 20
NO_TAGS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class StageTimes:
    """Where one stage's time went while batches were trained, in seconds.

    Busy, waiting and blocked time add up to the time that the stage's clock ran.
    """

    busy_s: float
    waiting_s: float
    """Idle between two batches: waiting for input, or for space in the next queue."""
    num_batches: int
    blocked_s: float = 0.0
    """Waiting within a batch: a trainer for rows, and for updates to be taken."""


class StageClock:
    """Splits the time from `start` to `stop` into work on batches and waiting between them.

    It is stopped while nothing is trained, so that validation does not count as waiting. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._busy_s = 0.0
        self._waiting_s = 0.0
        self._num_batches = 0
        self._idle_since: float | None = None
        """None while it is stopped."""

    def start(self) -> None:
        """Count time that is not work as waiting from now on."""
        self._idle_since = self._clock()

    def stop(self) -> None:
        if self._idle_since is not None:
            self._waiting_s += self._clock() - self._idle_since
        self._idle_since = None

    @contextmanager
    def busy(self, num_batches: int = 1) -> Iterator[None]:
        """Work on a batch, or on a part of one that is not counted as a batch of its own."""
        start = self._clock()
        if self._idle_since is not None:
            self._waiting_s += start - self._idle_since
        try:
            yield
        finally:
            end = self._clock()
            self._busy_s += end - start
            self._num_batches += num_batches
            if self._idle_since is not None:
                self._idle_since = end

    def times(self) -> StageTimes:
        """Up to the end of the last batch, or to the last stop."""
        return StageTimes(self._busy_s, self._waiting_s, self._num_batches)


class MeterClock:
    """A `StageClock` for a stage of many threads, which measures its busy time itself. Thread-safe.

    Args:
        meter_s: returns the busy seconds so far, overlapping work counted once.
    """

    def __init__(self, meter_s: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._meter_s = meter_s
        self._clock = clock
        self._busy_s = 0.0
        self._running_s = 0.0
        self._started: tuple[float, float] | None = None
        """(time, meter) of the last start; None while it is stopped."""
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self._started = self._clock(), self._meter_s()

    def stop(self) -> None:
        with self._lock:  # else times between the two lines would count what passed twice
            self._running_s, self._busy_s = self._totals()
            self._started = None

    def times(self, num_batches: int) -> StageTimes:
        with self._lock:
            running_s, busy_s = self._totals()
        return StageTimes(busy_s, running_s - busy_s, num_batches)

    def _totals(self) -> tuple[float, float]:
        if self._started is None:
            return self._running_s, self._busy_s
        started, meter_s = self._started
        return self._running_s + self._clock() - started, self._busy_s + self._meter_s() - meter_s


class RayMetrics:
    """Publishes metrics where the Ray dashboard and Prometheus find them, under `rayrec_` and their names.

    Names that end in `_total` are counters, the others are gauges.

    In a process that is not connected to Ray it does nothing. Thread-safe: a server's calls publish.
    """

    def __init__(self, tags: dict[str, str], more_keys: Sequence[str] = ()) -> None:
        """
        Args:
            more_keys: of tags that are named with the metrics.
        """
        self._tags, self._keys = tags, (*tags, *more_keys)
        self._gauges: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        self._counted: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    def publish(self, metrics: Mapping[str, float], more_tags: Mapping[str, str] = NO_TAGS) -> None:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        tags = {**self._tags, **more_tags}
        with self._lock:  # two gauges of one name would both be exported, and one count be added twice
            for name, value in metrics.items():
                if name.endswith("_total"):
                    self._count(name.removesuffix("_total"), value, tags)
                    continue
                if name not in self._gauges:
                    gauge = importlib.import_module("ray.util.metrics").Gauge
                    self._gauges[name] = gauge(f"rayrec_{name}", name.replace("_", " "), self._keys)
                self._gauges[name].set(value, tags)

    def _count(self, name: str, value: float, tags: dict[str, str]) -> None:
        """Ray's counters are told what has come, and it adds `_total` to their names."""
        if name not in self._counters:
            counter = importlib.import_module("ray.util.metrics").Counter
            self._counters[name] = counter(f"rayrec_{name}", name.replace("_", " "), self._keys)
        series = (name, *(tags[key] for key in self._keys))
        before = self._counted.get(series, 0.0)
        # What counts may have begun again, as a prefix cache does with a new version.
        if (more := value - before if value >= before else value) > 0:
            self._counters[name].inc(more, tags)
        self._counted[series] = value


class RayStageMetrics:
    """Publishes the times of one actor of a stage, with further gauges."""

    def __init__(self, run: str, stage: str, member: int) -> None:
        self._metrics = RayMetrics({"run": run, "stage": stage, "member": str(member)})

    def publish(self, times: StageTimes, further: Mapping[str, float] | None = None) -> None:
        self._metrics.publish(
            {
                "stage_busy_s": times.busy_s,
                "stage_waiting_s": times.waiting_s,
                "stage_blocked_s": times.blocked_s,
                "stage_batches": times.num_batches,
                **(further or {}),
            }
        )

    def after_batch(
        self, times: StageTimes, further: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        """Publish after every few batches: Prometheus scrapes only every few seconds."""
        if times.num_batches % PUBLISH_EVERY_BATCHES == 0:
            self.publish(times, further() if further else None)
