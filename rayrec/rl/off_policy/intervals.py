"""Estimates as sums over rows, and their intervals by requests.

Chance decides once about all rows of a request, and what the user does there is alike. So requests are
resampled, with all their rows (cluster bootstrap, Davison and Hinkley, "Bootstrap methods and their
application", 1997, section 3.8). Intervals are bias-corrected and accelerated (BCa, Efron, JASA 1987):
with dozens of clicks in ten thousand rows, terms are so skewed that an interval symmetric around the
estimate would be too low on both sides.

Resamples know only the rewards that the log has. Where rows that count all have the same one, resamples
do not differ, though the next log may. Then rewards of 0 or 1 get Wilson's interval, others none.

Axes: N rows, R requests, S resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from rayrec.pipelines.metrics.proportions import Z_95, wilson
from rayrec.platform.arrays import Float64Array, Int64Array

LEAST_REQUESTS = 20.0
"""Effective ones, for an interval: of fewer, with uneven weights, resamples lack the rows that matter
most, and 95 % intervals cover the truth half of the time."""
_COUNTS = 0.01
"""Of the mean weight: rows with less say next to nothing."""
_NUMBERS_AT_ONCE = 1 << 17
"""Of resamples: as many as caches hold."""


class PolicyEstimate(NamedTuple):
    """The reward of a policy with its 95 % interval."""

    value: float
    low: float | None
    """None, as `high`: there is no interval, see `note`."""
    high: float | None
    note: str = ""
    """Why there is no interval, or how it was found if not by resampling."""

    @property
    def shown(self) -> str:
        """With its interval, or why there is none."""
        if self.low is None or self.high is None:
            return f"{self.value:.5f} (no interval: {self.note})"
        note = f"; {self.note}" if self.note else ""
        return f"{self.value:.5f} ({self.low:.5f} to {self.high:.5f}{note})"

    def covers(self, truth: float) -> bool:
        """Whether the interval has it; where there is none, nothing is excluded."""
        return self.low is None or self.high is None or self.low <= truth <= self.high


@dataclass(frozen=True)
class Terms:
    """An estimate by its terms: the sum of numerators, divided by the sum of denominators."""

    numerators_N: Float64Array
    denominators_N: Float64Array | None = None
    """None: 1 for each row, so that the estimate is a mean."""
    requests_N: Int64Array | None = None
    """Request of each row; None: each row is one."""
    weights_N: Float64Array | None = None
    """By which rewards count; None: all rows alike."""
    rewards_N: Float64Array | None = None
    """That are weighed; None: none."""
    wilson_at: tuple[float, ...] = ()
    """Rewards for which the estimate is a share with Wilson's interval, if all that count are so."""

    @cached_property
    def value(self) -> float:
        tops_R, bottoms_R = self._sums_R
        return float(tops_R.sum() / bottoms_R.sum())

    def estimate(self, num_resamples: int = 999, seed: int = 0) -> PolicyEstimate:
        """Return the value and its interval over requests."""
        weights_N = np.ones(len(self.numerators_N)) if self.weights_N is None else self.weights_N
        num_requests = effective_number(self._by_request(weights_N))
        if num_requests < LEAST_REQUESTS:
            return PolicyEstimate(
                self.value,
                None,
                None,
                f"as little as {num_requests:.1f} equally weighted requests would say; "
                f"an interval needs {LEAST_REQUESTS:.0f}",
            )
        if self.rewards_N is not None:
            seen = self.rewards_N[weights_N > _COUNTS * weights_N.mean()]
            if np.ptp(seen) == 0:
                return self._of_equal_rewards(float(seen[0]), num_requests)
        tops_R, bottoms_R = self._sums_R
        residuals_R = tops_R - self.value * bottoms_R
        if np.abs(residuals_R).max() <= 1e-9 * max(np.abs(tops_R).max(), 1e-300):
            return PolicyEstimate(self.value, None, None, "every request says the same")
        return PolicyEstimate(self.value, *bca(tops_R, bottoms_R, num_resamples, seed))

    @cached_property
    def _sums_R(self) -> tuple[Float64Array, Float64Array]:
        bottoms_N = self.denominators_N
        if bottoms_N is None:
            bottoms_N = np.ones(len(self.numerators_N))
        return self._by_request(self.numerators_N), self._by_request(bottoms_N)

    def _by_request(self, values_N: Float64Array) -> Float64Array:
        return sums_by_request(values_N, self.requests_N)

    def _of_equal_rewards(self, reward: float, num_requests: float) -> PolicyEstimate:
        if reward not in self.wilson_at:
            note = f"every row that counts has the reward {reward:g}, and the next may not"
            return PolicyEstimate(self.value, None, None, note)
        # By requests, not rows: those of one request may all have their reward together.
        share = wilson(reward * num_requests, num_requests)
        low = max(self.value - (1.0 - share.low), 0.0) if reward else 0.0
        high = 1.0 if reward else min(self.value + share.high, 1.0)
        note = f"Wilson's: all of {num_requests:,.0f} effective requests have the reward {reward:g}"
        return PolicyEstimate(self.value, low, high, note)


def sums_by_request(values_N: Float64Array, requests_N: Int64Array | None) -> Float64Array:
    """[R] of requests that have rows; [N] if each row is one."""
    if requests_N is None:
        return values_N
    _, numbers_N = np.unique(requests_N, return_inverse=True)
    return np.bincount(numbers_N, values_N).astype(np.float64)


def effective_number(weights: Float64Array) -> float:
    """(Σ w)² / Σ w²: number of equal weights whose mean has the same variance (Kish, 1965)."""
    return float(weights.sum()) ** 2 / max(float(np.square(weights).sum()), 1e-300)


def bca(tops_R: Float64Array, bottoms_R: Float64Array, num_resamples: int, seed: int) -> tuple[float, float]:
    """The 95 % interval of Σ tops / Σ bottoms, which are drawn in pairs.

    Its jackknife is of sums without one pair each: as many steps as pairs.
    """
    random, num_requests = np.random.default_rng(seed), len(tops_R)
    found = []
    at_once = max(1, _NUMBERS_AT_ONCE // num_requests)
    for begin in range(0, num_resamples, at_once):
        shape = (min(at_once, num_resamples - begin), num_requests)
        drawn_SR = random.integers(0, num_requests, shape)
        sums_S, of_S = tops_R[drawn_SR].sum(axis=1), bottoms_R[drawn_SR].sum(axis=1)
        found.append(sums_S[of_S > 0] / of_S[of_S > 0])  # about one of 10⁹ draws nothing that counts
    ratios_S = np.concatenate(found)
    top, bottom = float(tops_R.sum()), float(bottoms_R.sum())
    without_R = (top - tops_R) / (bottom - bottoms_R)
    deviations_R = without_R.mean() - without_R
    skew = float((deviations_R**3).sum() / (6.0 * (deviations_R**2).sum() ** 1.5))
    value, least = top / bottom, 0.5 / len(ratios_S)
    below = float(((ratios_S < value).mean() + (ratios_S <= value).mean()) / 2)
    bias = float(ndtri(min(max(below, least), 1.0 - least)))
    ends = np.array([bias - Z_95, bias + Z_95])
    low, high = np.quantile(ratios_S, ndtr(bias + ends / (1.0 - skew * ends)))
    return float(low), float(high)
