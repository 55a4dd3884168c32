"""Policy-gradient losses: candidates of a group are compared with each other.

    rewards ─► advantages ─┐
    log π, log π_old ─► ratio ─► clip, gate or bound ─► sum_over_codes ─► [U, G], to be maximized

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rayrec.platform.lazy import LazyModule
from rayrec.rl.losses.base import LossInputs, Objective, PolicyLoss
from rayrec.rl.losses.terms import (
    CodeMean,
    bounded_old,
    centered,
    clipped,
    early_clipped_old,
    gated_by_target,
    is_clipped,
    leave_one_out,
    sequence_ratio,
    soft_gate,
    standardized,
    sum_over_codes,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

_Clip = Annotated[float, Field(gt=0, lt=1)]


class ReinforceLoss(PolicyLoss):
    """Â log π, weighted by the ratio to the policy that sampled (1 when that is the policy being trained).

    The weight is no part of the gradient, and at most `max_ratio`.

    Source: Williams, Machine Learning 1992; the baseline is RLOO's, arXiv:2402.14740. The bounded weight is
    that of IMPALA, arXiv:1802.01561.
    """

    name: Literal["reinforce"] = "reinforce"
    max_ratio: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight of a sample of an older policy."""

    def objective(self, inputs: LossInputs) -> Objective:
        advantages_UG = leave_one_out(inputs.rewards_UG, inputs.weights_UG)
        ratio_UG = sequence_ratio(inputs, by_length=False).detach()
        weight_UG = ratio_UG.clamp(max=self.max_ratio)
        values_UG = weight_UG * advantages_UG * inputs.log_probs_UGL.sum(dim=2)
        return Objective(values_UG, ratio_UG > self.max_ratio)


class GrpoLoss(PolicyLoss):
    """The clipped ratio of each code, times the candidate's advantage.

    Source: GRPO, arXiv:2402.03300, eq. 3. `scale: false` with `mean: constant` is Dr. GRPO, arXiv:2503.20783;
    `clip_high` above `clip_low` with `mean: batch` is DAPO, arXiv:2503.14476.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: _Clip = 0.2
    clip_high: _Clip = 0.2
    scale: bool = True
    """Divide advantages by the group's standard deviation; False is Dr. GRPO."""
    mean: CodeMean = "candidate"

    def objective(self, inputs: LossInputs) -> Objective:
        advantage = standardized if self.scale else centered
        advantages_UG1 = advantage(inputs.rewards_UG, inputs.weights_UG)[:, :, None]
        ratio_UGL = inputs.log_ratio_UGL.exp()
        low, high = self.clip_low, self.clip_high
        values_UG = sum_over_codes(clipped(ratio_UGL, advantages_UG1, low, high), inputs, self.mean)
        clipped_UGL = is_clipped(ratio_UGL, advantages_UG1, low, high) & inputs.is_choice_UGL
        return Objective(values_UG, clipped_UGL.any(dim=2))


class GspoLoss(PolicyLoss):
    """One clipped ratio for the whole candidate: the geometric mean of the ratios of its codes.

    Source: GSPO, arXiv:2507.18071, eq. 5 to 7.
    """

    name: Literal["gspo"] = "gspo"
    # Those of the paper, 3e-4 and 4e-4, are for thousands of tokens, whose mean moves little; IDs have three.
    clip_low: _Clip = 0.1
    clip_high: _Clip = 0.1

    def objective(self, inputs: LossInputs) -> Objective:
        advantages_UG = standardized(inputs.rewards_UG, inputs.weights_UG)
        ratio_UG = sequence_ratio(inputs, by_length=True)
        low, high = self.clip_low, self.clip_high
        return Objective(
            clipped(ratio_UG, advantages_UG, low, high), is_clipped(ratio_UG, advantages_UG, low, high)
        )


class _SoftGateLoss(PolicyLoss, ABC):
    """Soft gates of each code's ratio instead of clipping; steeper for candidates of negative advantage."""

    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the gate of candidates of positive advantage."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05

    def _gated(self, inputs: LossInputs, advantages_UG: Tensor) -> Objective:
        temperature_UG = torch.where(advantages_UG > 0, self.tau_positive, self.tau_negative)
        gate_UGL = soft_gate(inputs.log_ratio_UGL.exp(), temperature_UG[:, :, None])
        values_UG = sum_over_codes(gate_UGL * advantages_UG[:, :, None], inputs)
        return Objective(values_UG, torch.zeros_like(values_UG, dtype=torch.bool))


class SapoLoss(_SoftGateLoss):
    """Soft gates of each code's ratio.

    Source: SAPO, arXiv:2511.20347.
    """

    name: Literal["sapo"] = "sapo"

    def objective(self, inputs: LossInputs) -> Objective:
        return self._gated(inputs, standardized(inputs.rewards_UG, inputs.weights_UG))


class SaGcpoLoss(_SoftGateLoss):
    """SAPO with advantages gated by the reward of the logged target.

    Source: OxygenREC, arXiv:2512.22386.
    """

    name: Literal["sa_gcpo"] = "sa_gcpo"

    def objective(self, inputs: LossInputs) -> Objective:
        advantages_UG = standardized(inputs.rewards_UG, inputs.weights_UG)
        return self._gated(inputs, gated_by_target(advantages_UG, inputs.rewards_UG, inputs.target_rewards_U))


class EcpoLoss(PolicyLoss):
    """PPO's clipping with an old policy that is raised to where the ratio has a bound.

    Source: OneRec technical report, arXiv:2506.13695; whole candidates, as published.
    """

    name: Literal["ecpo"] = "ecpo"
    clip: _Clip = 0.2
    delta: Annotated[float, Field(ge=0)] = 0.1

    def objective(self, inputs: LossInputs) -> Objective:
        advantages_UG = standardized(inputs.rewards_UG, inputs.weights_UG)
        log_probs_UG, old_UG = inputs.log_probs_UGL.sum(dim=2), inputs.old_log_probs_UGL.sum(dim=2)
        raised_UG = early_clipped_old(log_probs_UG, old_UG, self.clip, self.delta)
        ratio_UG = (log_probs_UG - raised_UG).exp()
        is_clipped_UG = is_clipped(ratio_UG, advantages_UG, self.clip, self.clip) | (raised_UG > old_UG)
        return Objective(clipped(ratio_UG, advantages_UG, self.clip, self.clip), is_clipped_UG)


class GbpoLoss(PolicyLoss):
    """No clipping: every candidate has a gradient, bounded by that of binary cross-entropy.

    Source: OneRec-V2 technical report, arXiv:2508.20900; whole candidates, as published.
    """

    name: Literal["gbpo"] = "gbpo"

    def objective(self, inputs: LossInputs) -> Objective:
        advantages_UG = standardized(inputs.rewards_UG, inputs.weights_UG)
        log_probs_UG, old_UG = inputs.log_probs_UGL.sum(dim=2), inputs.old_log_probs_UGL.sum(dim=2)
        raised_UG = bounded_old(log_probs_UG, old_UG, advantages_UG)
        return Objective((log_probs_UG - raised_UG).exp() * advantages_UG, raised_UG > old_UG)
