"""`ray job submit`: the command inside a job of a cluster that this process does not own."""

import json
import shutil
import subprocess
import sys

import pytest

from rayrec.pipelines.run_folder import RunFolder
from rayrec.platform.checkout import CHECKOUT
from tests.data import small_dataset

SUBMIT = """
import json, sys, time
import ray
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_actors

working_dir, entrypoint = sys.argv[1:]
context = ray.init(
    num_cpus=8, object_store_memory=200_000_000, include_dashboard=True, dashboard_port=0, log_to_driver=False
)
client = JobSubmissionClient("http://" + context.dashboard_url)
job, deadline = None, time.monotonic() + 90
while job is None:  # the agent that starts jobs comes up some seconds after the dashboard
    try:
        job = client.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": working_dir})
    except RuntimeError as error:
        if "No available agent" not in str(error) or time.monotonic() > deadline:
            raise
        time.sleep(1)
while not client.get_job_status(job).is_terminal():
    time.sleep(0.2)
names = [actor.name for actor in list_actors(limit=100)]
print(json.dumps([client.get_job_status(job), client.get_job_logs(job), names]))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_submitted_job_trains_in_the_cluster_it_was_sent_to(tmp_path):
    dataset, run = small_dataset(tmp_path / "data"), tmp_path / "run"
    shutil.copytree(CHECKOUT / "rayrec", tmp_path / "work" / "rayrec", ignore=shutil.ignore_patterns("__*__"))
    (tmp_path / "work" / "run.yaml").write_text(
        f"data: {{path: {dataset.root}}}\nmodel: {{name: sasrec, backbone: {{dim: 8}}}}\n"
        "training: {batch_size: 16, epochs: 1}\n"
    )
    entrypoint = f"{sys.executable} -m rayrec train run.yaml --run {run} --json"

    submitted = subprocess.run(
        [sys.executable, "-c", SUBMIT, str(tmp_path / "work"), entrypoint],
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert submitted.returncode == 0, submitted.stderr
    status, logs, names = json.loads(submitted.stdout.splitlines()[-1])
    assert status == "SUCCEEDED", logs
    assert json.loads(logs.splitlines()[-1])["epochs"] == 1
    assert {"run/trainer-0", "run/parameter_server-0", "run/parameter_server-1"} <= set(names)
    assert RunFolder.open(run).state["state"] == "finished"
