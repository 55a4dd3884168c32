"""The time of a table: that of its batches, which is the newest event of the row in the middle.

A machine's clock would give up other rows each time that a step is done. Events come with the data, and
what is remembered of them with the snapshot:

    step      ... 999         1999         2999         evictions are due
    time          10:00       10:40        11:30        newest event until then

With rows that live for an hour, at step 2999 those are too old whose last change was in step 999 or before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayrec.embeddings.base.layout import NEVER

NO_TIME = -(2**63)
"""Before any event."""


@dataclass(frozen=True)
class ClockState:
    """What a snapshot has of a clock."""

    now: int = NO_TIME
    """UNIX seconds of the newest event."""
    times: tuple[tuple[int, int], ...] = ()
    """(step, time) of evictions, ascending."""

    @classmethod
    def latest(cls, one: ClockState, other: ClockState) -> ClockState:
        """Of two snapshots, or of two servers' parts of one, which are the same."""
        return max(one, other, key=lambda state: (state.times[-1:], state.now))


class EventClock:
    """Not thread-safe.

    Args:
        ttl_s: seconds for which rows live.
    """

    def __init__(self, ttl_s: float, state: ClockState | None = None) -> None:
        self._ttl_s = ttl_s
        state = state or ClockState()
        self._now = state.now
        self._times = deque(state.times)

    @property
    def state(self) -> ClockState:
        return ClockState(self._now, tuple(self._times))

    def advance(self, newest_event: int | None) -> None:
        """A step has read events, of which this was the newest; an older one than before changes nothing."""
        if newest_event is not None:
            self._now = max(self._now, newest_event)

    def old_step(self, step: int) -> int:
        """At an eviction: the last step of which rows are too old; less than `NEVER` for none."""
        # Without an event there is no time, and no age.
        if self._now == NO_TIME:
            return NEVER - 1
        if self._times and self._times[-1][1] == self._now:  # of a time that stands, the last step will do
            self._times.pop()
        self._times.append((step, self._now))
        while len(self._times) > 1 and self._times[1][1] <= self._now - self._ttl_s:
            self._times.popleft()
        of_step, time = self._times[0]
        return of_step if time <= self._now - self._ttl_s else NEVER - 1
