"""What travels between the workers of one RL step, as arrays of the host.

    Prompts ─► Rollouts ─┬─► ScoredRollouts, ChunkSummary
                         └─► ReferenceLogProbs

Axes: U users, G candidates of a user, L codes of a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.rl.prompts import Prompts


@dataclass(frozen=True)
class Rollouts:
    """Candidates sampled for a chunk of users."""

    prompts: Prompts
    items_UG: Int64Array
    """Catalog positions, in sampling order; -1 where a user has no further candidate."""
    code_log_probs_UGL: np.ndarray
    """Log-probability of each code given those before it, by the policy that sampled, under its trie, filter
    and temperature; 0 where there is no candidate."""
    weights_UG: np.ndarray
    """How much each candidate counts in its group, in sum 1; 0 where there is no candidate."""
    target_log_probs_U: np.ndarray
    """Of the logged targets, by the same policy; -inf where there is none, or it may not be sampled."""
    policy_version: int
    """Optimizer steps that the policy had taken."""

    @property
    def items_UW(self) -> Int64Array:
        """[U, G + 1] candidates, then the logged target."""
        return np.concatenate([self.items_UG, self.prompts.targets_U[:, None]], axis=1)

    @property
    def is_target_UG(self) -> BoolArray:
        """Candidates that are the logged next item of their user."""
        is_target_UG: BoolArray = (self.items_UG >= 0) & (self.items_UG == self.prompts.targets_U[:, None])
        return is_target_UG

    def some(self, rows_U: Int64Array) -> Rollouts:
        """The groups of some users, in the given order."""
        return Rollouts(
            self.prompts.some(rows_U),
            self.items_UG[rows_U],
            self.code_log_probs_UGL[rows_U],
            self.weights_UG[rows_U],
            self.target_log_probs_U[rows_U],
            self.policy_version,
        )

    @property
    def log_probs_UG(self) -> np.ndarray:
        """Log-probabilities of whole candidates; -inf where there is none."""
        return np.where(self.items_UG >= 0, self.code_log_probs_UGL.sum(axis=2), -np.inf)


@dataclass(frozen=True)
class ScoredRollouts:
    """Rollouts with their rewards."""

    rollouts: Rollouts
    rewards_UG: np.ndarray
    target_rewards_U: np.ndarray
    """Of the logged targets, scored as one more candidate of the list; NaN where there is none."""

    def some(self, rows_U: Int64Array) -> ScoredRollouts:
        """The groups of some users, in the given order."""
        return ScoredRollouts(
            self.rollouts.some(rows_U), self.rewards_UG[rows_U], self.target_rewards_U[rows_U]
        )


@dataclass(frozen=True)
class ReferenceLogProbs:
    """Log-probabilities of candidates and targets by the supervised policy, code by code."""

    candidates_UGL: np.ndarray
    targets_UL: np.ndarray


@dataclass(frozen=True)
class ChunkSummary:
    """What the controller needs to know about a chunk; the arrays themselves never pass through it."""

    policy_version: int
    num_users: int
    """Groups that were sampled."""
    num_groups: int
    """Groups that are learned from: all, or with dynamic sampling those with signal, if there are any."""
    num_candidates: int
    """Of these groups."""
    num_choices: int
    """Codes with an alternative, over these candidates."""
    entropy_sum: float
    """Nats: minus the weighted log-probability of a candidate, summed over users."""
    reward_metrics: Mapping[str, float]
    """Of every reward, and of their sum."""
    num_zero_variance: int
    """Groups whose candidates all have the same reward."""
    warnings: tuple[str, ...]
    """New warnings of the reward guard."""

    @property
    def num_with_signal(self) -> int:
        """Groups whose candidates have different rewards."""
        return self.num_users - self.num_zero_variance
