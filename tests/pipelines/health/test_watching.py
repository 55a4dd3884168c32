"""When what is found leads to isolation, and when that ends."""

from __future__ import annotations

from dataclasses import replace
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


def test_looks_that_leave_something_unknown_do_not_end_a_suspicion(quarantine):
    watch = Watch(quarantine)
    for _ in range(SUSPECT_LOOKS):
        watch.take(look(SUSPECT))

    for _ in range(3 * WELL_LOOKS):
        assert watch.take(look(OK, UNKNOWN)).lifted == ()
    lifted = [len(watch.take(look(*found)).lifted) for _ in range(WELL_LOOKS) for found in ([UNKNOWN], [OK])]

    assert lifted == [0] * (2 * WELL_LOOKS - 1) + [1]


def test_what_pairs_measured_has_to_be_seen_twice_in_a_row_even_if_it_is_bad(quarantine):
    watch = Watch(quarantine)
    wrong = Finding.of("pair-wrong", NODES[0].name, "bad", 4, 0)

    steps = [watch.take(look(*found)) for found in ([wrong], [OK], [wrong], [wrong])]

    assert [len(step.isolated) for step in steps] == [0, 0, 0, 1]
    assert quarantine.sessions()[0].verdict == "bad"


def test_a_suspicion_that_turns_bad_is_told_and_stays(quarantine):
    watch = Watch(quarantine)
    worse = replace(SUSPECT, verdict="bad", action="leave")

    steps = [watch.take(look(found)) for found in (SUSPECT, SUSPECT, worse, worse)]

    assert [[each.verdict for each in step.isolated] for step in steps] == [[], ["suspect"], ["bad"], []]
    assert len(quarantine.sessions()) == 1


def test_what_a_log_said_before_an_operator_lifted_it_does_not_isolate_again(quarantine):
    watch = Watch(quarantine)
    before, after = replace(BAD, time_s=990.0), replace(BAD, time_s=1010.0)
    (session,) = watch.take(look(before)).isolated
    quarantine.lift(session.id, "the card was exchanged")

    for _ in range(3):
        assert watch.take(look(before)).isolated == ()
    assert watch.take(look(replace(before, code="xid-48"))).isolated[0].reason == "xid-48 of cuda 2"
    assert watch.take(look(after)).isolated[0].reason == "xid-79 of cuda 2"


def test_a_machine_that_has_come_back_as_another_node_is_lifted_when_it_is_well(quarantine):
    watch = Watch(quarantine)
    for _ in range(SUSPECT_LOOKS):
        watch.take(look(SUSPECT))
    again = [NodeHealth(replace(NODES[0], id="id-new"), (OK,)), *look(OK)[1:]]

    steps = [watch.take(again) for _ in range(WELL_LOOKS)]

    assert [session.node_id for step in steps for session in step.lifted] == ["id-0"]


def test_what_somebody_else_has_lifted_meanwhile_does_not_end_the_watch(quarantine, monkeypatch):
    watch = Watch(quarantine)
    for _ in range(SUSPECT_LOOKS):
        watch.take(look(SUSPECT))
    (session,) = quarantine.sessions()
    stale = quarantine.sessions_of(NODES)
    quarantine.lift(session.id, "by hand")
    monkeypatch.setattr(quarantine, "sessions_of", lambda nodes: stale)

    assert [watch.take(look(OK)).lifted for _ in range(WELL_LOOKS)] == [()] * WELL_LOOKS


def test_what_an_operator_has_isolated_is_not_lifted(quarantine):
    watch = Watch(quarantine)
    quarantine.add(NODES[0], "looked odd", "suspect", NODES, by="operator")

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
