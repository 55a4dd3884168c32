"""Where actors run, how each is named, and how it is started.

    host.spawn(Trainer, "trainer", rank, arguments) ─► handle;  handle.train.remote(batch) ─► promise

A `Host` is Ray (`RayHost`) or this process (`rayrec.actors.in_process`). Handles and promises look alike, so
drivers do not know which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayrec.actors.collective import Meeting
from rayrec.actors.heartbeats import Heartbeats, HeartbeatSettings

Where = Callable[[int], Mapping[str, Any]]
"""Ray's options that say on which node a member of a stage goes, and what it takes there."""


def anywhere(member: int) -> Mapping[str, Any]:
    """Let Ray choose."""
    return {}


@dataclass(frozen=True)
class ActorRole:
    """One member of a stage, as the Ray dashboard shows it."""

    run: str
    """Name of the run; also the namespace part of the actor's name."""
    stage: str
    """`sample_reader`, `feature_worker`, `parameter_server`, `trainer` or `trainer_group`."""
    member: int
    heartbeats_to: HeartbeatSettings | None = None
    """None: it sends none."""
    is_bound: bool = False
    """Its process is bound to one socket of the machine, see `rayrec.actors.numa`."""

    @property
    def actor_name(self) -> str:
        return f"{self.run}/{self.stage}-{self.member}"

    def heartbeats(self) -> Heartbeats:
        """Start to send heartbeats; to be called in the actor's process."""
        return Heartbeats(self.actor_name, self.heartbeats_to)


class Host(Protocol):
    """Where the actors of a run live."""

    def spawn(
        self,
        cls: type,
        stage: str,
        member: int,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        restarts: int | None = None,
    ) -> Any:
        """Start one actor; its constructor gets an `ActorRole`, then the arguments. Returns its handle.

        Args:
            options: of Ray's actors: what it takes of a node, and how many of its calls run at once.
            restarts: None for an actor that has state. It never comes back alone: a server that did would
                answer with untrained rows, a trainer with weights of its own. Else answers depend on their
                arguments alone: when the process dies it is started again so many times and its calls are
                repeated, which nobody else notices.
        """

    def put(self, value: Any) -> Any:
        """A value that several actors get as an argument; it travels once."""

    def meeting(self, stage: str) -> Meeting | None:
        """Where the members of a stage meet that are threads of one process; None: they are processes."""

    def close(self) -> None:
        """End every actor."""


class Calls(Protocol):
    """Waits for what actors promise."""

    def wait(self, promises: Sequence[Any], may_take_long: bool = False) -> list[Any]:
        """Wait for one or more of the promises; returns those that are kept.

        Args:
            may_take_long: a call that is at work for long is no reason to think that its actor hangs.
        """

    def get(self, promises: Sequence[Any], may_take_long: bool = False) -> list[Any]:
        """Wait for all and return what they promised; the first error ends the wait for the others."""


@dataclass(frozen=True)
class Spawned:
    """One actor that runs on Ray."""

    name: str
    handle: Any
    has_state: bool


@dataclass(frozen=True)
class RayHost:
    """Every actor is a process of the connected Ray cluster."""

    run: str
    heartbeats_to: HeartbeatSettings | None = None
    room: Callable[[str], Where] | None = None
    """By stage, where its members go; None: anywhere."""
    bound_stages: frozenset[str] = frozenset()
    """Whose processes are bound to one socket each."""
    spawned: list[Spawned] = field(default_factory=list)
    """Every actor that was started, in order."""

    def spawn(
        self,
        cls: type,
        stage: str,
        member: int,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        restarts: int | None = None,
    ) -> Any:
        import ray

        where = anywhere if self.room is None else self.room(stage)
        role = ActorRole(self.run, stage, member, self.heartbeats_to, stage in self.bound_stages)
        retries = {} if restarts is None else {"max_restarts": restarts, "max_task_retries": -1}
        remote_cls: Any = ray.remote(cls)
        chosen = {**options, **where(member), **retries}
        handle = remote_cls.options(name=role.actor_name, **chosen).remote(role, *arguments)
        self.spawned.append(Spawned(role.actor_name, handle, has_state=restarts is None))
        return handle

    def put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def meeting(self, stage: str) -> None:
        return None

    def forget(self, handle: Any) -> None:
        """An actor has died, and another one takes its name."""
        import ray

        ray.kill(handle)  # without, Ray's client holds the name to be taken
        self.spawned[:] = [actor for actor in self.spawned if actor.handle is not handle]

    def close(self) -> None:
        import ray

        for actor in self.spawned:
            ray.kill(actor.handle)


class RayCalls:
    """Waits for objects of Ray's, however long they take."""

    def wait(self, promises: Sequence[Any], may_take_long: bool = False) -> list[Any]:
        import ray

        return list(ray.wait(list(promises), num_returns=1)[0])

    def get(self, promises: Sequence[Any], may_take_long: bool = False) -> list[Any]:
        import ray

        return list(ray.get(list(promises)))
