"""The policy loss `advantage_weighted`: log-likelihood of the candidates, weighted by exp(advantage / beta).

Axes: U users, G candidates of a user, L codes of a candidate.
Source: advantage-weighted regression, Peng et al., arXiv:1910.00177.
"""

from typing import Literal

import torch
from pydantic import Field

from rayrec.rl import LossInputs, Objective, PolicyLoss, standardized


class AdvantageWeightedLoss(PolicyLoss):
    """exp(Â / beta) log π, with weights of at most `max_weight`."""

    name: Literal["advantage_weighted"] = "advantage_weighted"
    beta: float = Field(default=1.0, gt=0)
    max_weight: float = Field(default=20.0, gt=0)

    def objective(self, inputs: LossInputs) -> Objective:
        advantages_UG = standardized(inputs.rewards_UG, inputs.weights_UG)
        weights_UG = torch.exp(advantages_UG / self.beta)
        log_probs_UG = inputs.log_probs_UGL.sum(dim=2)  # of whole candidates; differentiable
        return Objective(
            values_UG=weights_UG.clamp(max=self.max_weight) * log_probs_UG,
            is_clipped_UG=weights_UG > self.max_weight,
        )
