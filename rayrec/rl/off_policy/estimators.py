"""Off-policy estimates of a target policy's reward, from the log of another policy.

    log: action a, reward r, propensity p        target policy: π(a | x)        reward model: q(x, a)
    weight w = π(a | x) / p

Every estimate is a mean of one term per row, or a ratio of two such means; intervals are by request
(`intervals`).

Axes: N rows, A actions, R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rayrec.pipelines.metrics.clusters import student
from rayrec.platform.arrays import Float64Array
from rayrec.platform.errors import InputError
from rayrec.rl.off_policy.intervals import PolicyEstimate, Terms, effective_number, sums_by_request
from rayrec.rl.off_policy.logs import BanditLog

_ALARM = 5.0
"""Standard errors, were there very many requests: chance is that far off once in two million logs."""


def importance_weights(
    log: BanditLog, target_probs_NA: Float64Array, max_weight: float | None = None
) -> Float64Array:
    """[N] π(a | x) / p of the logged actions.

    Args:
        max_weight: larger ones are clipped to it, which trades variance for bias.
    """
    weights_N: Float64Array = target_probs_NA[np.arange(len(log)), log.actions_N] / log.propensities_N
    return weights_N if max_weight is None else np.minimum(weights_N, max_weight)


def direct_method(log: BanditLog, target_probs_NA: Float64Array, model_NA: Float64Array) -> Terms:
    """Σ_a π(a | x) q(x, a): as accurate as the model."""
    return Terms((target_probs_NA * model_NA).sum(axis=1), requests_N=log.requests_N)


def inverse_propensity(
    log: BanditLog, target_probs_NA: Float64Array, max_weight: float | None = None
) -> Terms:
    """w r: unbiased if the propensities are right and every action of the target policy could be logged.

    Source: Horvitz and Thompson, JASA 1952.
    """
    weights_N = importance_weights(log, target_probs_NA, max_weight)
    return Terms(
        weights_N * log.rewards_N,
        None,
        log.requests_N,
        weights_N,
        log.rewards_N,
        (0.0,) if log.rewards_are_binary else (),
    )


def self_normalized(log: BanditLog, target_probs_NA: Float64Array, max_weight: float | None = None) -> Terms:
    """Σ w r / Σ w: slightly biased, with a much smaller variance.

    Raises:
        InputError: the policy takes none of the logged actions.

    Source: Swaminathan and Joachims, NeurIPS 2015.
    """
    weights_N = importance_weights(log, target_probs_NA, max_weight)
    if not weights_N.any():
        raise InputError(
            f"{log.name}: in none of its {len(log):,} rows has the policy a chance to take the action "
            "that was logged, so nothing can be told of it; take a longer log, or one of a "
            "policy more like it"
        )
    return Terms(
        weights_N * log.rewards_N,
        weights_N,
        log.requests_N,
        weights_N,
        log.rewards_N,
        (0.0, 1.0) if log.rewards_are_binary else (),
    )


def doubly_robust(
    log: BanditLog, target_probs_NA: Float64Array, model_NA: Float64Array, max_weight: float | None = None
) -> Terms:
    """Σ_a π(a | x) q(x, a) + w (r - q(x, a_logged)): unbiased if either the model or the propensities are
    right.

    Source: Dudík, Langford and Li, ICML 2011, arXiv:1103.4601, eq. 1.
    """
    weights_N = importance_weights(log, target_probs_NA, max_weight)
    of_logged_N = model_NA[np.arange(len(log)), log.actions_N]
    return Terms(
        (target_probs_NA * model_NA).sum(axis=1) + weights_N * (log.rewards_N - of_logged_N),
        None,
        log.requests_N,
        weights_N,
        log.rewards_N,
    )


@dataclass(frozen=True)
class Diagnostics:
    """Whether the importance weights can be trusted."""

    effective_rows: float
    """(Σ w)² / Σ w²: number of equally weighted rows of the same variance (Kish, 1965)."""
    largest_weight: float
    mean_weight: float
    """1 in expectation; otherwise propensities are wrong, or the policy takes actions that are never
    logged."""
    is_implausible: bool
    """Whether the mean is so far from 1 that the estimates mean nothing. Above 1, propensities are wrong.
    Below it, they are, or the log hardly has what the policy does, for want of chances or of rows."""


def diagnostics(log: BanditLog, target_probs_NA: Float64Array) -> Diagnostics:
    weights_N = importance_weights(log, target_probs_NA)
    mean = float(weights_N.mean())
    return Diagnostics(
        is_implausible=abs(mean - 1.0) > _margin_of_mean(log, weights_N) + 1e-6,
        effective_rows=effective_number(weights_N),
        largest_weight=float(weights_N.max()),
        mean_weight=mean,
    )


def _margin_of_mean(log: BanditLog, weights_N: Float64Array) -> float:
    """How far from 1 the mean weight of a right log may be: so many standard errors of it, by request."""
    mean = float(weights_N.mean())
    residuals_R = sums_by_request(weights_N - mean, log.requests_N)
    freedom = len(residuals_R) - 1
    if freedom < 1:  # one request tells nothing of others
        return float("inf")
    error = (float(np.square(residuals_R).sum()) * (1.0 + 1.0 / freedom)) ** 0.5 / len(log)
    # Large weights that are missing from the mean are missing from its error, too: where the mean is
    # low, there would be 1 / mean times as many.
    return student(_ALARM, freedom) * error / max(min(mean, 1.0), 1e-300) ** 0.5


DIRECT_METHOD = "direct method"
"""Its interval is that of the reward model's mean. It does not cover what the model gets wrong:
docs/benchmarks/rl.md."""


def estimates(
    log: BanditLog,
    target_probs_NA: Float64Array,
    model_NA: Float64Array,
    num_resamples: int = 999,
    seed: int = 0,
    max_weight: float | None = None,
) -> Mapping[str, PolicyEstimate]:
    """Compute every estimate; returns them by name.

    Raises:
        InputError: the policy takes none of the logged actions.
    """
    made: dict[str, Callable[[], Terms]] = {
        DIRECT_METHOD: lambda: direct_method(log, target_probs_NA, model_NA),
        "inverse propensity": lambda: inverse_propensity(log, target_probs_NA, max_weight),
        "self-normalized": lambda: self_normalized(log, target_probs_NA, max_weight),
        "doubly robust": lambda: doubly_robust(log, target_probs_NA, model_NA, max_weight),
    }
    return {name: make().estimate(num_resamples, seed) for name, make in made.items()}
