"""Users that a policy is judged on: none that it learns from, and at least one."""

import numpy as np
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.training.placements import in_process
from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from rayrec.rl.evaluation import prompts_of, validation_prompts
from rayrec.rl.prompts import PromptStream, is_held_out
from rayrec.rl.run import train_policy
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, small_dataset, write_source
from tests.helpers.runs import MODELS, make_semantic_ids, trained


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return small_dataset(tmp_path_factory.mktemp("data"))


def config_of(**changes) -> RlConfig:
    return RlConfig.parse({"init_from": "run", "rewards": {"parts": [{"kind": "hit"}]}, **changes})


def users(prompts) -> np.ndarray:
    return np.concatenate([each.samples.user_ids_B for each in prompts])


def test_validation_users_are_in_no_prompt(dataset):
    prompts = {"split": "valid", "users_per_step": 16, "held_out_share": 0.3}
    config = config_of(prompts=prompts, evaluation={"batch_size": 7})
    evaluated = users(validation_prompts(dataset, config, with_times=False))
    stream = PromptStream(dataset, config.prompts, seed=0)
    asked = users([stream.step(step) for step in range(stream.plan.steps_per_epoch)])
    assert len(evaluated)
    assert not set(evaluated) & set(asked)
    everybody = users(prompts_of(dataset, "valid", batch_size=100))
    assert sorted([*evaluated, *np.unique(asked)]) == sorted(everybody)


def test_with_prompts_of_training_rows_nobody_asks_for_rewards_of_users_that_are_held_out(dataset):
    config = config_of(prompts={"split": "train", "held_out_share": 0.3})
    evaluated = users(validation_prompts(dataset, config, with_times=False))
    everybody = users(prompts_of(dataset, "valid", batch_size=100))
    assert evaluated.tolist() == everybody[~is_held_out(everybody, 0.3)].tolist()
    assert len(evaluated) < len(everybody)


def test_a_limit_counts_held_out_users(dataset):
    config = config_of(
        prompts={"split": "valid", "held_out_share": 0.3}, evaluation={"max_users": 5, "batch_size": 3}
    )
    evaluated = users(validation_prompts(dataset, config, with_times=False))
    assert len(evaluated) == 5
    assert is_held_out(evaluated, 0.3).all()


def test_targets_go_with_their_users(dataset):
    batches = prompts_of(dataset, "valid", batch_size=8, max_users=20, held_out_share=0.5)
    whole = prompts_of(dataset, "valid", batch_size=1000)[0]
    target_of = dict(zip(whole.samples.user_ids_B.tolist(), whole.targets_U.tolist(), strict=True))
    for batch in batches:
        expected = [target_of[user] for user in batch.samples.user_ids_B.tolist()]
        assert batch.targets_U.tolist() == expected


def test_no_validation_users_is_an_error_before_anything_starts(dataset):
    config = config_of(prompts={"split": "valid", "held_out_share": 1e-9})
    with pytest.raises(InputError, match=r"none is held out; raise prompts\.held_out_share"):
        validation_prompts(dataset, config, with_times=False)


def test_no_test_users_is_an_error_before_anything_starts(tmp_path):
    """The one event in the time of the test is of a user without a history."""
    source = write_source(tmp_path / "source", [*random_events(40, 30), ("new", "i4", 9000)])
    prepare(
        source,
        tmp_path / "data",
        PrepareConfig(split="time", valid_start=1004, test_start=9000, allow=("short-users",)),
    )
    make_semantic_ids(Dataset.open(tmp_path / "data"))
    values = {
        "data": {"path": str(tmp_path / "data")},
        "model": MODELS["prefix"],
        "training": {"batch_size": 16, "epochs": 1},
    }
    supervised = trained(RunConfig.parse(values), tmp_path / "supervised")

    config = config_of(init_from=str(supervised), snapshot="last", steps=1)
    with pytest.raises(InputError, match="no user has an item to predict in the split 'test'"):
        train_policy(config, tmp_path / "rl", cluster=in_process)
    assert not (tmp_path / "rl").exists()
