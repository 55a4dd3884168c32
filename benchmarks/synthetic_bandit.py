"""Logs whose true value is known, to see whether intervals cover it.

Axes: N rows, A actions, F features of a context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, softmax

from rayrec.platform.arrays import Float64Array
from rayrec.rl.off_policy.logs import BanditLog

_ROWS_OF_TRUTH = 400_000


@dataclass(frozen=True)
class World:
    """Normally distributed contexts; rewards of 1 with a probability whose logit is linear in the context,
    with weights per action; a logging and a target policy, both softmax in the context."""

    rewards_AF: Float64Array
    biases_A: Float64Array
    logging_AF: Float64Array
    target_AF: Float64Array

    @classmethod
    def random(cls, num_actions: int = 6, num_features: int = 3, seed: int = 0) -> World:
        random = np.random.default_rng(seed)
        rewards_AF = random.normal(size=(num_actions, num_features))
        # The target policy is better than the logging one, and not uniform.
        return cls(
            rewards_AF,
            random.normal(size=num_actions) - 1.0,
            0.5 * random.normal(size=(num_actions, num_features)),
            0.8 * rewards_AF,
        )

    def log(self, num_rows: int, seed: int) -> BanditLog:
        random = np.random.default_rng([seed, 1])
        contexts_NF = random.normal(size=(num_rows, self.rewards_AF.shape[1]))
        probs_NA = softmax(contexts_NF @ self.logging_AF.T, axis=1)
        actions_N = (random.random((num_rows, 1)) > probs_NA.cumsum(axis=1)).sum(axis=1)
        actions_N = np.minimum(actions_N, len(self.biases_A) - 1)
        rows_N = np.arange(num_rows)
        rewards_N = (random.random(num_rows) < self.means(contexts_NF)[rows_N, actions_N]).astype(np.float64)
        return BanditLog(contexts_NF, actions_N, rewards_N, probs_NA[rows_N, actions_N], len(self.biases_A))

    def means(self, contexts_NF: Float64Array) -> Float64Array:
        """[N, A] expected reward of every action."""
        means_NA: Float64Array = expit(contexts_NF @ self.rewards_AF.T + self.biases_A)
        return means_NA

    def target_probs(self, contexts_NF: Float64Array) -> Float64Array:
        """[N, A] action probabilities of the target policy."""
        probs_NA: Float64Array = softmax(contexts_NF @ self.target_AF.T, axis=1)
        return probs_NA

    @property
    def true_value(self) -> float:
        """Expected reward of the target policy, over so many contexts that it is practically exact."""
        contexts_NF = np.random.default_rng(99).normal(size=(_ROWS_OF_TRUTH, self.rewards_AF.shape[1]))
        return float((self.target_probs(contexts_NF) * self.means(contexts_NF)).sum(axis=1).mean())
