"""Who a policy is judged by: nobody that it learns from, and somebody."""

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


def test_those_who_validate_are_never_asked_for(dataset):
    prompts = {"split": "valid", "users_per_step": 16, "held_out_share": 0.3}
    config = config_of(prompts=prompts, evaluation={"batch_size": 7})
    judged = users(validation_prompts(dataset, config, with_times=False))
    stream = PromptStream(dataset, config.prompts, seed=0)
    asked = users([stream.step(step) for step in range(stream.plan.steps_per_epoch)])
    assert len(judged)
    assert not set(judged) & set(asked)
    everybody = users(prompts_of(dataset, "valid", batch_size=100))
    assert sorted([*judged, *np.unique(asked)]) == sorted(everybody)


def test_where_prompts_are_of_training_rows_everybody_validates(dataset):
    config = config_of(prompts={"split": "train", "held_out_share": 0.3})
    judged = users(validation_prompts(dataset, config, with_times=False))
    assert judged.tolist() == users(prompts_of(dataset, "valid", batch_size=100)).tolist()


def test_a_limit_is_of_those_who_are_held_out(dataset):
    config = config_of(
        prompts={"split": "valid", "held_out_share": 0.3}, evaluation={"max_users": 5, "batch_size": 3}
    )
    judged = users(validation_prompts(dataset, config, with_times=False))
    assert len(judged) == 5
    assert is_held_out(judged, 0.3).all()


def test_targets_go_with_their_users(dataset):
    batches = prompts_of(dataset, "valid", batch_size=8, max_users=20, held_out_share=0.5)
    whole = prompts_of(dataset, "valid", batch_size=1000)[0]
    target_of = dict(zip(whole.samples.user_ids_B.tolist(), whole.targets_U.tolist(), strict=True))
    for batch in batches:
        expected = [target_of[user] for user in batch.samples.user_ids_B.tolist()]
        assert batch.targets_U.tolist() == expected


def test_without_anybody_it_is_said_before_anything_starts(dataset):
    config = config_of(prompts={"split": "valid", "held_out_share": 1e-9})
    with pytest.raises(InputError, match=r"none is held out; raise prompts\.held_out_share"):
        validation_prompts(dataset, config, with_times=False)
