"""Which node an actor goes to, and what is said where there is none; all of it without a cluster."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from rayrec.pipelines.cluster import reservation
from rayrec.pipelines.cluster.placement import ActorGroup, Node, NoNodeError, actor_groups, assign, selects
from rayrec.pipelines.cluster.placement_check import check_possible, still_waiting
from rayrec.pipelines.cluster.reservation import Reservation
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.errors import InputError
from tests.helpers.runs import SPARSE_SASREC


def node(name: str, role: str | None = None, free: dict[str, float] | None = None, **total: float) -> Node:
    total = {"CPU": 4.0} | total
    labels = {"ray.io/node-id": name} | ({} if role is None else {"role": role})
    return Node(name, "10.0.0.1", labels, total, total | (free or {}))


def group(
    count: int, strategy: Any = "SPREAD", stage: str = "parameter_server", **settings: Any
) -> ActorGroup:
    values: dict[str, Any] = {"resources": {"CPU": 1.0}, "labels": {}} | settings
    return ActorGroup(stage, f"placement.{stage}", count, values["resources"], values["labels"], strategy)


def places(groups: list[ActorGroup], nodes: list[Node], of_total: bool = False) -> dict[str, list[str]]:
    return {stage: [n.id for n in found] for stage, found in assign(groups, nodes, of_total).items()}


THREE = [node("a"), node("b", CPU=8), node("c")]


@pytest.mark.parametrize(
    ("strategy", "count", "expected"),
    [
        ("SPREAD", 2, ["b", "a"]),
        ("SPREAD", 5, ["b", "a", "c", "b", "a"]),
        ("PACK", 3, ["a", "a", "a"]),
        ("PACK", 6, ["b"] * 6),
        ("PACK", 9, ["b"] * 8 + ["a"]),
        ("STRICT_PACK", 8, ["b"] * 8),
        ("STRICT_SPREAD", 3, ["b", "a", "c"]),
    ],
)
def test_a_group_is_laid_out_as_its_strategy_says(strategy, count, expected):
    assert places([group(count, strategy)], THREE) == {"parameter_server": expected}


@pytest.mark.parametrize(
    ("strategy", "count", "num_missing"), [("STRICT_PACK", 9, 9), ("STRICT_SPREAD", 4, 1), ("SPREAD", 17, 1)]
)
def test_what_does_not_fit_is_counted(strategy, count, num_missing):
    with pytest.raises(NoNodeError) as raised:
        assign([group(count, strategy)], THREE)

    assert raised.value.num_missing == num_missing


def test_those_who_can_choose_leave_room_for_those_who_cannot():
    """Whatever the order in which they are named."""
    nodes = [node("small", CPU=1), node("labeled", "trainer", CPU=2)]
    anywhere, there = group(1), group(2, "PACK", "trainer", labels={"role": "trainer"})

    for groups in ([anywhere, there], [there, anywhere]):
        assert places(groups, nodes) == {"parameter_server": ["small"], "trainer": ["labeled"] * 2}


def test_nodes_with_accelerators_are_for_those_who_use_them():
    nodes = [node("gpu", GPU=2, CPU=64), node("npu", NPU=2, CPU=64), node("cpu", CPU=4)]
    trainers = group(2, "PACK", "trainer", resources={"CPU": 1.0, "NPU": 1})

    assert places([group(3), trainers], nodes) == {"parameter_server": ["cpu"] * 3, "trainer": ["npu"] * 2}
    assert set(places([group(6)], nodes)["parameter_server"]) == {"cpu", "gpu", "npu"}


def test_what_other_jobs_hold_is_not_free():
    nodes = [node("a", free={"CPU": 0.5}), node("b")]

    assert places([group(2)], nodes) == {"parameter_server": ["b", "b"]}
    assert places([group(2)], nodes, of_total=True) == {"parameter_server": ["a", "b"]}


def test_shares_add_up_to_a_whole():
    tenths = group(10, "STRICT_PACK", resources={"CPU": 0.1})

    assert places([tenths], [node("a", CPU=1)]) == {"parameter_server": ["a"] * 10}


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("a", ["a"]),
        ("!a", ["b", "c", None]),
        ("in(a,b)", ["a", "b"]),
        ("!in(a,b)", ["c", None]),
        ("in", []),
    ],
)
def test_labels_are_selected_as_ray_does_it(wanted, chosen):
    assert [value for value in ["a", "b", "c", None] if selects(wanted, value)] == chosen


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (
            group(2, labels={"role": "servr"}),
            "placement.parameter_server.labels: no node of the Ray cluster has role=servr; "
            "its nodes have no label (2), role=trainer (1)",
        ),
        (
            group(2, labels={"role": "trainer", "zone": "!x"}, resources={"ssd": 1}),
            "placement.parameter_server: each parameter server asks for 1 ssd, and no node with role=trainer "
            "and zone=!x of the Ray cluster has any; they have CPU, GPU",
        ),
        (
            group(1, resources={"CPU": 9}),
            "placement.parameter_server: a parameter server fits on no node of the Ray cluster (each asks "
            "for 9 CPU); of such nodes, 10.0.0.1 (a) has 4 CPU, 10.0.0.1 (b) has 8 CPU, 10.0.0.1 (c) has "
            "4 CPU; ask for less, or join a cluster with larger nodes",
        ),
        (
            group(4, "STRICT_SPREAD"),
            "placement.parameter_server: 1 of 4 parameter servers find no room (each asks for 1 CPU, placed "
            "STRICT_SPREAD), even if no other job were there",
        ),
    ],
)
def test_what_can_never_start_is_refused_with_what_there_is(bad, sentence):
    nodes = [node("a"), node("b", CPU=8), node("c", "trainer", GPU=1)]

    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        check_possible([bad], nodes)
    check_possible([group(16)], nodes)


def test_who_waits_says_for_what():
    nodes = [node("a", "server", {"CPU": 0.5}), node("b", "trainer"), node("c", "server", {"CPU": 1})]
    servers = group(2, labels={"role": "server"})
    with pytest.raises(NoNodeError) as raised:
        assign([servers], nodes)

    assert still_waiting(raised.value, nodes, 61.3) == (
        "after 61 s, the run has not started: 1 of 2 parameter servers find no room (each asks for 1 CPU on "
        "a node with role=server); of such nodes, 10.0.0.1 (a) has 0.5 of 4 CPU, 10.0.0.1 (c) has 1 of 4 CPU "
        "free; waiting until other jobs end or nodes join, see `ray status`"
    )
    assert "its nodes have role=trainer (1)" in still_waiting(raised.value, nodes[1:2], 1.0)


def test_room_that_ray_does_not_give_is_said_too(monkeypatch, caplog):
    """Each attempt takes 10 s there, and nobody would know what the run waits for."""
    given = Reservation([], {}, None, {})
    attempts = iter([None, None, None, (given, None)])
    monkeypatch.setattr(reservation, "cluster_nodes", list)
    monkeypatch.setattr(reservation, "assign", lambda groups, nodes: {})
    monkeypatch.setattr(reservation, "_reserve", lambda *_: next(attempts))
    monkeypatch.setattr(reservation, "LOOK_AGAIN_S", (0.0, 0.0))

    with caplog.at_level(logging.WARNING), reservation.reserved([], patience_s=0.0) as found:
        assert found is given

    assert "there is room for all its actors, and Ray does not give it" in caplog.text


def test_nodes_that_are_draining_or_quarantined_get_nothing():
    draining = replace(node("a", CPU=9), is_draining=True)
    quarantined = replace(node("b", CPU=8), quarantined="xid 79")
    nodes = [draining, quarantined, node("c", CPU=2)]

    assert places([group(2)], nodes) == {"parameter_server": ["c", "c"]}
    with pytest.raises(NoNodeError) as raised:
        assign([group(3)], nodes)
    assert "10.0.0.1 (a) is draining, 10.0.0.1 (b) is quarantined: xid 79, 10.0.0.1 (c) has 2 of 2 CPU" in (
        still_waiting(raised.value, nodes, 1.0)
    )
    check_possible([group(3)], nodes)  # a quarantine ends
    with pytest.raises(InputError, match=r"10.0.0.1 \(a\) is draining"):
        check_possible([group(11)], nodes)


class Cluster:
    """Grants no room on some nodes, although they have it, and remembers what was asked."""

    def __init__(self, monkeypatch, nodes, refusing):
        self.asked: list[list[str]] = []
        self._refusing = refusing
        monkeypatch.setattr(reservation, "cluster_nodes", lambda: nodes)
        monkeypatch.setattr(reservation, "_reserve", self._reserve)
        monkeypatch.setattr(reservation, "LOOK_AGAIN_S", (0.0, 0.0))

    def _reserve(self, groups, placed, left_out):
        self.asked.append([each.id for nodes in placed.values() for each in nodes])
        return None if self._refusing & set(self.asked[-1]) else (Reservation([], {}, None, {}), None)


def test_actors_that_ray_places_are_kept_off_nodes_that_are_left_out():
    workers = replace(group(2, stage="feature_worker", labels={"role": "cpu"}), has_state=False)
    bundles, _ = reservation._bundles([workers], {"feature_worker": [node("a"), node("a")]}, ["b", "c"])
    assert [each.labels for each in bundles] == [{"role": "cpu", "ray.io/node-id": "!in(b,c)"}] * 2
    bundles, _ = reservation._bundles([workers], {"feature_worker": [node("a"), node("a")]})
    assert [each.labels for each in bundles] == [{"role": "cpu"}] * 2

    nothing = replace(workers, resources={})
    placed = Reservation([nothing], {"feature_worker": [node("a")] * 2}, None, {}, ["b"])
    assert placed.of("feature_worker")(0)["label_selector"] == {"role": "cpu", "ray.io/node-id": "!in(b)"}


def test_a_run_knows_whether_it_has_room_elsewhere(monkeypatch):
    nodes = [node("a", CPU=4, free={"CPU": 0.0}), node("b", CPU=4, free={"CPU": 1.0})]
    monkeypatch.setattr(reservation, "cluster_nodes", lambda: nodes)
    table = {"bundles_to_node_id": {0: "a", 1: "b"}}
    monkeypatch.setattr(reservation, "placement_group_table", lambda _: table)
    servers = group(2, resources={"CPU": 2.0})
    bundle_of = {("parameter_server", 0): 0, ("parameter_server", 1): 1}
    held: Any = object()
    mine = Reservation([servers], {"parameter_server": nodes}, held, bundle_of)
    assert mine.node_ids() == {"a", "b"}

    assert mine.has_room_elsewhere()
    nodes[0] = replace(nodes[0], quarantined="xid 79")
    assert not mine.has_room_elsewhere()  # 1 free, and 2 given back, for two of 2
    nodes[1] = replace(nodes[1], free={"CPU": 2.0})
    assert mine.has_room_elsewhere()


def test_what_a_moved_server_holds_is_given_back_where_it_is_now(monkeypatch):
    a, b, c = (letter * 56 for letter in "abc")  # Ray takes nothing shorter
    nodes = [node(a, CPU=2, free={"CPU": 0.0}), node(b, CPU=2, free={"CPU": 0.0})]
    monkeypatch.setattr(reservation, "cluster_nodes", lambda: nodes)
    table = {"bundles_to_node_id": {0: a, 1: b}}
    monkeypatch.setattr(reservation, "placement_group_table", lambda _: table)
    servers = group(2, resources={"CPU": 2.0})
    bundle_of = {("parameter_server", 0): 0, ("parameter_server", 1): 1}
    held: Any = object()
    mine = Reservation([servers], {"parameter_server": list(nodes)}, held, bundle_of)

    nodes[1] = node(c, CPU=2)  # b is gone
    assert mine.again("parameter_server", 1)["scheduling_strategy"].node_id == c
    nodes[1] = node(c, CPU=2, free={"CPU": 0.0})
    assert mine.node_ids() == {a, c}
    assert mine.has_room_elsewhere(), "a new attempt has the two nodes that this one gives back"
    nodes[1] = replace(nodes[1], quarantined="xid 79")
    assert not mine.has_room_elsewhere()


def test_a_lost_server_comes_back_to_its_node_or_to_another_if_it_was_there_alone(monkeypatch):
    a, b, c = (letter * 56 for letter in "abc")  # Ray takes nothing shorter
    nodes = [node(a, CPU=4), node(b, CPU=4)]
    monkeypatch.setattr(reservation, "cluster_nodes", lambda: nodes)
    servers, trainers = group(2, resources={"CPU": 1.0}), group(1, stage="trainer", resources={"CPU": 1.0})
    placed = {"parameter_server": list(nodes), "trainer": [nodes[0]]}
    mine = Reservation([servers, trainers], placed, None, {})

    def again(member: int) -> Any:
        options = mine.again("parameter_server", member)
        return None if options is None else options["scheduling_strategy"].node_id

    assert [again(0), again(1)] == [a, b]
    nodes[:] = [node(a, CPU=4, free={"CPU": 0.0})]  # b is gone
    assert again(1) is None
    nodes[0] = replace(nodes[0], free={"CPU": 1.0})
    assert again(1) == a
    assert mine.node_ids() == {a}, "the run is watched where it is now"
    nodes[0] = replace(nodes[0], free={"CPU": 0.0})
    assert again(1) == a, "what it had there is its own"
    nodes[:] = [node(b, CPU=4), node(c, CPU=4)]  # a is gone, and a trainer with it
    assert again(0) is None


def test_groups_of_trainers_that_are_not_on_one_node_are_known():
    trainers, a, b = group(5, stage="trainer"), node("a"), node("b")
    mine = Reservation([trainers], {"trainer": [a, a, a, b, b]}, None, {})
    assert mine.apart("trainer", 2) == [1]
    assert mine.apart("trainer", 1) == mine.apart("trainer", 3)[:0] == []
    assert mine.apart("trainer", 5) == [0]


def test_nodes_that_ray_refuses_come_last_at_the_next_look(monkeypatch):
    cluster = Cluster(monkeypatch, [node("a", CPU=9), node("b"), node("c", CPU=2)], {"a"})
    with reservation.reserved([group(1)], patience_s=60.0):
        assert cluster.asked == [["a"], ["b"]]


def test_where_ray_refuses_all_nodes_they_are_tried_again(monkeypatch):
    refusing = {"a", "b"}
    cluster = Cluster(monkeypatch, [node("a", CPU=9), node("b")], refusing)
    monkeypatch.setattr(reservation.time, "sleep", lambda _: len(cluster.asked) < 4 or refusing.clear())
    with reservation.reserved([group(1)], patience_s=60.0):
        assert cluster.asked[:3] == [["a"], ["b"], ["a"]]


def test_nodes_that_a_queue_has_chosen_come_first_and_others_where_they_have_no_room(monkeypatch):
    monkeypatch.setenv("RAYREC_NODES", "c,gone")
    cluster = Cluster(monkeypatch, [node("a", CPU=9), node("b"), node("c", CPU=2)], set())
    for count, expected in ((2, ["c", "c"]), (3, ["a", "b", "c"])):
        with reservation.reserved([group(count)], patience_s=60.0):
            assert sorted(cluster.asked[-1]) == expected


SMALLEST = {"data": {"path": "data"}, "model": {"name": "sasrec"}}


def test_a_run_asks_for_what_its_settings_say():
    placement = {
        "servers": {"labels": {"role": "server"}, "resources": {"ssd": 0.5}},
        "trainers": {"strategy": "STRICT_SPREAD", "resources": {"rack": 1}},
        "readers": {"labels": {"role": "in(server,reader)"}},
    }
    pipeline = {"num_trainers": 2, "num_readers": 3, "cpus_per_actor": 0}
    config = RunConfig.parse(
        SMALLEST | {"model": SPARSE_SASREC, "placement": placement, "pipeline": pipeline, "device": "npu"}
    )

    servers, readers, workers, trainers = actor_groups(config)

    assert (servers.count, servers.resources, servers.strategy) == (2, {"ssd": 0.5}, "SPREAD")
    assert (readers.count, readers.resources, readers.labels) == (3, {}, {"role": "in(server,reader)"})
    assert not readers.has_state
    assert not workers.has_state
    assert trainers.resources == {"CPU": 1.0, "NPU": 1, "rack": 1}
    assert (trainers.strategy, trainers.has_state) == ("STRICT_SPREAD", True)


@pytest.mark.parametrize(
    ("placement", "sentence"),
    [
        ({"servers": {"labels": {"role": "a b"}}}, "'role' has 'a b'"),
        ({"servers": {"resources": {"CPU": 2}}}, "pipeline.cpus_per_actor"),
        ({"trainers": {"resources": {"GPU": 2}}}, "device 'cuda'"),
        ({"trainers": {"resources": {"ssd": 1.5}}}, "'ssd' has 1.5"),
        ({"readers": {"strategy": "PACK"}}, "strategy"),
    ],
)
def test_settings_that_ray_would_refuse_are_refused_before(placement, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        RunConfig.parse(SMALLEST | {"placement": placement})
