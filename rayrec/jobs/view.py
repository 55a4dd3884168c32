"""What a cluster looks like to its operators: nodes, cards, health, who holds what, and queues.

cluster_nodes, holders ──┐
quarantine ──────────────┼─► ClusterView ─► `rayrec nodes`, its page
last verdicts of health ─┤
ledger of jobs ──────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.pipelines.cluster.placement import NODE_ID_LABEL, Node
from rayrec.pipelines.cluster.quarantine import Alarm, Quarantine, Session
from rayrec.platform.devices import ACCELERATOR_RESOURCES, HOST

TOPOLOGY = ("rack", "switch")
"""Labels that say where a node is, if somebody has given them (`ray start --labels rack=r1,switch=s3`)."""


@dataclass(frozen=True)
class NodeView:
    """One node."""

    id: str
    name: str
    hostname: str
    condition: str
    """usable, draining, or quarantined and why."""
    resources: Mapping[str, tuple[float, float]]
    """Held and total, of CPUs and accelerators, by Ray's name."""
    topology: Mapping[str, str]
    labels: Mapping[str, str]
    """The others."""
    holders: Mapping[str, int]
    """Who has actors there, and how many."""
    sessions: Sequence[str]
    """Of its quarantine."""
    health: str | None
    """ok, suspect, bad or unknown; None: nobody has looked."""
    findings: Sequence[str]
    """What was found that is not ok."""


@dataclass(frozen=True)
class ClusterView:
    """All of it, at one moment."""

    nodes: Sequence[NodeView]
    alarms: Sequence[Alarm]
    """Nodes that would have been quarantined, had the breaker not held."""
    queues: Sequence[Mapping[str, Any]]
    """As `rayrec queue list` has them; empty where there are none."""
    checked_at: float | None
    """Unix time of the last health check."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cluster_view(
    nodes: Sequence[Node],
    holders: Mapping[str, Mapping[str, int]],
    quarantine: Quarantine,
    health: Mapping[str, Any] | None = None,
    queues: Sequence[Mapping[str, Any]] = (),
) -> ClusterView:
    """Put together what is known of a cluster.

    Args:
        holders: by Ray's id of a node, as `nodes.holders` gives them.
        health: what the last check has written, as `read_health` gives it; None: there was none.
    """
    sessions = quarantine.sessions_of(nodes)
    checked = {} if health is None else health["nodes"]
    views = [
        _node_view(node, holders.get(node.id, {}), sessions.get(node.id, ()), checked.get(node.id))
        for node in nodes
    ]
    return ClusterView(
        views, quarantine.alarms(), list(queues), None if health is None else float(health["time"])
    )


def _node_view(
    node: Node, holders: Mapping[str, int], sessions: Sequence[Session], health: Mapping[str, Any] | None
) -> NodeView:
    shown = sorted(ACCELERATOR_RESOURCES & set(node.total))
    known = {NODE_ID_LABEL, *TOPOLOGY}
    return NodeView(
        node.id,
        node.name,
        node.hostname,
        node.condition,
        {
            name: (round(node.held.get(name, 0.0), 4), node.total.get(name, 0.0))
            for name in (HOST.ray_resource, *shown)
        },
        {name: node.labels[name] for name in TOPOLOGY if name in node.labels},
        {name: value for name, value in sorted(node.labels.items()) if name not in known},
        dict(holders),
        [each.id for each in sessions],
        None if health is None else str(health["verdict"]),
        [] if health is None else [str(each) for each in health["findings"]],
    )
