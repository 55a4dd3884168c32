"""What the actors of all stages have besides their part of the work."""

from __future__ import annotations

import socket
import sys
from typing import Generic, TypeVar

from rayrec.actors.numa import bind
from rayrec.actors.spawning import ActorRole
from rayrec.platform.metrics import MeterClock, RayStageMetrics, StageClock

ClockT = TypeVar("ClockT", StageClock, MeterClock)


def this_node() -> str:
    """Where this process runs: address and Ray's id of the node, or the host's name without Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return socket.gethostname()
    return f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"


class StageActor(Generic[ClockT]):
    """Base of an actor: its name, its heartbeats, and where its time goes."""

    def __init__(self, role: ActorRole, clock: ClockT) -> None:
        self._role = role
        # Before what a stage allocates, since memory is where it was touched first.
        self._bound = bind() if role.is_bound else None
        self._heartbeats = role.heartbeats()
        self._clock: ClockT = clock
        self._metrics = RayStageMetrics(role.run, role.stage, role.member)

    def __repr__(self) -> str:
        return self._role.actor_name

    def start_clock(self) -> None:
        """Training goes on: from now on, time between batches is waiting."""
        self._clock.start()

    def stop_clock(self) -> None:
        """Until the next start nothing is trained."""
        self._clock.stop()
