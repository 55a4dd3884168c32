"""Whole runs of reinforcement learning: placements and deaths on Ray; alarms and resuming in this process."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from rayrec.rl.rewards.base import RewardError
from rayrec.rl.run import train_policy
from rayrec.rl.training import CollapsedError, StepReport
from tests.helpers.examples import cases
from tests.helpers.runs import make_run

STEPS = 4


def on_ray(test):
    """Mark a test that starts its processes on the session's cluster."""
    return pytest.mark.contract(pytest.mark.usefixtures("ray_cluster")(test))


@pytest.fixture(scope="module")
def supervised(tmp_path_factory) -> Path:
    """With rows in tables, so that these are written as well."""
    return make_run(tmp_path_factory.mktemp("supervised"), "generative")


def config_of(run: Path, **changes) -> RlConfig:
    values = {
        "init_from": str(run),
        "snapshot": "last",
        "steps": STEPS,
        "algorithm": {"name": "grpo"},
        "prompts": {"users_per_step": 16, "held_out_share": 0.2},
        "rollout": {"group_size": 4, "chunk_users": 5},
        "rewards": {"parts": [{"kind": "hit"}, {"kind": "novelty", "normalize": "standard"}]},
        "learner": {"learning_rate": 0.003},
        "placement": {"cpus": 0.5},
        "evaluation": {"every_steps": 2, "temperatures": [0.5, 1.0], "list_size": 3},
    }
    return RlConfig.parse(values | changes)


def placed(**settings) -> dict:
    return {"cpus": 0.5, **settings}


def final_weights(run: Path) -> dict[str, np.ndarray]:
    return read_snapshot(RunFolder.open(run).chosen_snapshot("last")).weights


@pytest.fixture(scope="module")
def colocated(supervised, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rl") / "colocated"
    train_policy(config_of(supervised), path, cluster=in_process)
    return path


def test_a_run_leaves_what_everything_else_reads(colocated, supervised):
    folder = RunFolder.open(colocated)
    assert folder.condition == "finished"
    assert any(
        (final_weights(colocated)[name] != array).any() for name, array in final_weights(supervised).items()
    )
    recommender, before = Recommender.load(colocated, "last"), Recommender.load(supervised, "last")
    query = recommender.query_of_user("u1")
    items = recommender.recommend([query], 5)[0]
    assert len(items) == 5
    scores = [item.score for item in before.recommend([query], 5)[0]]
    assert [item.score for item in items] != pytest.approx(scores)
    # The rows are those of the supervised run.
    samples = {"code": np.arange(3)}
    assert np.array_equal(recommender._tables.read(samples)["code"], before._tables.read(samples)["code"])

    lines = [json.loads(line) for line in (colocated / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {"kl", "entropy", "clip_share", "zero_variance_share", "staleness", "reward/hit.mean"} <= set(
        steps[0]
    )
    validations = [line for line in lines if "valid/recall@10" in line]
    assert [line["step"] for line in validations] == [0, 2, 4]
    phases = {"rollouts.sample", "rewards.score", "reference.log_probs", "learner.update", "sync"}
    assert {f"seconds/{phase}" for phase in phases} <= set(validations[-1])
    report = json.loads((colocated / "rl-evaluation.json").read_text())
    for who in ("all", "held_out"):
        assert {"recall@1", "recall@50", "ndcg@10", "reward"} <= set(report[who]["change"])
    assert report["held_out"]["num_users"] < report["all"]["num_users"]


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", cases([1, 2], [2]))
def test_workers_of_their_own_make_the_same_updates_to_the_bit(supervised, colocated, tmp_path, rollouts):
    config = config_of(supervised, placement=placed(kind="disaggregated", rollouts=rollouts))
    train_policy(config, tmp_path / "run", cluster=in_process)
    expected = final_weights(colocated)
    for name, array in final_weights(tmp_path / "run").items():
        assert np.array_equal(array, expected[name]), name


@pytest.mark.slow
@on_ray
def test_two_learners_are_one_up_to_rounding(supervised, colocated, tmp_path):
    train_policy(config_of(supervised, placement=placed(learners=2)), tmp_path / "run")
    expected = final_weights(colocated)
    for name, array in final_weights(tmp_path / "run").items():
        np.testing.assert_allclose(array, expected[name], atol=2e-4)


@pytest.mark.slow
@on_ray
def test_asynchronous_rollouts_are_not_older_than_their_bound(supervised, tmp_path):
    placement = placed(kind="async", max_staleness=3, sync_every=2)
    train_policy(config_of(supervised, steps=8, placement=placement), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ages = [line["staleness"] for line in lines if "staleness" in line]
    assert len(ages) == 8
    assert 0 < max(ages) <= 3


@on_ray
@pytest.mark.slow
def test_a_killed_rollout_worker_loses_no_prompt_and_doubles_none(supervised, tmp_path):
    """Each is killed while the next batch is with it: what comes out is what comes out in one process."""
    config = config_of(supervised, placement=placed(kind="disaggregated", rollouts=2, max_policy_lag=1))
    train_policy(config, tmp_path / "one-process", cluster=in_process)
    killed: dict[int, int] = {}

    def process_of(rank: int) -> int:
        return ray.get(ray.get_actor(f"run/rl_rollouts-{rank}").__ray_call__.remote(lambda _: os.getpid()))

    def kill(report: StepReport, _: int) -> None:
        if (rank := report.step - 1) < 2:
            killed[rank] = process_of(rank)
            os.kill(killed[rank], signal.SIGKILL)
        elif report.step == STEPS:
            assert not {process_of(rank) for rank in range(2)} & set(killed.values())

    train_policy(config, tmp_path / "run", on_step=kill)

    assert len(killed) == 2
    expected = final_weights(tmp_path / "one-process")
    for name, array in final_weights(tmp_path / "run").items():
        assert np.array_equal(array, expected[name]), name


LEARNS_TWICE = {"learning_rate": 0.003, "updates_per_batch": 2}


@pytest.mark.slow
def test_a_resumed_run_continues_to_the_same_bits(supervised, tmp_path):
    """With all that could be lost: batches ahead of the learner, moments of rewards, an optimizer's."""
    changes = {"learner": LEARNS_TWICE, "placement": placed(kind="async", max_staleness=5)}
    train_policy(config_of(supervised, **changes), tmp_path / "left-alone", cluster=in_process)
    path = tmp_path / "run"
    train_policy(config_of(supervised, steps=2, **changes), path, cluster=in_process)
    result = train_policy(config_of(supervised, **changes), path, resume=True, cluster=in_process)
    assert result.steps == STEPS
    expected = final_weights(tmp_path / "left-alone")
    for name, array in final_weights(path).items():
        assert np.array_equal(array, expected[name]), name


@pytest.mark.slow
def test_several_updates_of_a_batch_are_steps_of_the_optimizer(supervised, colocated, tmp_path):
    train_policy(config_of(supervised, learner=LEARNS_TWICE), tmp_path / "run", cluster=in_process)
    snapshot = read_snapshot(RunFolder.open(tmp_path / "run").chosen_snapshot("last"))
    assert snapshot.optimizer_state["step"] == 2 * STEPS

    def deviations(run: Path) -> list[float]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [line["ratio_deviation"] for line in lines if "ratio_deviation" in line]

    # At the second update of a batch, the policy is no longer the one that sampled it.
    assert min(deviations(tmp_path / "run")) > 1e-4
    assert max(deviations(colocated)) < 1e-4


def test_weights_that_come_too_late_to_be_used_are_refused(supervised):
    learner = {"updates_per_batch": 4}
    config_of(supervised, learner=learner, placement=placed(kind="async", max_staleness=4))
    with pytest.raises(InputError, match="sent every 8 optimizer steps"):
        config_of(supervised, learner=learner, placement=placed(kind="async", max_staleness=7, sync_every=2))


def test_a_run_with_other_settings_is_not_resumed(supervised, colocated, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(colocated, path)
    with pytest.raises(InputError, match=r"differs from this config in learner\.learning_rate"):
        train_policy(
            config_of(supervised, learner={"learning_rate": 1.0}), path, resume=True, cluster=in_process
        )
    with pytest.raises(InputError, match="holds a run already"):
        train_policy(config_of(supervised), path, cluster=in_process)


def test_a_failing_reward_ends_the_run_and_its_last_snapshot_is_kept(supervised, tmp_path):
    path = tmp_path / "run"
    parts = [
        {"kind": "hit"},
        {"kind": "function", "function": "fails_at_step_3:reward", "folder": str(tmp_path)},
    ]
    (tmp_path / "fails_at_step_3.py").write_text(
        "import numpy as np\n"
        "calls = []\n"
        "def reward(lists):\n"
        "    calls.append(lists.num_users)\n"
        "    found = np.zeros(lists.items_UG.shape)\n"
        "    if lists.items_UG.shape[1] == 4 and sum(c for c in calls) > 250:\n"
        "        found[0, 0] = np.nan\n"
        "    return found\n"
    )
    with pytest.raises(RewardError, match=r"the reward 'function' of user 'u\d+'.*nan"):
        train_policy(config_of(supervised, steps=50, rewards={"parts": parts}), path, cluster=in_process)
    folder = RunFolder.open(path)
    assert folder.condition == "failed"
    assert "RewardError" in folder.state["error"]
    assert folder.state["last"] is not None
    Recommender.load(path, "last")


def test_a_collapsed_policy_stops_the_run_and_the_best_one_is_kept(supervised, tmp_path):
    path = tmp_path / "run"
    config = config_of(
        supervised,
        steps=60,
        learner={"learning_rate": 0.3, "max_grad_norm": None},
        rewards={"parts": [{"kind": "novelty"}]},
        evaluation={"every_steps": 100, "temperatures": [1.0], "list_size": 3},
    )
    with pytest.raises(CollapsedError, match=r"step \d+: the (KL divergence|entropy)"):
        train_policy(config, path, cluster=in_process)
    folder = RunFolder.open(path)
    assert folder.condition == "failed"
    assert folder.state["best"] == folder.state["last"] == "step-000000000"
    Recommender.load(path)


@pytest.mark.slow
def test_the_command_reports_what_became_better_and_worse(supervised, tmp_path):
    path = tmp_path / "rl.yaml"
    path.write_text(config_of(supervised, steps=2).to_yaml())
    result = CliRunner().invoke(app, ["rl", str(path), "--run", str(tmp_path / "run"), "--local"])
    assert result.exit_code == 0, result.output
    for shown in ("recall@10, all users", "reward, users held out", "coverage of lists", "seconds in whole"):
        assert shown in result.output


def test_a_mistake_in_the_config_is_one_sentence_before_anything_starts(supervised, tmp_path):
    path = tmp_path / "rl.yaml"
    parts = {"parts": [{"kind": "hit", "by_scenario": {"moon": 1.0}}]}
    path.write_text(config_of(supervised, rewards=parts).to_yaml())
    result = CliRunner().invoke(app, ["rl", str(path), "--run", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "by_scenario for 'moon'" in result.output
    assert not (tmp_path / "run").exists()
