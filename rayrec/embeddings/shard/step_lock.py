"""The lock of a shard's tables, lent to reads while a large step is applied.

    step being applied  ├─ rows ─┤ lends ├─ rows ─┤ ...           between two rows, and only if reads wait
    reads that may                └ rows ┘                        those that need no later step
    everything else     waits until the step is whole

The applying thread waits for the reads that were waiting when it lent the lock, and for no others: the step
must go on.

Anywhere in a step, the applying thread may be held up by a snapshot that lags behind. Only those that take
`changed` itself find the lock free then.
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
        self._mutex = threading.RLock()
        self.changed = threading.Condition(self._mutex)
        self._lent = False
        """Whether a step is half applied, and the lock is free for reads."""
        self._is_held_up = False
        """Whether it is free for nobody but those that take `changed` itself."""
        self._readers: set[object] = set()
        """Reads of rows that need no further step and are not done."""

    def __enter__(self) -> None:
        """Hold the lock whether or not a step is half applied."""
        self.changed.acquire()
        try:
            self._wait_until_let_in()
        except BaseException:
            self.changed.release()
            raise

    def __exit__(self, *error: object) -> None:
        self.changed.release()

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
        # Not reads that wait for a step: the thread that applies it would wait for them.
        if is_committed():
            self._readers.add(reader)
        try:
            with self.changed:
                try:
                    if not is_committed():
                        self._dismiss(reader)  # a new incarnation has begun meanwhile
                        wait()
                    self._wait_until_let_in()
                    yield
                finally:
                    self._dismiss(reader)
        finally:
            self._readers.discard(reader)  # also where it was interrupted before it had the lock

    def condition(self) -> threading.Condition:
        """Of the same lock: for who should not be woken by every change."""
        return threading.Condition(self._mutex)

    def wait_until_whole(self) -> None:
        """With the lock held: wait until no step is half applied."""
        self.changed.wait_for(lambda: not self._lent)

    @property
    def is_wanted(self) -> bool:
        """Whether reads wait that `lend` would let in."""
        return bool(self._readers)

    def lend(self) -> None:
        """With the lock held, between two rows of a step: let in the reads that wait now."""
        # A copy: reads that come meanwhile have to wait for the next time, or the step might never go on.
        waiting = self._readers.copy()
        self._lent = True
        try:
            while not self.changed.wait_for(lambda: waiting.isdisjoint(self._readers), _MISSED_S):
                pass
        finally:  # also where Ctrl-C comes, in one process: others would wait for ever
            self._lent = False
            self.changed.notify_all()

    def hold_up(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """With the lock held, anywhere in a step: let others take `changed`; returns whether it came to that.

        Numbers of rows hold on: nobody else finds, moves or changes rows meanwhile.
        """
        was_lent, self._lent, self._is_held_up = self._lent, True, True
        try:
            return self.changed.wait_for(until, timeout_s)
        finally:
            self._lent, self._is_held_up = was_lent, False
            self.changed.notify_all()

    def notify_held_up(self) -> None:
        """With the lock held: let a step that is held up see whether it can go on."""
        if self._is_held_up:
            self.changed.notify_all()

    def _wait_until_let_in(self) -> None:
        self.changed.wait_for(lambda: not self._is_held_up)

    def _dismiss(self, reader: object) -> None:
        self._readers.discard(reader)
        if self._lent:
            self.changed.notify_all()
