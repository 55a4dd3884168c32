"""Who is alive, and what it has been doing for how long: how a stage is found that hangs and does not die.

    every actor: a thread of its own ──► HeartbeatMonitor ◄──accounts── driver, when no step ends

A process that is stopped or swaps itself to death sends none. One that is stuck in a call sends heartbeats
that name the call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

KILL_PATIENCE_S = 30.0
"""How long another node may take to end a process."""
HEARTBEATS_PER_TIMEOUT = 5
"""Heartbeats in the time after which a silent process counts as hung."""


@dataclass(frozen=True)
class ProcessId:
    """One process of the cluster, which a number alone is not: numbers are used again."""

    node: str
    """Ray's id of the node that it runs on."""
    number: int
    started: str
    """When, as the kernel counts; empty where that is not known."""

    @classmethod
    def own(cls) -> ProcessId:
        import ray

        return cls(ray.get_runtime_context().get_node_id(), os.getpid(), _started(os.getpid()))


@dataclass(frozen=True)
class Heartbeat:
    """What a process says of itself."""

    process: ProcessId
    call: str | None
    """The call that it is in, such as `train(17)`; None between two calls."""
    busy_s: float
    """Since when."""


@dataclass(frozen=True)
class Account:
    """The last heartbeat of an actor, and how long ago that was."""

    heartbeat: Heartbeat
    age_s: float


class HeartbeatMonitor:
    """Keeps the last heartbeat of every actor; the driver itself cannot be called."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[Heartbeat, float]] = {}

    def take(self, actor_name: str, heartbeat: Heartbeat) -> None:
        self._last[actor_name] = heartbeat, self._clock()

    def forget(self, actor_name: str) -> None:
        """It is gone; another one of this name has said nothing yet."""
        self._last.pop(actor_name, None)

    def accounts(self) -> dict[str, Account]:
        now = self._clock()
        return {name: Account(heartbeat, now - then) for name, (heartbeat, then) in self._last.items()}


@dataclass(frozen=True)
class HeartbeatSettings:
    """Where an actor's heartbeats go, and how often."""

    monitor: str
    """Ray's name of it."""
    every_s: float


class Heartbeats:
    """An actor's heartbeats, sent from a thread of their own: also while other threads compute or wait."""

    def __init__(self, actor_name: str, to: HeartbeatSettings | None) -> None:
        self._actor_name = actor_name
        self._call: tuple[str, float] | None = None
        if to is not None:
            self._process = ProcessId.own()
            threading.Thread(target=self._send, args=(to,), name="heartbeats", daemon=True).start()

    @contextmanager
    def during(self, call: str, step: int | None = None) -> Iterator[None]:
        """Inside the block the actor is in this call."""
        self._call = (call if step is None else f"{call}({step})"), time.monotonic()
        try:
            yield
        finally:
            self._call = None

    def _send(self, to: HeartbeatSettings) -> None:
        import ray

        monitor = ray.get_actor(to.monitor)
        while True:
            call = self._call  # once: another thread changes it
            busy_s = 0.0 if call is None else time.monotonic() - call[1]
            heartbeat = Heartbeat(self._process, None if call is None else call[0], busy_s)
            monitor.take.remote(self._actor_name, heartbeat)
            time.sleep(to.every_s)


def monitor_name(run: str) -> str:
    return f"{run}/heartbeats"


def spawn_heartbeat_monitor(run: str) -> Any:
    import ray

    # It comes back by itself: all that it knows is a moment old.
    monitor: Any = ray.remote(HeartbeatMonitor)
    return monitor.options(name=monitor_name(run), num_cpus=0, max_restarts=-1).remote()


def kill_process(process: ProcessId, timeout_s: float = KILL_PATIENCE_S) -> None:
    """End a process of the cluster by the kernel: one that is stopped hears nothing that Ray says.

    Where its node is gone, or does not answer in time, that is all that is done.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if process.node == ray.get_runtime_context().get_node_id():
        _kill(process)
        return
    strategy = NodeAffinitySchedulingStrategy(process.node, soft=False)
    killed: Any = ray.remote(_kill).options(num_cpus=0, scheduling_strategy=strategy).remote(process)
    try:
        ray.get(killed, timeout=timeout_s)
    except (GetTimeoutError, RayError) as error:
        logger.warning("process %d of node %s cannot be killed: %s", process.number, process.node, error)


def _kill(process: ProcessId) -> None:
    # Where nobody can tell that it is still the same process, it is left to Ray.
    if process.started and _started(process.number) == process.started:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process.number, signal.SIGKILL)


def _started(number: int) -> str:
    try:
        described = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    return described.rpartition(")")[2].split()[19]  # field 22 of proc(5); names may have blanks
