"""Two variants that were shown to users at the same time: metrics of each, and their difference, over users.

Requests of one user are alike, so intervals are over users: a bootstrap takes users again and again, with all
their requests of both variants. A user who has seen both, as where requests are routed at random, is taken
with both. Few users, or such as are all alike, say nothing of others: then there is no interval.

Axes: R requests, U users, S resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.arrays import BoolArray, Float64Array, Int64Array

QUANTILES = {"latency p50": 0.5, "latency p95": 0.95}
"""In ms."""
NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)
LEAST_USERS = 20
"""Of a variant, for an interval."""
RARE = 1e-3
"""Probability of so uneven a division of users, below which it is no chance."""

Measure = Callable[[Float64Array], float]
"""[U] how often each user is taken, to a metric."""


@dataclass(frozen=True)
class VariantRows:
    """Requests of one variant."""

    users_R: Int64Array
    """From 0 to below the number of users of both variants."""
    has_error_R: BoolArray
    latency_ms_R: Float64Array
    outcomes_R: dict[str, Float64Array]
    """By name: of each request that was answered what came of it, such as 1 where a recommended item was
    clicked."""

    def measures(self, num_users: int) -> dict[str, Measure]:
        """By name."""
        answered_R = ~self.has_error_R
        requests_U = np.bincount(self.users_R, minlength=num_users).astype(np.float64)
        errors_U = np.bincount(self.users_R[self.has_error_R], minlength=num_users).astype(np.float64)
        found: dict[str, Measure] = {"errors": _ratio(errors_U, requests_U)}
        users_A, latency_A = self.users_R[answered_R], self.latency_ms_R[answered_R]
        order_A = np.argsort(latency_A, kind="stable")
        for name, share in QUANTILES.items():
            found[name] = _quantile(latency_A[order_A], users_A[order_A], share)
        answers_U = np.bincount(users_A, minlength=num_users).astype(np.float64)
        for name, values_R in self.outcomes_R.items():
            sums_U = np.bincount(users_A, values_R[answered_R], minlength=num_users).astype(np.float64)
            found[name] = _ratio(sums_U, answers_U)
        return found


@dataclass(frozen=True)
class SampleRatio:
    """Whether as many users came to each variant as were to."""

    expected: float
    """Share of the users that the variant was to get."""
    found: float
    p_value: float
    """Of a share as far from the expected one, by chance (exact binomial test)."""

    @property
    def is_off(self) -> bool:
        """Something else than chance divides the users, and may divide them by what they do."""
        return self.p_value < RARE


def sample_ratio(num_baseline: int, num_variant: int, share: float) -> SampleRatio:
    """Compare users of the variants with what the variant was to get of them."""
    from scipy.stats import binomtest  # takes a second to import

    num_users = num_baseline + num_variant
    p_value = float(binomtest(num_variant, num_users, share).pvalue)
    return SampleRatio(share, num_variant / num_users, p_value)


@dataclass(frozen=True)
class Difference:
    """One metric."""

    baseline: Estimate
    variant: Estimate
    difference: Estimate
    """The variant's minus the baseline's."""


def compared(
    baseline: VariantRows, variant: VariantRows, num_users: int, num_resamples: int = 999, seed: int = 0
) -> dict[str, Difference]:
    """Metrics of both by name, with 95 % percentile intervals of a bootstrap over users (Efron, 1979).

    An interval is not known where a variant has few users, nor where all samples are alike.
    """
    of_baseline, of_variant = baseline.measures(num_users), variant.measures(num_users)
    random = np.random.default_rng(seed)
    resampled: dict[str, list[tuple[float, float]]] = {name: [] for name in of_baseline}
    for _ in range(num_resamples):
        taken_U = np.bincount(random.integers(0, num_users, num_users), minlength=num_users)
        weights_U = taken_U.astype(np.float64)
        for name, pairs in resampled.items():
            pairs.append((of_baseline[name](weights_U), of_variant[name](weights_U)))
    ones_U = np.ones(num_users)
    enough = [len(np.unique(rows.users_R)) >= LEAST_USERS for rows in (baseline, variant)]
    found = {}
    for name, pairs in resampled.items():
        values_S2 = np.array(pairs)
        first, second = of_baseline[name](ones_U), of_variant[name](ones_U)
        found[name] = Difference(
            _estimate(first, values_S2[:, 0], enough[0]),
            _estimate(second, values_S2[:, 1], enough[1]),
            _estimate(second - first, values_S2[:, 1] - values_S2[:, 0], all(enough)),
        )
    return found


def _ratio(above_U: Float64Array, below_U: Float64Array) -> Measure:
    def measure(weights_U: Float64Array) -> float:
        below = float(weights_U @ below_U)
        return float(weights_U @ above_U) / below if below else math.nan

    return measure


def _quantile(sorted_R: Float64Array, users_R: Int64Array, share: float) -> Measure:
    def measure(weights_U: Float64Array) -> float:
        sums_R = np.cumsum(weights_U[users_R])
        if not len(sums_R) or not sums_R[-1]:
            return math.nan
        return float(sorted_R[np.searchsorted(sums_R, share * sums_R[-1])])

    return measure


def _estimate(value: float, values_S: Float64Array, has_interval: bool) -> Estimate:
    known_S = values_S[np.isfinite(values_S)]
    if not math.isfinite(value) or not len(known_S):
        return NO_ESTIMATE
    if not has_interval or known_S.min() == known_S.max():
        return Estimate(value, math.nan, math.nan)
    low, high = np.quantile(known_S, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
