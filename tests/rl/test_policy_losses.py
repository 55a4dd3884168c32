"""Policy losses against numbers worked by hand, the direction of their gradients, and a known bandit.

Axes: U users, G candidates of a user, L codes of a candidate.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from rayrec.models.decoding.prefixes import ItemDistribution, item_code_log_probs
from rayrec.models.decoding.sampling import constrained_sample, stochastic_beam_search
from rayrec.models.decoding.trie import CodeTrie
from rayrec.rl.config import RlConfig
from rayrec.rl.learner import StepLoss
from rayrec.rl.losses.base import LossInputs
from rayrec.rl.losses.config import POLICY_LOSSES
from rayrec.rl.losses.terms import (
    bounded_old,
    centered,
    early_clipped_old,
    gated_by_target,
    has_spread,
    kl_to_reference,
    leave_one_out,
    soft_gate,
    standardized,
    sum_over_codes,
)
from rayrec.rl.policy import importance_weights
from tests.helpers.examples import cases

LOSSES = POLICY_LOSSES.names()
PREFERENCES = ("dpo", "s_dpo")


def settings(name: str, **values):
    """As a config has them."""
    config = {
        "init_from": "run",
        "algorithm": {"name": name, **values},
        "rewards": {"parts": [{"kind": "hit"}]},
    }
    return RlConfig.parse(config).algorithm


def sampled(
    log_probs_UGL,
    old_log_probs_UGL,
    rewards_UG,
    target_rewards_U=None,
    weights_UG=None,
    target_log_probs_UL=None,
    reference_log_probs_UGL=None,
    reference_target_log_probs_UL=None,
) -> LossInputs:
    log_probs_UGL = torch.as_tensor(log_probs_UGL, dtype=torch.float64)
    num_users, num_candidates, num_levels = log_probs_UGL.shape
    nothing_UL = torch.full((num_users, num_levels), -1.0, dtype=torch.float64)

    def given(values, otherwise):
        return otherwise if values is None else torch.as_tensor(values, dtype=torch.float64)

    return LossInputs(
        log_probs_UGL=log_probs_UGL,
        old_log_probs_UGL=torch.as_tensor(old_log_probs_UGL, dtype=torch.float64),
        rewards_UG=torch.as_tensor(rewards_UG, dtype=torch.float64),
        weights_UG=given(weights_UG, torch.full((num_users, num_candidates), 1 / num_candidates).double()),
        target_rewards_U=given(target_rewards_U, torch.full((num_users,), math.nan).double()),
        target_log_probs_UL=given(target_log_probs_UL, nothing_UL),
        has_target_U=torch.full((num_users,), target_rewards_U is not None),
        target_likelihood_U=given(target_log_probs_UL, nothing_UL).sum(dim=1),
        reference_log_probs_UGL=given(reference_log_probs_UGL, log_probs_UGL.detach()),
        reference_target_log_probs_UL=given(reference_target_log_probs_UL, nothing_UL),
    )


def numbers(tensor: Tensor) -> list[float]:
    return pytest.approx(tensor.tolist(), abs=1e-5)


EVEN_U4 = torch.full((1, 4), 0.25)
REWARDS_U4 = torch.tensor([[1.0, 0.0, 0.0, 3.0]])


def test_advantages_are_centered_standardized_or_against_the_others():
    assert centered(REWARDS_U4, EVEN_U4)[0].tolist() == [0.0, -1.0, -1.0, 2.0]
    # The variance is (0 + 1 + 1 + 4) / 4.
    std = math.sqrt(1.5)
    assert standardized(REWARDS_U4, EVEN_U4)[0].tolist() == pytest.approx(
        [0.0, -1 / std, -1 / std, 2 / std], rel=1e-5
    )
    # 1 - (0 + 0 + 3) / 3, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3
    assert leave_one_out(REWARDS_U4, EVEN_U4)[0].tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])


def test_a_missing_candidate_is_in_no_baseline():
    weights_UG = torch.tensor([[0.5, 0.5, 0.0]])
    rewards_UG = torch.tensor([[1.0, 0.0, 100.0]])
    for advantage in (centered, standardized, leave_one_out):
        first, second, missing = advantage(rewards_UG, weights_UG)[0].tolist()
        assert (first, missing) == (pytest.approx(-second), 0.0)
    assert leave_one_out(torch.tensor([[5.0, 0.0]]), torch.tensor([[1.0, 0.0]]))[0].tolist() == [0.0, 0.0]


def test_zero_variance_groups_are_recognized():
    rewards_UG = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [2.0, 2.0, 9.0]])
    weights_UG = torch.tensor([[1 / 3] * 3, [1 / 3] * 3, [0.5, 0.5, 0.0]])
    assert has_spread(rewards_UG, weights_UG).tolist() == [False, True, False]


def test_the_target_gates_good_candidates_that_are_worse_than_it():
    advantages_UG = torch.tensor([[1.0, 0.5, -0.5, -1.0]])
    rewards_UG = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert gated_by_target(advantages_UG, rewards_UG, torch.tensor([3.0])).tolist() == [
        [1.0, 0.0, -0.5, -1.0]
    ]
    assert gated_by_target(advantages_UG, rewards_UG, torch.tensor([9.0])).tolist() == [
        [0.0, 0.0, -0.5, -1.0]
    ]
    unknown = gated_by_target(advantages_UG, rewards_UG, torch.tensor([math.nan]))
    assert torch.equal(unknown, advantages_UG)


LOG = math.log
TWO = [[[LOG(0.5), LOG(0.4)], [LOG(0.25), LOG(0.2)]]]
"""[1, 2, 2]: what the policy says of two candidates of two codes."""
TWO_OLD = [[[LOG(0.25), LOG(0.4)], [LOG(0.5), LOG(0.4)]]]
"""By the policy that sampled: ratios are (2, 1) and (0.5, 0.5)."""
GOOD_AND_BAD = [[1.0, 0.0]]
"""Advantages are 1 and -1, centered times two, or standardized."""


def test_reinforce_by_hand():
    values_UG = settings("reinforce", max_ratio=1.5).objective(sampled(TWO, TWO_OLD, GOOD_AND_BAD)).values_UG
    # Leave-one-out advantages are 1 and -1; weights min(2, 1.5) and 0.25; log π is that of both codes.
    assert values_UG[0].tolist() == pytest.approx([1.5 * LOG(0.2), -0.25 * LOG(0.05)])


def test_grpo_and_its_kin_by_hand():
    given = sampled(TWO, TWO_OLD, GOOD_AND_BAD)
    grpo = settings("grpo").objective(given)
    # min(2, 1.2) and 1 for the good one; max(0.5, 0.8) twice for the bad one.
    assert grpo.values_UG[0].tolist() == pytest.approx([(1.2 + 1.0) / 2, -0.8], abs=1e-5)
    assert grpo.is_clipped_UG.tolist() == [[True, True]]
    higher = settings("grpo", clip_high=0.5).objective(given)
    assert higher.values_UG[0, 0].item() == pytest.approx((1.5 + 1.0) / 2, abs=1e-5)
    dr_grpo = settings("grpo", scale=False, mean="constant").objective(given)
    assert dr_grpo.values_UG[0].tolist() == pytest.approx([0.5 * 1.1, -0.5 * 0.8])


def test_what_codes_are_divided_by():
    """Of the second candidate, only the first code had an alternative."""
    old_UGL = [[[LOG(0.25), LOG(0.4)], [LOG(0.5), 0.0]]]
    given, values_UGL = sampled(TWO, old_UGL, GOOD_AND_BAD), torch.tensor([[[2.0, 4.0], [8.0, 100.0]]])
    assert sum_over_codes(values_UGL, given, "candidate").tolist() == [[3.0, 8.0]]
    assert sum_over_codes(values_UGL, given, "constant").tolist() == [[3.0, 4.0]]
    # 1.5 codes a candidate.
    assert sum_over_codes(values_UGL, given, "batch")[0].tolist() == pytest.approx([4.0, 8 / 1.5])


def test_gspo_by_hand():
    objective = settings("gspo", clip_high=0.3).objective(sampled(TWO, TWO_OLD, GOOD_AND_BAD))
    # Ratios are the roots of 2 and of 1/4; advantages 1 and -1.
    assert objective.values_UG[0].tolist() == pytest.approx([1.3, -0.9], abs=1e-5)


def test_sapo_by_hand():
    values_UG = settings("sapo").objective(sampled(TWO, TWO_OLD, GOOD_AND_BAD)).values_UG

    def gate(ratio, tau):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    assert values_UG[0].tolist() == pytest.approx(
        [(gate(2, 1.0) + gate(1, 1.0)) / 2, -(gate(0.5, 1.05) + gate(0.5, 1.05)) / 2], abs=1e-5
    )
    ratio = torch.tensor(1.0, requires_grad=True)
    (slope,) = torch.autograd.grad(soft_gate(ratio, torch.tensor(1.7)), ratio)
    assert slope.item() == pytest.approx(1.0)


def test_sa_gcpo_is_sapo_until_rewards_are_graded():
    old_UGL = [[[LOG(0.5), LOG(0.4)], [LOG(0.25), LOG(0.4)], [LOG(0.5), LOG(0.5)]]]
    now_UGL = [[[LOG(0.5), LOG(0.5)], [LOG(0.3), LOG(0.4)], [LOG(0.4), LOG(0.5)]]]

    def both(rewards, target):
        given = sampled(now_UGL, old_UGL, [rewards], [target])
        return (settings(name).objective(given).values_UG[0] for name in ("sapo", "sa_gcpo"))

    sapo, sa_gcpo = both([1.0, 0.0, 0.0], 1.0)
    assert torch.equal(sapo, sa_gcpo)
    sapo, sa_gcpo = both([2.0, 1.5, 0.0], 2.0)
    # Above the mean of 1.17, and worse than the target: gated.
    assert (sa_gcpo[0], sa_gcpo[1], sa_gcpo[2]) == (sapo[0], 0.0, sapo[2])
    assert sapo[1] > 0


def test_ecpo_bounds_the_ratio_of_what_is_bad():
    old, now = torch.tensor([LOG(0.1), LOG(0.1)]), torch.tensor([LOG(0.5), LOG(0.1)])
    # 0.5 / (1 + 0.2 + 0.1) is above 0.1.
    raised = early_clipped_old(now, old, 0.2, 0.1)
    assert raised.exp().tolist() == pytest.approx([0.5 / 1.3, 0.1])
    given = sampled([[[LOG(0.1)], [LOG(0.5)]]], [[[LOG(0.1)], [LOG(0.1)]]], GOOD_AND_BAD)
    objective = settings("ecpo").objective(given)
    assert objective.values_UG[0].tolist() == pytest.approx([1.0, -1.3], abs=1e-5)
    assert objective.is_clipped_UG.tolist() == [[False, True]]


def test_gbpo_divides_by_the_other_side_of_what_is_bad():
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    now, old = torch.tensor([0.5, 0.1, 0.5, 0.9]).log(), torch.tensor([0.2, 0.3, 0.2, 0.3]).log()
    # max(0.2, 0.5), max(0.3, 0.1); max(0.2, 1 - 0.5), max(0.3, 1 - 0.9)
    assert bounded_old(now, old, advantages).exp().tolist() == pytest.approx([0.5, 0.3, 0.5, 0.3])
    given = sampled([[[LOG(0.5)], [LOG(0.25)]]], [[[LOG(0.2)], [LOG(0.1)]]], GOOD_AND_BAD)
    values_UG = settings("gbpo").objective(given).values_UG
    assert values_UG[0].tolist() == pytest.approx([1.0, -0.25 / 0.75], abs=1e-5)


def test_dpo_and_s_dpo_by_hand():
    """Against the reference, the target has grown by 0.5, the candidates by 0.2, -0.1 and 0.3; the last one
    is worth as much as the target, so nothing is said of it."""
    reference_UGL = [[[-1.0], [-1.0], [-1.0]]]
    given = sampled(
        [[[-0.8], [-1.1], [-0.7]]],
        [[[-1.0], [-1.0], [-1.0]]],
        [[0.0, 0.5, 1.0]],
        [1.0],
        target_log_probs_UL=[[-1.5]],
        reference_log_probs_UGL=reference_UGL,
        reference_target_log_probs_UL=[[-2.0]],
    )

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    dpo = settings("dpo", beta=2.0).objective(given)
    value = (dpo.values_UG * given.weights_UG).sum().item()
    assert value == pytest.approx((log_sigmoid(2 * 0.3) + log_sigmoid(2 * 0.6)) / 2)
    s_dpo = settings("s_dpo", beta=2.0).objective(given)
    value = (s_dpo.values_UG * given.weights_UG).sum().item()
    assert value == pytest.approx(log_sigmoid(-math.log(math.exp(-2 * 0.3) + math.exp(-2 * 0.6))))


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_target_is_never_rejected_in_favor_of_itself(name):
    """Its reward as a candidate is lower than as the target where rewards depend on places in the list."""
    given = sampled(
        [[[-0.8], [-1.5]]],
        [[[-1.0], [-2.0]]],
        [[0.0, 0.5]],
        [1.0],
        target_log_probs_UL=[[-1.5]],
        reference_log_probs_UGL=[[[-1.0], [-2.0]]],
        reference_target_log_probs_UL=[[-2.0]],
    )
    given = dataclasses.replace(given, is_target_UG=torch.tensor([[False, True]]))
    values_UG = settings(name, beta=2.0).objective(given).values_UG
    # Of the first candidate alone: the target has grown by 0.5, and it by 0.2.
    assert (values_UG * given.weights_UG).sum().item() == pytest.approx(-math.log1p(math.exp(-2 * 0.3)))


def test_the_divergence_is_that_of_the_policies_in_the_mean():
    probs, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    estimate = (probs * kl_to_reference(probs.log(), reference.log())).sum()
    assert estimate.item() == pytest.approx((probs * (probs / reference).log()).sum().item())


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_pushes_toward_what_is_better(name):
    """The sign: a step down the loss makes the best candidate likelier, and the worst one less so."""
    log_probs_UGL = torch.tensor([[[-1.0, -0.5], [-1.2, -0.7], [-0.9, -0.6]]], dtype=torch.float64)
    log_probs_UGL.requires_grad_()
    target_UL = torch.tensor([[-1.0, -0.5]], dtype=torch.float64, requires_grad=True)
    given = sampled(log_probs_UGL, log_probs_UGL.detach().clone(), [[2.0, 1.0, 0.0]], [2.0])
    given = dataclasses.replace(given, target_log_probs_UL=target_UL)
    loss, _ = StepLoss(settings(name))(given)
    gradient_UGL, of_target_UL = torch.autograd.grad(
        loss, (log_probs_UGL, target_UL), allow_unused=True, materialize_grads=True
    )
    of_best = of_target_UL.sum() if name in PREFERENCES else gradient_UGL[0, 0].sum()
    assert of_best < 0
    assert gradient_UGL[0, 2].sum() > 0


def test_of_a_zero_variance_group_only_kl_and_nll_count():
    log_probs_UGL = torch.tensor([[[-1.0], [-2.0]]], dtype=torch.float64, requires_grad=True)
    given = sampled(
        log_probs_UGL, [[[-1.1], [-1.9]]], [[0.3, 0.3]], [1.0], reference_log_probs_UGL=[[[-1.0], [-2.0]]]
    )
    for name in [each for each in LOSSES if each not in PREFERENCES]:
        loss, metrics = StepLoss(settings(name))(given)
        assert loss.item() == 0.0
        assert metrics["kl"].item() == 0.0
        assert torch.autograd.grad(loss, log_probs_UGL)[0].abs().max() == 0
    loss, _ = StepLoss(settings("grpo"), nll_coefficient=0.5)(given)
    assert loss.item() == pytest.approx(0.5)  # the target's log-probability is -1


@pytest.mark.parametrize("name", [each for each in LOSSES if each not in PREFERENCES])
def test_of_a_zero_variance_group_nothing_is_clipped(name):
    """Advantages of 16 equal rewards are rounding errors, of which a standard deviation makes ones."""
    moved_UGL = torch.linspace(-2.0, 2.0, 16, dtype=torch.float64).reshape(1, 16, 1) - 3.0
    given = sampled(moved_UGL, torch.full((1, 16, 1), -3.0).double(), [[-0.137] * 16], [1.0])

    _, metrics = StepLoss(settings(name))(given)

    assert metrics["clip_share"].item() == 0


CODES_IL = [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
BEST = 4
WORTH_I = torch.tensor([0.1, 0.3, 0.2, 0.0, 1.0, 0.4, 0.2, 0.6])


class Bandit:
    """A policy of one logit per code and prefix, for users who all want the same item."""

    def __init__(self) -> None:
        self.trie = CodeTrie.from_codes(CODES_IL)
        self.first_K = torch.zeros(3, requires_grad=True)
        self.second_KK = torch.zeros(3, 3, requires_grad=True)

    def distribution(self, num_users: int) -> ItemDistribution:
        def step(depth, codes_BWd, parent_BW):
            if depth == 0:
                return self.first_K.expand(num_users, 1, 3)
            return self.second_KK[codes_BWd[:, :, 0]]

        return ItemDistribution(step, self.trie, num_users)

    def probabilities(self) -> Tensor:
        items_1I = torch.arange(len(CODES_IL))[None]
        return item_code_log_probs(self.distribution(1), items_1I).sum(2).exp()[0].detach()


SAMPLERS = (constrained_sample, stochastic_beam_search)


@pytest.mark.parametrize(
    ("name", "sample"),
    cases(
        itertools.product(LOSSES, SAMPLERS),
        {(name, SAMPLERS[number % 2]) for number, name in enumerate(LOSSES)},
    ),
)
def test_every_algorithm_solves_a_bandit_whose_best_arm_is_known(name, sample):
    bandit, generator = Bandit(), torch.Generator().manual_seed(0)
    reference = Bandit()
    loss_of = StepLoss(settings(name, **({"beta": 1.0} if name in PREFERENCES else {})))
    optimizer = torch.optim.Adam([bandit.first_K, bandit.second_KK], lr=0.1)
    num_users, num_candidates = 16, 4
    for _ in range(60):
        with torch.no_grad():
            found = sample(bandit.distribution(num_users), num_candidates, generator)
            is_distinct = sample is stochastic_beam_search
            weights_UG = (
                importance_weights(found) if is_distinct else torch.full((num_users, num_candidates), 0.25)
            )
            with_target = torch.cat([found.items_BW, torch.full((num_users, 1), BEST)], dim=1)
            of_reference = item_code_log_probs(reference.distribution(num_users), with_target)
        for _ in range(2):  # the second time, it is no longer the policy that sampled
            now_UWL = item_code_log_probs(bandit.distribution(num_users), with_target)
            loss, _ = loss_of(
                LossInputs(
                    log_probs_UGL=now_UWL[:, :-1],
                    old_log_probs_UGL=found.code_log_probs_BWL,
                    rewards_UG=WORTH_I[found.items_BW],
                    weights_UG=weights_UG,
                    target_rewards_U=torch.ones(num_users),
                    target_log_probs_UL=now_UWL[:, -1],
                    has_target_U=torch.ones(num_users, dtype=torch.bool),
                    target_likelihood_U=now_UWL[:, -1].sum(dim=1),
                    reference_log_probs_UGL=of_reference[:, :-1],
                    reference_target_log_probs_UL=of_reference[:, -1],
                )
            )
            optimizer.zero_grad()
            (loss / num_users).backward()
            optimizer.step()
    assert bandit.probabilities().argmax() == BEST
    assert bandit.probabilities()[BEST] > 0.6
