"""Off-policy estimates of a target policy's reward, from the log of another policy.

    log: action a, reward r, propensity p        target policy: π(a | x)        reward model: q(x, a)
    weight w = π(a | x) / p

Every estimate is a mean of one term per row, or a ratio of two such means. Intervals are bias-corrected and
accelerated bootstrap intervals (BCa, Efron, JASA 1987; scipy's): with dozens of clicks in ten thousand rows,
terms are so skewed that an interval symmetric around the estimate would be too low on both sides.

Axes: N rows, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.arrays import Float64Array
from rayrec.rl.off_policy.logs import BanditLog

CONFIDENCE = 0.95
_NUMBERS_AT_ONCE = 1 << 23
"""Of a resample or of the jackknife, in memory."""


@dataclass(frozen=True)
class Terms:
    """An estimate by its terms: mean(numerators), divided by mean(denominators) where there are any."""

    numerators_N: Float64Array
    denominators_N: Float64Array | None = None

    @property
    def value(self) -> float:
        top = float(self.numerators_N.mean())
        return top if self.denominators_N is None else top / float(self.denominators_N.mean())

    def estimate(self, num_resamples: int = 999, seed: int = 0) -> Estimate:
        """Return the value and its bootstrap interval over rows."""
        from scipy import stats  # takes a second to import

        top_N, bottom_N = self.numerators_N, self.denominators_N
        if np.ptp(top_N) == 0 and (bottom_N is None or np.ptp(bottom_N) == 0):
            return Estimate(self.value, self.value, self.value)  # all rows are equal
        samples = (top_N,) if bottom_N is None else (top_N, bottom_N)
        found = stats.bootstrap(
            samples,
            np.mean if bottom_N is None else _ratio,
            paired=True,
            vectorized=True,
            n_resamples=num_resamples,
            batch=max(1, _NUMBERS_AT_ONCE // len(top_N)),
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        return Estimate(self.value, float(found.low), float(found.high))


def _ratio(top: Float64Array, bottom: Float64Array, axis: int = -1) -> Float64Array:
    found: Float64Array = top.mean(axis=axis) / bottom.mean(axis=axis)
    return found


def importance_weights(
    log: BanditLog, target_probs_NA: Float64Array, max_weight: float | None = None
) -> Float64Array:
    """[N] π(a | x) / p of the logged actions.

    Args:
        max_weight: larger ones are clipped to it, which trades variance for bias.
    """
    weights_N: Float64Array = target_probs_NA[np.arange(len(log)), log.actions_N] / log.propensities_N
    return weights_N if max_weight is None else np.minimum(weights_N, max_weight)


def direct_method(target_probs_NA: Float64Array, model_NA: Float64Array) -> Terms:
    """Σ_a π(a | x) q(x, a): as accurate as the model."""
    return Terms((target_probs_NA * model_NA).sum(axis=1))


def inverse_propensity(
    log: BanditLog, target_probs_NA: Float64Array, max_weight: float | None = None
) -> Terms:
    """w r: unbiased if the propensities are right and every action of the target policy could be logged.

    Source: Horvitz and Thompson, JASA 1952.
    """
    return Terms(importance_weights(log, target_probs_NA, max_weight) * log.rewards_N)


def self_normalized(log: BanditLog, target_probs_NA: Float64Array, max_weight: float | None = None) -> Terms:
    """Σ w r / Σ w: slightly biased, with a much smaller variance.

    Source: Swaminathan and Joachims, NeurIPS 2015.
    """
    weights_N = importance_weights(log, target_probs_NA, max_weight)
    return Terms(weights_N * log.rewards_N, weights_N)


def doubly_robust(
    log: BanditLog, target_probs_NA: Float64Array, model_NA: Float64Array, max_weight: float | None = None
) -> Terms:
    """Σ_a π(a | x) q(x, a) + w (r - q(x, a_logged)): unbiased if either the model or the propensities are
    right.

    Source: Dudík, Langford and Li, ICML 2011, arXiv:1103.4601, eq. 1.
    """
    weights_N = importance_weights(log, target_probs_NA, max_weight)
    of_logged_N = model_NA[np.arange(len(log)), log.actions_N]
    return Terms((target_probs_NA * model_NA).sum(axis=1) + weights_N * (log.rewards_N - of_logged_N))


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
    """Whether the mean is above 1 by more than five of its standard errors: true propensities give none."""


def diagnostics(log: BanditLog, target_probs_NA: Float64Array) -> Diagnostics:
    weights_N = importance_weights(log, target_probs_NA)
    total = float(weights_N.sum())
    error = float(weights_N.std()) / len(log) ** 0.5
    return Diagnostics(
        is_implausible=total / len(log) > 1.0 + 5.0 * error + 1e-6,
        effective_rows=total**2 / max(float(np.square(weights_N).sum()), 1e-300),
        largest_weight=float(weights_N.max()),
        mean_weight=total / len(log),
    )


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
) -> Mapping[str, Estimate]:
    """Compute every estimate; returns them by name."""
    made: dict[str, Callable[[], Terms]] = {
        DIRECT_METHOD: lambda: direct_method(target_probs_NA, model_NA),
        "inverse propensity": lambda: inverse_propensity(log, target_probs_NA, max_weight),
        "self-normalized": lambda: self_normalized(log, target_probs_NA, max_weight),
        "doubly robust": lambda: doubly_robust(log, target_probs_NA, model_NA, max_weight),
    }
    return {name: make().estimate(num_resamples, seed) for name, make in made.items()}
