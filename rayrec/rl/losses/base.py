"""What a policy loss is, and what it is computed from.

Axes: U users, G candidates of a user (a group), L codes of a candidate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from rayrec.platform.config import Config
from rayrec.platform.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True, kw_only=True)
class SampledGroups:
    """Groups of candidates with their rewards. Log-probabilities are 0 where there is no candidate."""

    old_log_probs_UGL: Tensor
    """Log-probability of each code given those before it, by the policy that sampled the candidates, under
    the same trie, filter and temperature."""
    rewards_UG: Tensor
    weights_UG: Tensor
    """How much each candidate counts within its group, in sum 1; 0 where there is no candidate."""
    target_rewards_U: Tensor
    """R*: reward of the logged target; NaN where it is unknown."""
    is_target_UG: Tensor | None = None
    """[U, G] bool: candidates that are the logged target; None: none is."""
    reference_log_probs_UGL: Tensor | None = None
    """By the supervised policy."""
    reference_target_log_probs_UL: Tensor | None = None
    codes_per_candidate: float | None = None
    """Mean number of codes with an alternative, over all candidates of the global batch; None: over these."""

    @property
    def is_choice_UGL(self) -> Tensor:
        """[U, G, L] bool: codes that had an alternative. The others are certain under every policy, and
        their log-probability is exactly 0."""
        return self.old_log_probs_UGL != 0

    def of_users(self, rows: slice) -> Self:
        """The groups of some users."""
        chosen: dict[str, Any] = {
            name: value[rows] for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **chosen)


@dataclass(frozen=True, kw_only=True)
class LossInputs(SampledGroups):
    """Sampled groups, and what the policy that is trained says of them now."""

    log_probs_UGL: Tensor
    """Log-probability of each code given those before it: differentiable."""
    target_log_probs_UL: Tensor
    """Of the logged target; 0 where there is none."""
    has_target_U: Tensor
    """[U] bool."""
    target_likelihood_U: Tensor
    """log π(target) at temperature 1, as in supervised training; 0 where there is no target."""

    @property
    def log_ratio_UGL(self) -> Tensor:
        """log(π / π_old) of each code."""
        return self.log_probs_UGL - self.old_log_probs_UGL


class Objective(NamedTuple):
    """What is maximized: the weighted sum over each group, averaged over groups."""

    values_UG: Tensor
    """One value per candidate, differentiable."""
    is_clipped_UG: Tensor
    """[U, G] bool: candidates with a code whose gradient was clipped away, or bounded by losses that do
    that instead (`ecpo`, `gbpo`). Reported as `clip_share`."""


class PolicyLoss(Config, ABC):
    """Base of every policy loss: its settings are its fields, `name` is how configs choose it."""

    name: str

    learns_from_equal_rewards: ClassVar[bool] = False
    """Whether a group whose candidates all have the same reward (a zero-variance group) counts. Losses that
    compare candidates with each other have nothing to learn from one, and leave it out."""

    @abstractmethod
    def objective(self, inputs: LossInputs) -> Objective:
        """Compute what is to be maximized, one value per candidate."""
