"""How every actor of a run is named, placed and watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrec.actors.heartbeats import Heart, Pulse

Where = Callable[[int], Mapping[str, Any]]
"""Ray's options that say on which node a member of a stage goes, and what it takes there."""


def anywhere(member: int) -> Mapping[str, Any]:
    """Ray chooses."""
    return {}


@dataclass(frozen=True)
class ActorRole:
    """One member of a stage, as the Ray dashboard shows it."""

    run: str
    """Name of the run; also the namespace part of the actor's name."""
    stage: str
    """`sample_reader`, `feature_worker`, `parameter_server` or `trainer`."""
    member: int
    heart: Heart | None = None
    """Where its beats go."""

    @property
    def actor_name(self) -> str:
        return f"{self.run}/{self.stage}-{self.member}"

    def pulse(self) -> Pulse:
        """To be called in the actor's process: from now on it beats."""
        return Pulse(self.actor_name, self.heart)


def spawn(cls: type, role: ActorRole, options: dict[str, Any], *arguments: Any) -> ActorHandle:
    """Start one actor that has state: it never comes back alone.

    A server that did would answer with untrained rows, a trainer with weights of its own.
    """
    return _spawn(cls, role, options, *arguments)


def spawn_stateless(
    cls: type, role: ActorRole, options: dict[str, Any], restarts: int, *arguments: Any
) -> ActorHandle:
    """Start one actor whose answers depend on its arguments alone.

    When its process dies Ray starts it anew and repeats the calls that it owes answers to, so that nobody
    else takes notice.

    Args:
        restarts: of its process, after which its death is the run's.
    """
    retries = {"max_restarts": restarts, "max_task_retries": -1}
    return _spawn(cls, role, options | retries, *arguments)


def _spawn(cls: type, role: ActorRole, options: dict[str, Any], *arguments: Any) -> ActorHandle:
    remote_cls: Any = ray.remote(cls)
    handle: ActorHandle = remote_cls.options(name=role.actor_name, **options).remote(role, *arguments)
    return handle
