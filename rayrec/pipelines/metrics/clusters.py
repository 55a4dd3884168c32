"""Shares of requests whose users are drawn: requests of one user are alike, and say less than those of many.

Users are in groups by a hash of theirs, and shares of the groups differ by what users differ by. How much
more than by chance alone is the design effect, by which the requests count less. Few groups that hold most of
the requests measure it badly, so the interval is that of Student's t.

Source: Kish, "Survey sampling" (1965), chapters 5 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.proportions import Z_95, newcombe

_FAR = 1e6
"""Standard deviations: an interval of a share is all of it, and squares of more would overflow."""


@dataclass(frozen=True)
class GroupedShare:
    """Hits among trials, by groups [G] of users."""

    hits_G: NDArray[np.float64]
    trials_G: NDArray[np.float64]

    @property
    def num_trials(self) -> float:
        return float(self.trials_G.sum())

    @property
    def num_groups(self) -> float:
        """Of equal size that would say as much."""
        return self.num_trials**2 / float((self.trials_G**2).sum()) if self.num_trials else 0.0

    @property
    def design_effect(self) -> float:
        """Times the variance of as many independent trials."""
        num_trials, num_groups = self.num_trials, int((self.trials_G > 0).sum())
        share = float(self.hits_G.sum()) / num_trials if num_trials else 0.0
        if num_groups < 2 or not 0 < share < 1:
            return 1.0
        residual = float(((self.hits_G - share * self.trials_G) ** 2).sum())
        of_chance = share * (1 - share) * num_trials
        return max(residual * num_groups / (num_groups - 1) / of_chance, 1.0)


def difference(after: GroupedShare, before: GroupedShare, z: float = Z_95) -> Estimate:
    """The first share minus the second, with its interval.

    Args:
        z: standard deviations of it, were there very many groups.
    """
    # The larger one for both: where nothing is a hit, or everything, groups do not differ, whatever users do.
    effect = max(after.design_effect, before.design_effect)
    freedom = min(after.num_groups, before.num_groups) - 1
    first, second = (
        (float(each.hits_G.sum()) / effect, each.num_trials / effect) for each in (after, before)
    )
    if freedom <= 0:  # one user, perhaps: nothing is known of others
        return Estimate(newcombe(first, second).value, -1.0, 1.0)
    return newcombe(first, second, student(z, freedom))


def student(z: float, freedom: float) -> float:
    """The quantile of Student's t with the probability that the normal distribution has up to `z`.

    Args:
        freedom: degrees of it, above 0; need not be a whole number.
    """
    from scipy.special import ndtr, stdtrit  # not at import: services that have no canary need none of it

    # By the lower tail, whose small probabilities are exact; with less freedom it is farther still.
    return min(-float(stdtrit(max(freedom, 0.01), ndtr(-z))), _FAR)
