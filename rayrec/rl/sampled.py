"""What a policy loss is made of: groups of candidates, and what the policies say of them.

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """Groups of candidates. Log-probabilities are finite everywhere: 0 where there is no candidate."""

    log_probs_UGL: Tensor
    """Of each code, given those before it, by the policy that learns: differentiable."""
    old_log_probs_UGL: Tensor
    """By the policy that drew them, under the same trie, filter and temperature."""
    rewards_UG: Tensor
    weights_UG: Tensor
    """How much each counts within its group, in sum 1 there; 0 where there is no candidate."""
    target_rewards_U: Tensor
    """R*: what the logged target is worth; NaN where nobody knows."""
    target_log_probs_UL: Tensor
    """Of the logged target, by the policy that learns; 0 where there is none."""
    has_target_U: Tensor
    """[U] bool."""
    target_likelihood_U: Tensor
    """log π(target) at temperature 1, as supervised training has it; 0 where there is none."""
    reference_log_probs_UGL: Tensor | None = None
    """By the policy to stay near to."""
    reference_target_log_probs_UL: Tensor | None = None
    codes_per_candidate: float | None = None
    """Mean number of codes with an alternative, of all candidates of the global batch; None: of these."""

    @property
    def is_choice_UGL(self) -> Tensor:
        """[U, G, L] bool: codes that had an alternative. The others are certain under every policy, and
        their log-probability is exactly 0."""
        return self.old_log_probs_UGL != 0

    @property
    def log_ratio_UGL(self) -> Tensor:
        """log(π / π_old) of each code."""
        return self.log_probs_UGL - self.old_log_probs_UGL
