"""What a service has done in the last seconds, for those who look at it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from rayrec.serve.web.metrics import ReadMetrics

SECONDS = 10.0
"""That metrics are of."""
MOST_KEPT = 20_000
"""Requests, and batches; more than come in that time."""


@dataclass(frozen=True)
class RecentMetrics:
    """Of the last `SECONDS`."""

    requests_per_s: float
    failed: int
    """Requests with another status than 200."""
    p50_ms: float | None
    """None where there was no request."""
    p99_ms: float | None
    mean_batch: float | None
    """Requests that were computed together; None where nothing was computed."""
    largest_batch: int | None


class RecentActivity:
    """A meter that forgets; safe to call from several threads."""

    def __init__(self, routes: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            routes: whose requests count: looking at a service is none of its work.
        """
        self._routes, self._clock = frozenset(routes), clock
        self._requests: deque[tuple[float, int, float]] = deque(maxlen=MOST_KEPT)
        self._batches: deque[tuple[float, int]] = deque(maxlen=MOST_KEPT)
        self._lock = threading.Lock()

    def request(self, route: str, status: int, seconds: float) -> None:
        if route in self._routes:
            with self._lock:
                self._requests.append((self._clock(), status, seconds))

    def batch(self, num_requests: int, seconds: float) -> None:
        with self._lock:
            self._batches.append((self._clock(), num_requests))

    def watch(self, metrics: ReadMetrics) -> None:
        """They are no activity."""

    def metrics(self) -> RecentMetrics:
        since = self._clock() - SECONDS
        with self._lock:
            requests = [each for each in self._requests if each[0] > since]
            batches = [size for at, size in self._batches if at > since]
        p50_ms = p99_ms = None
        if requests:
            p50_ms, p99_ms = (
                float(ms) for ms in np.percentile([1e3 * seconds for _, _, seconds in requests], [50, 99])
            )
        return RecentMetrics(
            requests_per_s=len(requests) / SECONDS,
            failed=sum(status != 200 for _, status, _ in requests),
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            mean_batch=float(np.mean(batches)) if batches else None,
            largest_batch=max(batches, default=None),
        )
