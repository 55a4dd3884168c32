"""Batches on their way from those who draw to the learner, none of which gets too old.

    may_begin(version) ─► put(version, batch) ─► ... in the order begun ... ─► take(version)

Age is counted in optimizer steps: how many the learner has taken since the policy that drew was sent, when
it takes the last of those for which the batch is there. The learner takes batches in the order in which they
were begun; so it is known when a batch is begun how old it will be. One that would be too old is not begun,
and nothing that was drawn is thrown away.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class StaleRolloutsError(RuntimeError):
    """A batch is older than the bound."""


class RolloutQueue(Generic[T]):
    """At most so many batches, each at most so old. For one thread."""

    def __init__(
        self, capacity: int, max_staleness: int, num_taken: int = 0, updates_per_batch: int = 1
    ) -> None:
        """
        Args:
            num_taken: batches that the learner has learned from.
            updates_per_batch: optimizer steps that it takes for each.

        Raises:
            ValueError: no room, or a bound below the age that a batch has at the last of its own updates.
        """
        if capacity < 1 or max_staleness < updates_per_batch - 1:
            raise ValueError(
                f"a queue needs room, and a bound from {updates_per_batch - 1}, for {updates_per_batch} "
                f"updates per batch, got {capacity} and {max_staleness}"
            )
        self._capacity, self._max_staleness, self._updates = capacity, max_staleness, updates_per_batch
        self._next_put = self._next_take = num_taken
        self._held: deque[tuple[int, T]] = deque()
        self.observed_staleness: list[int] = []
        """Of every batch that was taken."""

    def __len__(self) -> int:
        return len(self._held)

    def may_begin(self, version: int) -> bool:
        """Whether there is room, and a batch that this policy draws now is young enough at its turn."""
        return len(self._held) < self._capacity and self._age_at_turn(version) <= self._max_staleness

    def put(self, version: int, batch: T) -> None:
        """A batch that was begun with a policy of this version.

        Raises:
            StaleRolloutsError: it would be too old at its turn.
            ValueError: there is no room, or the policy is of the future.
        """
        age = self._age_at_turn(version)
        if age < 0:
            raise ValueError(f"batch {self._next_put} was drawn by version {version}, which is not there yet")
        if age > self._max_staleness:
            raise StaleRolloutsError(
                f"batch {self._next_put}, drawn by version {version}, would be learned from at an age of "
                f"{age} steps; the bound is {self._max_staleness}"
            )
        if len(self._held) >= self._capacity:
            raise ValueError(f"the queue holds {self._capacity} batches already")
        self._held.append((version, batch))
        self._next_put += 1

    def take(self, version: int) -> T:
        """The oldest batch, for a learner that has taken so many steps.

        Raises:
            StaleRolloutsError: it is too old: the learner has taken steps without the queue.
            LookupError: there is none.
        """
        if not self._held:
            raise LookupError("no batch was begun")
        drawn_by, _ = self._held[0]
        if (age := version + self._updates - 1 - drawn_by) > self._max_staleness:
            raise StaleRolloutsError(
                f"batch {self._next_take}, drawn by version {drawn_by}, is {age} steps old; the bound is "
                f"{self._max_staleness}"
            )
        self._next_take += 1
        self.observed_staleness.append(age)
        return self._held.popleft()[1]

    @property
    def next_batch(self) -> int:
        """Number of the batch that is begun next."""
        return self._next_put

    def _age_at_turn(self, version: int) -> int:
        return (self._next_put + 1) * self._updates - 1 - version
