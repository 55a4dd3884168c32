"""One step of reinforcement learning in this process: its files, and what other packages can add."""

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import rayrec
from rayrec.actors.in_process import InProcessCalls, InProcessHost
from rayrec.actors.rl_worker import RlProcesses
from rayrec.rl.config import RlConfig
from rayrec.rl.controller import SingleController
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import PromptStream
from rayrec.rl.training import PolicyTraining
from tests.helpers.runs import make_run

PACKAGE = Path(rayrec.__file__).parent
MAX_FILES = 18


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("supervised"), "prefix")


def config_of(run: Path, **changes) -> RlConfig:
    """As `configs/beauty-rl.yaml`, in small."""
    values = {
        "init_from": str(run),
        "snapshot": "last",
        "steps": 2,
        "algorithm": {"name": "sa_gcpo"},
        "prompts": {"split": "valid", "users_per_step": 16, "held_out_share": 0.2},
        "rollout": {"group_size": 4, "chunk_users": 5},
        "rewards": {"parts": [{"kind": "hit"}, {"kind": "rank_position"}]},
        "learner": {"learning_rate": 0.01, "warmup_steps": 0, "updates_per_batch": 2},
    }
    return RlConfig.parse(values | changes)


def training_of(config: RlConfig) -> PolicyTraining:
    policy = Policy.load(config)
    controller = SingleController(
        config, policy.task.config.device, RlProcesses(InProcessHost("run"), InProcessCalls())
    )
    return PolicyTraining(config, controller, PromptStream(policy.task.dataset, config.prompts, config.seed))


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
