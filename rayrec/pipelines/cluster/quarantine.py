"""Nodes that new actors do not go to for a while: a file that every process of a cluster reads.

    verdict of a check ─► add ─► breaker ─► an entry: the node is left out from now on
                                    └ too many of late: an alarm, and nothing else
    lift(session) ─► that entry ends; another one of the same node stays

`ray drain-node` has no way back and ends a node with its last actor, so it is only for what leaves for good.
A wrong rule could isolate a whole cluster, so a breaker holds at a bound. What it has held is not kept to be
done later, when it may be wrong (NVSentinel's issue 450): the next look judges again. An entry is one session
of a node, so that the recovery from an old fault does not end the quarantine for a new one (its issue 1451).
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from rayrec.pipelines.cluster.placement import Node
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_json

logger = logging.getLogger(__name__)

FILE = "quarantine.json"
_VERSION = 1
WINDOW_S = 3600.0
SHARE_IN_WINDOW = 0.1
"""Of the nodes, at least one, that rules may isolate within `WINDOW_S`, and that are isolated by rules at a
time. As many for verdicts that are `bad`, whatever is only suspect."""
KEPT_S = 7 * 86_400.0
"""After they were lifted."""
MOST_ALARMS = 100
"""That are kept, the newest."""

By = Literal["rule", "operator"]


@dataclass(frozen=True)
class Session:
    """One quarantine of a node."""

    id: str
    node_id: str
    """Ray's, which another one gets that starts on the same machine."""
    node_name: str
    address: str
    hostname: str
    reason: str
    verdict: Literal["suspect", "bad"]
    since: float
    """Unix time."""
    by: By
    evidence: Mapping[str, Any]
    lifted_at: float | None = None
    lifted_why: str | None = None


@dataclass(frozen=True)
class Alarm:
    """A node that would have been isolated, had the breaker not held."""

    node_name: str
    reason: str
    at: float


class Quarantine:
    """Of one cluster; any process may read and write."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            folder: of the cluster; made with the first entry.
            clock: Unix time.
        """
        self.path, self._clock = folder / FILE, clock

    def add(
        self,
        node: Node,
        reason: str,
        verdict: Literal["suspect", "bad"],
        nodes: Sequence[Node],
        by: By = "rule",
        evidence: Mapping[str, Any] | None = None,
    ) -> Session | None:
        """Leave a node out from now on.

        Args:
            nodes: all that are alive, for the breaker.
            by: a rule is bound by the breaker, an operator is not.

        Returns:
            The session. If the node is out for the same reason already, that one, which is `bad` from now on
            if the new verdict is. None: the breaker holds, and there is only an alarm.
        """
        now = self._clock()
        with self._changing() as (sessions, alarms):
            held = [each for each in sessions if each.lifted_at is None]
            same = [each for each in matching(held, nodes).get(node.id, ()) if each.reason == reason]
            if any(each.verdict == "bad" for each in same) or (same and verdict == "suspect"):
                return same[-1]
            if by == "rule" and not self._may_isolate(node, verdict, sessions, nodes, now):
                alarms[:] = [each for each in alarms if (each.node_name, each.reason) != (node.name, reason)]
                alarms.append(Alarm(node.name, reason, now))
                logger.error(
                    "%s is not isolated, although: %s; rules have isolated as many of %d nodes as they may "
                    "within an hour, so look at it, and at the rule",
                    node.name,
                    reason,
                    len(nodes),
                )
                return None
            if same:
                worse = replace(same[-1], verdict="bad", evidence=dict(evidence or {}))
                sessions[sessions.index(same[-1])] = worse
                return worse
            session = Session(
                uuid.uuid4().hex[:12],
                node.id,
                node.name,
                node.address,
                node.hostname,
                reason,
                verdict,
                now,
                by,
                dict(evidence or {}),
            )
            sessions.append(session)
            return session

    def _may_isolate(
        self,
        node: Node,
        verdict: Literal["suspect", "bad"],
        sessions: Sequence[Session],
        nodes: Sequence[Node],
        now: float,
    ) -> bool:
        """Whether the breaker lets a rule isolate one more. What is bad does not wait for what is suspect."""
        most = max(1, math.floor(SHARE_IN_WINDOW * len(nodes)))
        counted = [
            each
            for each in sessions
            if each.by == "rule"
            and (each.lifted_at is None or now - each.since < WINDOW_S)
            and (verdict == "suspect" or each.verdict == "bad")
        ]
        return len({node.id, *matching(counted, nodes)}) <= most

    def lift(self, which: str, why: str = "") -> Session:
        """End one session; others of the same node stay.

        Args:
            which: its id, or the start of the id of a node that has one session.

        Raises:
            InputError: there is no such session, or the node has several.
        """
        with self._changing() as (sessions, _):
            held = [place for place, each in enumerate(sessions) if each.lifted_at is None]
            named = [place for place in held if sessions[place].id == which]
            named = named or [place for place in held if which and sessions[place].node_id.startswith(which)]
            if len(named) == 1:
                ended = replace(sessions[named[0]], lifted_at=self._clock(), lifted_why=why)
                sessions[named[0]] = ended
                return ended
        there = ", ".join(each.id for each in self.sessions()) or "none"
        how = "several nodes are" if len(named) > 1 else "no node is"
        raise InputError(f"{how} quarantined as {which!r}; there are: {there}")

    def sessions(self) -> list[Session]:
        """Those that hold now, the oldest first."""
        sessions, _ = self._read()
        return [each for each in sessions if each.lifted_at is None]

    def alarms(self) -> list[Alarm]:
        """What the breaker has held, the oldest first."""
        return self._read()[1]

    def sessions_of(self, nodes: Sequence[Node]) -> dict[str, list[Session]]:
        """By Ray's id of those nodes that are out: the sessions that hold them, the oldest first.

        Args:
            nodes: all that are alive.
        """
        return matching(self.sessions(), nodes)

    def reasons(self, nodes: Sequence[Node]) -> dict[str, str]:
        """By Ray's id of those nodes that are out: why.

        Args:
            nodes: all that are alive.
        """
        return {
            node: "; ".join(dict.fromkeys(each.reason for each in sessions))
            for node, sessions in self.sessions_of(nodes).items()
        }

    def lifted(self, node: Node, reason: str) -> float | None:
        """When a quarantine of the node for this reason was lifted last; None: not of late."""
        sessions, _ = self._read()
        times = [
            each.lifted_at
            for each in sessions
            if each.node_id == node.id and each.reason == reason and each.lifted_at is not None
        ]
        return max(times, default=None)

    @contextmanager
    def _changing(self) -> Iterator[tuple[list[Session], list[Alarm]]]:
        """Inside the block, nobody else changes the file; at its end, what was changed is written at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sessions, alarms = self._read()
            before = (list(sessions), list(alarms))
            yield sessions, alarms
            if (sessions, alarms) == before:
                return
            began = self._clock() - KEPT_S
            kept = [each for each in sessions if each.lifted_at is None or each.lifted_at > began]
            write_json(
                self.path,
                {
                    "version": _VERSION,
                    "sessions": [_values(each) for each in kept],
                    "alarms": [asdict(each) for each in alarms[-MOST_ALARMS:]],
                },
            )

    def _read(self) -> tuple[list[Session], list[Alarm]]:
        try:
            found = json.loads(self.path.read_text())
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']!r}, not {_VERSION}")
            return [Session(**each) for each in found["sessions"]], [
                Alarm(**each) for each in found["alarms"]
            ]
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.path}: is no record of quarantined nodes ({error}); mend it, or remove it to have "
                "none quarantined"
            ) from error


def matching(sessions: Sequence[Session], nodes: Sequence[Node]) -> dict[str, list[Session]]:
    """By Ray's id of the nodes that sessions are of: these sessions, in order.

    A machine that has come back as another node of Ray's is the same machine, and so may be its fault. Where
    it has several nodes, as clusters for tests have, nobody can tell which of them it was.

    Args:
        nodes: all that are alive.
    """
    alive = {node.id for node in nodes}
    machines = Counter((node.hostname, node.address) for node in nodes)
    found: dict[str, list[Session]] = {}
    for each in sessions:
        for node in nodes:
            machine = (node.hostname, node.address)
            has_returned = (
                each.node_id not in alive
                and machine == (each.hostname, each.address)
                and machines[machine] == 1
            )
            if node.id == each.node_id or has_returned:
                found.setdefault(node.id, []).append(each)
    return found


def _values(session: Session) -> dict[str, Any]:
    return {field.name: getattr(session, field.name) for field in fields(session)}
