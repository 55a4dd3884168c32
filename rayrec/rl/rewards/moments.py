"""Mean and standard deviation of numbers that come in batches, in one pass.

Axes: N numbers of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayrec.rl.rewards.candidates import RewardArray

_ROUNDING = 1e-9
"""Standard deviations below this share of the mean are what rounding makes of equal numbers."""


@dataclass(frozen=True)
class Moments:
    """Of all numbers so far.

    Source: Welford, Technometrics 1962; for batches, Chan, Golub and LeVeque, COMPSTAT 1982, eq. 2.1.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    def with_batch(self, values_N: RewardArray) -> Moments:
        """Those of all numbers and these."""
        if not len(values_N):
            return self
        of_batch, mean_of_batch = float(len(values_N)), float(values_N.mean())
        count = self.count + of_batch
        distance = mean_of_batch - self.mean
        return Moments(
            count,
            self.mean + distance * of_batch / count,
            self.squares
            + float(((values_N - mean_of_batch) ** 2).sum())
            + distance**2 * self.count * of_batch / count,
        )

    @property
    def std(self) -> float:
        """Of the population; 0 before there are numbers, and where they are equal up to rounding."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > _ROUNDING * abs(self.mean) else 0.0
