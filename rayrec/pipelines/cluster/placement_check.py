"""What is said of actors for which a cluster has no node: at once, or while a run waits for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rayrec.pipelines.cluster.placement import (
    NODE_ID_LABEL,
    ActorGroup,
    Node,
    NoNodeError,
    assign,
    in_words,
    selects,
    times,
)
from rayrec.platform.errors import MachineError

SHOWN_NODES = 8
"""Nodes, or kinds of them, that a sentence lists."""


def check_possible(groups: Sequence[ActorGroup], nodes: Sequence[Node]) -> None:
    """Refuse what the nodes that there are could not take if nobody else were on them.

    Raises:
        MachineError: names the setting, what no node has, and what nodes have.
    """
    for group in groups:
        _check_group(group, nodes)
    try:
        assign(groups, nodes, of_total=True)
    except NoNodeError as error:
        able = [node for node in nodes if error.group.may_be_on(node)]
        raise MachineError(
            f"{error.group.setting}: {error}, even if no other job were there; of such nodes, "
            f"{_rooms(able, error.group, of_total=True)}; start fewer actors, ask for less, or join a larger "
            "cluster"
        ) from None


def _check_group(group: ActorGroup, nodes: Sequence[Node]) -> None:
    for name, wanted in group.labels.items():
        if not any(selects(wanted, node.labels.get(name)) for node in nodes):
            raise MachineError(
                f"{group.setting}.labels: no node of the Ray cluster has {name}={wanted}; {_kinds(nodes)}"
            )
    able = [node for node in nodes if group.may_be_on(node)]
    if not able:
        raise MachineError(
            f"{group.setting}.labels: no node of the Ray cluster has {in_words(group.labels)} together; "
            f"{_kinds(nodes)}"
        )
    for name in group.resources:
        if not any(node.total.get(name, 0.0) > 0 for node in able):
            there = sorted({name for node in able for name in node.total if not name.startswith("node:")})
            which = f"with {in_words(group.labels)} " if group.labels else ""
            raise MachineError(
                f"{group.setting}: each {group.stage.replace('_', ' ')} asks for {group.resources[name]:g} "
                f"{name}, and no node {which}of the Ray cluster has any; they have {', '.join(there)}"
            )
    if not any(times(group.resources, node.total) >= 1 for node in able):
        raise MachineError(
            f"{group.setting}: a {group.stage.replace('_', ' ')} fits on no node of the Ray cluster "
            f"({group.demand}); of such nodes, {_rooms(able, group, of_total=True)}; ask for less, or join a "
            "cluster with larger nodes"
        )


def still_waiting(error: NoNodeError, nodes: Sequence[Node], waited_s: float) -> str:
    """What is said of a run that has not begun, since not all of its actors find room at once."""
    able = [node for node in nodes if error.group.may_be_on(node)]
    rooms = f"of such nodes, {_rooms(able, error.group)} free" if able else _kinds(nodes)
    return (
        f"after {waited_s:.0f} s, the run has not started: {error}; {rooms}; waiting until other jobs end or "
        "nodes join, see `ray status`"
    )


def _rooms(nodes: Sequence[Node], group: ActorGroup, of_total: bool = False) -> str:
    def room(node: Node) -> str:
        counts = [
            f"{node.total.get(name, 0):g} {name}"
            if of_total
            else f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}"
            for name in group.resources
        ]
        if node.is_draining or (not of_total and not node.is_usable):
            return f"{node.name} is {node.condition}"
        return f"{node.name} has {', '.join(counts)}"

    more = len(nodes) - SHOWN_NODES
    return ", ".join(map(room, nodes[:SHOWN_NODES])) + (f", {more} more" if more > 0 else "")


def _kinds(nodes: Sequence[Node]) -> str:
    """Which labels there are, on how many nodes."""
    kinds = Counter(in_words(_own_labels(node)) or "no label" for node in nodes)
    most = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{kind} ({count})" for kind, count in most[:SHOWN_NODES]]
    more = len(kinds) - len(shown)
    return f"its nodes have {', '.join(shown)}" + (f", and {more} other kinds" if more > 0 else "")


def _own_labels(node: Node) -> dict[str, str]:
    """Without the one that is every node's own."""
    return {name: value for name, value in sorted(node.labels.items()) if name != NODE_ID_LABEL}
