"""Room on the cluster for all actors of an attempt: all of it at once, or none.

    nodes, free ──► assign ──► placement group, servers and trainers pinned to the nodes that were chosen
       ▲               │              │
       └── no room: it is said, ◄─────┘ somebody else was faster: again, first without those nodes
           and waited for

A queue that has started the run says which nodes it has chosen; they come first, and others where there is no
room on them.

Two runs that want the same nodes never hold half of them each and wait for the other half. Readers and
feature workers are reserved by label only: when a node dies, Ray finds them room on another.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayrec.actors.spawning import Where
from rayrec.pipelines.cluster.nodes import cluster_nodes
from rayrec.pipelines.cluster.placement import NODE_ID_LABEL, ActorGroup, Node, NoNodeError, assign
from rayrec.pipelines.cluster.placement_check import still_waiting
from rayrec.platform.devices import ray_options

logger = logging.getLogger(__name__)

NODES_VARIABLE = "RAYREC_NODES"
"""Ray's ids of the nodes that a queue has chosen for a run, with commas."""
LOOK_AGAIN_S = (0.1, 1.0)
"""First and longest time between two looks for room."""
GRANTED_S = 10.0
"""Time in which Ray reserves room that is there."""


@dataclass(frozen=True)
class _Bundle:
    """One part of a placement group, and the nodes that it may be on."""

    resources: dict[str, float]
    labels: dict[str, str]


class Reservation:
    """Where each actor of an attempt goes."""

    def __init__(
        self,
        groups: Sequence[ActorGroup],
        placed: Mapping[str, Sequence[Node]],
        held: PlacementGroup | None,
        bundle_of: Mapping[tuple[str, int], int],
        left_out: Sequence[str] = (),
    ) -> None:
        """
        Args:
            left_out: Ray's ids of nodes that nothing new goes to.
            held: None where no actor asks for anything that could be reserved.
            bundle_of: by stage and member, its place in what is held.
        """
        self._groups = {group.stage: group for group in groups}
        self._placed = placed
        self._held = held
        self._bundle_of = bundle_of
        self._left_out = left_out
        self._moved: dict[tuple[str, int], str] = {}
        """Where members are that started again on another node."""

    def of(self, stage: str) -> Where:
        """For the actors of a stage: what they ask for, and where they get that."""
        return partial(self._options, stage)

    def beside(self, stage: str, every: int) -> Where:
        """For actors that ask for nothing: member m on the node of member m * every of a stage."""

        def options(member: int) -> dict[str, Any]:
            node = self._node_ids_of(stage)[member * every]
            return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}

        return options

    def apart(self, stage: str, every: int) -> list[int]:
        """Numbers of the groups of so many members each that are not on one node."""
        ids = self._node_ids_of(stage)
        return [
            number for number in range(-(-len(ids) // every)) if len(set(ids[number * every :][:every])) > 1
        ]

    def _node_ids_of(self, stage: str) -> list[str]:
        """Ray's, of the nodes that the members of a stage are on."""
        held = {} if self._held is None else placement_group_table(self._held)["bundles_to_node_id"]
        placed = [
            node.id if (bundle := self._bundle_of.get((stage, member))) is None else held[bundle]
            for member, node in enumerate(self._placed[stage])
        ]
        return [self._moved.get((stage, member), node) for member, node in enumerate(placed)]

    def _options(self, stage: str, member: int) -> dict[str, Any]:
        group = self._groups[stage]
        options = ray_options(group.resources)
        if (bundle := self._bundle_of.get((stage, member))) is not None:
            assert self._held is not None, "there are bundles"
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._held, bundle)
        elif group.has_state:
            node = self._placed[stage][member]
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node.id, soft=False)
        elif selector := _selector(group, self._left_out):
            options["label_selector"] = selector
        return options

    def again(self, stage: str, member: int) -> Mapping[str, Any] | None:
        """As `of`, for a lost member with state that is to start again alone; None: it finds no place.

        It comes back to its node. Where that is gone it goes to another one, if nothing else of the attempt
        was there: what is pinned to a lost node, and what Ray does not move, comes back with a new attempt.
        """
        group, node_ids = self._groups[stage], {name: self._node_ids_of(name) for name in self._placed}
        node, nodes = node_ids[stage][member], cluster_nodes()
        if any(each.id == node and each.is_usable for each in nodes):
            return (
                self._pinned(group, node) if (stage, member) in self._moved else self._options(stage, member)
            )
        if sum(ids.count(node) for ids in node_ids.values()) > 1:
            return None
        try:
            (elsewhere,) = assign([replace(group, count=1)], nodes)[stage]
        except NoNodeError:
            return None
        self._moved[stage, member] = elsewhere.id
        return self._pinned(group, elsewhere.id)

    @staticmethod
    def _pinned(group: ActorGroup, node_id: str) -> Mapping[str, Any]:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return {**ray_options(group.resources), "scheduling_strategy": strategy}

    def node_ids(self) -> frozenset[str]:
        """Ray's, of the nodes that the actors are on."""
        return frozenset(node for stage in self._placed for node in self._node_ids_of(stage))

    def has_room_elsewhere(self) -> bool:
        """Whether all actors find room on nodes that may be used, once these have given back their own."""
        back: dict[str, dict[str, float]] = {}
        held = {} if self._held is None else placement_group_table(self._held)["bundles_to_node_id"]
        # A member that has moved holds what it asks for where it is now, besides its bundle.
        holding = [(stage, held[bundle]) for (stage, _), bundle in self._bundle_of.items()]
        holding += [(stage, node_id) for (stage, _), node_id in self._moved.items()]
        for stage, node_id in holding:
            resources = back.setdefault(node_id, {})
            for name, count in self._groups[stage].resources.items():
                resources[name] = resources.get(name, 0.0) + count
        nodes = [
            replace(
                node,
                free={
                    name: node.free.get(name, 0.0) + back.get(node.id, {}).get(name, 0.0)
                    for name in node.total
                },
            )
            for node in cluster_nodes()
        ]
        try:
            assign(list(self._groups.values()), nodes)
        except NoNodeError:
            return False
        return True

    def log(self) -> None:
        """One line per stage, where there is more than one node to be on."""
        nodes = {node.id: node for node in cluster_nodes()}
        if len(nodes) == 1:
            return
        held = {} if self._held is None else placement_group_table(self._held)["bundles_to_node_id"]
        for stage, chosen in self._placed.items():
            members_of: dict[str, list[int]] = {}
            for member, node in enumerate(chosen):
                bundle = self._bundle_of.get((stage, member))
                members_of.setdefault(node.id if bundle is None else held[bundle], []).append(member)
            where = [
                f"{', '.join(map(str, members))} on {nodes[node].name if node in nodes else node[:8]}"
                for node, members in members_of.items()
            ]
            logger.info("%s %s", stage.replace("_", " "), "; ".join(where))


@contextmanager
def reserved(groups: Sequence[ActorGroup], patience_s: float) -> Iterator[Reservation]:
    """Inside the block, room for all actors is there; it is given back whatever happens inside.

    Waits without end for room, since other jobs may end and nodes join.

    Args:
        patience_s: time to wait, after which, and again at growing intervals, is said what is missing.
    """
    began = said = time.monotonic()
    pause_s, most_s = LOOK_AGAIN_S
    preferred = frozenset(filter(None, os.environ.get(NODES_VARIABLE, "").split(",")))
    refused: set[str] = set()
    while True:
        nodes = cluster_nodes()
        placed, missing = _assigned(groups, nodes, preferred, refused)
        left_out = [node.id for node in nodes if not node.is_usable]
        found = None if placed is None else _reserve(groups, placed, left_out)
        if found is not None:
            break
        # Of a node that it gives nothing of, Ray may know something that its figures do not show.
        chosen = set() if placed is None else {node.id for each in placed.values() for node in each}
        refused = set() if chosen <= refused else refused | chosen
        now = time.monotonic()
        if now >= said + patience_s:
            waited_s = now - began
            logger.warning(
                "%s",
                f"after {waited_s:.0f} s, the run has not started: there is room for all its actors, and Ray "
                "does not give it, perhaps since others ask, too; waiting until it does, see `ray status`"
                if missing is None
                else still_waiting(missing, nodes, waited_s),
            )
            said, patience_s = now, 2 * patience_s
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, most_s)
    reservation, held = found
    try:
        yield reservation
    finally:
        if held is not None:
            remove_placement_group(held)


def _assigned(
    groups: Sequence[ActorGroup], nodes: Sequence[Node], preferred: frozenset[str], refused: set[str]
) -> tuple[dict[str, list[Node]] | None, NoNodeError | None]:
    """A node for every actor, or what is missing: of the preferred nodes, else of all; those that Ray has
    refused last."""
    choices = [[node for node in nodes if node.id not in refused], nodes]
    if preferred:
        choices.insert(0, [node for node in choices[0] if node.id in preferred])
    missing: NoNodeError | None = None
    for some in choices:
        try:
            return assign(groups, some), None
        except NoNodeError as error:
            missing = error
    return None, missing


def _reserve(
    groups: Sequence[ActorGroup], placed: Mapping[str, Sequence[Node]], left_out: Sequence[str] = ()
) -> tuple[Reservation, PlacementGroup | None] | None:
    """None if the room is gone: somebody else was faster, or a node was lost."""
    bundles, bundle_of = _bundles(groups, placed, left_out)
    if not bundles:
        return Reservation(groups, placed, None, bundle_of, left_out), None
    held = placement_group(
        [bundle.resources for bundle in bundles],
        strategy="SPREAD",  # of what is not pinned
        bundle_label_selector=[bundle.labels for bundle in bundles],
    )
    try:
        if held.wait(GRANTED_S):
            return Reservation(groups, placed, held, bundle_of, left_out), held
    except BaseException:
        remove_placement_group(held)
        raise
    remove_placement_group(held)
    return None


def _selector(group: ActorGroup, left_out: Sequence[str]) -> dict[str, str]:
    """Of nodes for actors that Ray places: it knows nothing of quarantine."""
    labels = dict(group.labels)
    if left_out:
        labels[NODE_ID_LABEL] = f"!in({','.join(left_out)})"
    return labels


def _bundles(
    groups: Sequence[ActorGroup], placed: Mapping[str, Sequence[Node]], left_out: Sequence[str] = ()
) -> tuple[list[_Bundle], dict[tuple[str, int], int]]:
    """One bundle for all that is pinned to a node, and one for each other actor; and whose is which."""
    bundles: list[_Bundle] = []
    of_node: dict[str, int] = {}
    bundle_of: dict[tuple[str, int], int] = {}
    for group in groups:
        if not group.resources:  # Ray reserves no bundle of nothing
            continue
        for member, node in enumerate(placed[group.stage]):
            if not group.has_state:
                place = len(bundles)
                bundles.append(_Bundle(dict(group.resources), _selector(group, left_out)))
            else:
                place = of_node.setdefault(node.id, len(bundles))
                if place == len(bundles):
                    bundles.append(_Bundle({}, {NODE_ID_LABEL: node.id}))
                resources = bundles[place].resources
                for name, count in group.resources.items():
                    resources[name] = round(resources.get(name, 0.0) + count, 4)
            bundle_of[group.stage, member] = place
    return bundles, bundle_of
