"""How every actor of a run is named and placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle


@dataclass(frozen=True)
class ActorRole:
    """One member of a stage, as the Ray dashboard shows it."""

    run: str
    """Name of the run; also the namespace part of the actor's name."""
    stage: str
    """`sample_reader`, `feature_worker`, `parameter_server` or `trainer`."""
    member: int

    @property
    def actor_name(self) -> str:
        return f"{self.run}/{self.stage}-{self.member}"


def spawn(cls: type, role: ActorRole, options: dict[str, Any], *arguments: Any) -> ActorHandle:
    """Start one actor.

    No `max_restarts` anywhere: an actor that came back by itself would answer
    with another state than the run has (a server with untrained rows).
    """
    remote_cls: Any = ray.remote(cls)
    handle: ActorHandle = remote_cls.options(name=role.actor_name, **options).remote(role, *arguments)
    return handle
