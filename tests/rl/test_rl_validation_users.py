"""Validation users: none that the policy learns from, and at least one."""

import numpy as np
import pytest

from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from rayrec.rl.evaluation import prompts_of, validation_prompts
from rayrec.rl.prompts import PromptStream, is_held_out
from rayrec.samples.dataset.dataset import Dataset
from tests.helpers.data import small_dataset


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
