"""A service whose replicas are scaled: by load, and by a queue that needs the room."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

from rayrec.pipelines.cluster.nodes import FOLDER_VARIABLE
from rayrec.pipelines.cluster.service_limits import ServiceLimits
from rayrec.platform.checkout import CHECKOUT
from tests.helpers.http import fetch
from tests.helpers.runs import make_run

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SOON = {"average_s": 0, "raise_again_s": 1, "look_s": 1}
SIGNALS = {
    "requests": {"requests_per_replica": 0.01, **SOON},
    "batcher": {"batcher": {"work": 1e-4, "queue_wait_s": 1e-4}, **SOON},
}
"""Anything at all in flight, or that came of late, is too much for two replicas."""


def wait_for(condition, timeout_s=240):
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.2)
    return found


@pytest.mark.parametrize("signal_of", SIGNALS)
def test_load_raises_replicas_and_a_limit_takes_them_away_while_requests_are_answered(
    signal_of, tmp_path, free_port
):
    run, limits = make_run(tmp_path), ServiceLimits(tmp_path)
    (tmp_path / "scaling.yaml").write_text(yaml.safe_dump(SIGNALS[signal_of]))
    command = [sys.executable, "-m", "rayrec", "serve", str(run), "--port", str(free_port)]
    command += ["--max-replicas", "2", "--scaling", str(tmp_path / "scaling.yaml")]
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    changes = {FOLDER_VARIABLE: str(tmp_path), "RAY_metrics_report_interval_ms": "1000"}
    statuses = []
    stopped = threading.Event()

    def ask():
        while not stopped.is_set():
            statuses.append(fetch(f"http://127.0.0.1:{free_port}/v1/recommend", {"user_id": "u3", "k": 3})[0])

    process = subprocess.Popen(command, env={**kept, **changes, "PYTHONPATH": str(CHECKOUT)})
    callers = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    try:
        wait_for(limits.state)
        assert limits.state().target == 1
        for caller in callers:
            caller.start()
        wait_for(lambda: limits.state() and limits.state().num_replicas == limits.state().wish == 2)
        wait_for(lambda: limits.allow(1, "a job needs the room"))
        assert limits.state().wish == 2
        limits.allow(None)
        wait_for(lambda: limits.state().target == 2)
    finally:
        stopped.set()
        for caller in callers:
            if caller.is_alive():
                caller.join()
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    assert code == 0
    assert limits.limit() is None
    assert len(statuses) > 100
    assert set(statuses) == {200}
