"""The queue on a real Ray cluster of three nodes: a program runs, a borrower is stopped and goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.queue_cluster import QueueCluster, queue_cluster
from rayrec.jobs.runner import RayRunner, Submission
from rayrec.jobs.watcher import ClusterWatcher
from rayrec.platform.errors import InputError
from tests.cli.commands import answer, rayrec, refused

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

WORK = """
import os, sys, time
log, ready = sys.argv[1:]
with open(log, "a") as file:
    file.write(f"began on {os.environ['RAYREC_NODES']} in {os.getcwd()}\\n")
while not os.path.exists(ready):
    time.sleep(0.1)
with open(log, "a") as file:
    file.write("ended\\n")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueueCluster]:
    """Of two nodes beside the head."""
    folder = tmp_path_factory.mktemp("queue")
    with queue_cluster(folder, [{"num_cpus": 2, "num_gpus": 1}] * 2) as made:
        made.start_queue()
        for team in ("team-a", "team-b"):
            answer("queue", "add", team, "--cards", "1", "--cohort", "all", "--ledger", made.ledger_path)
        yield made


def submit(cluster: QueueCluster, name: str, team: str, *more: str, ready: Path) -> Path:
    log = cluster.folder / f"{name}.log"
    (cluster.folder / "work.py").write_text(WORK)
    options = ["--id", name, "--queue", team, "--gpus", "1", "--working-dir", cluster.folder]
    program = [sys.executable, cluster.folder / "work.py", log, ready]
    code, _, stderr = rayrec("submit", *options, *more, "--ledger", cluster.ledger_path, "--", *program)
    assert code == 0, stderr
    return log


def test_a_program_runs_and_a_borrower_is_stopped_for_an_owner_and_goes_on(cluster):
    ready, never = cluster.folder / "ready", cluster.folder / "later"
    ready.touch()
    log = submit(cluster, "small", "team-a", ready=ready)
    cluster.wait_for(lambda: cluster.is_over("small"), 60.0)
    began, ended = log.read_text().splitlines()
    assert cluster.job("small").state.value == "succeeded"
    assert began.endswith(f" in {cluster.folder}")
    assert ended == "ended"

    own = submit(cluster, "own", "team-b", "--may-stop", "--priority", "1", ready=never)
    cluster.wait_for(lambda: own.exists(), 30.0)
    borrower = submit(cluster, "borrower", "team-b", "--may-stop", ready=never)
    cluster.wait_for(lambda: borrower.exists(), 30.0)

    owner = submit(cluster, "owner", "team-a", ready=never)
    took_s = cluster.wait_for(lambda: owner.exists(), 60.0)
    assert took_s < 60.0
    assert cluster.is_running("own")
    assert not cluster.is_running("borrower")
    (node,) = [line.split()[2] for line in owner.read_text().splitlines()]
    assert node in borrower.read_text()

    (waiting,) = answer("queue", "list", "--ledger", cluster.ledger_path)["queues"][1]["waiting"]
    assert waiting["id"] == "borrower"
    assert "1 GPU" in waiting["reason"]

    never.touch()
    cluster.wait_for(lambda: cluster.is_over("own", "borrower", "owner"), 60.0)
    lines = borrower.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["began", "began", "ended"]
    details = answer("jobs", "borrower", "--ledger", cluster.ledger_path)
    assert [each["outcome"] for each in details["attempts"]] == ["stopped", "succeeded"]

    # What the queue has seen of the nodes is known to commands now.
    line = refused(
        "submit", "--queue", "team-a", "--gpus", "2", "--ledger", cluster.ledger_path, "--", "python", "x.py"
    )
    assert "could never run" in line
    assert refused("queue", "run", "--ledger", cluster.ledger_path, code=1).startswith(
        f"rayrec: {cluster.ledger_path}: another process runs this queue (process "
    )


def test_rays_head_is_given_an_attempt_twice_and_starts_it_once(cluster):
    """A kill comes between Ray's answer and the note of it; Ray answers 500 to the second submission."""
    log = cluster.folder / "once.log"
    watcher = ClusterWatcher(cluster.address)
    try:
        runner = RayRunner(watcher.dashboard)
        mine = Submission("once-1", f"echo began >> {log}", owner="a ledger")
        runner.submit(mine)
        runner.submit(mine)
        with pytest.raises(InputError, match="Ray has a job 'once-1' that is not of this ledger"):
            runner.submit(replace(mine, owner="another"))
        cluster.wait_for(lambda: (found := runner.report("once-1")) is not None and found.is_over, 60.0)
    finally:
        watcher.close()
    assert log.read_text() == "began\n"


def test_a_cluster_belongs_to_the_ledger_whose_queue_was_there_first(cluster, tmp_path):
    other = tmp_path / "other.db"
    line = refused("queue", "run", "--ledger", other, "--address", cluster.address)
    assert f"the queue of another ledger ({cluster.ledger_path.resolve()} on " in line
