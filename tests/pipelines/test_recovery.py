"""Whole runs whose actors die or hang, or that are interrupted, one thing at a time.

`benchmarks.chaos` does it all at random.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from benchmarks.chaos import differences
from rayrec.actors.heartbeats import Account, ProcessId, kill_process
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_copy import RunCopy
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshot_requests import request_snapshot
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError, NoRoomError
from rayrec.platform.ray_errors import ActorDeathError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.examples import cases
from tests.helpers.runs import SPARSE_SASREC

STEPS_PER_EPOCH = 20  # 160 users in batches of 8
EPOCHS = 2
SNAPSHOT_EVERY = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """160 users who walk round a ring of 30 items."""
    folder = tmp_path_factory.mktemp("data")
    users_N = np.repeat(np.arange(160), 6)
    places_N = np.tile(np.arange(6), 160)
    table = pa.table(
        {"user_id": users_N, "item_id": (users_N * 7 + places_N) % 30, "timestamp": 1_600_000_000 + places_N}
    )
    (folder / "log").mkdir()
    pq.write_table(table, folder / "log" / "interactions.parquet")
    prepare(folder / "log", folder / "data", PrepareConfig(rows_per_group=8, rows_per_file=64))
    return folder / "data"


def settings(data: Path, **changes: Any) -> RunConfig:
    """`changes` by dotted key with `__` for dots."""
    values: dict[str, Any] = {
        "data": {"path": str(data), "window_rows": 40},
        "model": SPARSE_SASREC,
        "sparse": {"num_servers": 2, "optimizer": {"kind": "adam", "lr": 0.03}},
        "pipeline": {"trainer_threads": 1, "cpus_per_actor": 0.1, "cpus_per_trainer": 0.1},
        "training": {"batch_size": 8, "epochs": EPOCHS},
        "evaluation": {"every_epochs": EPOCHS},
        "snapshots": {"every_steps": SNAPSHOT_EVERY, "increments": 2},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return RunConfig.parse(values)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> tuple[Path, list[float]]:
    """The run that nothing happens to, and the loss of each of its steps."""
    run = tmp_path_factory.mktemp("alone") / "run"
    losses: list[float] = []
    train(settings(data), run, on_step=lambda done, total, loss: losses.append(loss), cluster=in_process)
    return run, losses


def process_of(run: str, member: str) -> ProcessId:
    """Waits for its first heartbeat."""
    monitor = ray.get_actor(f"{run}/heartbeats")
    while True:
        accounts: dict[str, Account] = ray.get(monitor.accounts.remote())
        if f"{run}/{member}" in accounts:
            return accounts[f"{run}/{member}"].heartbeat.process
        time.sleep(0.05)  # or it would take the time of what it waits for


def at(acts: dict[int, Callable[[], None]]) -> Callable[[int, int, float], None]:
    """For `on_step`: act behind these steps, each the first time."""
    left = dict(acts)

    def on_step(done: int, total: int, loss: float) -> None:
        if done in left:
            left.pop(done)()

    return on_step


def interrupt() -> None:
    raise KeyboardInterrupt


def wait_for_snapshot(run: Path) -> None:
    """One is begun; what has a thread of its own for it goes on."""
    while RunFolder.open(run).state["last"] is None:
        time.sleep(0.01)


def recoveries(run: Path) -> list[dict[str, Any]]:
    path = run / "recoveries.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.ray
@pytest.mark.contract
def test_stateless_stages_that_die_are_replaced_and_lost_state_is_that_of_the_last_snapshot(
    ray_cluster, alone, data, tmp_path
):
    """Nobody takes notice of the former; after the latter the run goes back by itself."""
    run = tmp_path / "run"

    def kill(member: str) -> Callable[[], None]:
        return lambda: kill_process(process_of("run", member))

    stayed: list[list[int]] = []

    def look() -> None:
        members = ("parameter_server-0", "trainer-0", "sample_reader-0", "parameter_server-1")
        stayed.append([process_of("run", member).number for member in members])

    def kill_server() -> None:
        wait_for_snapshot(run)
        look()
        kill("parameter_server-1")()

    kills = {3: kill("sample_reader-0"), 6: kill("feature_worker-0"), 15: kill_server, 25: look}
    train(settings(data), run, on_step=at(kills))

    (of_server,) = recoveries(run)
    before, after = stayed
    assert before[:3] == after[:3], "nobody else starts again"
    assert before[3] != after[3]
    assert of_server["replaced_alone"]
    assert of_server["reason"].startswith("run/parameter_server-1 died")
    assert of_server["snapshot"] in ("step-000000006", "step-000000012")
    assert differences(run, alone[0], EPOCHS) == []
    assert RunFolder.open(run).state["state"] == "finished"


@pytest.mark.ray
@pytest.mark.contract
@pytest.mark.slow
def test_a_group_of_trainers_that_loses_its_caller_goes_back_to_the_last_snapshot(
    ray_cluster, data, tmp_path
):
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    config = settings(data, pipeline__num_trainers=2, pipeline__trainers_per_group=2)
    stages = train(config, undisturbed, cluster=in_process).stages
    assert stages["callers_busy_s"] > 0

    def kill_caller() -> None:
        wait_for_snapshot(run)
        kill_process(process_of("run", "trainer_group-0"))

    train(config, run, on_step=at({15: kill_caller}))

    (of_caller,) = recoveries(run)
    assert of_caller["reason"].startswith("run/trainer_group-0 died")
    assert differences(run, undisturbed, EPOCHS) == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 2])
def test_trainers_that_wait_for_each_other_stay_when_a_server_is_lost(
    ray_cluster, data, tmp_path, group_size
):
    """One has failed at a lookup, the other may be in a sum with it; or both at the process beside them."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    config = settings(data, pipeline__num_trainers=2, pipeline__trainers_per_group=group_size)
    train(config, undisturbed, cluster=in_process)
    stayed: list[list[int]] = []

    def look() -> None:
        stayed.append([process_of("run", f"trainer-{rank}").number for rank in range(2)])

    def kill_server() -> None:
        wait_for_snapshot(run)
        look()
        kill_process(process_of("run", "parameter_server-0"))

    train(config, run, on_step=at({15: kill_server, 25: look, 26: kill_server}))

    assert [of_server["replaced_alone"] for of_server in recoveries(run)] == [True, True]
    assert stayed[0] == stayed[1] == stayed[2]
    assert differences(run, undisturbed, EPOCHS) == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("wire", "transport"), [("bfloat16", "ray"), ("int8_row", "auto")])
def test_a_narrow_wire_has_the_same_bits_on_ray_with_a_server_killed(
    ray_cluster, data, tmp_path, wire, transport
):
    """Two trainers; whatever brings the calls. The other run is in one process and undisturbed."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    config = settings(data, pipeline__num_trainers=2, sparse__wire=wire, sparse__transport=transport)
    train(config, undisturbed, cluster=in_process)

    def kill_server() -> None:
        wait_for_snapshot(run)
        kill_process(process_of("run", "parameter_server-0"))

    train(config, run, on_step=at({15: kill_server}))

    assert len(recoveries(run)) == 1
    assert differences(run, undisturbed, EPOCHS) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "num_trainers"),
    cases([(wire, number) for wire in ("bfloat16", "int8_row") for number in (1, 2)], [("int8_row", 2)]),
)
def test_an_interrupted_run_with_a_narrow_wire_goes_on_to_the_same_bits(
    alone, data, tmp_path, wire, num_trainers
):
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    config = settings(data, pipeline__num_trainers=num_trainers, sparse__wire=wire)
    train(config, undisturbed, cluster=in_process)

    with pytest.raises(KeyboardInterrupt):
        train(
            config,
            run,
            on_step=at({8: lambda: wait_for_snapshot(run), 19: interrupt}),
            cluster=in_process,
        )
    train(config, run, resume=True, cluster=in_process)

    assert differences(run, undisturbed, EPOCHS) == []
    assert differences(undisturbed, alone[0], EPOCHS) != [], "what travels is rounded"


@pytest.mark.slow
def test_a_run_that_loses_state_before_its_first_snapshot_goes_back_to_its_beginning(alone, data, tmp_path):
    run = tmp_path / "run"

    def lose_trainer() -> None:
        raise ActorDeathError("run/trainer-0 died")

    train(settings(data), run, on_step=at({2: lose_trainer}), cluster=in_process)

    (of_trainer,) = recoveries(run)
    assert (of_trainer["reason"], of_trainer["snapshot"]) == ("run/trainer-0 died", None)
    assert differences(run, alone[0], EPOCHS) == []


@pytest.mark.ray
@pytest.mark.contract
@pytest.mark.slow
def test_a_stage_that_hangs_is_found(ray_cluster, alone, data, tmp_path):
    """Stopped by a signal, a process is as alive to the system as any other."""
    run = tmp_path / "run"
    config = settings(data, recovery__hang_timeout_s=4.0)

    def stop(member: str) -> Callable[[], None]:
        return lambda: os.kill(process_of("run", member).number, signal.SIGSTOP)

    train(config, run, on_step=at({5: stop("sample_reader-0"), 9: stop("parameter_server-0")}))

    # A reader comes back alone. On a busy machine, a process that is only slow may be found too.
    reasons = [recovery["reason"] for recovery in recoveries(run)]
    assert any("run/parameter_server-0 hangs: it has given no sign of life" in reason for reason in reasons)
    assert differences(run, alone[0], EPOCHS) == []


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_cannot_be_kept_alive_is_given_up_with_what_it_has(ray_cluster, data, tmp_path):
    run = tmp_path / "run"

    def on_step(done: int, total: int, loss: float) -> None:
        if done > SNAPSHOT_EVERY + 3:
            wait_for_snapshot(run)
            kill_process(process_of("run", "trainer-0"))

    with pytest.raises(ActorDeathError, match="run/trainer-0 died"):
        train(settings(data, recovery__max_rollbacks=1), run, on_step=on_step)

    assert ray.util.list_named_actors() == []
    state = RunFolder.open(run).state
    assert state["state"] == "failed"
    assert state["last"] is not None
    assert "run/trainer-0 died" in state["error"]
    assert recoveries(run)


@pytest.fixture(scope="module")
def interrupted(data, tmp_path_factory) -> Path:
    """A run that was interrupted behind some snapshots."""
    run = tmp_path_factory.mktemp("interrupted") / "run"

    def wait() -> None:  # or the next ones would be left out, while this one is written
        wait_for_snapshot(run)

    config = settings(data, snapshots__keep=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, run, on_step=at({8: wait, 19: interrupt}), cluster=in_process)
    assert len(RunFolder.open(run).snapshot_names()) >= 2
    return run


@pytest.fixture
def stopped(interrupted, tmp_path) -> Path:
    """A copy of it, to go on with."""
    shutil.copytree(interrupted, tmp_path / "stopped")
    return tmp_path / "stopped"


def test_a_damaged_snapshot_is_refused_and_the_one_before_it_used_if_asked(alone, data, stopped):
    damaged = RunFolder.open(stopped).chosen_snapshot("last") / "item-00001.parquet"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)

    with pytest.raises(InputError, match=f"^{damaged}: its checksum differs.*--snapshot previous"):
        train(settings(data), stopped, resume=True, cluster=in_process)
    train(settings(data), stopped, resume=True, snapshot="previous", cluster=in_process)

    assert differences(stopped, alone[0], EPOCHS) == []


@pytest.mark.slow
def test_another_number_of_trainers_goes_on_to_the_same_losses(alone, data, stopped):
    """Up to rounding: each adds up another part of the batch."""
    losses: list[float] = []
    goes_on_after = read_snapshot(RunFolder.open(stopped).chosen_snapshot("last")).committed_step
    more = settings(data, pipeline__num_trainers=2, sparse__num_servers=3, pipeline__num_readers=2)

    train(
        more, stopped, resume=True, on_step=lambda done, total, loss: losses.append(loss), cluster=in_process
    )

    expected = alone[1][goes_on_after + 1 :]
    assert len(losses) == len(expected) >= 20
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_snapshot_on_demand_is_of_a_step_in_between_and_changes_nothing(alone, data, tmp_path):
    run = tmp_path / "run"
    found: list[Path] = []
    asking = threading.Thread(target=lambda: found.append(request_snapshot(run, timeout_s=60.0)))
    config = settings(data, snapshots__every_steps=1000, snapshots__keep=5)

    train(config, run, on_step=at({4: asking.start}), cluster=in_process)
    asking.join()

    step = read_snapshot(found[0]).committed_step
    assert 4 <= step < EPOCHS * STEPS_PER_EPOCH
    assert differences(run, alone[0], EPOCHS) == []


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_goes_on_from_its_copy(alone, data, tmp_path):
    run = tmp_path / "run"
    config = settings(data, snapshots__copy_to=(tmp_path / "other disk" / "mine").as_uri())
    acts = {9: lambda: wait_for_snapshot(run), 15: interrupt}

    with pytest.raises(KeyboardInterrupt):
        train(config, run, resume="if_begun", on_step=at(acts), cluster=in_process)
    shutil.rmtree(run)
    train(config, run, resume="if_begun", cluster=in_process)

    assert differences(run, alone[0], EPOCHS) == []


def test_a_second_run_with_the_settings_of_the_first_is_refused_its_copy(data, tmp_path):
    url = (tmp_path / "other disk" / "mine").as_uri()
    config = settings(data, snapshots__copy_to=url)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "first", on_step=at({2: interrupt}), cluster=in_process)
    assert not (tmp_path / "other disk" / "mine" / "copy.json").exists()  # it had nothing to copy yet
    RunCopy(url).claim(tmp_path / "first")

    for resume in (False, "if_begun"):
        with pytest.raises(InputError, match=r"this is the copy of the run 'first', not of .*second"):
            train(config, tmp_path / "second", resume=resume, cluster=in_process)
    assert not (tmp_path / "second").exists()


def test_a_full_disk_ends_a_run_with_the_folder_and_what_to_do(data, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "snapshots"))

    monkeypatch.setattr("rayrec.pipelines.training.snapshot_writer.write_snapshot", full)

    with pytest.raises(
        NoRoomError, match=r"run: its disk is full .*make room there.*continue with --resume$"
    ):
        train(settings(data), tmp_path / "run", cluster=in_process)

    state = RunFolder.open(tmp_path / "run").state
    assert state["state"] == "failed"
    assert "its disk is full" in state["error"]
