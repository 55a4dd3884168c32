"""All nodes at once: silent ones, peers on other nodes, and the tasks that Ray runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayrec.pipelines.cluster.nodes import cluster_nodes
from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.health.node_health import (
    HEALTH_FILE,
    Look,
    NodeHealth,
    agreed_offset_s,
    judge_looks,
    read_health,
    write_health,
)
from rayrec.pipelines.health.sweep import (
    HealthMetrics,
    Sweep,
    burn_in_nodes,
    expected_cards,
    read_nodes,
    run_pairs,
)
from rayrec.platform.health.counters import Card, Counters, Link
from rayrec.platform.health.findings import Finding

NODES = [Node(f"id-{n}", f"10.0.0.{n}", {}, {"GPU": 1.0}, {}, f"host-{n}") for n in range(4)]


def look(heat: float = 60.0, clock_s: float = 100.0) -> Look:
    card = Card("cuda", 0, "H100", values={"temperature_c": heat, "utilization_percent": 90.0})
    return Look(Counters(clock_s, (card,), {"cuda": 1}), 99.0, 101.0)


def test_cards_of_other_nodes_are_peers():
    looks = {node.id: look() for node in NODES} | {"id-2": look(heat=90.0)}

    health = judge_looks(NODES, looks)

    assert [each.verdict for each in health] == ["ok", "ok", "suspect", "ok"]
    assert [finding.code for finding in health[2].wrong] == ["hotter-than-peers"]


def test_a_node_that_does_not_answer_is_unknown_and_a_wrong_clock_is_told():
    looks = {node.id: look() for node in NODES[1:]} | {"id-1": look(clock_s=500.0)}

    health = judge_looks(NODES, looks)

    assert [each.verdict for each in health] == ["unknown", "suspect", "ok", "ok"]
    assert [each.wrong[0].code for each in health[:2]] == ["node-silent", "clock-skew"]
    assert health[0].action == "none"


def clocks(*offsets_s: float, took_s: float = 2.0) -> list[Look]:
    """Of nodes whose clocks are so far ahead of the one that looks, each read in the middle."""
    return [Look(Counters(100.0 + took_s / 2 + offset), 100.0, 100.0 + took_s) for offset in offsets_s]


def test_a_wrong_clock_of_the_one_that_looks_is_no_fault_of_the_nodes():
    looks = dict(zip([node.id for node in NODES], clocks(500.0, 500.2, 499.9, 480.0), strict=True))

    health = judge_looks(NODES, looks)

    codes = [[finding.code for finding in each.wrong if finding.code == "clock-skew"] for each in health]
    assert codes == [[], [], [], ["clock-skew"]]


@pytest.mark.parametrize(
    ("offsets_s", "agreed_s"),
    [
        ([], 0.0),
        ([0.3], 0.0),
        ([500.0], 0.0),  # one against one: the driver's
        ([500.0, 500.0], 499.0),
        ([0.0, 0.1, 500.0], 0.0),
        ([500.0, -500.0, 300.0], 0.0),
    ],
)
def test_the_time_that_most_clocks_may_have_is_the_right_one(offsets_s, agreed_s):
    assert agreed_offset_s(clocks(*offsets_s)) == pytest.approx(agreed_s)


def test_an_answer_that_took_long_does_not_make_a_clock_wrong():
    late = Look(Counters(150.0), 100.0, 155.0)

    assert agreed_offset_s([*clocks(0.0, 0.0), late]) == 0.0


def test_the_worst_comes_first_and_what_burn_ins_found_counts():
    slow = Finding.of("slow-matrix", "card", "bad", 1.0, 2.0)
    looks = {"id-0": look(clock_s=500.0)}

    (health,) = judge_looks(NODES[:1], looks, further={"id-0": [slow]})

    assert [finding.code for finding in health.wrong] == ["slow-matrix", "clock-skew"]
    assert health.to_dict()["action"] == "leave"


def test_rays_cards_are_those_expected():
    node = replace(NODES[0], total={"CPU": 4.0, "GPU": 8.0, "NPU": 0.5})

    assert expected_cards(node) == {"cuda": 8}


def test_the_last_look_is_left_for_others_and_what_is_no_look_is_none(tmp_path):
    assert read_health(tmp_path) is None

    write_health(tmp_path / "new", judge_looks(NODES[:2], {"id-0": look(clock_s=500.0)}), 7.0)

    found = read_health(tmp_path / "new")
    assert found is not None
    assert (found["time"], {name: node["verdict"] for name, node in found["nodes"].items()}) == (
        7.0,
        {"id-0": "suspect", "id-1": "unknown"},
    )
    assert found["nodes"]["id-0"]["findings"] == ["clock-skew of node: 399 (limit 1)"]
    (tmp_path / "new" / HEALTH_FILE).write_text("{")
    assert read_health(tmp_path / "new") is None


def test_metrics_of_what_is_over_go_back_to_zero(monkeypatch):
    published = []

    class Metrics:
        def __init__(self, tags: dict[str, str]) -> None:
            self._tags = tags

        def publish(self, metrics: dict[str, float]) -> None:
            published.append((*self._tags.values(), *metrics.items()))

    monkeypatch.setattr("rayrec.pipelines.health.sweep.RayMetrics", Metrics)
    metrics = HealthMetrics()
    name = NODES[0].name

    metrics.publish([NodeHealth(NODES[0], (Finding.of("xid-79", "cuda 0", "bad"),))])
    metrics.publish([NodeHealth(NODES[0], (Finding.of("kernel-log", "node", "unknown"),))])

    assert published == [
        (name, ("node_health", 2)),
        (name, "xid-79", ("node_findings", 1)),
        (name, ("node_health", -1)),
        (name, "xid-79", ("node_findings", 0)),
        (name, "kernel-log", ("node_findings", 1)),
    ]


def test_of_a_node_that_is_gone_it_is_said_once_that_nothing_is_known(monkeypatch):
    published = []

    class Metrics:
        def __init__(self, tags: dict[str, str]) -> None:
            self._tags = tags

        def publish(self, metrics: dict[str, float]) -> None:
            published.append((*self._tags.values(), *metrics.items()))

    monkeypatch.setattr("rayrec.pipelines.health.sweep.RayMetrics", Metrics)
    metrics = HealthMetrics()
    stays, goes = (
        NodeHealth(node, (Finding.of("xid-79", "cuda 0", "bad"),)) for node in (NODES[0], NODES[1])
    )
    metrics.publish([stays, goes])

    published.clear()
    metrics.publish([stays])
    name = NODES[1].name
    of_gone = [each for each in published if each[0] == name]
    published.clear()
    metrics.publish([stays])

    assert of_gone == [(name, ("node_health", -1)), (name, "xid-79", ("node_findings", 0))]
    assert [each for each in published if each[0] == name] == []


def test_a_card_that_is_lost_is_missed_in_every_look_also_after_one_without_an_answer(monkeypatch):
    def counters(number: int) -> Look:
        cards = tuple(
            Card("cuda", n, "H100", f"0000:{n:02}:00", values={"power_w": 9.0}) for n in range(number)
        )
        return Look(Counters(100.0, cards, {"cuda": 2}), 99.0, 101.0)

    answers = iter(
        [{"id-0": counters(1)}, {"id-0": counters(2)}, {}, {"id-0": counters(1)}, {"id-0": counters(1)}]
    )
    monkeypatch.setattr("rayrec.pipelines.health.sweep.read_nodes", lambda nodes: next(answers))
    sweep = Sweep()

    verdicts = [sweep.look(NODES[:1])[0].verdict for _ in range(5)]

    assert verdicts == ["unknown", "ok", "unknown", "bad", "bad"]


def test_after_a_look_without_an_answer_counts_go_on_from_the_one_before(monkeypatch):
    """Lost packets of long ago are no news because a node was silent once."""

    def counters(packets: int) -> dict[str, Look]:
        links = (Link("eth0", packets, errors=5_000, dropped=0),)
        return {"id-0": Look(Counters(100.0, links=links), 99.0, 101.0)}

    answers = iter([counters(50_000), counters(100_000), {}, counters(150_000), counters(200_000)])
    monkeypatch.setattr("rayrec.pipelines.health.sweep.read_nodes", lambda nodes: next(answers))
    sweep = Sweep()

    verdicts = [sweep.look(NODES[:1])[0].verdict for _ in range(5)]

    assert verdicts == ["suspect", "ok", "unknown", "ok", "ok"]


@pytest.fixture
def nodes(ray_cluster: None, tmp_path) -> list[Node]:
    return cluster_nodes(Quarantine(tmp_path))


def test_a_pinned_task_reads_each_node(nodes):
    sweep = Sweep()

    (health,) = sweep.look(nodes)

    codes = {finding.code for finding in health.findings}
    assert {"disk-space", "memory-available", "clock-skew"} <= codes
    assert "node-silent" not in codes
    (again,) = sweep.look(nodes)
    assert {finding.code for finding in again.findings} >= {"disk-space"}


def test_draining_nodes_are_left_alone(nodes):
    assert Sweep().look([replace(node, is_draining=True) for node in nodes]) == []


def test_a_node_that_is_gone_is_silent(nodes):
    gone = replace(nodes[0], id="ab" * 28)

    assert read_nodes([gone], limit_s=20.0) == {}


def test_pairs_add_numbers_and_get_the_right_sums(nodes):
    # Two ends on one node: what Ray and the collective do is the same.
    twins = [nodes[0], replace(nodes[0], address="again")]

    (result,) = run_pairs(twins)

    assert result.is_right
    assert result.bytes_per_s is not None
    assert result.bytes_per_s > 1e5


def test_a_node_is_burnt_in_and_cards_that_are_held_are_not(nodes):
    held = replace(nodes[0], total={**nodes[0].total, "GPU": 2.0}, free={**nodes[0].free, "GPU": 0.0})

    findings = burn_in_nodes([held], {})[held.id]

    by_subject = {finding.subject: finding for finding in findings}
    cards = by_subject[f"cuda cards of {held.name}"]
    assert (cards.verdict, "2 of 2 are held" in cards.detail) == ("unknown", True)
    # Measured, or unknown since others work on this machine now.
    assert by_subject[f"the CPUs of {held.name}"].code in ("checksum", "burn-in")
