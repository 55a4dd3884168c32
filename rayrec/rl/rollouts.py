"""Candidates that a policy drew for users, and all that a learner has to know of how.

Arrays of the host, since they travel between processes.

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.rl.prompts import Prompts


@dataclass(frozen=True)
class Rollouts:
    """Candidates of a chunk of users."""

    prompts: Prompts
    items_UG: Int64Array
    """Catalog positions, in the order of the draw; -1 where a user has no further candidate."""
    code_log_probs_UGL: np.ndarray
    """By the policy that drew, of each code given those before it, under its trie, filter and temperature; 0
    where there is no candidate."""
    weights_UG: np.ndarray
    """How much each counts in its group, in sum 1; 0 where there is no candidate."""
    target_log_probs_U: np.ndarray
    """By the same policy, of the logged targets; -inf where there is none, or it may not be drawn."""
    policy_version: int
    """Optimizer steps that the policy had taken."""

    @property
    def log_probs_UG(self) -> np.ndarray:
        """Of whole candidates; -inf where there is none."""
        return np.where(self.items_UG >= 0, self.code_log_probs_UGL.sum(axis=2), -np.inf)

    def summary(self) -> RolloutSummary:
        is_there_UG = self.items_UG >= 0
        return RolloutSummary(
            num_users=len(self.items_UG),
            num_candidates=int(is_there_UG.sum()),
            num_choices=int((self.code_log_probs_UGL != 0).sum()),
            entropy_sum=float(-(self.weights_UG[:, :, None] * self.code_log_probs_UGL).sum()),
            policy_version=self.policy_version,
        )


@dataclass(frozen=True)
class RolloutSummary:
    """What a controller has to know of a chunk; the candidates themselves go on to whoever needs them."""

    num_users: int
    num_candidates: int
    num_choices: int
    """Codes that had an alternative, of all candidates."""
    entropy_sum: float
    """Nats: minus the weighed log-probability of a candidate, in sum over users."""
    policy_version: int


@dataclass(frozen=True)
class Rewarded:
    """Rollouts, and what they are worth."""

    rollouts: Rollouts
    rewards_UG: np.ndarray
    target_rewards_U: np.ndarray
    """Of the logged targets, as one more candidate of the list; NaN where there is none."""
    flat_U: np.ndarray
    """[U] bool: groups without spread, of which nothing is to be learned."""


@dataclass(frozen=True)
class ReferenceLogProbs:
    """What the supervised policy says of candidates and targets, code by code."""

    candidates_UGL: np.ndarray
    targets_UL: np.ndarray
