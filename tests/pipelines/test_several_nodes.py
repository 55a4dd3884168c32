"""Runs on four simulated nodes; `tests.helpers.several_nodes` is the program that trains them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.several_nodes import NUM_STEPS, SNAPSHOT_EVERY

TIMEOUT_S = 840.0
"""Half a hundred processes are started, one after the other."""
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]

ENDS_S = 60.0
"""Time in which a program that is told to end takes its cluster down."""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nodes")
    # Ray's sockets need short names, and other clusters of this machine are not to be met.
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        _train(folder, ray_folder)
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def _train(folder: Path, ray_folder: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with open(folder / "log", "wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.several_nodes", str(folder)],
            cwd=Path(__file__).parents[2],
            env=environment | {"RAY_TMPDIR": ray_folder},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            program.wait(TIMEOUT_S)
        finally:
            program.terminate()  # nothing, if it has ended
            try:
                program.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                program.kill()  # Ray's own watchdog then ends its processes
                program.wait()
    if program.returncode != 0:
        pytest.fail((folder / "log").read_text()[-5000:])


def losses(report: dict[str, Any], story: str) -> np.ndarray:
    by_step = report["stories"][story]["losses"]
    return np.array([by_step[str(step)] for step in range(1, NUM_STEPS + 1)])


def test_actors_are_on_nodes_with_the_labels_that_were_asked_for(report):
    (places,) = report["stories"]["replicated"]["places"]

    roles = {actor: report["roles"].get(node, "head") for actor, node in places.items()}
    assert {roles[f"parameter_server-{shard}"] for shard in (0, 1)} == {"server"}
    assert {roles[f"trainer-{rank}"] for rank in (0, 1)} == {"trainer"}
    assert roles["feature_worker-0"] == "server"
    assert roles["sample_reader-0"] != "trainer"
    assert places["parameter_server-0"] != places["parameter_server-1"]
    assert places["trainer-0"] != places["trainer-1"]


@pytest.mark.parametrize("story", ["replicated", "fsdp2"])
def test_two_trainers_have_the_losses_of_one(report, story):
    np.testing.assert_allclose(losses(report, story), losses(report, "one trainer"), rtol=0, atol=1e-3)


def test_a_run_that_loses_nodes_goes_back_and_ends_as_if_it_had_not(report):
    told = report["stories"]["nodes lost"]

    of_server, of_trainer = told["recoveries"]
    assert of_server["reason"].startswith("lost/parameter_server-0 died: its node has died")
    assert of_trainer["reason"].startswith("lost/trainer-1 died: its node has died")
    # Steps go on while the driver cuts a node off, so the snapshot may be of a later one.
    first, second = (int(recovery["snapshot"].removeprefix("step-")) for recovery in told["recoveries"])
    assert first % SNAPSHOT_EVERY == second % SNAPSHOT_EVERY == 0
    assert 0 < first <= second < NUM_STEPS
    for lost, before, after in zip(told["lost_nodes"], told["places"][:-1], told["places"][1:], strict=True):
        assert lost in before.values()
        assert lost not in after.values()
    np.testing.assert_array_equal(losses(report, "nodes lost"), losses(report, "replicated"))
    assert told["final_loss"] == report["stories"]["replicated"]["final_loss"]


def test_a_replacement_is_used_and_without_one_actors_share_the_node_that_is_left(report):
    _, with_replacement, without = report["stories"]["nodes lost"]["places"]

    assert with_replacement["parameter_server-0"] != with_replacement["parameter_server-1"]
    assert without["trainer-0"] == without["trainer-1"]


def test_a_run_leaves_a_bad_node_loses_no_step_and_has_the_same_bits(report):
    told = report["stories"]["bad node"]

    (recovery,) = told["recoveries"]
    assert "is bad (xid 79)" in recovery["reason"]
    (bad,) = told["lost_nodes"]
    before, after = told["places"]
    assert bad in before.values()
    assert bad not in after.values()
    np.testing.assert_array_equal(losses(report, "bad node"), losses(report, "replicated"))
    assert len(told["left_s"]) == 1


def test_a_run_starts_although_a_draining_node_has_the_most_room(report):
    (places,) = report["stories"]["draining"]["places"]
    assert report["draining"] not in places.values()
    np.testing.assert_array_equal(losses(report, "draining"), losses(report, "replicated"))


def test_no_attempt_leaves_room_reserved(report):
    assert report["groups_left"] == []


def test_what_no_node_has_is_refused(report):
    label, size = report["refused"]

    assert label == (
        "placement.servers.labels: no node of the Ray cluster has role=servr; its nodes have "
        "role=server (2), role=trainer (2), no label (1)"
    )
    assert size.startswith(
        "placement.trainers: a trainer fits on no node of the Ray cluster (each asks for 3 CPU on a node "
        "with role=trainer); of such nodes, "
    )
