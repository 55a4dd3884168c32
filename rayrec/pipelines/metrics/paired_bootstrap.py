"""Two methods on the same users: the difference of a metric, with an interval over users, and over seeds.

A resample draws users, the same ones for both methods. To the mean of a method with several seeds it adds a
deviation of the seeds: the standard error of a mean of S seeds times a value of Student's t distribution
with S - 1 degrees of freedom. Resampled seeds would not do: with two or three of them, the quantiles of a
bootstrap lie far inside those of t. Where only seeds vary, the interval is Student's (Biometrika 1908), and
of two methods with seeds that of Behrens and Fisher (Fisher, Annals of Eugenics 1935), which covers 95 % or
more. Users and seeds are crossed, since every seed ranks for every user; what varies with both is counted in
both parts, so that the interval is rather too wide (as in Owen, "The pigeonhole bootstrap", Annals of
Applied Statistics 2007).

Axes: S seeds of one method, U users, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.arrays import Float64Array

NUM_RESAMPLES = 1000
_ROWS_AT_ONCE = 50
"""Resamples that are drawn at once: a number per user for each of them is in memory."""
_LEAST_A = 1e-9
"""Of resamples whose ratio is taken: a mean of scores that is no larger counts as 0."""


@dataclass(frozen=True)
class PairedEstimate:
    """One metric of methods A and B."""

    num_users: int
    a: Estimate
    b: Estimate
    difference: Estimate
    """B - A."""
    ratio: Estimate | None
    """B / A; None where A may be 0."""
    only_a: float
    """Users for whom A hits and B does not; of several seeds, the mean over all pairs of them."""
    only_b: float
    mcnemar_p: float | None
    """Probability that users for whom one method alone hits are divided at least so unevenly by chance
    (McNemar, 1947; exact). None with several seeds."""

    def to_json(self) -> dict[str, Any]:
        return {
            "num_users": self.num_users,
            **{name: getattr(self, name)._asdict() for name in ("a", "b", "difference")},
            "ratio": None if self.ratio is None else self.ratio._asdict(),
            "only_a": self.only_a,
            "only_b": self.only_b,
            "mcnemar_p": self.mcnemar_p,
        }


def compare_scores(
    a_SU: Float64Array, b_SU: Float64Array, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> PairedEstimate:
    """Compare two methods by a metric, of which more is better and 0 is a miss.

    Args:
        a_SU, b_SU: scores of each seed and user; the numbers of seeds may differ.

    Raises:
        ValueError: there is no user or no seed, or the users are not equally many.
    """
    if not a_SU.size or not b_SU.size or a_SU.shape[1] != b_SU.shape[1]:
        raise ValueError(f"scores of shapes {a_SU.shape} and {b_SU.shape} cannot be compared")
    random = np.random.default_rng(seed)
    a_RS, b_RS = _over_users(a_SU, b_SU, num_resamples, random)
    # No mean is negative, though a deviation of few seeds may say so.
    a_R, b_R = (
        np.maximum(
            means_RS.mean(axis=1) + seed_deviations(scores_SU.mean(axis=1), num_resamples, random), 0.0
        )
        for means_RS, scores_SU in ((a_RS, a_SU), (b_RS, b_SU))
    )
    a, b = float(a_SU.mean()), float(b_SU.mean())
    only_a, only_b = _alone(a_SU, b_SU), _alone(b_SU, a_SU)
    return PairedEstimate(
        num_users=a_SU.shape[1],
        a=_estimate(a, a_R),
        b=_estimate(b, b_R),
        difference=_estimate(b - a, b_R - a_R),
        ratio=_estimate(b / a, b_R / np.maximum(a_R, _LEAST_A)) if _is_above_zero(a_R) else None,
        only_a=only_a,
        only_b=only_b,
        mcnemar_p=_mcnemar(only_a, only_b) if len(a_SU) == len(b_SU) == 1 else None,
    )


def _over_users(
    a_SU: Float64Array, b_SU: Float64Array, num_resamples: int, random: np.random.Generator
) -> tuple[Float64Array, Float64Array]:
    """([R, S], [R, S]) means over resampled users, the same ones for both."""
    num_users = a_SU.shape[1]
    both_US = np.concatenate((a_SU, b_SU)).T.copy()
    found = np.empty((num_resamples, both_US.shape[1]))
    for first in range(0, num_resamples, _ROWS_AT_ONCE):
        rows = range(first, min(first + _ROWS_AT_ONCE, num_resamples))
        drawn = [
            np.bincount(random.integers(0, num_users, num_users), minlength=num_users).astype(np.float64)
            for _ in rows
        ]
        found[rows.start : rows.stop] = np.stack(drawn) @ both_US / num_users
    return found[:, : len(a_SU)], found[:, len(a_SU) :]


def seed_deviations(means_S: Float64Array, num_resamples: int, random: np.random.Generator) -> Float64Array:
    """[R] deviations of the mean of all seeds, in random order; 0 of one seed, which says nothing of others.

    They are evenly spaced quantiles of the t distribution, not draws: those of few seeds have tails so long
    that limits from a thousand draws would vary by a fifth.
    """
    num_seeds = len(means_S)
    if num_seeds == 1:
        return np.zeros(num_resamples)
    from scipy.stats import t  # takes a second to import

    shares_R = random.permutation((np.arange(num_resamples) + 0.5) / num_resamples)
    deviations_R: Float64Array = t.ppf(shares_R, num_seeds - 1) * means_S.std(ddof=1) / np.sqrt(num_seeds)
    return deviations_R


def _is_above_zero(means_R: Float64Array) -> bool:
    """Whether next to no resample is 0, so that a ratio to the mean has limits."""
    return float(np.quantile(means_R, 0.01)) > _LEAST_A


def _alone(hits_SU: Float64Array, others_SU: Float64Array) -> float:
    """Users for whom a seed of the first hits and one of the second does not, mean over pairs of seeds."""
    return float(((hits_SU > 0).mean(axis=0) * (others_SU <= 0).mean(axis=0)).sum())


def _mcnemar(only_a: float, only_b: float) -> float:
    from scipy.stats import binomtest  # takes a second to import

    of_one = round(only_a + only_b)
    return float(binomtest(round(only_a), of_one, 0.5).pvalue) if of_one else 1.0


def _estimate(value: float, resampled_R: Float64Array) -> Estimate:
    low, high = np.quantile(resampled_R, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
