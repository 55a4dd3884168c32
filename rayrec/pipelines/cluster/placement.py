"""Which actor goes to which node of a cluster: arithmetic on what nodes have and actors ask for.

Ray's placement groups know one strategy for all that they hold, and a run has several: so the nodes of what
has a state are chosen here, and reserved by name, all at once (`rayrec.pipelines.cluster.reservation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrec.pipelines.config.placement import NodeChoice, Strategy
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.devices import ACCELERATOR_RESOURCES, HOST, claimed_resources, ray_claim

NODE_ID_LABEL = "ray.io/node-id"
"""Ray gives it to every node."""
SMALLEST_SHARE = 1e-4
"""Of a resource, that Ray counts."""


@dataclass(frozen=True)
class Node:
    """One node of the cluster that is alive."""

    id: str
    address: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    """Count by Ray's name of the resource."""
    free: Mapping[str, float]
    """What no other actor holds now."""
    hostname: str = ""
    is_draining: bool = False
    """It leaves for good: Ray gives it nothing new, and ends it with its last actor."""
    quarantined: str | None = None
    """Why new actors do not go there for now; None: they may."""

    @property
    def is_usable(self) -> bool:
        """Whether new actors may go there."""
        return not self.is_draining and self.quarantined is None

    @property
    def held(self) -> dict[str, float]:
        """What actors hold now, by Ray's name of the resource."""
        return {name: count - self.free.get(name, 0.0) for name, count in self.total.items()}

    @property
    def condition(self) -> str:
        """In words."""
        if self.is_draining:
            return "draining"
        return "usable" if self.quarantined is None else f"quarantined: {self.quarantined}"

    @property
    def name(self) -> str:
        """Address, and enough of the id to tell nodes of one machine apart."""
        return f"{self.address} ({self.id[:8]})"


@dataclass(frozen=True)
class ActorGroup:
    """The actors of one stage, which are all alike."""

    stage: str
    """As in `ActorRole`."""
    setting: str
    """Section of the settings that says where they go."""
    count: int
    resources: Mapping[str, float]
    """What each of them asks for."""
    labels: Mapping[str, str]
    strategy: Strategy = "SPREAD"
    has_state: bool = True
    """Others may come up again, on another node than the one that was chosen."""

    @property
    def name(self) -> str:
        return self.stage.replace("_", " ") + ("" if self.count == 1 else "s")

    def may_be_on(self, node: Node) -> bool:
        """By labels alone."""
        return all(selects(wanted, node.labels.get(name)) for name, wanted in self.labels.items())

    @property
    def demand(self) -> str:
        """What each asks for, and of which nodes, in words."""
        asked = ", ".join(f"{count:g} {name}" for name, count in self.resources.items()) or "nothing"
        return f"each asks for {asked}" + (f" on a node with {in_words(self.labels)}" if self.labels else "")


class NoNodeError(Exception):
    """Some actors of a group find no node; one sentence, that others are to finish."""

    def __init__(self, group: ActorGroup, num_placed: int) -> None:
        super().__init__(group, num_placed)
        self.group = group
        self.num_missing = group.count - num_placed

    def __str__(self) -> str:
        group = self.group
        strictly = f", placed {group.strategy}" if group.strategy.startswith("STRICT") else ""
        return f"{self.num_missing} of {group.count} {group.name} find no room ({group.demand}{strictly})"


def selects(wanted: str, value: str | None) -> bool:
    """Whether a label's value, None where a node has no such label, is what Ray's selector asks for."""
    positive = wanted.removeprefix("!")
    values = positive[3:-1].split(",") if positive.startswith("in(") else [positive]
    return (value in values) != wanted.startswith("!")


def actor_groups(config: RunConfig) -> tuple[ActorGroup, ...]:
    """What a run's settings ask of a cluster, in the order in which actors are started."""
    pipeline, placement = config.pipeline, config.placement
    actor = {HOST.ray_resource: pipeline.cpus_per_actor}
    trainer = {
        HOST.ray_resource: pipeline.cpus_per_trainer,
        **claimed_resources(ray_claim(config.device)),
    }

    def group(
        stage: str,
        setting: str,
        count: int,
        asked: Mapping[str, float],
        choice: NodeChoice,
        strategy: Strategy | None = None,
    ) -> ActorGroup:
        return ActorGroup(
            stage,
            f"placement.{setting}",
            count,
            {name: each for name, each in {**asked, **choice.resources}.items() if each > 0},
            choice.labels,
            strategy or "SPREAD",
            has_state=strategy is not None,
        )

    servers, trainers = placement.servers, placement.trainers
    workers = pipeline.num_feature_workers
    groups = (
        group("parameter_server", "servers", config.num_servers, actor, servers, servers.strategy),
        group("sample_reader", "readers", pipeline.num_readers, actor, placement.readers),
        group("feature_worker", "feature_workers", workers, actor, placement.feature_workers),
        group("trainer", "trainers", pipeline.num_trainers, trainer, trainers, trainers.strategy),
    )
    return tuple(group for group in groups if group.count)


def assign(
    groups: Sequence[ActorGroup], nodes: Sequence[Node], of_total: bool = False
) -> dict[str, list[Node]]:
    """A node for every actor of every group; by stage, in the order of its members.

    Groups that few nodes can take come first, then those that ask for much. Actors that ask for no
    accelerator go to nodes with one only where there is no other: so a run's servers leave them to trainers.
    Nodes that are draining or quarantined get none.

    Args:
        of_total: what other jobs hold counts as free, and quarantined nodes as usable: both may end.

    Raises:
        NoNodeError: not all of them find one.
    """
    nodes = [node for node in nodes if (not node.is_draining if of_total else node.is_usable)]
    left = {node.id: dict(node.total if of_total else node.free) for node in nodes}
    choices = {group.stage: [node for node in nodes if group.may_be_on(node)] for group in groups}

    def urgency(group: ActorGroup) -> tuple[int, bool, float]:
        able = [node for node in choices[group.stage] if times(group.resources, node.total) >= 1]
        return len(able), not group.strategy.startswith("STRICT"), -sum(group.resources.values())

    placed: dict[str, list[Node]] = {}
    for group in sorted(groups, key=urgency):
        placed[group.stage] = _assign_group(group, choices[group.stage], left)
    return placed


def _assign_group(
    group: ActorGroup, nodes: Sequence[Node], left: Mapping[str, dict[str, float]]
) -> list[Node]:
    """Takes what the group gets out of `left`."""
    placed: list[Node] = []
    while len(placed) < group.count:
        node = _next_node(group, nodes, left, placed)
        if node is None:
            raise NoNodeError(group, len(placed))
        for name, count in group.resources.items():
            left[node.id][name] -= count
        placed.append(node)
    return placed


def _next_node(
    group: ActorGroup, nodes: Sequence[Node], left: Mapping[str, Mapping[str, float]], placed: Sequence[Node]
) -> Node | None:
    """The best node for one more actor, when others of its group are on some already."""
    num_left = group.count - len(placed)
    num_here = Counter(node.id for node in placed)
    rooms = {node.id: times(group.resources, left[node.id]) for node in nodes}
    able = [node for node in nodes if rooms[node.id] >= 1]
    if group.strategy == "STRICT_SPREAD":
        able = [node for node in able if not num_here[node.id]]
    elif group.strategy == "STRICT_PACK":
        able = [node for node in able if (num_here[node.id] if placed else rooms[node.id] >= num_left)]

    def preference(node: Node) -> tuple[bool, int, float]:
        others = ACCELERATOR_RESOURCES - set(group.resources)
        idles = any(node.total.get(name, 0) > 0 for name in others)
        if group.strategy.endswith("PACK"):
            return idles, -num_here[node.id], -min(rooms[node.id], num_left)
        return idles, num_here[node.id], -rooms[node.id]

    return min(able, key=preference, default=None)


def times(resources: Mapping[str, float], there: Mapping[str, float]) -> float:
    """How often the resources are there."""
    most = [
        (there.get(name, 0.0) + SMALLEST_SHARE / 2) // count for name, count in resources.items() if count > 0
    ]
    return min(most, default=float("inf"))


def in_words(labels: Mapping[str, str]) -> str:
    return " and ".join(f"{name}={value}" for name, value in labels.items())
