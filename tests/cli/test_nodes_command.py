"""`rayrec nodes`: what is shown of a cluster, and quarantine by hand."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.pipelines.cluster import nodes as cluster
from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.platform import cluster as joining


@pytest.fixture
def run(monkeypatch, tmp_path):
    nodes = [
        Node(name, f"10.0.0.{number}", {"rack": "r1"}, {"CPU": 4.0}, {"CPU": 1.0}, name)
        for number, name in enumerate(("aa1", "aa2", "b"))
    ]

    def with_reasons(quarantine):
        reasons = quarantine.reasons(nodes)
        return [cluster.replace(node, quarantined=reasons.get(node.id)) for node in nodes]

    monkeypatch.setattr(joining, "ray_cluster", lambda *_: nullcontext())
    monkeypatch.setattr(cluster, "cluster_nodes", with_reasons)
    monkeypatch.setattr(cluster, "holders", lambda: {"b": {"runs/x": 2}})

    def run(*arguments):
        return CliRunner().invoke(
            app,
            [
                "nodes",
                "--json",
                "--folder",
                str(tmp_path / "cluster"),
                "--ledger",
                str(tmp_path / "jobs.db"),
                *arguments,
            ],
        )

    return run


def test_nodes_are_shown_with_who_holds_them(run):
    view = json.loads(run().stdout.splitlines()[-1])
    assert [node["id"] for node in view["nodes"]] == ["aa1", "aa2", "b"]
    assert view["nodes"][2]["holders"] == {"runs/x": 2}
    assert view["nodes"][0]["resources"] == {"CPU": [3.0, 4.0]}


def test_queues_of_the_ledger_are_shown(run, tmp_path):
    assert json.loads(run().stdout.splitlines()[-1])["queues"] == []
    added = CliRunner().invoke(
        app, ["queue", "add", "team-a", "--resource", "CPU=4", "--ledger", str(tmp_path / "jobs.db")]
    )
    assert added.exit_code == 0, added.output

    (queue,) = json.loads(run().stdout.splitlines()[-1])["queues"]

    assert (queue["name"], queue["use"], queue["waiting"]) == ("team-a", "0 of 4 CPU", [])


def test_an_operator_quarantines_a_node_and_lifts_it(run, tmp_path):
    shown = json.loads(run("--quarantine", "b", "--reason", "a fan is loud").stdout.splitlines()[-1])
    assert shown["nodes"][2]["condition"] == "quarantined: a fan is loud"
    (session,) = Quarantine(tmp_path / "cluster").sessions()
    assert (session.by, session.node_id, session.verdict) == ("operator", "b", "suspect")
    run("--quarantine", "aa1", "--leave")
    assert Quarantine(tmp_path / "cluster").sessions()[1].verdict == "bad"

    shown = json.loads(run("--lift", session.id).stdout.splitlines()[-1])
    assert shown["nodes"][2]["condition"] == "usable"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--quarantine", "a"), "more than one node of the cluster has an id that begins with 'a'"),
        (("--quarantine", "x"), "no node of the cluster has an id that begins with 'x'; there are 10.0.0.0"),
        (("--quarantine", ""), "no node of the cluster has an id that begins with ''"),
        (("--leave",), "--leave says how a node is isolated by --quarantine; leave it out"),
        (("--reason", "heat"), "--reason says why there is a --quarantine or --lift"),
        (("--port", "80"), "--port says where --page is served"),
        (("--lift", "x"), "no node is quarantined as 'x'; there are: none"),
    ],
)
def test_a_node_or_session_that_is_not_there_is_told(run, arguments, sentence):
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in " ".join((done.output + done.stderr).split())
