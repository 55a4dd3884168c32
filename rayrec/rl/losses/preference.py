"""Preference losses: the logged target is compared with the candidates of lower reward.

Axes: U users, G candidates of a user.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rayrec.platform.lazy import LazyModule
from rayrec.rl.losses.base import LossInputs, Objective, PolicyLoss

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional
else:
    torch = LazyModule("torch")
    functional = LazyModule("torch.nn.functional")


class _PreferenceLoss(PolicyLoss, ABC):
    """Margins between the logged target and each candidate of lower reward, the rejected ones."""

    learns_from_equal_rewards: ClassVar[bool] = True

    beta: Annotated[float, Field(gt=0)] = 0.1

    def _margins(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """([U, G] β (Δ_target - Δ_candidate), [U, G] whether the candidate is rejected)."""
        assert inputs.reference_log_probs_UGL is not None, "every step has a reference"
        assert inputs.reference_target_log_probs_UL is not None, "as above"
        grown_UG = (inputs.log_probs_UGL - inputs.reference_log_probs_UGL).sum(dim=2)
        grown_U = (inputs.target_log_probs_UL - inputs.reference_target_log_probs_UL).sum(dim=1)
        is_rejected_UG = inputs.rewards_UG < inputs.target_rewards_U[:, None]
        is_rejected_UG &= (inputs.weights_UG > 0) & inputs.has_target_U[:, None]
        if inputs.is_target_UG is not None:
            # Where rewards depend on places in the list, the target may have a lower one as a candidate.
            is_rejected_UG &= ~inputs.is_target_UG
        return self.beta * (grown_U[:, None] - grown_UG), is_rejected_UG


class DpoLoss(_PreferenceLoss):
    """log σ(β (Δ_target - Δ_candidate)), Δ = log π - log π_ref, averaged over the rejected candidates.

    Source: DPO, arXiv:2305.18290, eq. 7.
    """

    name: Literal["dpo"] = "dpo"

    def objective(self, inputs: LossInputs) -> Objective:
        margin_UG, is_rejected_UG = self._margins(inputs)
        values_UG = functional.logsigmoid(margin_UG) * _shares(is_rejected_UG)
        return Objective(_per_weight(values_UG, inputs), torch.zeros_like(is_rejected_UG))


class SDpoLoss(_PreferenceLoss):
    """log σ(-log Σ_j exp(β (Δ_j - Δ_target))): the target against all rejected candidates at once.

    Source: S-DPO, arXiv:2406.09215, eq. 11.
    """

    name: Literal["s_dpo"] = "s_dpo"

    def objective(self, inputs: LossInputs) -> Objective:
        margin_UG, is_rejected_UG = self._margins(inputs)
        has_any_U = is_rejected_UG.any(dim=1)
        against_UG = (-margin_UG).masked_fill(~is_rejected_UG, -torch.inf)
        # A group without a pair has no value; without the zeros, its gradient would be NaN.
        total_U = torch.logsumexp(torch.where(has_any_U[:, None], against_UG, 0.0), dim=1)
        values_U = torch.where(has_any_U, functional.logsigmoid(-total_U), 0.0)
        values_UG = values_U[:, None] * _shares(is_rejected_UG)
        return Objective(_per_weight(values_UG, inputs), torch.zeros_like(is_rejected_UG))


def _shares(is_rejected_UG: Tensor) -> Tensor:
    """[U, G] 1 / number of rejected candidates of the group, at each of them."""
    return is_rejected_UG / is_rejected_UG.sum(dim=1, keepdim=True).clamp(min=1)


def _per_weight(values_UG: Tensor, inputs: LossInputs) -> Tensor:
    """Divide by the candidates' weights, since the objective is multiplied by them."""
    weights_UG = inputs.weights_UG
    return torch.where(weights_UG > 0, values_UG / weights_UG.clamp(min=1e-12), 0.0)
