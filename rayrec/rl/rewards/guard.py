"""Warns when rewards give the policy nothing to learn, or when one reward dominates the others.

A policy learns from how the candidates of one user differ, so the guard looks at the variance within groups:
a reward that differs only between users has no effect.

Axes: U users, G candidates of a user (a group), N candidates that are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from rayrec.platform.arrays import BoolArray
from rayrec.platform.config import Config
from rayrec.rl.rewards.base import RewardArray
from rayrec.rl.rewards.mix import MixedRewards

EQUAL = 1e-8
"""Totals of a group that differ by no more than this count as equal."""
_ZERO_VARIANCE = "zero_variance"

_RENAMED = {"num_flat": "num_zero_variance", "flat": _ZERO_VARIANCE}
"""Names in states of version 0.1 to those of today."""

_Share = Annotated[float, Field(ge=0, le=1)]


class GuardConfig(Config):
    """When to warn about the rewards."""

    RENAMED: ClassVar[Mapping[str, str]] = {"max_flat": "max_zero_variance"}

    max_share: _Share = 0.9
    """Largest share that one of several rewards may have of the total's variance within groups."""
    max_zero_variance: _Share = 0.5
    """Largest share of zero-variance groups: those whose candidates all have the same total."""
    window: int = Field(default=20, ge=1)
    """Number of chunks of users (`rollout.chunk_users`) that are looked at together; a batch has several."""


@dataclass(frozen=True)
class GuardReport:
    """Warnings and metrics of the last batches."""

    warnings: list[str]
    """New ones; what was warned about within the last window is not repeated."""
    metrics: Mapping[str, float]
    """`hit.variance_share` of each part, and `zero_variance_groups`, the share of such groups."""


@dataclass(frozen=True)
class _Sums:
    """Sums over one batch."""

    shared_with_total: dict[str, float]
    """Name -> sum over candidates of the part's distance from its group's mean, times the total's."""
    num_groups: int
    num_zero_variance: int


class RewardGuard:
    """Watches batches of mixed rewards. Warns of nothing until it has seen `window` of them."""

    def __init__(self, config: GuardConfig | None = None) -> None:
        self._config = config or GuardConfig()
        self._batches: deque[_Sums] = deque(maxlen=self._config.window)
        self._batches_since: dict[str, int] = {}
        """Batches since a condition last held, of those that were warned about."""

    def watch(self, mixed: MixedRewards) -> GuardReport:
        """Look at one more batch."""
        self._batches.append(_sums_of(mixed))
        shares = self._shares()
        num_groups = sum(batch.num_groups for batch in self._batches)
        num_zero_variance = sum(batch.num_zero_variance for batch in self._batches)
        zero_variance = num_zero_variance / num_groups if num_groups else 0.0
        holds = self._about_parts(shares) | self._about_groups(zero_variance)
        if len(self._batches) < self._config.window:
            holds = {}
        new = [sentence for what, sentence in holds.items() if what not in self._batches_since]
        since = {what: batches + 1 for what, batches in self._batches_since.items()}
        since |= dict.fromkeys(holds, 0)
        self._batches_since = {
            what: batches for what, batches in since.items() if batches < self._config.window
        }
        metrics = {f"{name}.variance_share": share for name, share in shares.items()}
        return GuardReport(new, {**metrics, "zero_variance_groups": zero_variance})

    def state(self) -> dict[str, Any]:
        """Return what it has seen and warned about, as JSON values."""
        return {"batches": [asdict(batch) for batch in self._batches], "batches_since": self._batches_since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, also from one of version 0.1."""
        self._batches.clear()
        self._batches.extend(
            _Sums(**{_RENAMED.get(key, key): value for key, value in batch.items()})
            for batch in state["batches"]
        )
        self._batches_since = {
            _RENAMED.get(what, what): batches for what, batches in state["batches_since"].items()
        }

    def _shares(self) -> dict[str, float]:
        """Share of each part in the variance of the total: Cov(part, total) / Var(total), in sum 1.

        Above 1 if other parts work against it, below 0 for those; 0 for all if the total has no variance.
        """
        names = self._batches[-1].shared_with_total
        sums = {name: sum(batch.shared_with_total[name] for batch in self._batches) for name in names}
        whole = sum(sums.values())
        return {name: each / whole if whole > EQUAL**2 else 0.0 for name, each in sums.items()}

    def _about_parts(self, shares: Mapping[str, float]) -> dict[str, str]:
        if len(shares) < 2:
            return {}
        return {
            f"share of {name}": (
                f"over the last {self._config.window} chunks, the reward {name!r} has {share:.0%} of the "
                f"variance of the total within groups, more than {self._config.max_share:.0%}: the policy "
                "learns almost nothing from the others; lower its weight, or normalize them"
            )
            for name, share in shares.items()
            if share > self._config.max_share
        }

    def _about_groups(self, zero_variance: float) -> dict[str, str]:
        if zero_variance <= self._config.max_zero_variance:
            return {}
        return {
            _ZERO_VARIANCE: (
                f"over the last {self._config.window} chunks, {zero_variance:.0%} of the groups have the "
                f"same total for all candidates, more than {self._config.max_zero_variance:.0%}: nothing is "
                "learned from them; sample larger groups or at a higher temperature, or add a reward that "
                "distinguishes candidates"
            )
        }


def _sums_of(mixed: MixedRewards) -> _Sums:
    is_item_UG = mixed.is_item_UG
    total_UG = _centered(mixed.total_UG, is_item_UG)
    highest_U = np.where(is_item_UG, mixed.total_UG, -np.inf).max(axis=1)
    lowest_U = np.where(is_item_UG, mixed.total_UG, np.inf).min(axis=1)
    return _Sums(
        {
            name: float((_centered(part_UG, is_item_UG) * total_UG).sum())
            for name, part_UG in mixed.weighted.items()
        },
        num_groups=len(total_UG),
        # A group without candidates has none to compare either.
        num_zero_variance=int((highest_U - lowest_U <= EQUAL).sum()),
    )


def _centered(reward_UG: RewardArray, is_item_UG: BoolArray) -> RewardArray:
    """Rewards less their group's mean; 0 where there is no candidate."""
    num_items_U1 = np.maximum(is_item_UG.sum(axis=1, keepdims=True), 1)
    mean_U1 = np.where(is_item_UG, reward_UG, 0.0).sum(axis=1, keepdims=True) / num_items_U1
    return np.where(is_item_UG, reward_UG - mean_U1, 0.0)
