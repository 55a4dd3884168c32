"""How the driver's loop calls the trainers: each, or by groups, so that its work grows less with them.

    EachTrainer     driver ─► trainer 0, trainer 1, ...                 with the batch, which the driver owns
    ByGroup         driver ─► group 0 ─► trainer 0, trainer 1, ...      (`rayrec.actors.leading`)
                                └─► group 1 ─► trainer 8, ...

Trainers get their calls in the order in which the driver makes them, either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FAN_OUT = 8
"""Most groups that one group calls."""


class TrainerCalls(Protocol):
    """All trainers of a run, called at once."""

    @property
    def num_objects(self) -> int:
        """That a feature worker makes of a batch: one for each group; none where it brings them there."""
        ...

    def prefetch(self, step: int, batches: Sequence[Any]) -> list[Any]:
        """Promises that all trainers have a batch."""
        ...

    def train(self, step: int, batches: Sequence[Any]) -> list[Any]:
        """Promises of all trainers' reports; `answers` says what is in them."""
        ...

    def each(self, method: str) -> list[Any]:
        """Promises that all trainers have carried out a method."""
        ...

    def answers(self, kept: Sequence[Any]) -> list[Any]:
        """Of each trainer, in the order of the ranks, out of what was promised."""
        ...

    def ask(self, method: str, ranks: Sequence[int]) -> list[Any]:
        """Promises of what some trainers answer, behind the calls that were made before."""
        ...


@dataclass(frozen=True)
class EachTrainer:
    """Every trainer by itself."""

    trainers: Sequence[Any]
    group_size: int = 1

    @property
    def num_objects(self) -> int:
        return -(-len(self.trainers) // self.group_size)

    def prefetch(self, step: int, batches: Sequence[Any]) -> list[Any]:
        return [trainer.prefetch.remote(batch) for trainer, batch in self._pairs(batches)]

    def train(self, step: int, batches: Sequence[Any]) -> list[Any]:
        return [trainer.train.remote(batch) for trainer, batch in self._pairs(batches)]

    def each(self, method: str) -> list[Any]:
        return [getattr(trainer, method).remote() for trainer in self.trainers]

    def _pairs(self, batches: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(trainer, batches[rank // self.group_size]) for rank, trainer in enumerate(self.trainers)]

    def answers(self, kept: Sequence[Any]) -> list[Any]:
        return list(kept)

    def ask(self, method: str, ranks: Sequence[int]) -> list[Any]:
        return [getattr(self.trainers[rank], method).remote() for rank in ranks]


class ByGroup:
    """The trainers of a group by the process beside them; of a tree of groups, the driver calls the first."""

    num_objects = 0
    """Feature workers bring batches to the groups."""

    def __init__(
        self,
        groups: Sequence[Any],
        trainers: Sequence[Any],
        group_size: int,
        get: Callable[[list[Any]], Any],
    ) -> None:
        """
        Args:
            get: waits for promises, as `Calls.get`.
        """
        self._first = groups[0]
        self._get = get
        self._number = 0
        """Of the next call: groups make their trainers' calls in this order."""
        starts = range(0, len(trainers), group_size)
        of_group = [trainers[first : first + group_size] for first in starts]
        get(
            [
                group.lead.remote(of_group[number], [(groups[below.start], len(below)) for below in parts])
                for number, (group, parts) in enumerate(zip(groups, tree(len(groups)), strict=True))
            ]
        )

    def prefetch(self, step: int, batches: Sequence[Any]) -> list[Any]:
        return [self._first.forward.remote(self._next(), "prefetch", step)]

    def train(self, step: int, batches: Sequence[Any]) -> list[Any]:
        return [self._first.forward.remote(self._next(), "train", step)]

    def each(self, method: str) -> list[Any]:
        return [self._first.forward.remote(self._next(), method)]

    def answers(self, kept: Sequence[Any]) -> list[Any]:
        (answers,) = kept
        return list(answers)

    def ask(self, method: str, ranks: Sequence[int]) -> list[Any]:
        (promises,) = self._get([self._first.ask.remote(self._next(), method, list(ranks))])
        return list(promises)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def tree(num_groups: int) -> list[list[range]]:
    """For each group, those below it, in the parts of which it calls the first group of each.

    A part is contiguous, and parts are in order: what comes back is in the order of the groups.
    """
    below: list[list[range]] = [[] for _ in range(num_groups)]
    waiting = [range(num_groups)]
    while waiting:
        first, *rest = part = waiting.pop()
        size = -(-len(rest) // FAN_OUT)
        below[first] = [part[at : at + size] for at in range(1, len(part), size)] if rest else []
        waiting += below[first]
    return below
