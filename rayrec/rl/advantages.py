"""How much better than the others of its group a candidate is.

A group are the candidates that were drawn for one user. Each counts by a weight, and those of a group sum to
one: 1 / G for independent draws, more for what a sample without replacement was unlikely to have. A place
without a candidate has the weight 0, and an advantage of 0.

Axes: U users, G candidates of a user.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_EPSILON = 1e-6
"""Added to a standard deviation before it divides."""
FLAT = 1e-8
"""Groups whose rewards differ by no more than this have no spread."""


def centered(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """Rewards less their group's mean.

    Source: Dr. GRPO, arXiv:2503.20783, which leaves out the division by the standard deviation, since it
    makes groups count more that are nearly flat.
    """
    mean_U1 = (weights_UG * rewards_UG).sum(dim=1, keepdim=True)
    return torch.where(weights_UG > 0, rewards_UG - mean_U1, 0.0)


def standardized(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """(R - mean) / std, of each group: the standard deviation is that of the group, not of a population.

    Source: GRPO, arXiv:2402.03300, section 4.1.2.
    """
    centered_UG = centered(rewards_UG, weights_UG)
    std_U1 = (weights_UG * centered_UG.square()).sum(dim=1, keepdim=True).sqrt()
    return centered_UG / (std_U1 + SCALE_EPSILON)


def leave_one_out(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """Rewards less the mean of the *others* of the group, which no draw is its own baseline in.

    A candidate that is alone has no others, and an advantage of 0.

    Source: RLOO, Kool et al., "Buy 4 REINFORCE samples, get a baseline for free", 2019; arXiv:2402.14740.
    """
    others_UG = 1.0 - weights_UG
    return torch.where(others_UG > FLAT, centered(rewards_UG, weights_UG) / others_UG.clamp(min=FLAT), 0.0)


def gated_by_target(advantages_UG: Tensor, rewards_UG: Tensor, target_rewards_U: Tensor) -> Tensor:
    """Γ: advantages, without those of candidates above the group's mean that are worse than what was logged.

    Γ = 0 where Â > 0 and R < R*, the reward of the logged target, else Â. A target whose reward is unknown
    (NaN) gates nothing.

    Source: SA-GCPO, OxygenREC, arXiv:2512.22386.
    """
    is_worse_UG = rewards_UG < target_rewards_U[:, None]
    return advantages_UG.masked_fill((advantages_UG > 0) & is_worse_UG, 0.0)


def has_spread(rewards_UG: Tensor, weights_UG: Tensor) -> Tensor:
    """[U] whether two candidates of a group have different rewards: without, there is nothing to learn."""
    is_there_UG = weights_UG > 0
    highest_U = rewards_UG.masked_fill(~is_there_UG, -torch.inf).amax(dim=1)
    lowest_U = rewards_UG.masked_fill(~is_there_UG, torch.inf).amin(dim=1)
    return highest_U - lowest_U > FLAT
