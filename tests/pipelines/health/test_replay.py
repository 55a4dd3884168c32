"""Steps that are computed again have the same bits, and one bit that differs is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.health_faults import flip_bit_of_row, flip_bit_of_tensor, wrong_bit_in_gradient
from rayrec.models.program.torch_program import TorchProgram
from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.health.replay import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    BackgroundReplay,
    NoRoomNowError,
    on_ray_with_room,
    replay,
    replay_newest,
)
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import OPTIMIZER, WEIGHTS
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from tests.helpers.examples import cases
from tests.helpers.training_runs import settings, walks

STEPS = (4, 8, 12, 15)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return walks(tmp_path_factory.mktemp("data"))


def config_of(data: Path, **changes: Any) -> RunConfig:
    """Snapshots of all of `STEPS`, with the validations: full ones and increments."""
    kept = {"evaluation__every_steps": 4, "snapshots__keep": 9, "snapshots__increments": 2}
    return settings(data, **{**kept, **changes})


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(config_of(data), run, cluster=in_process)
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("step", cases(STEPS, (4, 8, 15)))
def test_steps_computed_again_have_the_same_bits(finished, step):
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))

    report = replay(finished, step, in_process)

    assert (report.verdict, report.differences) == ("ok", ())
    assert report.hash == report.replayed_hash
    assert (report.from_step, report.step) == (([0, *STEPS])[STEPS.index(step)], step)
    assert report.num_compared > 20
    assert report.finding().action == "none"
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before
    assert [path.name for path in finished.parent.iterdir()] == [finished.name]


@pytest.mark.slow
def test_two_trainers_and_exact_prefetch_have_the_same_bits(data, tmp_path):
    config = config_of(data, pipeline__num_trainers=2, pipeline__mode="exact_prefetch", sparse__num_servers=2)
    train(config, tmp_path / "run", cluster=in_process)

    assert replay(tmp_path / "run", 8, in_process).verdict == "ok"


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("seed", cases(range(3), (0,)))
def test_a_flipped_bit_of_a_dense_tensor_is_named(run, file, seed):
    name = flip_bit_of_tensor(run / "snapshots" / "step-000000008" / file, np.random.default_rng(seed))

    report = replay(run, 8, in_process)

    kind = "weights" if file == WEIGHTS else "optimizer"
    assert [each.name for each in report.differences] == [f"{kind} {name}"]
    assert report.differences[0].detail.startswith("1 of ")
    assert (report.verdict, report.finding().action) == ("bad", "avoid")
    assert report.hash != report.replayed_hash


@pytest.mark.parametrize("column", ["weights", "state"])
@pytest.mark.parametrize("seed", cases(range(2), (0,)))
def test_a_flipped_bit_of_a_row_is_named(run, column, seed):
    snapshot = run / "snapshots" / "step-000000004"
    (file, *_) = sorted(snapshot.glob("*-00000.parquet"))
    row = flip_bit_of_row(file, column, np.random.default_rng(seed))

    report = replay(run, 4, in_process)

    (difference,) = report.differences
    assert difference.name == f"rows of {file.name.split('-')[0]}"
    assert difference.detail.endswith(f"the first of id {row}")
    assert difference.detail.startswith(f"{column} of 1 of ")


@pytest.mark.slow
def test_a_fault_while_a_step_was_computed_is_found(data, tmp_path):
    with wrong_bit_in_gradient(6, np.random.default_rng(0)):
        train(config_of(data), tmp_path / "run", cluster=in_process)

    assert replay(tmp_path / "run", 4, in_process).verdict == "ok"
    assert replay(tmp_path / "run", 8, in_process).verdict == "bad"
    assert replay(tmp_path / "run", 12, in_process).verdict == "ok"  # it goes on from what was computed


def test_a_fault_of_the_machine_that_computes_again_is_found_too(finished, monkeypatch):
    backward = TorchProgram.backward

    def faulty(self: TorchProgram, *arguments: Any, **named: Any) -> Any:
        gradients = backward(self, *arguments, **named)
        next(iter(gradients.row_grads.values()))[0, 0] += 1e-3
        return gradients

    monkeypatch.setattr(TorchProgram, "backward", faulty)

    assert replay(finished, 8, in_process).verdict == "bad"


def test_a_run_that_was_begun_again_since_may_differ_for_another_reason(run):
    flip_bit_of_tensor(run / "snapshots" / "step-000000008" / WEIGHTS, np.random.default_rng(0))
    RunFolder.open(run).update(incarnation=7)

    report = replay(run, 8, in_process)

    assert (report.verdict, report.finding().action) == ("unknown", "none")
    assert "begun again since" in report.note


def test_a_file_that_was_changed_on_disk_is_named_before_anything_is_computed(run):
    with open(run / "snapshots" / "step-000000008" / WEIGHTS, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")

    with pytest.raises(InputError, match=r"dense.safetensors: its checksum differs"):
        replay(run, 8, in_process)


def test_a_step_without_a_snapshot_is_refused_with_those_that_there_are(finished):
    with pytest.raises(InputError, match=r"no snapshot of that step; it has 4, 8, 12, 15"):
        replay(finished, 7, in_process)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        replay(tmp_path, 7, in_process)


def test_a_run_that_has_other_bits_every_time_is_refused(data, tmp_path):
    train(config_of(data, pipeline__mode="bounded_stale"), tmp_path / "run", cluster=in_process)

    with pytest.raises(InputError, match="bounded_stale reads rows as they happen to arrive"):
        replay(tmp_path / "run", 8, in_process)


def test_a_watch_replays_the_newest_snapshot_once(finished):
    report = replay_newest(finished, 0, in_process)

    assert report is not None
    assert (report.from_step, report.step, report.verdict) == (12, 15, "ok")
    assert replay_newest(finished, report.step, in_process) is None


def test_a_run_with_one_snapshot_is_not_replayed_in_the_background(data, tmp_path):
    train(config_of(data, evaluation__every_steps=100), tmp_path / "run", cluster=in_process)

    assert replay_newest(tmp_path / "run", 0, in_process) is None


def test_a_background_replay_answers_when_it_is_over_and_does_not_stop_at_an_error(finished):
    reports = [InputError("the snapshot is gone"), replay_newest(finished, 0, in_process), None]
    asked = []

    def again(run: Path, after: int, address: str | None) -> Any:
        asked.append(after)
        report = reports[len(asked) - 1]
        if isinstance(report, Exception):
            raise report
        return report

    now = [0.0]
    background = BackgroundReplay(finished, replay_again=again, clock=lambda: now[0])
    found = []
    for _ in range(5):
        found.append(background.look())
        now[0] += 2 * FIRST_PAUSE_S
        background.wait()
        if len(asked) == len(reports):
            break

    assert [report and report.step for report in found] == [None, None, None, 15]
    assert asked == [0, 0, 15]


def test_after_each_failure_a_background_replay_waits_twice_as_long(finished):
    now, asked = [0.0], []

    def fails(run: Path, after: int, address: str | None) -> Any:
        asked.append(now[0])
        raise NoRoomNowError("1 of 1 trainers find no room")

    background = BackgroundReplay(finished, replay_again=fails, clock=lambda: now[0])
    for _ in range(int(4 * LONGEST_PAUSE_S / 30)):
        background.look()
        background.wait()
        now[0] += 30.0

    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses[:3] == [90.0, 150.0, 270.0]  # a failure is seen in the next look, 30 s later
    assert pauses[-1] == LONGEST_PAUSE_S + 30.0


@pytest.mark.slow
def test_a_background_replay_that_hangs_does_not_keep_its_process(finished):
    program = (
        "import sys, time; from rayrec.pipelines.health.replay import BackgroundReplay; "
        "BackgroundReplay(sys.argv[1], replay_again=lambda *_, **__: time.sleep(600)).look(); print('over')"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(finished)], capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_a_replay_that_finds_no_room_now_is_refused_before_anything_starts(finished, monkeypatch):
    full = Node("id-0", "10.0.0.1", {}, {"CPU": 64.0}, {"CPU": 0.0})
    monkeypatch.setattr("rayrec.pipelines.cluster.nodes.cluster_nodes", lambda: [full])
    assembly = assemble(RunFolder.open(finished).config)

    with (
        pytest.raises(NoRoomNowError, match=r"find no room .* does not wait for it"),
        on_ray_with_room.running("again", assembly, None, 60.0),
    ):
        raise AssertionError("it has started")
