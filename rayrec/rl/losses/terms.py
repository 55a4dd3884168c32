"""What policy losses are made of: advantages, ratios, clipping, soft gates, sums over codes.

Everything here is to be *maximized*. Values per code are reduced to one number per candidate
(`sum_over_codes`), so that groups can be weighted and split among learners in one place.

A group are the candidates sampled for one user. Each has a weight, and the weights of a group sum to one: 1/G
for independent samples, more for what a sample without replacement was unlikely to contain. A position
without a candidate has weight 0 and advantage 0.

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rayrec.platform.lazy import LazyModule
from rayrec.rl.losses.base import LossInputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

CodeMean = Literal["candidate", "batch", "constant"]
"""What the sum over a candidate's codes is divided by: its own number of codes (GRPO, arXiv:2402.03300), the
mean number over the batch, so that each code counts alike (DAPO, arXiv:2503.14476), or the number of levels,
whatever was certain (Dr. GRPO, arXiv:2503.20783)."""
SCALE_EPSILON = 1e-6
"""Added to a standard deviation before it divides."""
EQUAL = 1e-8
"""Rewards of a group that differ by no more than this count as equal."""


def centered(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """Subtract from each reward its group's mean.

    Source: Dr. GRPO, arXiv:2503.20783, which leaves out the division by the standard deviation, since that
    gives more weight to groups with little variance.
    """
    mean_U1 = (weights_UG * rewards_UG).sum(dim=1, keepdim=True)
    return torch.where(weights_UG > 0, rewards_UG - mean_U1, 0.0)


def standardized(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """Standardize rewards within their group: (R - mean) / std, where std is that of the group.

    Source: GRPO, arXiv:2402.03300, section 4.1.2.
    """
    centered_UG = centered(rewards_UG, weights_UG)
    std_U1 = (weights_UG * centered_UG.square()).sum(dim=1, keepdim=True).sqrt()
    return centered_UG / (std_U1 + SCALE_EPSILON)


def leave_one_out(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """Subtract from each reward the mean of the *other* candidates, so that none is part of its own baseline.

    A candidate that is alone in its group has advantage 0.

    Source: RLOO, Kool et al., "Buy 4 REINFORCE samples, get a baseline for free", 2019; arXiv:2402.14740.
    """
    others_UG = 1.0 - weights_UG
    return torch.where(others_UG > EQUAL, centered(rewards_UG, weights_UG) / others_UG.clamp(min=EQUAL), 0.0)


def gated_by_target(advantages_UG: Tensor, rewards_UG: Tensor, target_rewards_U: Tensor) -> Tensor:
    """Zero positive advantages of candidates with a lower reward than the logged target.

    Γ = 0 where Â > 0 and R < R*, the reward of the logged target, else Â. A target whose reward is unknown
    (NaN) gates nothing.

    Source: SA-GCPO, OxygenREC, arXiv:2512.22386.
    """
    is_worse_UG = rewards_UG < target_rewards_U[:, None]
    return advantages_UG.masked_fill((advantages_UG > 0) & is_worse_UG, 0.0)


def has_spread(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """[U] whether two candidates of a group have different rewards; False for zero-variance groups."""
    is_there_UG = weights_UG > 0
    highest_U = rewards_UG.masked_fill(~is_there_UG, -torch.inf).amax(dim=1)
    lowest_U = rewards_UG.masked_fill(~is_there_UG, torch.inf).amin(dim=1)
    return highest_U - lowest_U > EQUAL


def sum_over_codes(values_UGL: Tensor, inputs: LossInputs, mean: CodeMean = "candidate") -> Tensor:
    """[U, G] average each candidate over its codes with an alternative; 0 for a candidate without any."""
    is_choice_UGL = inputs.is_choice_UGL
    sums_UG = values_UGL.masked_fill(~is_choice_UGL, 0.0).sum(dim=2)
    if mean == "constant":
        return sums_UG / values_UGL.shape[2]
    counts_UG = is_choice_UGL.sum(dim=2)
    if mean == "candidate":
        return sums_UG / counts_UG.clamp(min=1)
    per_candidate = inputs.codes_per_candidate
    if per_candidate is None:
        is_there_UG = inputs.weights_UG > 0
        per_candidate = counts_UG.sum().item() / max(int(is_there_UG.sum()), 1)
    return sums_UG / max(per_candidate, 1e-6)


def sequence_ratio(inputs: LossInputs, by_length: bool) -> Tensor:
    """[U, G] π / π_old of whole candidates.

    Args:
        by_length: take the n-th root, n being the number of codes with an alternative.

    Source: the length-normalized ratio is that of GSPO, arXiv:2507.18071, eq. 7.
    """
    log_ratio_UG = inputs.log_ratio_UGL.sum(dim=2)
    if by_length:
        log_ratio_UG = log_ratio_UG / inputs.is_choice_UGL.sum(dim=2).clamp(min=1)
    return log_ratio_UG.exp()


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """min(r Â, clip(r, 1 - low, 1 + high) Â), elementwise.

    Source: PPO, arXiv:1707.06347, eq. 7; unequal bounds are those of DAPO, arXiv:2503.14476, eq. 10.
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def is_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Where `clipped` has no gradient."""
    return ((ratio > 1.0 + high) & (advantages > 0)) | ((ratio < 1.0 - low) & (advantages < 0))


def soft_gate(ratio: Tensor, temperature: Tensor) -> Tensor:
    """f(r) = (4 / τ) σ(τ (r - 1)): its slope is 1 at r = 1 and fades on both sides, instead of being cut off.

    Source: SAPO, arXiv:2511.20347.
    """
    return 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))


def early_clipped_old(log_probs: Tensor, old_log_probs: Tensor, high: float, delta: float) -> Tensor:
    """log π'_old with π'_old = max(sg(π) / (1 + ε + δ), π_old).

    A candidate of negative advantage whose probability has grown far past that of the old policy would push
    with a ratio without bound; so the ratio is at most 1 + ε + δ.

    Source: ECPO, OneRec technical report, arXiv:2506.13695.
    """
    return torch.maximum(log_probs.detach() - torch.tensor(1.0 + high + delta).log(), old_log_probs)


def bounded_old(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """log π'_old with π'_old = max(π_old, sg π) where Â >= 0, and max(π_old, 1 - sg π) where Â < 0.

    The gradient of π / π'_old is then at most that of binary cross-entropy, 1 / (1 - π) for what is to
    become unlikelier; nothing is clipped.

    Source: GBPO, OneRec-V2 technical report, arXiv:2508.20900.
    """
    now = log_probs.detach()
    against = torch.where(advantages >= 0, now, torch.log1p(-now.exp().clamp(max=1.0 - 1e-7)))
    return torch.maximum(old_log_probs, against)


def kl_to_reference(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimate the KL divergence: ρ - log ρ - 1 with ρ = π_ref / π, elementwise. Never negative, and averaged
    over samples of π the divergence KL(π ‖ π_ref). Its gradient is that of KL(π_ref ‖ π), since samples are
    not differentiated: as a penalty, it keeps what the reference finds likely.

    Source: Schulman, "Approximating KL divergence", 2020, estimator k3; as GRPO uses it, arXiv:2402.03300,
    eq. 4.
    """
    log_rho = reference_log_probs - log_probs
    return torch.expm1(log_rho) - log_rho
