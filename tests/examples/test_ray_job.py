"""`ray job submit`: the command inside a job, on a cluster that it joins and leaves running."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.checkout import CHECKOUT
from tests.helpers.data import small_dataset

BIN = Path(sys.executable).parent
# A cluster made by `ray start` asks for a token otherwise, and there may be none on this machine.
ENVIRONMENT = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
START_TIMEOUT_S = 90


@pytest.fixture
def dashboard():
    """Address of the dashboard of a cluster of its own; no port of it is fixed."""
    probes = [socket.socket() for _ in range(3)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    port, dashboard_port, agent_port = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    folder = tempfile.mkdtemp(prefix="ray")  # short, since the path of a socket has to be
    options = {
        "port": port,
        "dashboard-port": dashboard_port,
        "dashboard-agent-listen-port": agent_port,
        "num-cpus": 8,
        "object-store-memory": 200_000_000,
        "temp-dir": folder,
    }
    command = [
        BIN / "ray",
        "start",
        "--head",
        "--block",
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as cluster:
        yield f"http://127.0.0.1:{dashboard_port}"
        cluster.terminate()
    shutil.rmtree(folder, ignore_errors=True)


def ray_cli(*arguments, cwd=None):
    command = [str(BIN / "ray"), *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, cwd=cwd, capture_output=True, text=True, timeout=240)


def submitted(dashboard, working_dir, *entrypoint):
    """The finished `ray job submit`; tried again until the cluster can take it."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        job = ray_cli(
            "job", "submit", "--address", dashboard, "--working-dir", ".", "--", *entrypoint, cwd=working_dir
        )
        starting = any(text in job.stderr for text in ("No available agent", "Failed to connect"))
        if not starting or time.monotonic() > deadline:
            return job
        time.sleep(1)


@pytest.mark.ray
@pytest.mark.slow
def test_a_submitted_job_trains_in_the_cluster_it_was_sent_to(dashboard, tmp_path):
    dataset, run = small_dataset(tmp_path / "data"), tmp_path / "run"
    shutil.copytree(CHECKOUT / "rayrec", tmp_path / "work" / "rayrec", ignore=shutil.ignore_patterns("__*__"))
    (tmp_path / "work" / "run.yaml").write_text(
        f"data: {{path: {dataset.root}}}\n"
        "model: {name: sasrec, item_matrix: sparse, backbone: {dim: 8}}\n"
        "training: {batch_size: 16, epochs: 1}\n"
    )

    command = ("python", "-m", "rayrec", "train", "run.yaml", "--run", run, "--json")
    job = submitted(dashboard, tmp_path / "work", *command)

    assert job.returncode == 0, job.stdout + job.stderr
    assert '"epochs": 1.0' in job.stdout
    assert RunFolder.open(run).state["state"] == "finished"
    # The cluster outlives the job, and its dashboard knows the actors by their names.
    actors = json.loads(ray_cli("list", "actors", "--address", dashboard, "--format", "json").stdout)
    names = {actor["name"] for actor in actors}
    assert {"run/trainer-0", "run/parameter_server-0", "run/parameter_server-1"} <= names
