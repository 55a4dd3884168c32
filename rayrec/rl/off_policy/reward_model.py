"""A reward model: logistic regression that predicts each row from rows of other requests only.

Requests are divided into folds, and each fold is predicted by a model of the others (cross-fitting,
Chernozhukov et al., The Econometrics Journal 2018): the residuals that the doubly robust estimate corrects
are then not those of its own fit. Rows of one request are alike, so they are never apart.

Axes: N rows, A actions, F features of a context, D of the model, K folds.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_expit

from rayrec.platform.arrays import Float64Array
from rayrec.rl.off_policy.logs import BanditLog


def cross_fitted(
    log: BanditLog, num_folds: int = 3, strength: float = 1.0, interactions: bool = False, seed: int = 0
) -> Float64Array:
    """[N, A] predict the probability of a reward of 1 for every action, at the row's context and position.

    Args:
        strength: of the squared penalty on weights, intercept aside.
        interactions: whether the effect of a context depends on the action.

    Raises:
        ValueError: fewer than two folds, or rewards other than 0 and 1.
    """
    if num_folds < 2:
        raise ValueError(f"num_folds must be at least 2, got {num_folds}")
    if not np.isin(log.rewards_N, (0.0, 1.0)).all():
        raise ValueError("rewards must be 0 or 1: the model is one of probabilities")
    folds_N = log.folds_N(num_folds, seed)
    model_NA = np.empty((len(log), log.num_actions))
    for fold in range(num_folds):
        fitted = _Logistic.fit(log.some(np.flatnonzero(folds_N != fold)), strength, interactions)
        rows_M = np.flatnonzero(folds_N == fold)
        model_NA[rows_M] = fitted.predict(log.some(rows_M))
    return model_NA


def mean_rewards(log: BanditLog, num_folds: int = 3, seed: int = 0) -> Float64Array:
    """[N, A] the mean reward of every action among the rows of other folds; of all, of an action without any.

    For rewards that are no probabilities, such as what was earned.
    """
    folds_N = log.folds_N(num_folds, seed)
    model_NA = np.empty((len(log), log.num_actions))
    for fold in range(num_folds):
        (others_M,) = np.nonzero(folds_N != fold)
        actions_M, rewards_M = log.actions_N[others_M], log.rewards_N[others_M]
        counts_A = np.bincount(actions_M, minlength=log.num_actions)
        sums_A = np.bincount(actions_M, rewards_M, minlength=log.num_actions)
        of_all = float(rewards_M.mean()) if len(others_M) else 0.0
        model_NA[folds_N == fold] = np.where(counts_A > 0, sums_A / np.maximum(counts_A, 1), of_all)
    return model_NA


class _Logistic:
    """logit q(x, a) = intercept + b_a + position + x·θ, or x·θ_a with interactions."""

    def __init__(self, weights_D: Float64Array, interactions: bool) -> None:
        self._weights_D, self._interactions = weights_D, interactions

    @classmethod
    def fit(cls, log: BanditLog, strength: float, interactions: bool) -> _Logistic:
        actions_N, signs_N = log.actions_N, 2.0 * log.rewards_N - 1.0

        def loss(weights_D: Float64Array) -> tuple[float, Float64Array]:
            parts = _Parts.of(weights_D, log, interactions)
            logits_N = parts.logits(log, actions_N)
            slopes_N = -signs_N * expit(-signs_N * logits_N)
            penalized_D = strength * weights_D
            penalized_D[0] = 0.0
            value = -float(log_expit(signs_N * logits_N).sum()) + 0.5 * float(penalized_D @ weights_D)
            return value, parts.gradient(log, slopes_N) + penalized_D

        start_D = np.zeros(_Parts.size(log, interactions))
        rate = np.clip(log.rewards_N.mean(), 1e-6, 1 - 1e-6)
        start_D[0] = np.log(rate / (1 - rate))
        found = minimize(loss, start_D, jac=True, method="L-BFGS-B", options={"maxiter": 200})
        return cls(found.x, interactions)

    def predict(self, log: BanditLog) -> Float64Array:
        """[N, A]"""
        probabilities_NA: Float64Array = expit(
            _Parts.of(self._weights_D, log, self._interactions).all_logits(log)
        )
        return probabilities_NA


class _Parts:
    """Weights by what they belong to."""

    def __init__(
        self, intercept: float, actions_A: Float64Array, positions_P: Float64Array, contexts: Float64Array
    ) -> None:
        self._intercept, self._actions_A, self._positions_P = intercept, actions_A, positions_P
        self._contexts = contexts
        """[F], or [A, F] with interactions."""

    @staticmethod
    def size(log: BanditLog, interactions: bool) -> int:
        num_features = log.contexts_NF.shape[1] * (log.num_actions if interactions else 1)
        return 1 + log.num_actions + log.num_positions + num_features

    @classmethod
    def of(cls, weights_D: Float64Array, log: BanditLog, interactions: bool) -> _Parts:
        positions = 1 + log.num_actions
        contexts = positions + log.num_positions
        of_contexts = weights_D[contexts:]
        if interactions:
            of_contexts = of_contexts.reshape(log.num_actions, -1)
        return cls(float(weights_D[0]), weights_D[1:positions], weights_D[positions:contexts], of_contexts)

    def logits(self, log: BanditLog, actions_N: np.ndarray) -> Float64Array:
        """[N] of one action each."""
        shared_N = self._shared(log)
        if self._contexts.ndim == 2:
            shared_N = shared_N + (log.contexts_NF * self._contexts[actions_N]).sum(axis=1)
        logits_N: Float64Array = shared_N + self._actions_A[actions_N]
        return logits_N

    def all_logits(self, log: BanditLog) -> Float64Array:
        """[N, A]"""
        logits_NA: Float64Array = self._shared(log)[:, None] + self._actions_A[None, :]
        if self._contexts.ndim == 2:
            logits_NA = logits_NA + log.contexts_NF @ self._contexts.T
        return logits_NA

    def gradient(self, log: BanditLog, slopes_N: Float64Array) -> Float64Array:
        """[D] of the sum over rows, given that of each logit."""
        of_actions_A = np.bincount(log.actions_N, slopes_N, minlength=log.num_actions)
        positions_N = np.zeros(0, dtype=np.int64) if log.positions_N is None else log.positions_N
        of_positions_P = np.bincount(
            positions_N, slopes_N[: len(positions_N)], minlength=log.num_positions
        ).astype(np.float64)
        if self._contexts.ndim == 2:
            of_contexts = np.zeros_like(self._contexts)
            np.add.at(of_contexts, log.actions_N, slopes_N[:, None] * log.contexts_NF)
        else:
            of_contexts = log.contexts_NF.T @ slopes_N
        return np.concatenate([[slopes_N.sum()], of_actions_A, of_positions_P, of_contexts.ravel()])

    def _shared(self, log: BanditLog) -> Float64Array:
        shared_N = np.full(len(log), self._intercept)
        if log.positions_N is not None:
            shared_N += self._positions_P[log.positions_N]
        if self._contexts.ndim == 1:
            shared_N += log.contexts_NF @ self._contexts
        return shared_N
