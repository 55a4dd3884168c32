"""A process beside the trainers of a node: it calls the servers for them (`GroupCaller`), and them for the
driver (`Leader`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.actors.leading import Leader
from rayrec.actors.spawning import ActorRole, Host
from rayrec.actors.stage_actor import StageActor
from rayrec.actors.transport import Listening, ServerPlace, TransportChoice, connect
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.base.row_codec import Wire
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.transport.group_caller import GroupCaller
from rayrec.embeddings.transport.protocol import Empty, ReplyT, ShardCall
from rayrec.platform.metrics import MeterClock, StageTimes

GROUP_STAGE = "trainer_group"


@dataclass(frozen=True)
class GroupSpec:
    """What the callers of all groups have to know."""

    tables: tuple[TableConfig, ...]
    num_trainers: int
    group_size: int
    transport: TransportChoice
    wait_timeout_s: float
    max_staleness: int = 0
    wire: Wire = "float32"
    """Between callers and servers; between trainers and callers, which are on one node, it is float32."""
    queue_depth: int = 4
    """Batches that the driver begins at once."""
    unasked_bytes: int | None = None
    """As of `ShardClient`."""

    @property
    def num_groups(self) -> int:
        return -(-self.num_trainers // self.group_size)

    def members(self, group: int) -> range:
        """Ranks of a group's trainers; the last group may have fewer than the others."""
        first = group * self.group_size
        return range(first, min(first + self.group_size, self.num_trainers))


class GroupCallerActor(StageActor[MeterClock]):
    """A thin shell; trainers of its node reach it through shared memory, others as Ray calls."""

    def __init__(self, role: ActorRole, spec: GroupSpec, servers: Sequence[Any]) -> None:
        super().__init__(role, MeterClock(lambda: self._busy_before_s + self._caller.busy_s))
        self._spec = spec
        self._busy_before_s = 0.0
        self._leader, self._caller = self._begun(servers)
        self._listening = Listening(role.actor_name, self.answer)

    def reach(self, servers: Sequence[Any]) -> None:
        """Call these servers from now on; nothing is known of calls before, and `lead` has to follow."""
        self._busy_before_s += self._caller.busy_s
        self._leader, self._caller = self._begun(servers)

    def _begun(self, servers: Sequence[Any]) -> tuple[Leader, GroupCaller]:
        spec, members = self._spec, self._spec.members(self._role.member)
        return Leader(members), GroupCaller(
            self._role.member,
            members,
            spec.tables,
            ShardMap(len(servers)),
            connect(servers, spec.transport, spec.wire, spec.tables),
            spec.wait_timeout_s,
            spec.unasked_bytes,
        )

    def place(self) -> ServerPlace:
        """Where this caller runs; from now on it listens for processes of its node, too."""
        return self._listening.place()

    def answer(self, call: ShardCall[ReplyT], empty: Empty = np.empty) -> ReplyT:
        """As `GroupCaller.answer`."""
        reply = self._caller.answer(call, empty)
        if call.commits(reply):
            self._metrics.after_batch(self._times())
        return reply

    def lead(self, trainers: Sequence[Any], below: Sequence[tuple[Any, int]]) -> None:
        """As `Leader.lead`."""
        self._leader.lead(trainers, below)

    def take(self, step: int, batches: Any) -> None:
        """As `Leader.take`."""
        self._leader.take(step, batches)

    def forward(self, number: int, method: str, step: int | None = None) -> list[Any]:
        """As `Leader.forward`."""
        return self._leader.forward(number, method, step)

    def ask(self, number: int, method: str, ranks: Sequence[int]) -> list[Any]:
        """As `Leader.ask`."""
        return self._leader.ask(number, method, ranks)

    def abort(self, error: BaseException) -> None:
        """As `GroupCaller.abort`."""
        self._caller.abort(error)

    def stats(self) -> StageTimes:
        times = self._times()
        self._metrics.publish(times)
        return times

    def _times(self) -> StageTimes:
        return self._clock.times(num_batches=self._caller.num_steps)


def spawn_trainer_groups(host: Host, spec: GroupSpec, servers: Sequence[Any]) -> list[Any]:
    """Start the callers of a run, one for each group; none where every trainer calls for itself."""
    if spec.group_size == 1 or not servers:
        return []
    return [
        host.spawn(
            GroupCallerActor,
            GROUP_STAGE,
            group,
            (spec, list(servers)),
            # No CPU of its own: it works while its trainers wait for it. Calls of trainers on other nodes
            # wait on threads, as those of trainers do on a server; and those of the driver, two a batch, and
            # of the worker that brings it.
            {
                "num_cpus": 0,
                "max_concurrency": (4 + spec.max_staleness) * spec.group_size + 3 * spec.queue_depth + 8,
            },
        )
        for group in range(spec.num_groups)
    ]
