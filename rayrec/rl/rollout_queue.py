"""Batches in flight from rollout workers to the learner, with a bound on their age.

    may_begin(version) ─► put(version, batch) ─► ... in the order begun ... ─► take(version)

The age of a batch is the number of optimizer steps between the policy that sampled it and the last update on
it. The learner takes batches in the order in which they were begun, so the age is known when a batch is
begun: one that would be too old is not begun, and no sample is ever discarded.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class StaleRolloutsError(RuntimeError):
    """A batch is older than the bound."""


class RolloutQueue(Generic[T]):
    """At most `capacity` batches, each at most `max_staleness` steps old. Not thread-safe."""

    def __init__(
        self, capacity: int, max_staleness: int, num_taken: int = 0, updates_per_batch: int = 1
    ) -> None:
        """
        Args:
            num_taken: batches that the learner has already learned from.
            updates_per_batch: optimizer steps per batch.

        Raises:
            ValueError: no capacity, or a bound below the age that a batch reaches by its own updates.
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
        """Age of every batch that was taken."""

    def __len__(self) -> int:
        return len(self._held)

    def may_begin(self, version: int) -> bool:
        """Whether there is room, and a batch sampled now by this version will be young enough at its turn."""
        return len(self._held) < self._capacity and self._age_at_turn(version) <= self._max_staleness

    def put(self, version: int, batch: T) -> None:
        """Add a batch that is sampled by this version of the policy.

        Raises:
            StaleRolloutsError: it would be too old at its turn.
            ValueError: there is no room, or the version does not exist yet.
        """
        age = self._age_at_turn(version)
        if age < 0:
            raise ValueError(
                f"batch {self._next_put} is sampled by version {version}, which does not exist yet"
            )
        if age > self._max_staleness:
            raise StaleRolloutsError(
                f"batch {self._next_put}, sampled by version {version}, would be learned from at an age of "
                f"{age} steps; the bound is {self._max_staleness}"
            )
        if len(self._held) >= self._capacity:
            raise ValueError(f"the queue holds {self._capacity} batches already")
        self._held.append((version, batch))
        self._next_put += 1

    def take(self, version: int) -> T:
        """Take the oldest batch, for a learner of this version.

        Raises:
            StaleRolloutsError: it is too old, since the learner has taken steps that the queue does not know
            of. LookupError: there is none.
        """
        if not self._held:
            raise LookupError("no batch was begun")
        sampled_by, _ = self._held[0]
        if (age := version + self._updates - 1 - sampled_by) > self._max_staleness:
            raise StaleRolloutsError(
                f"batch {self._next_take}, sampled by version {sampled_by}, is {age} steps old; the bound is "
                f"{self._max_staleness}"
            )
        self._next_take += 1
        self.observed_staleness.append(age)
        return self._held.popleft()[1]

    @property
    def next_batch(self) -> int:
        """Index of the batch that is begun next."""
        return self._next_put

    def _age_at_turn(self, version: int) -> int:
        return (self._next_put + 1) * self._updates - 1 - version
