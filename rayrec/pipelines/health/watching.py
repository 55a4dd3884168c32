"""A watch over a cluster: look, tell, and isolate what is not to be trusted.

    every so many seconds: Sweep.look ─► bad: quarantine, until somebody lifts it
                                         suspect, twice in a row: quarantine, until it was well for a while
                                         unknown: told, and nothing else; no look at a well node either
    with a run: the newest snapshot's steps computed again ─► what differs

A sign that is seen once may be the network's or the driver's mood (ByteRobust, arXiv:2509.16293, wants a
network alert twice in five minutes); so is what a pair of nodes measured together. How many nodes may be
isolated is bounded by the quarantine's breaker; what it holds is tried again in the next look.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine, Session
from rayrec.pipelines.health.node_health import NodeHealth
from rayrec.pipelines.health.pairs import PAIR_CODES
from rayrec.platform.errors import InputError
from rayrec.platform.health.findings import ACTIONS, Finding

logger = logging.getLogger(__name__)

SUSPECT_LOOKS = 2
"""In a row, after which a suspect node is avoided, and what pairs measured is believed."""
WELL_LOOKS = 10
"""With everything known and well, after which a node that was suspect is used again; twice as many after each
time it was."""
MOST_WELL_LOOKS = 640


@dataclass(frozen=True)
class Step:
    """What one look led to."""

    isolated: tuple[Session, ...] = ()
    """Sessions that began, or became worse."""
    lifted: tuple[Session, ...] = ()
    held: tuple[str, ...] = ()
    """Names of nodes that the breaker has kept in use."""


class Watch:
    """Turns looks into quarantine; one object per process that watches. It has no clock."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._in_a_row: Counter[tuple[str, str]] = Counter()
        """Looks in which a node had a finding."""
        self._well: Counter[str] = Counter()
        """Looks without anything unknown, or to avoid the node for, since the last that had something."""
        self._wanted: dict[str, int] = {}
        """Such looks that lift a suspicion, by node."""

    def take(self, health: Sequence[NodeHealth]) -> Step:
        """Isolate and lift by one look at all nodes."""
        nodes = [each.node for each in health]
        sessions_of = self._quarantine.sessions_of(nodes)
        known = {(session.id, session.verdict) for sessions in sessions_of.values() for session in sessions}
        isolated: list[Session] = []
        lifted: list[Session] = []
        held: list[str] = []
        now: Counter[tuple[str, str]] = Counter()
        for each in health:
            found = [
                finding
                for finding in each.findings
                if ACTIONS[finding.action] and not self._is_over(each.node, finding)
            ]
            for reason in {_reason(finding) for finding in found}:
                now[each.node.id, reason] = self._in_a_row[each.node.id, reason] + 1
            if found:
                self._well[each.node.id] = 0
            elif all(finding.verdict != "unknown" for finding in each.findings):
                self._well[each.node.id] += 1
            if (finding := self._due(each.node, found, now)) is not None:
                session = self._isolate(each.node, finding, nodes)
                if session is None:
                    held.append(each.node.name)
                elif (session.id, session.verdict) not in known:
                    isolated.append(session)
            elif not found:
                lifted += self._lift(each.node, sessions_of.get(each.node.id, ()))
        self._in_a_row = now
        return Step(tuple(isolated), tuple(lifted), tuple(held))

    def _is_over(self, node: Node, finding: Finding) -> bool:
        """Whether somebody has used the node again, knowing of it: a log keeps it for long."""
        if finding.time_s is None:
            return False
        lifted_s = self._quarantine.lifted(node, _reason(finding))
        return lifted_s is not None and finding.time_s <= lifted_s

    def _due(self, node: Node, found: Sequence[Finding], now: Counter[tuple[str, str]]) -> Finding | None:
        """The finding that is reason enough by now."""
        due = [
            finding
            for finding in found
            if (finding.action == "leave" and finding.code not in PAIR_CODES)
            or now[node.id, _reason(finding)] >= SUSPECT_LOOKS
        ]
        return max(due, key=lambda finding: ACTIONS[finding.action], default=None)

    def _isolate(self, node: Node, finding: Finding, nodes: Sequence[Node]) -> Session | None:
        verdict = "bad" if finding.action == "leave" else "suspect"
        return self._quarantine.add(
            node,
            _reason(finding),
            verdict,  # type: ignore[arg-type]
            nodes,
            evidence=finding.to_dict(),
        )

    def _lift(self, node: Node, sessions: Sequence[Session]) -> list[Session]:
        wanted = self._wanted.setdefault(node.id, WELL_LOOKS)
        if self._well[node.id] < wanted:
            return []
        ours = [session for session in sessions if session.by == "rule" and session.verdict == "suspect"]
        if ours:
            self._wanted[node.id] = min(2 * wanted, MOST_WELL_LOOKS)
            self._well[node.id] = 0
        why = f"nothing found in {wanted} looks in a row"
        lifted = []
        for session in ours:
            try:
                lifted.append(self._quarantine.lift(session.id, why))
            except InputError as error:  # an operator was faster
                logger.info("%s is not lifted: %s", session.id, error)
        return lifted


def _reason(finding: Finding) -> str:
    """The same in every look, as long as the fault is: no value is in it."""
    return f"{finding.code} of {finding.subject}"


def tell(health: Iterable[NodeHealth], step: Step, log: Callable[..., None] = logger.warning) -> None:
    """One line for each node that is not ok, and for each that is isolated or used again."""
    for each in health:
        for finding in each.wrong:
            log("%s is %s: %s", each.node.name, finding.verdict, finding)
    for session in step.isolated:
        log("%s is isolated as %s: %s", session.node_name, session.id, session.reason)
    for session in step.lifted:
        log("%s is used again: %s", session.node_name, session.lifted_why)
