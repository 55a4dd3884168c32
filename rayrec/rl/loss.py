"""The loss of a step: an algorithm's objective, what holds the policy near to where it began, and figures.

    loss = - reward_weight · Σ_G w · objective + kl_weight · k3(π, π_ref) - anchor_weight · log π(target)

k3 is `kl_to_reference`: an estimate of KL(π ‖ π_ref) as a figure, and that of GRPO as a penalty.

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayrec.rl.advantages import has_spread
from rayrec.rl.algorithms import ALGORITHMS
from rayrec.rl.objectives import kl_to_reference
from rayrec.rl.sampled import Sampled

PREFERENCES = ("dpo", "s_dpo")
"""Algorithms that compare candidates with the logged target, and not with each other."""


@dataclass(frozen=True)
class PolicyLoss:
    """By an algorithm's settings."""

    algorithm: Any
    kl_weight: float = 0.0
    anchor_weight: float = 0.0
    reward_weight: float = 1.0

    def __call__(self, sampled: Sampled) -> tuple[Tensor, dict[str, Tensor]]:
        """(scalar: summed over groups, sums over groups of what is reported, by name)."""
        objective = ALGORITHMS[self.algorithm.name](sampled, self.algorithm)
        weights_UG = sampled.weights_UG
        value_U = (weights_UG * objective.values_UG).sum(dim=1)
        if self.algorithm.name not in PREFERENCES:
            # They have no gradient, but what is divided by nearly nothing.
            value_U = value_U.masked_fill(~has_spread(sampled.rewards_UG, weights_UG), 0.0)
        loss_U = -self.reward_weight * value_U
        figures = {"clip_share": (weights_UG * objective.is_clipped_UG).sum()}
        if sampled.reference_log_probs_UGL is not None:
            kl_UGL = kl_to_reference(sampled.log_probs_UGL, sampled.reference_log_probs_UGL)
            kl_U = (weights_UG * kl_UGL.sum(dim=2)).sum(dim=1)
            loss_U = loss_U + self.kl_weight * kl_U
            figures["kl"] = kl_U.sum()
        target_U = torch.where(sampled.has_target_U, sampled.target_likelihood_U, 0.0)
        loss_U = loss_U - self.anchor_weight * target_U
        figures["target_log_prob"] = target_U.sum()
        figures["ratio_deviation"] = (weights_UG * (sampled.log_ratio_UGL.sum(dim=2).exp() - 1.0).abs()).sum()
        return loss_U.sum(), {name: figure.detach() for name, figure in figures.items()}
