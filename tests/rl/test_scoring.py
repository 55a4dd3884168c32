"""Rewards of rollouts and of their logged targets."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayrec.rl.losses.terms import gated_by_target, standardized
from rayrec.rl.rewards.base import CandidateLists, RewardError
from rayrec.rl.rewards.guard import RewardGuard
from rayrec.rl.rewards.logged_targets import Hit, RankPosition
from rayrec.rl.rewards.mix import RewardMix, WeightedReward
from rayrec.rl.rollouts import Rollouts
from rayrec.rl.scoring import RolloutScorer

HIT_AND_RANK = [WeightedReward("hit", Hit()), WeightedReward("rank_position", RankPosition())]


def scorer_and_rollouts(mix, items_UG, log_probs_UG, targets_U, target_log_probs_U):
    items_UG, targets_U = np.array(items_UG), np.array(targets_U)
    prompts = SimpleNamespace(targets_U=targets_U)
    inputs = SimpleNamespace(
        lists=lambda _, items_UG, log_probs_UG: CandidateLists(
            items_UG, log_probs_UG, targets_U, [f"u{user}" for user in range(len(items_UG))]
        )
    )
    weights_UG = np.full(items_UG.shape, 1.0 / items_UG.shape[1])
    of_codes_UGL = np.array(log_probs_UG)[:, :, None]
    rollouts = Rollouts(prompts, items_UG, of_codes_UGL, weights_UG, np.array(target_log_probs_U), 0)
    return RolloutScorer(mix, RewardGuard(), inputs), rollouts


def scored(*lists):
    """By the rewards of `configs/beauty-rl.yaml`."""
    scorer, rollouts = scorer_and_rollouts(RewardMix(HIT_AND_RANK), *lists)
    return scorer.score(rollouts)[1]


def test_the_target_is_scored_as_part_of_the_sampled_list():
    """Sampled as the second likeliest and as the likeliest; not sampled, but likelier or less likely than all
    that were; one that may not be sampled; none."""
    found = scored(
        [[5, 7, 9], [7, 5, 9], [5, 6, 9], [5, 6, 9], [5, 6, 9], [5, 6, 9]],
        [[-1.0, -2.0, -3.0]] * 6,
        [7, 7, 7, 7, 7, -1],
        [-2.0, -1.0, -0.5, -9.0, -np.inf, -np.inf],
    )
    second, last = 1.0 + 1.0 / np.log2(3.0), 1.0 + 1.0 / np.log2(5.0)
    np.testing.assert_allclose(found.target_rewards_U, [second, 2.0, 2.0, last, np.nan, np.nan])


def test_a_hit_is_not_gated_for_being_unlikely():
    """What SA-GCPO is to learn most from: the target was sampled, and is not at the top."""
    found = scored([[5, 7, 9, 3]], [[-1.0, -2.0, -3.0, -4.0]], [7], [-2.0])
    rewards_UG = torch.from_numpy(found.rewards_UG)
    advantages_UG = standardized(rewards_UG, torch.from_numpy(found.rollouts.weights_UG))
    gated_UG = gated_by_target(advantages_UG, rewards_UG, torch.from_numpy(found.target_rewards_U))
    assert advantages_UG[0, 1] > 0
    assert torch.equal(gated_UG, advantages_UG)


def test_where_the_reward_of_a_target_fails_nothing_is_learned_of_the_candidates():
    def fails_at_targets(lists):
        if (lists.items_UG == 7).any():
            raise OSError("no answer")
        return lists.items_UG.astype(float)

    mix = RewardMix([WeightedReward("asked", fails_at_targets, normalize="standard")])
    scorer, rollouts = scorer_and_rollouts(mix, [[5, 9]], [[-1.0, -2.0]], [7], [-2.0])
    before = scorer.state()

    with pytest.raises(RewardError, match="no answer"):
        scorer.score(rollouts)

    assert scorer.state() == before
