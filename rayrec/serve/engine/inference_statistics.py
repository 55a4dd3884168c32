"""What was computed since the service began, as the statistics of Triton's protocol count it."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lasted:
    """How often something happened, and how long it took in all."""

    count: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float, count: int = 1) -> Lasted:
        return Lasted(self.count + count, self.seconds + seconds)


@dataclass(frozen=True)
class Statistics:
    """At one moment."""

    last_at: float
    """When a batch was last done, in UNIX seconds; 0: none was."""
    num_batches: int
    computed: Lasted
    """Requests, each with the time of its batch."""
    waited: Lasted
    """Requests, before their batch began."""
    batches: dict[int, Lasted]
    """By the number of their requests."""
    outcomes: dict[str, Lasted]
    """Requests by `success`, `fail` and `cache_hit`, each as long as it was here. What was refused before it
    was admitted is not counted here."""


class StatisticsCounter:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_at = 0.0
        self._num_batches, self._num_requests = 0, 0
        self._computed_s, self._waited_s = 0.0, 0.0
        self._batches: defaultdict[int, Lasted] = defaultdict(Lasted)
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def batch(self, waited_s: Sequence[float], seconds: float, now: float) -> None:
        """A batch was computed.

        Args:
            waited_s: what each of its requests waited before.
            now: UNIX seconds.
        """
        size = len(waited_s)
        with self._lock:
            self._last_at = now
            self._num_batches += 1
            self._num_requests += size
            self._computed_s += size * seconds
            self._waited_s += sum(waited_s)
            self._batches[size] = self._batches[size].plus(seconds)

    def outcome(self, name: str, seconds: float) -> None:
        """A request has its answer or its error."""
        with self._lock:
            self._counts[name] += 1
            self._seconds[name] += seconds

    def read(self) -> Statistics:
        with self._lock:
            return Statistics(
                self._last_at,
                self._num_batches,
                Lasted(self._num_requests, self._computed_s),
                Lasted(self._num_requests, self._waited_s),
                dict(sorted(self._batches.items())),
                {name: Lasted(count, self._seconds[name]) for name, count in self._counts.items()},
            )
