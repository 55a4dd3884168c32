"""`rayrec health`: this machine, a cluster, and a run's steps again."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from ray.exceptions import GetTimeoutError

from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.health import sweep
from rayrec.pipelines.health.node_health import NodeHealth, read_health
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.platform.health.findings import Finding
from tests.cli.commands import answer, refused
from tests.helpers.training_runs import settings, walks


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = settings(walks(folder), evaluation__every_steps=5, snapshots__keep=9)
    train(config, folder / "run", cluster=in_process)
    return folder / "run"


@pytest.mark.slow
def test_this_machine_is_looked_at_without_ray():
    program = (
        "import sys; sys.modules['ray'] = None; from rayrec.cli import main; "
        "sys.argv = ['rayrec', 'health', '--here', '--json']; main()"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert '"verdict": ' in done.stdout.splitlines()[-1]
    assert "memory-available" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--here", "--watch"), "--here looks at this machine alone, once"),
        (("--here", "--address", "auto"), "--here looks at this machine alone, once"),
        (("--here", "--folder", "x"), "--folder is of a cluster"),
        (("--here", "--looks", 3), "--looks is about --watch"),
        (("--no-isolate",), "--no-isolate is about --watch"),
        (("--address", "auto", "replay", "runs/x", "--step", 3), "--address has no effect before"),
        (("--json", "replay", "runs/x", "--step", 3), "--json has no effect before replay"),
        (("--replay", "runs/x"), "--replay works in the background of --watch"),
        (("replay", "nowhere", "--step", 3, "--in-process"), "nowhere: not a run folder"),
        (("replay", "nowhere", "--step", 3, "--in-process", "--node", "a"), "leave out --node and --address"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(arguments, sentence):
    assert sentence in refused("health", *arguments)


@pytest.mark.slow
def test_a_runs_steps_are_computed_again(run):
    report = answer("health", "replay", run, "--step", 10, "--in-process")

    assert (report["verdict"], report["from_step"], report["step"], report["differences"]) == (
        "ok",
        5,
        10,
        [],
    )


@pytest.mark.slow
def test_a_step_without_snapshot_is_refused(run):
    assert "it has 5, 10, 15" in refused("health", "replay", run, "--step", 7, "--in-process")


def test_a_cluster_is_looked_at_and_its_folder_knows(ray_cluster, tmp_path):
    found = answer("health", "--folder", tmp_path)

    (node,) = found["nodes"]
    assert node["verdict"] == found["verdict"]
    assert {"disk-space", "clock-skew"} <= {finding["code"] for finding in node["findings"]}
    left = read_health(tmp_path)
    assert left is not None
    assert left["nodes"][node["id"]]["verdict"] == node["verdict"]


def test_a_watch_isolates_what_is_bad_and_with_no_isolate_tells_it_alone(ray_cluster, tmp_path, monkeypatch):
    def bad(nodes, *_, **__):
        finding = Finding.of("xid-79", "cuda 0", "bad", 79, detail="has fallen off the bus")
        return [NodeHealth(node, (finding,)) for node in nodes]

    monkeypatch.setattr(sweep.Sweep, "look", lambda self, nodes, *more: bad(nodes))
    told = ("health", "--watch", "--looks", 2, "--every-s", 1, "--folder", tmp_path)

    assert answer(*told, "--no-isolate")["verdict"] == "bad"
    assert Quarantine(tmp_path).sessions() == []
    assert answer(*told)["nodes"][0]["action"] == "leave"
    assert [session.reason for session in Quarantine(tmp_path).sessions()] == ["xid-79 of cuda 0"]


@pytest.fixture
def one_node(monkeypatch) -> None:
    """A cluster of one node, without Ray."""
    node = Node("id-0", "10.0.0.0", {}, {}, {}, "host-0")
    monkeypatch.setattr("rayrec.platform.cluster.ray_cluster", lambda *_: nullcontext())
    monkeypatch.setattr("rayrec.pipelines.cluster.nodes.cluster_nodes", lambda *_: [node])


def test_a_watch_goes_on_after_looks_that_fail_and_counts_them(one_node, tmp_path, monkeypatch):
    counted = []
    failures = iter(
        [InputError("the file is damaged"), TimeoutError("the head is silent"), GetTimeoutError("slow")]
    )

    def look(self, nodes, *_):
        if (error := next(failures, None)) is not None:
            raise error
        return [NodeHealth(node, (Finding.of("xid-79", "cuda 0", "bad", 79),)) for node in nodes]

    monkeypatch.setattr(sweep.Sweep, "look", look)
    monkeypatch.setattr(
        "rayrec.platform.metrics.RayMetrics.publish", lambda self, found: counted.append(found)
    )
    monkeypatch.setattr("time.sleep", lambda _: None)

    found = answer("health", "--watch", "--looks", 4, "--every-s", 1, "--folder", tmp_path)

    assert found["verdict"] == "bad"
    assert [each["health_looks_failed_total"] for each in counted] == [1, 2, 3, 3]
    assert len(Quarantine(tmp_path).sessions()) == 1


def test_one_look_that_fails_is_told(one_node, tmp_path, monkeypatch):
    def look(self, nodes, *_):
        raise InputError("the file is damaged")

    monkeypatch.setattr(sweep.Sweep, "look", look)

    assert "the file is damaged" in refused("health", "--folder", tmp_path)
