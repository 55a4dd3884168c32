"""Settings of reinforcement learning: names of version 0.1, and values that exclude each other."""

import pytest
import yaml

from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig

OLD = """
init_from: run
rollout: {draw: stochastic_beam}
rewards:
  parts: [{kind: hit, normalise: standard}]
  guard: {max_flat: 0.25}
learner: {kl_weight: 0.1, anchor_weight: 0.02}
"""


def test_names_of_version_0_1_are_read(tmp_path):
    (tmp_path / "rl.yaml").write_text(OLD)

    config = RlConfig.load(tmp_path / "rl.yaml", ["learner.kl_weight=0.2"])

    assert config.rollout.method == "stochastic_beam"
    assert config.rewards.parts[0].normalize == "standard"
    assert config.rewards.guard.max_zero_variance == 0.25
    assert (config.learner.kl_coefficient, config.learner.nll_coefficient) == (0.2, 0.02)
    assert RlConfig.parse(yaml.safe_load(config.to_yaml())) == config


def test_an_old_name_next_to_the_new_one_is_refused():
    values = yaml.safe_load(OLD)
    values["learner"]["nll_coefficient"] = 0.5

    with pytest.raises(InputError, match="'anchor_weight' is called 'nll_coefficient' now"):
        RlConfig.parse(values)


def test_a_run_without_anything_to_learn_is_refused():
    values = yaml.safe_load(OLD) | {"learner": {"reward_weight": 0}}

    with pytest.raises(InputError, match="kl_coefficient and nll_coefficient are all 0"):
        RlConfig.parse(values)


def test_a_report_without_a_temperature_is_refused_before_anything_is_trained():
    values = yaml.safe_load(OLD) | {"evaluation": {"temperatures": []}}

    with pytest.raises(InputError, match=r"evaluation\.temperatures"):
        RlConfig.parse(values)
