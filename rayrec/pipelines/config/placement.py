"""On which nodes of a cluster the actors of a run may be: the section `placement` of its settings."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from rayrec.platform.config import Config
from rayrec.platform.devices import HOST, KINDS, device_named

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""In Ray's words: on few nodes, on many nodes; strictly: on one, or each on another."""

_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
SELECTOR = re.compile(rf"!?({_NAME}|in\({_NAME}(,{_NAME})*\))")
"""What Ray selects nodes with by the value of one label: `a`, `!a`, `in(a,b)` or `!in(a,b)`."""
COUNTED_OTHERWISE = {
    HOST.ray_resource: "pipeline.cpus_per_actor and pipeline.cpus_per_trainer say how many each takes",
    **{
        device.ray_resource: f"trainers take one each with device {device.kind!r}"
        for device in map(device_named, KINDS)
        if device.has_own_memory
    },
    "memory": "sparse.server_memory says what a server may take; choose nodes by a label",
    "object_store_memory": "Ray takes it as it needs it",
}
"""Resources that an actor gets from other settings, and from which."""


class NodeChoice(Config):
    """Which nodes one kind of actors may be on; what is left out is not asked for."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that a node has to have (`ray start --labels`): a value, `!value`, `in(a,b)` or `!in(a,b)`."""
    resources: dict[str, float] = Field(default_factory=dict)
    """How much each actor takes of a node's custom resources (`ray start --resources`), by their name."""

    @field_validator("labels")
    @classmethod
    def _values_can_be_selected(cls, labels: dict[str, str]) -> dict[str, str]:
        for name, wanted in labels.items():
            if not SELECTOR.fullmatch(wanted):
                raise ValueError(
                    f"placement labels select nodes by 'value', '!value', 'in(a,b)' or '!in(a,b)', and "
                    f"{name!r} has {wanted!r}"
                )
        return labels

    @field_validator("resources")
    @classmethod
    def _custom_ones_are_taken(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, count in resources.items():
            if (instead := COUNTED_OTHERWISE.get(name)) is not None:
                raise ValueError(f"placement resources are a cluster's own, and {name!r} is not: {instead}")
            if count <= 0 or (count > 1 and count != int(count)):
                raise ValueError(
                    f"placement resources are taken in shares of one or in whole numbers, and {name!r} has "
                    f"{count:g}"
                )
        return resources


class ServerPlacement(NodeChoice):
    """Parameter servers: apart, so that their tables find memory, and updates a network, on many nodes."""

    strategy: Strategy = "SPREAD"


class TrainerPlacement(NodeChoice):
    """Trainers: together, since they sum gradients over what is between them in every step."""

    strategy: Strategy = "PACK"


class PlacementConfig(Config):
    """Where the actors of a run go. On one machine there is nothing to say."""

    servers: ServerPlacement = ServerPlacement()
    trainers: TrainerPlacement = TrainerPlacement()
    readers: NodeChoice = NodeChoice()
    feature_workers: NodeChoice = NodeChoice()
    numa: Literal["off", "bind"] = "off"
    """On machines with several sockets: `bind` each server and trainer to the CPUs and the memory of one of
    them, a trainer to that of its GPU. An actor then uses the CPUs of one socket at most."""

    @property
    def bound_stages(self) -> frozenset[str]:
        """Stages whose processes are bound to a socket."""
        return frozenset({"parameter_server", "trainer"} if self.numa == "bind" else ())
