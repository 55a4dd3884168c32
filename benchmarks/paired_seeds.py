"""Two methods on the same users with the same seeds: the difference of a metric with its interval.

A pair is one seed: the trained policy started from the supervised policy of its seed. A resample takes users,
the same ones for all seeds, and pairs; of S pairs, S - 1 are drawn with replacement, since S would understate
the variance of a mean (Rao and Wu, JASA 1988). Users and seeds are crossed (Owen, Annals of Applied
Statistics 2007).

Axes: S seeds, U users, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.arrays import Float64Array

NUM_RESAMPLES = 2_000


def mean_of(scores_SU: Float64Array) -> Estimate:
    """The mean over users and seeds."""
    return _estimate([scores_SU], lambda means: means[0], NUM_RESAMPLES)


def change_of(
    after_SU: Float64Array, before_SU: Float64Array, num_resamples: int = NUM_RESAMPLES
) -> Estimate:
    """Relative change of the mean, (after - before) / before; NaN where a mean may be 0."""
    if after_SU.shape != before_SU.shape:
        raise ValueError(f"scores of shapes {after_SU.shape} and {before_SU.shape} are not paired")

    def change(means: list[Float64Array]) -> Float64Array:
        is_there = means[1] != 0
        ratio = np.divide(means[0], means[1], out=np.full_like(means[1], np.nan), where=is_there)
        return ratio - 1.0

    return _estimate([after_SU, before_SU], change, num_resamples)


def _estimate(
    scores: list[Float64Array],
    statistic: Callable[[list[Float64Array]], Float64Array],
    num_resamples: int,
) -> Estimate:
    num_seeds, num_users = scores[0].shape
    random = np.random.default_rng(0)
    resampled = [np.empty(num_resamples) for _ in scores]
    for resample in range(num_resamples):
        counts_U = np.bincount(random.integers(num_users, size=num_users), minlength=num_users)
        pairs = random.integers(num_seeds, size=max(num_seeds - 1, 1))
        for found, scores_SU in zip(resampled, scores, strict=True):
            found[resample] = (scores_SU @ counts_U)[pairs].mean() / num_users
    low, high = np.quantile(statistic(resampled), [0.025, 0.975])
    value = statistic([np.array([scores_SU.mean()]) for scores_SU in scores])[0]
    return Estimate(float(value), float(low), float(high))
