"""Which nodes are left out, for how long, and when a rule may not leave out any more."""

from __future__ import annotations

import json
import threading

import pytest

from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import KEPT_S, WINDOW_S, Quarantine
from rayrec.platform.errors import InputError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def node(name: str, hostname: str = "", address: str = "10.0.0.1") -> Node:
    return Node(name, address, {}, {"CPU": 4.0}, {"CPU": 4.0}, hostname or name)


def nodes_of(count: int) -> list[Node]:
    """Of a cluster, n0, n1, ..."""
    return [node(f"n{number}", address=f"10.0.0.{number}") for number in range(count)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def quarantine(tmp_path, clock):
    return Quarantine(tmp_path / "cluster", clock)


def test_a_node_is_out_until_its_session_is_lifted(quarantine):
    a, b = node("a"), node("b")
    session = quarantine.add(a, "xid 79", "bad", nodes=[a, b], evidence={"xid": 79})

    assert quarantine.reasons([a, b]) == {"a": "xid 79"}
    assert (session.since, session.by, session.evidence) == (1000.0, "rule", {"xid": 79})

    quarantine.lift(session.id, "card replaced")
    assert quarantine.reasons([a, b]) == {}
    with pytest.raises(InputError, match="no node is quarantined as"):
        quarantine.lift(session.id)


def test_a_session_is_lifted_by_the_start_of_its_nodes_id(quarantine):
    quarantine.add(node("a1"), "hot", "suspect", nodes=nodes_of(1))
    quarantine.add(node("b1"), "hot", "suspect", nodes=nodes_of(1))
    quarantine.add(node("b1"), "xid 48", "bad", nodes=nodes_of(1))
    assert quarantine.lift("a").node_id == "a1"
    with pytest.raises(InputError, match="several nodes are quarantined as 'b'"):
        quarantine.lift("b")
    with pytest.raises(InputError, match="no node is quarantined as ''"):
        quarantine.lift("")


def test_the_recovery_from_an_old_fault_leaves_the_quarantine_for_a_new_one(quarantine):
    old = quarantine.add(node("a"), "hot", "suspect", nodes=nodes_of(1))
    quarantine.add(node("a"), "xid 48", "bad", nodes=nodes_of(1))

    quarantine.lift(old.id)

    assert quarantine.reasons([node("a")]) == {"a": "xid 48"}


def test_the_same_reason_is_one_session(quarantine, clock):
    first = quarantine.add(node("a"), "hot", "suspect", nodes=[node("a")])
    clock.now += 5
    assert quarantine.add(node("a"), "hot", "suspect", nodes=[node("a")]) == first
    assert len(quarantine.sessions()) == 1


def test_rules_isolate_no_more_than_their_share_and_alarm_instead(quarantine, clock, caplog):
    nodes = nodes_of(30)
    outcomes = [quarantine.add(each, "hot", "suspect", nodes) for each in nodes[:5]]

    assert [each is not None for each in outcomes] == [True] * 3 + [False] * 2
    assert [each.node_name for each in quarantine.alarms()] == ["10.0.0.3 (n3)", "10.0.0.4 (n4)"]
    assert "is not isolated, although: hot" in caplog.text
    quarantine.add(nodes[3], "hot", "suspect", nodes)
    assert len(quarantine.alarms()) == 2

    # Lifting makes no room within the hour: a rule that flaps would isolate one node after the other.
    quarantine.lift(outcomes[0].id)
    assert quarantine.add(nodes[5], "hot", "suspect", nodes) is None
    clock.now += WINDOW_S + 1
    assert len(quarantine.sessions()) == 2
    assert quarantine.add(nodes[6], "hot", "suspect", nodes) is not None
    assert quarantine.add(nodes[7], "hot", "suspect", nodes) is None


def test_what_is_bad_does_not_wait_for_what_is_suspect(quarantine):
    nodes = nodes_of(9)
    assert quarantine.add(nodes[0], "/tmp is full", "suspect", nodes) is not None
    assert quarantine.add(nodes[1], "xid 79", "bad", nodes) is not None
    assert quarantine.add(nodes[2], "xid 79", "bad", nodes) is None


def test_what_is_gone_does_not_hold_the_breaker(quarantine, clock):
    nodes = nodes_of(9)
    assert quarantine.add(nodes[0], "xid 79", "bad", nodes) is not None
    clock.now += 30 * 86_400
    left = [*nodes[1:], node("new", "another", "10.0.0.99")]
    assert quarantine.add(nodes[5], "xid 79", "bad", left) is not None


def test_a_suspect_that_turns_out_to_be_bad_is_bad(quarantine):
    nodes = nodes_of(3)
    first = quarantine.add(nodes[0], "driver-health", "suspect", nodes)
    second = quarantine.add(nodes[0], "driver-health", "bad", nodes, evidence={"word": "Critical"})
    assert (second.id, second.verdict, second.evidence) == (first.id, "bad", {"word": "Critical"})
    assert quarantine.add(nodes[0], "driver-health", "suspect", nodes) == second
    assert [each.verdict for each in quarantine.sessions()] == ["bad"]


def test_a_node_that_flaps_takes_the_place_of_one(quarantine):
    nodes = nodes_of(20)
    for _ in range(5):
        session = quarantine.add(nodes[0], "link down", "suspect", nodes)
        quarantine.lift(session.id)
    assert quarantine.add(nodes[1], "link down", "suspect", nodes) is not None


def test_an_operator_is_bound_by_nothing(quarantine):
    for name in "abc":
        assert quarantine.add(node(name), "maintenance", "bad", nodes=nodes_of(3), by="operator")
    assert len(quarantine.reasons([node(name) for name in "abc"])) == 3
    assert quarantine.add(node("d"), "hot", "suspect", nodes=nodes_of(3)) is not None


def test_a_machine_that_comes_back_as_another_node_is_still_out(quarantine):
    quarantine.add(node("old", "host-1"), "ecc", "bad", nodes=nodes_of(2))
    back, other = node("new", "host-1"), node("x", "host-2", "10.0.0.2")

    assert quarantine.reasons([back, other]) == {"new": "ecc"}
    (session,) = quarantine.sessions_of([back, other])["new"]
    assert quarantine.add(back, "ecc", "bad", nodes=[back, other]) == session
    # Two nodes of one machine: nobody can tell which of them it was.
    assert quarantine.reasons([back, node("newer", "host-1"), other]) == {}


def test_several_writers_lose_nothing(tmp_path):
    def write(number):
        mine = Quarantine(tmp_path)
        for turn in range(5):
            mine.add(node(f"{number}-{turn}"), "x", "bad", nodes=nodes_of(1), by="operator")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(Quarantine(tmp_path).sessions()) == 30


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 9}', '{"version": 1, "sessions": [{}], "alarms": []}']
)
def test_a_damaged_file_is_told_and_kept(tmp_path, text):
    (tmp_path / "quarantine.json").write_text(text)
    with pytest.raises(InputError, match="is no record of quarantined nodes"):
        Quarantine(tmp_path).add(node("a"), "x", "bad", nodes=nodes_of(1))
    assert (tmp_path / "quarantine.json").read_text() == text


def test_one_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "quarantine.json").mkdir()
    with pytest.raises(InputError, match=r"quarantine\.json: cannot be read"):
        Quarantine(tmp_path).sessions()


def test_what_was_lifted_long_ago_is_forgotten(quarantine, clock, tmp_path):
    session = quarantine.add(node("a"), "hot", "suspect", nodes=nodes_of(1))
    quarantine.lift(session.id)
    assert quarantine.lifted(node("a"), "hot") == clock.now
    clock.now += KEPT_S + 1
    quarantine.add(node("b"), "hot", "suspect", nodes=nodes_of(1))
    kept = json.loads((tmp_path / "cluster" / "quarantine.json").read_text())["sessions"]
    assert [each["node_id"] for each in kept] == ["b"]
