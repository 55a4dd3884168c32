"""How often something fails, how often to write a snapshot, and what is lost in between.

    failures come with rate 1 / M, M = mean time between failures of a node / nodes
    snapshots every tau, each costs delta; tau* = sqrt(2 delta M)

Sources: J. W. Young, CACM 17(9), 1974 (first order); J. T. Daly, FGCS 22(3), 2006 (higher order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def cluster_mtbf_s(groups: Sequence[tuple[float, float]]) -> float:
    """Mean time between failures of anything, in seconds; infinite where nothing fails.

    Args:
        groups: (number of nodes, mean time between failures of one of them).
    """
    rate = sum(count / mtbf_s for count, mtbf_s in groups if mtbf_s > 0)
    return 1 / rate if rate else math.inf


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Time between snapshots that loses least, in first order: sqrt(2 delta M)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The same to a higher order, which matters where a snapshot costs much of the time between failures.

    Source: Daly 2006, equation 37; M where the cost is 2 M or more.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + x / 3 + x * x / 9) - cost_s


@dataclass(frozen=True)
class Losses:
    """Shares of the time of a run that train nothing."""

    snapshots: float
    """Steps that stand still or are slower while a snapshot is written."""
    rework: float
    """Steps that are trained again after a failure: half an interval on average."""
    restarts: float

    @property
    def total(self) -> float:
        return min(self.snapshots + self.rework + self.restarts, 1.0)


def expected_losses(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> Losses:
    """Losses of a run that writes a snapshot every so often: delta / tau + tau / (2 M) + restart / M.

    Args:
        restart_s: from a failure until the next step: detection, start of all actors, loading.
    """
    if math.isinf(mtbf_s):
        return Losses(cost_s / interval_s if interval_s else 0.0, 0.0, 0.0)
    return Losses(cost_s / interval_s, interval_s / (2 * mtbf_s), restart_s / mtbf_s)
