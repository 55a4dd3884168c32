"""One step of reinforcement learning in this process: its files, and what other packages can add."""

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import rayrec
from rayrec.rl.training import PolicyTraining
from tests.helpers.runs import make_run
from tests.rl.rl_steps import config_of, training_of

PACKAGE = Path(rayrec.__file__).parent
MAX_FILES = 18


def files_of_a_step(training: PolicyTraining) -> set[str]:
    """Files of `rl` and `actors` with a function that runs, or a class of which an object is made."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file == "<string>" and "self" in frame.f_locals:  # what dataclasses generate
            module = sys.modules[type(frame.f_locals["self"]).__module__]
            file = module.__file__ or ""
        path = Path(file)
        if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in ("rl", "actors"):
            found.add(str(path.relative_to(PACKAGE)))

    steps = training.steps()
    next(steps)  # the first one may import
    sys.setprofile(watch)
    try:
        next(steps)
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("supervised"), "prefix")


def test_one_step_passes_through_few_files(run):
    # And `run.py`, which iterates over the steps.
    files = files_of_a_step(training_of(config_of(run))) | {"rl/run.py"}
    files -= {"actors/in_process.py"}  # it stands where Ray does

    assert {"rl/training.py", "rl/controller.py", "rl/worker.py", "rl/learner.py"} <= files
    assert len(files) <= MAX_FILES, sorted(files)


def test_own_processes_make_the_same_updates_as_shared_ones(run):
    def weights(placement: dict) -> dict[str, np.ndarray]:
        training = training_of(config_of(run, placement=placement))
        list(training.steps())
        return training._controller.state()[0].arrays

    expected = weights({"kind": "colocated"})
    for name, array in weights({"kind": "disaggregated", "rollouts": 2}).items():
        assert np.array_equal(array, expected[name]), name


def test_batches_of_an_older_policy_move_ratios_and_clips_act(run):
    """In turns, a batch is learned from by the policy that sampled it, so nothing is ever clipped."""

    def metrics(placement: dict) -> list[dict[str, float]]:
        config = config_of(
            run,
            steps=6,
            algorithm={"name": "grpo"},
            rewards={"parts": [{"kind": "novelty"}]},
            learner={"learning_rate": 0.03, "warmup_steps": 0},
            placement=placement,
        )
        return [report.metrics for report in training_of(config).steps()]

    in_turns = metrics({"kind": "colocated"})
    assert max(step["staleness"] for step in in_turns) == 0
    assert max(step["ratio_deviation"] for step in in_turns) < 1e-4
    assert max(step["clip_share"] for step in in_turns) == 0

    late = metrics({"kind": "async", "max_staleness": 3})
    assert [step["staleness"] for step in late] == [0, 1, 2, 3, 3, 3]
    assert all(step["ratio_deviation"] > 0.01 for step in late[1:])
    assert max(step["clip_share"] for step in late) > 0
