"""Learning from what users do: one config for trainer and service, and a trainer that comes back."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare
from rayrec.serve.launch.online import BAD_INPUT, MOST_RESTARTS, STEADY_S, TrainerProcess, events_of
from tests.helpers.data import random_events, write_source
from tests.helpers.http import free_port

ONLINE = CHECKOUT / "configs" / "online.yaml"


def test_the_service_writes_what_the_run_reads():
    events = events_of(RunConfig.load(ONLINE))
    assert events.store == "data/events"
    assert events.log is not None
    assert Path(events.log.folder).parent == Path("data/samples")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.follow": "null"}, "data.follow and data.samples"),
        ({"snapshots.publish": "null"}, "snapshots.publish"),
        ({"data.features": "[]"}, "0 operations `join_history`"),
    ],
)
def test_a_config_that_cannot_learn_online_is_refused(changes, message):
    config = RunConfig.load(ONLINE, [f"{key}={value}" for key, value in changes.items()])
    with pytest.raises(InputError, match=message):
        events_of(config)


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


def test_a_trainer_that_ends_is_started_again_but_not_for_ever():
    now, started = 0.0, []

    def start():
        started.append(now)
        return Ended(1)

    trainer = TrainerProcess(start, clock=lambda: now)
    trainer.start()
    for _ in range(MOST_RESTARTS):
        trainer.check()
    with pytest.raises(RuntimeError, match="ended with code 1"):
        trainer.check()
    assert len(started) == 1 + MOST_RESTARTS
    now = STEADY_S  # the last one did its work for long
    trainer.check()
    assert len(started) == 2 + MOST_RESTARTS


def test_a_trainer_that_is_refused_or_has_given_nothing_to_serve_is_not_started_again():
    refused = TrainerProcess(lambda: Ended(BAD_INPUT))
    refused.start()
    with pytest.raises(InputError, match="what it said above"):
        refused.check()
    dead = TrainerProcess(lambda: Ended(1))
    dead.start()
    with pytest.raises(RuntimeError, match="ended with code 1"):
        dead.check(may_restart=False)


def test_a_trainer_that_has_finished_is_left_alone_and_said_once(caplog):
    started = []

    def start():
        started.append(Ended(0))
        return started[-1]

    trainer = TrainerProcess(start)
    trainer.start()
    assert not trainer.is_finished
    for _ in range(MOST_RESTARTS + 2):
        trainer.check()
    assert trainer.is_finished
    assert len(started) == 1
    assert caplog.text.count("the trainer has finished") == 1


def ask(url: str, body: object) -> dict:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with opener.open(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.ray
@pytest.mark.slow
def test_what_users_do_is_in_the_next_answer_then_trained_on_and_served(tmp_path):
    """The command as it is typed, with a cluster of its own; it is stopped, and goes on where it was."""
    data = prepared(tmp_path)
    settings = {
        "data.path": data,
        "data.samples": tmp_path / "samples",
        "data.features": json.dumps(
            [
                {"op": "join_history", "store": str(tmp_path / "events"), "last": 8},
                {"op": "concat", "inputs": ["item_ids", "item_id"], "output": "item_ids"},
            ]
        ),
        "model.backbone": "{dim: 8, num_layers: 1, num_heads: 2, feedforward_dim: 16, max_length: 8}",
        "model.num_negatives": 8,
        "training.batch_size": 32,
        "pipeline.trainer_threads": 1,
        "snapshots.every_s": 1,
        "snapshots.publish.to": tmp_path / "versions",
        "cluster.dashboard": "false",
    }
    port = free_port()
    command = [sys.executable, "-m", "rayrec", "online", str(ONLINE), "--run", str(tmp_path / "run")]
    command += ["--port", str(port)]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    url = f"http://127.0.0.1:{port}"
    steps = []
    for user in ("first", "second"):
        with started(command, tmp_path / f"{user}.log") as process:
            before = wait_for_answer(url, process)["model"]
            key = "i3"
            answer = ask(f"{url}/v1/events", [{"user_id": user, "item_id": key}])
            assert (answer["taken"], answer["unknown_items"]) == (1, 0)
            for place in range(3):
                ask(f"{url}/v1/events", {"user_id": user, "item_id": f"i{place}"})
            expected = ask(f"{url}/v1/recommend", {"history": ["i3", "i0", "i1", "i2"], "k": 3})
            found = ask(f"{url}/v1/recommend", {"user_id": user, "k": 3})
            if found["model"] == expected["model"]:
                assert [item["item_id"] for item in found["items"]] == [
                    item["item_id"] for item in expected["items"]
                ]
            ends = time.monotonic() + 120
            while (model := ask(f"{url}/v1/recommend", {"k": 1})["model"])["step"] <= before["step"]:
                assert process.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.2)
            steps.append(model["step"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert steps[1] > steps[0]  # the run went on, and trained each row once
    rows = sum(pq.read_metadata(path).num_rows for path in (tmp_path / "samples" / "live").rglob("*.parquet"))
    assert rows == 8


def prepared(folder: Path) -> Path:
    """A data set, its event store, and samples of it."""
    source = write_source(folder / "source", random_events(40, 30))
    prepare(source, folder / "data", PrepareConfig(rows_per_group=4, rows_per_file=16, num_partitions=3))
    for arguments in (
        ["data", "store", str(source / "interactions.parquet"), str(folder / "events")],
        ["data", "keys", str(folder / "events"), str(folder / "samples")],
    ):
        subprocess.run(
            [sys.executable, "-m", "rayrec", *arguments],
            check=True,
            capture_output=True,
            env=environment(),
        )
    return folder / "data"


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}, "PYTHONPATH": path}


def started(command: list[str], log: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command, env=environment(), stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True
    )


def wait_for_answer(url: str, process: subprocess.Popen) -> dict:
    ends = time.monotonic() + 180
    while True:
        try:
            return ask(f"{url}/v1/recommend", {"k": 1})
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.3)
