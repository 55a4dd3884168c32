"""Calls trainers for the driver: those of a group, and by the first of other groups those of theirs.

    feature worker ── batch of step t ──► every group: takes it          the driver hears that all have it
    driver ── train(t) ──► first group ──► its trainers, with the batch
                                └──► other groups ──► their trainers

So a batch costs the driver three calls, however many trainers there are.

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
        self._batches: dict[int, Any] = {}
        """By step: those that feature workers have brought, and that trainers have not got to train."""
        self._trained = -1

    def lead(self, trainers: Sequence[Any], below: Sequence[tuple[Any, int]]) -> None:
        """Whom to call; once, before the first call.

        Args:
            trainers: handles, of this group.
            below: (handle of another group's leader, how many groups it calls, its own and others), in the
                order of the groups that follow this one.
        """
        self._trainers, self._below = list(trainers), list(below)

    def take(self, step: int, batches: Any) -> None:
        """Keep the per-rank batches of a step; a worker that has started again may bring them again."""
        import ray

        # An object of this process: of the worker's own, its death would take the batch along.
        kept = ray.put(batches)
        with self._turned:
            if step > self._trained:
                self._batches[step] = kept

    def forward(self, number: int, method: str, step: int | None = None) -> list[Any]:
        """Call the trainers of this group and of those below; returns what they answer.

        Args:
            number: of the call, from 0.
            step: whose batch they get, which every group has taken; `train` is the last to ask for it. None:
                the method takes nothing.
        """
        import ray

        with self._in_turn(number):
            arguments = [] if step is None else [self._batches[step]]
            if method == "train" and step is not None:
                del self._batches[step]
                self._trained = step
            own = [getattr(trainer, method).remote(*arguments) for trainer in self._trainers]
            others = [group.forward.remote(number, method, step) for group, _ in self._below]
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
