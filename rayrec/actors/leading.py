"""Calls trainers for the driver: those of a group, and by the first of other groups those of theirs.

Calls come numbered, since they run on threads; every trainer gets them by their numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Leader:
    """Thread-safe; every call that waits for trainers needs a thread.

    Args:
        members: ranks of the group's trainers.
    """

    def __init__(self, members: range) -> None:
        self._members = members
        self._trainers: list[Any] = []
        self._below: list[tuple[Any, int]] = []
        self._turned, self._next = threading.Condition(), 0

    def lead(self, trainers: Sequence[Any], below: Sequence[tuple[Any, int]]) -> None:
        """Whom to call; once, before the first call.

        Args:
            trainers: handles, of this group.
            below: (handle of another group's leader, how many groups it calls, its own and others), in the
                order of the groups that follow this one.
        """
        self._trainers, self._below = list(trainers), list(below)

    def forward(self, number: int, method: str, batches: Sequence[Any]) -> list[Any]:
        """Call the trainers of this group and of those below with a batch; returns what they answer.

        Args:
            number: of the call, from 0.
            batches: for each group, the object of its per-rank batches. They do not come here.
        """
        import ray

        with self._in_turn(number):
            own = [getattr(trainer, method).remote(batches[0]) for trainer in self._trainers]
            first, others = 1, []
            for group, num_groups in self._below:
                others.append(group.forward.remote(number, method, batches[first : first + num_groups]))
                first += num_groups
        # Of all at once: the first error ends the wait for the others.
        answers = ray.get([*own, *others])
        return [*answers[: len(own)], *(answer for below in answers[len(own) :] for answer in below)]

    def ask(self, number: int, method: str, ranks: Sequence[int]) -> list[Any]:
        """Call some trainers of this group and of those below; returns the promises of their answers."""
        import ray

        with self._in_turn(number):
            pairs = zip(self._members, self._trainers, strict=True)
            own = [getattr(trainer, method).remote() for rank, trainer in pairs if rank in ranks]
            others = [group.ask.remote(number, method, ranks) for group, _ in self._below]
        return [*own, *(promise for promises in ray.get(others) for promise in promises)]

    @contextmanager
    def _in_turn(self, number: int) -> Iterator[None]:
        with self._turned:
            self._turned.wait_for(lambda: self._next == number)
            try:
                yield
            finally:
                self._next = number + 1
                self._turned.notify_all()
