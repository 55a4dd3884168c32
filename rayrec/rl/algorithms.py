"""Policy losses by name. A new one is one function: `Sampled` and its settings in, an `Objective` out.

    rewards ─► advantages ─┐
    log π, log π_old ─► ratio ─► clip, gate or bound ─► of_candidates ─► [U, G], to be maximized

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.rl import settings as of
from rayrec.rl.advantages import centered, gated_by_target, leave_one_out, standardized
from rayrec.rl.objectives import (
    bounded_old,
    clipped,
    early_clipped_old,
    is_clipped,
    of_candidates,
    sequence_ratio,
    soft_gate,
)
from rayrec.rl.sampled import Sampled


class Objective(NamedTuple):
    """What is to be maximized: the weighted sum over each group, in the mean over groups."""

    values_UG: Tensor
    """Of each candidate, differentiable."""
    is_clipped_UG: Tensor
    """Candidates that were kept from pushing further, at one code at least."""


Algorithm = Callable[[Sampled, Any], Objective]


def reinforce(sampled: Sampled, settings: of.ReinforceSettings) -> Objective:
    """Â log π, with the ratio to the policy that drew as a weight (it is 1 when that is the one that learns).

    The weight is no part of the gradient, and at most `max_ratio`.

    Source: Williams, Machine Learning 1992; the baseline is RLOO's, arXiv:2402.14740. The bounded weight is
    that of IMPALA, arXiv:1802.01561.
    """
    advantages_UG = leave_one_out(sampled.rewards_UG, sampled.weights_UG)
    ratio_UG = sequence_ratio(sampled, by_length=False).detach()
    weight_UG = ratio_UG.clamp(max=settings.max_ratio)
    values_UG = weight_UG * advantages_UG * sampled.log_probs_UGL.sum(dim=2)
    return Objective(values_UG, ratio_UG > settings.max_ratio)


def grpo(sampled: Sampled, settings: of.GrpoSettings) -> Objective:
    """The clipped ratio of each code, times the candidate's advantage.

    Source: GRPO, arXiv:2402.03300, eq. 3. `scale: false` with `mean: constant` is Dr. GRPO, arXiv:2503.20783;
    `clip_high` above `clip_low` with `mean: batch` is DAPO, arXiv:2503.14476.
    """
    advantage = standardized if settings.scale else centered
    advantages_UG1 = advantage(sampled.rewards_UG, sampled.weights_UG)[:, :, None]
    ratio_UGL = sampled.log_ratio_UGL.exp()
    low, high = settings.clip_low, settings.clip_high
    values_UG = of_candidates(clipped(ratio_UGL, advantages_UG1, low, high), sampled, settings.mean)
    cut_UGL = is_clipped(ratio_UGL, advantages_UG1, low, high) & sampled.is_choice_UGL
    return Objective(values_UG, cut_UGL.any(dim=2))


def gspo(sampled: Sampled, settings: of.GspoSettings) -> Objective:
    """One ratio for the whole candidate, the mean of its codes' in logarithms, clipped.

    Source: GSPO, arXiv:2507.18071, eq. 5 to 7.
    """
    advantages_UG = standardized(sampled.rewards_UG, sampled.weights_UG)
    ratio_UG = sequence_ratio(sampled, by_length=True)
    low, high = settings.clip_low, settings.clip_high
    return Objective(
        clipped(ratio_UG, advantages_UG, low, high), is_clipped(ratio_UG, advantages_UG, low, high)
    )


def sapo(sampled: Sampled, settings: of.SapoSettings) -> Objective:
    """Soft gates of each code's ratio instead of clipping; steeper for what is to become unlikelier.

    Source: SAPO, arXiv:2511.20347.
    """
    advantages_UG = standardized(sampled.rewards_UG, sampled.weights_UG)
    return _soft(sampled, advantages_UG, settings)


def sa_gcpo(sampled: Sampled, settings: of.SapoSettings) -> Objective:
    """SAPO whose advantages are gated by what the logged target is worth.

    Source: OxygenREC, arXiv:2512.22386.
    """
    advantages_UG = standardized(sampled.rewards_UG, sampled.weights_UG)
    gated_UG = gated_by_target(advantages_UG, sampled.rewards_UG, sampled.target_rewards_U)
    return _soft(sampled, gated_UG, settings)


def _soft(sampled: Sampled, advantages_UG: Tensor, settings: of.SapoSettings) -> Objective:
    temperature_UG = torch.where(advantages_UG > 0, settings.tau_positive, settings.tau_negative)
    gate_UGL = soft_gate(sampled.log_ratio_UGL.exp(), temperature_UG[:, :, None])
    values_UG = of_candidates(gate_UGL * advantages_UG[:, :, None], sampled)
    return Objective(values_UG, torch.zeros_like(values_UG, dtype=torch.bool))


def ecpo(sampled: Sampled, settings: of.EcpoSettings) -> Objective:
    """PPO's clipping with an old policy that is raised to where the ratio has a bound.

    Source: OneRec technical report, arXiv:2506.13695; whole candidates, as published.
    """
    advantages_UG = standardized(sampled.rewards_UG, sampled.weights_UG)
    log_probs_UG, old_UG = sampled.log_probs_UGL.sum(dim=2), sampled.old_log_probs_UGL.sum(dim=2)
    raised_UG = early_clipped_old(log_probs_UG, old_UG, settings.clip, settings.delta)
    ratio_UG = (log_probs_UG - raised_UG).exp()
    cut_UG = is_clipped(ratio_UG, advantages_UG, settings.clip, settings.clip) | (raised_UG > old_UG)
    return Objective(clipped(ratio_UG, advantages_UG, settings.clip, settings.clip), cut_UG)


def gbpo(sampled: Sampled, settings: of.GbpoSettings) -> Objective:
    """No clipping: every candidate has a gradient, bounded by that of binary cross-entropy.

    Source: OneRec-V2 technical report, arXiv:2508.20900; whole candidates, as published.
    """
    advantages_UG = standardized(sampled.rewards_UG, sampled.weights_UG)
    log_probs_UG, old_UG = sampled.log_probs_UGL.sum(dim=2), sampled.old_log_probs_UGL.sum(dim=2)
    raised_UG = bounded_old(log_probs_UG, old_UG, advantages_UG)
    return Objective((log_probs_UG - raised_UG).exp() * advantages_UG, raised_UG > old_UG)


def dpo(sampled: Sampled, settings: of.PreferenceSettings) -> Objective:
    """log σ(β (Δ_target - Δ_candidate)), Δ = log π - log π_ref, in the mean over the candidates that the
    logged target is worth more than.

    Source: DPO, arXiv:2305.18290, eq. 7.
    """
    margin_UG, is_rejected_UG = _margins(sampled, settings.beta)
    share_UG = _shares(is_rejected_UG)
    values_UG = _spread_over_groups(functional.logsigmoid(margin_UG) * share_UG, sampled)
    return Objective(values_UG, torch.zeros_like(is_rejected_UG))


def s_dpo(sampled: Sampled, settings: of.PreferenceSettings) -> Objective:
    """log σ(-log Σ_j exp(β (Δ_j - Δ_target))): the target against all that it is worth more than, at once.

    Source: S-DPO, arXiv:2406.09215, eq. 11.
    """
    margin_UG, is_rejected_UG = _margins(sampled, settings.beta)
    has_any_U = is_rejected_UG.any(dim=1)
    against_UG = (-margin_UG).masked_fill(~is_rejected_UG, -torch.inf)
    # A group without a pair has no value, and no gradient that is not a number.
    total_U = torch.logsumexp(torch.where(has_any_U[:, None], against_UG, 0.0), dim=1)
    values_U = torch.where(has_any_U, functional.logsigmoid(-total_U), 0.0)
    values_UG = _spread_over_groups(values_U[:, None] * _shares(is_rejected_UG), sampled)
    return Objective(values_UG, torch.zeros_like(is_rejected_UG))


def _margins(sampled: Sampled, beta: float) -> tuple[Tensor, Tensor]:
    """([U, G] β (Δ_target - Δ_candidate), [U, G] whether the target is worth more than the candidate)."""
    assert sampled.reference_log_probs_UGL is not None, "settings ask for a reference"
    assert sampled.reference_target_log_probs_UL is not None, "as above"
    grown_UG = (sampled.log_probs_UGL - sampled.reference_log_probs_UGL).sum(dim=2)
    grown_U = (sampled.target_log_probs_UL - sampled.reference_target_log_probs_UL).sum(dim=1)
    is_rejected_UG = sampled.rewards_UG < sampled.target_rewards_U[:, None]
    is_rejected_UG &= (sampled.weights_UG > 0) & sampled.has_target_U[:, None]
    return beta * (grown_U[:, None] - grown_UG), is_rejected_UG


def _shares(is_rejected_UG: Tensor) -> Tensor:
    """[U, G] 1 / number of rejected candidates of the group, at each of them."""
    return is_rejected_UG / is_rejected_UG.sum(dim=1, keepdim=True).clamp(min=1)


def _spread_over_groups(values_UG: Tensor, sampled: Sampled) -> Tensor:
    """What sums up to a group's value when each candidate is weighed."""
    weights_UG = sampled.weights_UG
    return torch.where(weights_UG > 0, values_UG / weights_UG.clamp(min=1e-12), 0.0)


ALGORITHMS: Mapping[str, Algorithm] = {
    "reinforce": reinforce,
    "grpo": grpo,
    "gspo": gspo,
    "sapo": sapo,
    "sa_gcpo": sa_gcpo,
    "ecpo": ecpo,
    "gbpo": gbpo,
    "dpo": dpo,
    "s_dpo": s_dpo,
}
"""By the name that a config has."""
