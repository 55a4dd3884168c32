"""Two methods on the same users with the same seeds: the difference of a metric with its interval.

A pair is one seed: the trained policy started from the supervised policy of its seed. A resample takes users,
the same ones for all seeds, and adds a deviation of the pairs: the standard error over pairs times a value of
Student's t distribution, as in `paired_bootstrap`. That of a ratio is by the delta method: each pair deviates
by what its `after` differs from `before` times the ratio.

Axes: S seeds, U users, R resamples.
"""

from __future__ import annotations

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.paired_bootstrap import seed_deviations
from rayrec.platform.arrays import Float64Array

NUM_RESAMPLES = 2_000


def mean_of(scores_SU: Float64Array, num_resamples: int = NUM_RESAMPLES) -> Estimate:
    """The mean over users and seeds."""
    random = np.random.default_rng(0)
    means_R = _over_users(scores_SU.mean(axis=0)[None], num_resamples, random)[:, 0]
    means_S = scores_SU.mean(axis=1)
    return _estimate(float(means_S.mean()), means_R + seed_deviations(means_S, num_resamples, random))


def change_of(
    after_SU: Float64Array, before_SU: Float64Array, num_resamples: int = NUM_RESAMPLES
) -> Estimate:
    """Relative change of the mean, (after - before) / before; NaN where a mean may be 0."""
    if after_SU.shape != before_SU.shape:
        raise ValueError(f"scores of shapes {after_SU.shape} and {before_SU.shape} are not paired")
    random = np.random.default_rng(0)
    both_2U = np.stack((after_SU.mean(axis=0), before_SU.mean(axis=0)))
    after, before = both_2U.mean(axis=1)
    if not before:
        return Estimate(np.nan, np.nan, np.nan)
    means_R2 = _over_users(both_2U, num_resamples, random)
    is_there_R = means_R2[:, 1] != 0
    ratio_R = np.divide(*means_R2.T, out=np.full(num_resamples, np.nan), where=is_there_R)
    differing_S = (after_SU.mean(axis=1) - after / before * before_SU.mean(axis=1)) / before
    deviations_R = seed_deviations(differing_S, num_resamples, random)
    return _estimate(float(after / before) - 1.0, ratio_R - 1.0 + deviations_R)


def _over_users(scores_NU: Float64Array, num_resamples: int, random: np.random.Generator) -> Float64Array:
    """[R, N] means over resampled users, the same ones for all N."""
    num_users = scores_NU.shape[1]
    found = np.empty((num_resamples, len(scores_NU)))
    for resample in range(num_resamples):
        counts_U = np.bincount(random.integers(num_users, size=num_users), minlength=num_users)
        found[resample] = scores_NU @ counts_U / num_users
    return found


def _estimate(value: float, resampled_R: Float64Array) -> Estimate:
    low, high = np.quantile(resampled_R, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
