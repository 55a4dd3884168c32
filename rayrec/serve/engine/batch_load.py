"""What a batcher says of its own load: the signal by which replicas are added and taken away.

    name            what                                                            is 1 replica's fill where
    work            s of computing that come per s, in batches of the best size     it reaches 1
    queue_wait_s    s that a request waits until its batch begins                   it passes what users bear
    full_batches    share of the batches that take as many as pay, and leave some   it nears 1
    backlog_s       s of computing that wait now                                    it does not fall again

Requests in flight and the time that the model is busy say little here: batches grow with the load, so that a
replica is always busy long before it is full, and answers ten times as many with hardly more in flight.
`work` grows in proportion to the requests, whatever size their batches have. What was refused came, too: a
full service that refuses half of its load needs twice the replicas, and not one. Rows of one message wait for
each other however many replicas there are: waits are those of its first row.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOW_S = 10
"""Of which it is told; Ray exports metrics as often."""
PREFIX = "batcher_"


@dataclass(frozen=True)
class BatcherLoad:
    """Of one replica, of late."""

    work: float
    queue_wait_s: float
    full_batches: float
    backlog_s: float

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return {
            f"{PREFIX}work": self.work,
            f"{PREFIX}queue_wait_seconds": self.queue_wait_s,
            f"{PREFIX}full_batches": self.full_batches,
            f"{PREFIX}backlog_seconds": self.backlog_s,
        }


@dataclass
class _Second:
    number: int
    work_s: float = 0.0
    waited_s: float = 0.0
    num_waited: int = 0
    num_batches: int = 0
    num_full: int = 0


class LoadWindow:
    """Counts what comes to a batcher and what it computes, by the second; from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._seconds: deque[_Second] = deque()
        self._lock = threading.Lock()

    def came(self, work_s: float) -> None:
        """Requests came, whether they are computed or refused.

        Args:
            work_s: that they take in a batch of the best size.
        """
        with self._lock:
            self._now().work_s += work_s

    def computed(self, waited_s: Sequence[float], is_full: bool) -> None:
        """A batch was computed.

        Args:
            waited_s: of the requests whose waits count.
            is_full: it took as many as pay, and others still waited.
        """
        with self._lock:
            now = self._now()
            now.waited_s += sum(waited_s)
            now.num_waited += len(waited_s)
            now.num_batches += 1
            now.num_full += is_full

    def read(self, backlog_s: float) -> BatcherLoad:
        with self._lock:
            self._now()
            span_s = min(max(self._clock() - self._began, 1.0), float(WINDOW_S))
            seen = list(self._seconds)
            num_waited = sum(each.num_waited for each in seen)
            num_batches = sum(each.num_batches for each in seen)
            return BatcherLoad(
                sum(each.work_s for each in seen) / span_s,
                sum(each.waited_s for each in seen) / max(num_waited, 1),
                sum(each.num_full for each in seen) / max(num_batches, 1),
                backlog_s,
            )

    def _now(self) -> _Second:
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        while self._seconds[0].number <= number - WINDOW_S:
            self._seconds.popleft()
        return self._seconds[-1]
