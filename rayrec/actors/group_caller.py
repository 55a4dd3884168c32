"""A process beside the trainers of a node: it calls the parameter servers for them, and them for the driver.

The first is all in `GroupCaller`. Of the second there is only the order to keep: calls come numbered, run on
threads, and reach every trainer by their numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.actors.spawning import ActorRole, Host
from rayrec.actors.stage_actor import StageActor
from rayrec.actors.transport import Listening, ServerPlace, TransportChoice, connect
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.transport.group_caller import GroupCaller
from rayrec.embeddings.transport.protocol import Empty, ReplyT, ShardCall
from rayrec.platform.metrics import MeterClock, StageTimes

GROUP_STAGE = "trainer_group"
DRIVER_CALLS = 64
"""Most calls of the driver that wait for trainers at once; two for each batch that is begun."""


@dataclass(frozen=True)
class GroupSpec:
    """What the callers of all groups have to know."""

    tables: tuple[TableConfig, ...]
    num_trainers: int
    group_size: int
    transport: TransportChoice
    wait_timeout_s: float
    max_staleness: int = 0

    @property
    def num_groups(self) -> int:
        return -(-self.num_trainers // self.group_size)

    def members(self, group: int) -> range:
        """Ranks of a group's trainers; the last group may have fewer than the others."""
        first = group * self.group_size
        return range(first, min(first + self.group_size, self.num_trainers))


class TrainerGroup(StageActor[MeterClock]):
    """A thin shell; trainers of its node reach it through shared memory, others as Ray calls."""

    def __init__(self, role: ActorRole, spec: GroupSpec, servers: Sequence[Any]) -> None:
        super().__init__(role, MeterClock(lambda: self._caller.busy_s))
        self._members = spec.members(role.member)
        self._trainers: list[Any] = []
        self._turned, self._next = threading.Condition(), 0
        self._caller = GroupCaller(
            role.member,
            self._members,
            spec.tables,
            ShardMap(len(servers)),
            connect(servers, spec.transport),
            spec.wait_timeout_s,
        )
        self._listening = Listening(role.actor_name, self._caller.answer)

    def place(self) -> ServerPlace:
        """Where this caller runs; from now on it listens for processes of its node, too."""
        return self._listening.place()

    def answer(self, call: ShardCall[ReplyT], empty: Empty = np.empty) -> ReplyT:
        """As `GroupCaller.answer`."""
        return self._caller.answer(call, empty)

    def lead(self, trainers: Sequence[Any]) -> None:
        """Whom to call for the driver; once, before its first call."""
        self._trainers = list(trainers)

    def forward(self, number: int, method: str, share: Sequence[Any]) -> list[Any]:
        """Call all trainers of the group with what is theirs of a batch, and return what they answer.

        Args:
            number: of the call, from 0.
            share: the object of all their shares, which need not come here.
        """
        import ray

        with self._in_turn(number):
            promises = [getattr(trainer, method).remote(share[0]) for trainer in self._trainers]
        return list(ray.get(promises))

    def ask(self, number: int, method: str, ranks: Sequence[int]) -> list[Any]:
        """Call some of the trainers; returns the promises of their answers."""
        first = self._members.start
        with self._in_turn(number):
            return [getattr(self._trainers[rank - first], method).remote() for rank in ranks]

    @contextmanager
    def _in_turn(self, number: int) -> Iterator[None]:
        with self._turned:
            self._turned.wait_for(lambda: self._next == number)
            try:
                yield
            finally:
                self._next = number + 1
                self._turned.notify_all()

    def abort(self, error: BaseException) -> None:
        """As `GroupCaller.abort`; only where all trainers are in one process."""
        self._caller.abort(error)

    def stats(self) -> StageTimes:
        times = self._clock.times(num_batches=self._caller.num_steps)
        self._metrics.publish(times)
        return times


def spawn_trainer_groups(host: Host, spec: GroupSpec, servers: Sequence[Any]) -> list[Any]:
    """Start the callers of a run, one for each group; none where every trainer calls for itself."""
    if spec.group_size == 1 or not servers:
        return []
    return [
        host.spawn(
            TrainerGroup,
            GROUP_STAGE,
            group,
            (spec, list(servers)),
            # No CPU of its own: it works while its trainers wait for it. Calls of trainers on other nodes
            # wait on threads, as those of trainers do on a server; and those of the driver.
            {
                "num_cpus": 0,
                "max_concurrency": (4 + spec.max_staleness) * spec.group_size + 4 + DRIVER_CALLS,
            },
        )
        for group in range(spec.num_groups)
    ]
