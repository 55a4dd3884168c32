"""When what is found leads to isolation, and when that ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.health.node_health import NodeHealth
from rayrec.pipelines.health.watching import SUSPECT_LOOKS, WELL_LOOKS, Watch, tell
from rayrec.platform.health.findings import Finding

NODES = [Node(f"id-{n}", f"10.0.0.{n}", {}, {}, {}, f"host-{n}") for n in range(10)]
OK = Finding.of("kernel-log", "node", "ok", 0)
BAD = Finding.of("xid-79", "cuda 2", "bad", 79)
SUSPECT = Finding.of("throttled", "cuda 2", "suspect", "hw-slowdown")
UNKNOWN = Finding.of("kernel-log", "node", "unknown")


@pytest.fixture
def quarantine(tmp_path: Path) -> Quarantine:
    return Quarantine(tmp_path, clock=lambda: 1000.0)


def look(*findings: Finding, node: int = 0) -> list[NodeHealth]:
    """At all nodes; one has these findings."""
    return [NodeHealth(each, findings if n == node else (OK,)) for n, each in enumerate(NODES)]


def test_a_bad_node_is_isolated_at_once_and_stays_so(quarantine):
    watch = Watch(quarantine)

    (session,) = watch.take(look(BAD)).isolated

    assert (session.node_id, session.verdict, session.reason) == ("id-0", "bad", "xid-79 of cuda 2")
    assert session.evidence["value"] == 79
    for _ in range(3 * WELL_LOOKS):
        assert watch.take(look(OK)).lifted == ()
    assert len(quarantine.sessions()) == 1


def test_a_fault_that_lasts_is_one_session(quarantine):
    watch = Watch(quarantine)

    steps = [watch.take(look(BAD)) for _ in range(5)]

    assert [len(step.isolated) for step in steps] == [1, 0, 0, 0, 0]
    assert len(quarantine.sessions()) == 1


def test_a_suspicion_has_to_be_seen_twice_in_a_row(quarantine):
    watch = Watch(quarantine)

    for findings in ([SUSPECT], [OK], [SUSPECT], [OK], [UNKNOWN]):
        assert watch.take(look(*findings)).isolated == ()
    steps = [watch.take(look(SUSPECT)) for _ in range(SUSPECT_LOOKS)]

    assert [len(step.isolated) for step in steps] == [0, 1]
    assert quarantine.sessions()[0].verdict == "suspect"


def test_unknown_and_what_asks_for_no_action_isolate_nobody(quarantine):
    watch = Watch(quarantine)
    killed = Finding("oom-kill", "ray::Trainer", "suspect", 1)

    for _ in range(5):
        assert watch.take(look(UNKNOWN, killed)).isolated == ()


def test_a_suspicion_ends_when_nothing_is_found_for_a_while_and_a_node_that_flaps_waits_longer(quarantine):
    watch = Watch(quarantine)

    def looks_until_lifted() -> int:
        for _ in range(SUSPECT_LOOKS):
            watch.take(look(SUSPECT))
        for number in range(1, 100):
            if watch.take(look(OK)).lifted:
                return number
        raise AssertionError("it is never lifted")

    assert [looks_until_lifted() for _ in range(3)] == [WELL_LOOKS, 2 * WELL_LOOKS, 4 * WELL_LOOKS]
    assert quarantine.sessions() == []


def test_what_an_operator_has_isolated_is_not_lifted(quarantine):
    watch = Watch(quarantine)
    quarantine.add(NODES[0], "looked odd", "suspect", 10, by="operator")

    for _ in range(3 * WELL_LOOKS):
        assert watch.take(look(OK)).lifted == ()


def test_a_rule_that_is_wrong_about_all_nodes_isolates_no_more_than_the_bound(quarantine):
    watch = Watch(quarantine)

    step = watch.take([NodeHealth(node, (BAD,)) for node in NODES])

    assert len(step.isolated) == 1
    assert len(step.held) == 9
    assert len(quarantine.alarms()) == 9


def test_each_thing_that_is_found_is_told_in_one_line(quarantine):
    said = []
    health = look(BAD, OK)

    tell(health, Watch(quarantine).take(health), lambda form, *values: said.append(form % values))

    assert said[0] == "10.0.0.0 (id-0) is bad: xid-79 of cuda 2: 79"
    assert said[1].startswith("10.0.0.0 (id-0) is isolated as ")
    assert len(said) == 2
