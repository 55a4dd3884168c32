"""Parts of which policy losses are made: ratios, clipping, soft gates, and how codes add up to a candidate.

Everything here is to be *maximized*. What an objective is of each code comes down to one number for each
candidate (`of_candidates`), so that groups can be weighed, and cut among trainers, in one place.

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rayrec.rl.sampled import Sampled

CodeMean = Literal["candidate", "batch", "constant"]
"""What the sum over a candidate's codes is divided by: its own number of codes (GRPO, arXiv:2402.03300), the
mean number over the batch, so that each code counts alike (DAPO, arXiv:2503.14476), or the number of levels,
whatever was certain (Dr. GRPO, arXiv:2503.20783)."""


def of_candidates(values_UGL: Tensor, sampled: Sampled, mean: CodeMean = "candidate") -> Tensor:
    """[U, G] mean over the codes with an alternative; of a candidate without any it is 0."""
    is_choice_UGL = sampled.is_choice_UGL
    sums_UG = values_UGL.masked_fill(~is_choice_UGL, 0.0).sum(dim=2)
    if mean == "constant":
        return sums_UG / values_UGL.shape[2]
    counts_UG = is_choice_UGL.sum(dim=2)
    if mean == "candidate":
        return sums_UG / counts_UG.clamp(min=1)
    per_candidate = sampled.codes_per_candidate
    if per_candidate is None:
        is_there_UG = sampled.weights_UG > 0
        per_candidate = counts_UG.sum().item() / max(int(is_there_UG.sum()), 1)
    return sums_UG / max(per_candidate, 1e-6)


def sequence_ratio(sampled: Sampled, by_length: bool) -> Tensor:
    """[U, G] π / π_old of whole candidates; by length, its root of as many codes as had an alternative.

    Source: the length-normalized ratio is that of GSPO, arXiv:2507.18071, eq. 7.
    """
    log_ratio_UG = sampled.log_ratio_UGL.sum(dim=2)
    if by_length:
        log_ratio_UG = log_ratio_UG / sampled.is_choice_UGL.sum(dim=2).clamp(min=1)
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
    """ρ - log ρ - 1 with ρ = π_ref / π, elementwise: never negative, and in the mean over draws of π the
    divergence KL(π ‖ π_ref). Its gradient is that of KL(π_ref ‖ π), since draws are not differentiated: as
    a penalty, it holds on to what the reference thinks likely.

    Source: Schulman, "Approximating KL divergence", 2020, estimator k3; as GRPO uses it, arXiv:2402.03300,
    eq. 4.
    """
    log_rho = reference_log_probs - log_probs
    return torch.expm1(log_rho) - log_rho
