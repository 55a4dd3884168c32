"""Trials as tasks of a cluster: the outcomes of trials here, several at once, and processes that die."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrec.pipelines.tuning.config import TrialConfig, TuningConfig
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.running import TrialsOnRay, trials_here, trials_on_ray
from rayrec.pipelines.tuning.tune import tune
from tests.helpers.training_runs import assert_no_actor_survives, settings, walks

pytestmark = pytest.mark.ray
SPACE = {"training.optimizer.learning_rate": {"kind": "float", "low": 0.0001, "high": 0.05, "log": True}}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tuning")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings(walks(folder)).model_dump(mode="json", exclude_unset=True)))
    return path


def tuning(run_file: Path, **more: Any) -> TuningConfig:
    return TuningConfig.parse({"config": str(run_file), "space": SPACE, "trials": 3, "at_once": 2, **more})


def journal(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    timed = ("minutes", "cpu_minutes")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def test_tasks_have_the_outcomes_of_trials_here(ray_cluster, run_file, tmp_path):
    search = tuning(run_file, finalists=2, settings={"evaluation.max_users": 4})
    result = tune(search, tmp_path / "ray", open_trials=trials_on_ray)
    here = tune(search, tmp_path / "here", open_trials=trials_here)

    assert journal(tmp_path / "ray") == journal(tmp_path / "here")
    assert (result.best, result.judged) == (here.best, here.judged)
    assert len(result.judged) >= 2
    assert all(trial["cpu_minutes"] > 0 for trial in result.trials)


@pytest.mark.slow
def test_so_have_trials_with_actors_of_their_own(ray_cluster, run_file, tmp_path):
    tune(tuning(run_file, trials=2, trial={"actors": True}), tmp_path / "actors", open_trials=trials_on_ray)
    tune(tuning(run_file, trials=2), tmp_path / "here", open_trials=trials_here)

    assert journal(tmp_path / "actors") == journal(tmp_path / "here")
    assert_no_actor_survives()


def dies_once(spec: Any) -> Outcome:
    file = spec.folder / "tries"
    if not file.exists():
        file.write_text("1")
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome("complete", 0.5, (0.5,))


def always_dies(spec: Any) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


def fails(spec: Any) -> Outcome:
    raise OSError(28, "No space left on device")


def spec(folder: Path) -> Any:
    from rayrec.pipelines.config.run import RunConfig
    from rayrec.pipelines.tuning.trial import TrialSpec

    config = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}})
    return TrialSpec(0, folder, config, "ndcg@10", True)


def outcome_of(run: Any, folder: Path, tries: int) -> Outcome:
    trials = TrialsOnRay(TrialConfig(tries=tries), "cpu", run)
    trials.begin(spec(folder))
    try:
        return trials.outcome(0)
    finally:
        trials.close()


def test_a_trial_whose_process_dies_is_tried_again(ray_cluster, tmp_path):
    assert outcome_of(dies_once, tmp_path, 2) == Outcome("complete", 0.5, (0.5,))


def test_a_trial_whose_process_always_dies_has_failed(ray_cluster, tmp_path):
    outcome = outcome_of(always_dies, tmp_path, 1)

    assert outcome.state == "failed"
    assert (outcome.reason or "").startswith("its process died: ")


def test_an_error_that_is_no_trials_fault_ends_the_search(ray_cluster, tmp_path):
    with pytest.raises(OSError, match="No space"):
        outcome_of(fails, tmp_path, 2)


def test_trials_that_run_are_ended_with_the_search(ray_cluster, tmp_path):
    trials = TrialsOnRay(TrialConfig(), "cpu", _waits)
    trials.begin(spec(tmp_path))
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    trials.close()

    ended = tmp_path / "ended"
    deadline = time.monotonic() + 60  # Ray may say so before the process has heard of it
    while not (ended.exists() and ended.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended.read_text() == "KeyboardInterrupt"


def _waits(spec: Any) -> Outcome:
    try:
        (spec.folder / "begun").touch()
        for _ in range(6_000):  # Ray's interrupt does not wake a sleep
            time.sleep(0.1)
    except BaseException as stop:
        (spec.folder / "ended").write_text(type(stop).__name__)
        raise
    raise AssertionError("nobody ends it")
