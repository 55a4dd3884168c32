"""How the driver's loop calls the trainers: each, or by groups, so that its work grows less with them.

    EachTrainer     driver ─► trainer 0, trainer 1, ...
    ByGroup         driver ─► group 0 ─► trainer 0, trainer 1, ...      (`rayrec.actors.group_caller`)
                           └► group 1 ─► ...

Trainers get their calls in the order in which the driver makes them, either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class TrainerCalls(Protocol):
    """All trainers of a run, called at once."""

    @property
    def num_shares(self) -> int:
        """Objects that a feature worker makes of a batch: one for each group."""
        ...

    def call(self, method: str, shares: Sequence[Any]) -> list[Any]:
        """Promises of what all trainers answer; `answers` says what is in them."""
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
    def num_shares(self) -> int:
        return -(-len(self.trainers) // self.group_size)

    def call(self, method: str, shares: Sequence[Any]) -> list[Any]:
        return [
            getattr(trainer, method).remote(shares[rank // self.group_size])
            for rank, trainer in enumerate(self.trainers)
        ]

    def answers(self, kept: Sequence[Any]) -> list[Any]:
        return list(kept)

    def ask(self, method: str, ranks: Sequence[int]) -> list[Any]:
        return [getattr(self.trainers[rank], method).remote() for rank in ranks]


class ByGroup:
    """The trainers of a group by the process beside them."""

    def __init__(self, groups: Sequence[Any], group_size: int, get: Any) -> None:
        """
        Args:
            get: waits for promises, as `Calls.get`.
        """
        self._groups = groups
        self._group_size = group_size
        self._get = get
        self._number = 0
        """Of the next call: groups make their trainers' calls in this order."""

    @property
    def num_shares(self) -> int:
        return len(self._groups)

    def call(self, method: str, shares: Sequence[Any]) -> list[Any]:
        number = self._next()
        # In a list: the batch itself goes from the feature worker to the trainers.
        return [
            group.forward.remote(number, method, [share])
            for group, share in zip(self._groups, shares, strict=True)
        ]

    def answers(self, kept: Sequence[Any]) -> list[Any]:
        return [answer for of_group in kept for answer in of_group]

    def ask(self, method: str, ranks: Sequence[int]) -> list[Any]:
        number = self._next()
        asked = [
            group.ask.remote(number, method, [rank for rank in ranks if rank // self._group_size == place])
            for place, group in enumerate(self._groups)
        ]
        return [promise for promises in self._get(asked) for promise in promises]

    def _next(self) -> int:
        self._number += 1
        return self._number - 1
