"""The lock of a shard's tables, lent to reads while a large step is applied.

    whoever applies     ├─ rows ─┤ lends ├─ rows ─┤ ...           between two rows, and only if reads wait
    reads that may                └ rows ┘                        those that need no later step
    everything else     waits until the step is whole

Whoever applies waits for the reads that were waiting when it lent the lock, and for no others: the step
must go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MISSED_S = 0.1
"""How often is looked whether reads are still there: one that was interrupted says nothing."""


class StepLock:
    """A condition whose owner may lend it; `changed` is for waiting, and for waking who waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._lent = False
        """Whether a step is half applied, and the lock is free for reads."""
        self._readers: set[object] = set()
        """Reads of rows that need no further step and are not done."""

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the lock while no step is half applied."""
        with self.changed:
            self.wait_until_whole()
            yield

    @contextmanager
    def reading(self, is_committed: Callable[[], bool], wait: Callable[[], None]) -> Iterator[None]:
        """Hold the lock once the step that a read needs is committed; a later one may be half applied then.

        Args:
            is_committed: whether it is.
            wait: called with the lock held, returns when it is or raises.
        """
        reader = object()
        # Not those that will wait for a step: whoever applies it would wait for them.
        if is_committed():
            self._readers.add(reader)
        try:
            with self.changed:
                try:
                    if not is_committed():
                        self._dismiss(reader)  # a new incarnation has begun meanwhile
                        wait()
                    yield
                finally:
                    self._dismiss(reader)
        finally:
            self._readers.discard(reader)  # also where it was interrupted before it had the lock

    def wait_until_whole(self) -> None:
        """With the lock held: wait until no step is half applied."""
        self.changed.wait_for(lambda: not self._lent)

    @property
    def is_wanted(self) -> bool:
        """Whether reads wait that `lend` would let in."""
        return bool(self._readers)

    def lend(self) -> None:
        """With the lock held, between two rows of a step: let in the reads that wait now."""
        waiting = self._readers.copy()
        self._lent = True
        while not self.changed.wait_for(lambda: waiting.isdisjoint(self._readers), _MISSED_S):
            pass
        self._lent = False

    def _dismiss(self, reader: object) -> None:
        self._readers.discard(reader)
        if self._lent:
            self.changed.notify_all()
