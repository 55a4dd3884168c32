"""Intervals of shares, and of the difference of two.

Sources: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927);
Newcombe, "Interval estimation for the difference between independent proportions", Statistics in Medicine 17
(1998), method 10. Both hold for small counts, and at shares of 0 and 1.
"""

from __future__ import annotations

import math

from rayrec.pipelines.metrics.estimate import Estimate

Z_95 = 1.959964
"""Standard deviations of a 95 % interval."""


def wilson(successes: float, count: float, z: float = Z_95) -> Estimate:
    """A share with its interval; of no trials, anything is possible."""
    if not count:
        return Estimate(math.nan, 0.0, 1.0)
    share, of_z = successes / count, z * z / count
    center = (share + of_z / 2) / (1 + of_z)
    half = z * math.sqrt(share * (1 - share) / count + of_z / (4 * count)) / (1 + of_z)
    return Estimate(share, max(center - half, 0.0), min(center + half, 1.0))


def newcombe(after: tuple[float, float], before: tuple[float, float], z: float = Z_95) -> Estimate:
    """The first share minus the second, with its interval; both as (successes, trials)."""
    first, second = wilson(*after, z), wilson(*before, z)
    if math.isnan(first.value) or math.isnan(second.value):
        return Estimate(math.nan, first.low - second.high, first.high - second.low)
    difference = first.value - second.value
    low = math.hypot(first.value - first.low, second.high - second.value)
    high = math.hypot(first.high - first.value, second.value - second.low)
    return Estimate(difference, difference - low, difference + high)
