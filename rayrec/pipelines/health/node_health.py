"""What is known of one node, and the judgment of all beside each other; needs neither Ray nor torch."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayrec.pipelines.cluster.placement import Node
from rayrec.platform.files import write_json
from rayrec.platform.health.counters import Counters
from rayrec.platform.health.findings import Action, Finding, Verdict, strongest_action, worst
from rayrec.platform.health.verdict import Limits, Seen, clock_finding, judge

HEALTH_FILE = "health.json"


@dataclass(frozen=True)
class Look:
    """What a node's task brought back."""

    counters: Counters
    sent_s: float
    received_s: float
    """By the driver's clock, between which the node read its own."""


@dataclass(frozen=True)
class NodeHealth:
    """One node's findings."""

    node: Node
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    @property
    def action(self) -> Action:
        return strongest_action(self.findings)

    @property
    def wrong(self) -> list[Finding]:
        """Those that are not ok, the worst first."""
        order = {"bad": 0, "suspect": 1, "unknown": 2}
        return sorted(
            (each for each in self.findings if each.verdict != "ok"), key=lambda each: order[each.verdict]
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "node": self.node.name,
            "id": self.node.id,
            "verdict": self.verdict,
            "action": self.action,
            "findings": [asdict(each) for each in self.findings],
        }


def judge_looks(
    nodes: Sequence[Node],
    looks: Mapping[str, Look],
    previous: Mapping[str, Counters] | None = None,
    limits: Limits | None = None,
    further: Mapping[str, Sequence[Finding]] | None = None,
    seen: Mapping[str, Seen] | None = None,
) -> list[NodeHealth]:
    """Judge all nodes, each with the cards of the others as its peers.

    Args:
        looks: by node; one that is not among them has not answered.
        previous: by node, an earlier look.
        further: by node, what burn-ins and pairs found.
        seen: by node, the most of all earlier looks.
    """
    health = []
    reference_s = agreed_offset_s(list(looks.values()))
    for node in nodes:
        look = looks.get(node.id)
        if look is None:
            detail = "its task did not come back; see `ray status`, and whether the node can start processes"
            findings = [Finding.of("node-silent", node.name, "unknown", detail=detail)]
        else:
            peers = [
                card for other, seen in looks.items() if other != node.id for card in seen.counters.cards
            ]
            findings = judge(
                look.counters, (previous or {}).get(node.id), limits, peers, (seen or {}).get(node.id)
            )
            findings.append(
                clock_finding(look.sent_s, look.counters.time_s, look.received_s, limits, reference_s)
            )
        findings += (further or {}).get(node.id, ())
        health.append(NodeHealth(node, tuple(findings)))
    return health


def agreed_offset_s(looks: Sequence[Look]) -> float:
    """How far the nodes' time is ahead of the driver's clock, which is one clock of many and may be wrong.

    Each look says between which two numbers its node's offset is, as wide as the time that it took. The
    result is in most of these intervals, the driver's own one of 0 among them, and of what is in as many the
    nearest to 0.

    Source: the intersection algorithm of K. Marzullo, as NTP selects clocks (RFC 5905, section 11.2.1).
    """
    intervals = [
        (look.counters.time_s - look.received_s, look.counters.time_s - look.sent_s)
        for look in looks
        if look.received_s >= look.sent_s
    ]
    begins = sorted([0.0, *(begin for begin, _ in intervals)])
    ends = sorted([0.0, *(end for _, end in intervals)])
    return max(
        {*begins, *ends},
        key=lambda offset: (bisect_right(begins, offset) - bisect_left(ends, offset), -abs(offset)),
    )


def write_health(folder: Path, health: Sequence[NodeHealth], time_s: float) -> None:
    """Leave the last look in a cluster's folder, for `rayrec nodes` and its page."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = {
        each.node.id: {"verdict": each.verdict, "findings": [str(finding) for finding in each.wrong]}
        for each in health
    }
    write_json(folder / HEALTH_FILE, {"time": time_s, "nodes": nodes})


def read_health(folder: Path) -> dict[str, Any] | None:
    """What `write_health` has left: `time`, and `nodes` by id with `verdict` and `findings`, if anything."""
    try:
        found: dict[str, Any] = json.loads((folder / HEALTH_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if {"time", "nodes"} <= found.keys() else None
