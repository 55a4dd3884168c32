"""Says when a mix of rewards has nothing, or but one thing, to teach.

A policy learns from how the candidates of one user differ. So what is looked at is the variance within
groups: a reward that differs between users alone moves nobody.

Axes: U users, G candidates of a user (a group), N candidates that are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rayrec.platform.arrays import BoolArray
from rayrec.rl.rewards.candidates import RewardArray
from rayrec.rl.rewards.mix import MixedRewards

FLAT = 1e-8
"""Groups whose totals differ by no more than this have no spread."""


@dataclass(frozen=True)
class GuardReport:
    """What is to be said of the last batches."""

    sentences: list[str]
    """What has come to be so with this batch; what was so within the last window is not said again."""
    figures: Mapping[str, float]
    """`hit.variance_share` of each part, and `flat_groups`, the share of groups without spread."""


@dataclass(frozen=True)
class _Sums:
    """Of one batch."""

    shared_with_total: dict[str, float]
    """Name -> sum over candidates of the part's distance from its group's mean, times the total's."""
    num_groups: int
    num_flat: int


class RewardGuard:
    """Watches batches of mixed rewards. Says nothing until it has seen `window` of them."""

    def __init__(self, max_share: float = 0.9, max_flat: float = 0.5, window: int = 20) -> None:
        """
        Args:
            max_share: of the variance of the total that one of several parts may have.
            max_flat: share of groups that may be without spread.
            window: batches that are judged together.

        Raises:
            ValueError: a share is not within 0 and 1, or there is no batch to judge.
        """
        for name, share in (("max_share", max_share), ("max_flat", max_flat)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} must be within 0 and 1, got {share}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self._max_share, self._max_flat, self._window = max_share, max_flat, window
        self._batches: deque[_Sums] = deque(maxlen=window)
        self._batches_since: dict[str, int] = {}
        """Batches since something last was so, of what was said."""

    def watch(self, mixed: MixedRewards) -> GuardReport:
        """Take in a batch."""
        self._batches.append(_sums_of(mixed))
        shares = self._shares()
        num_groups = sum(batch.num_groups for batch in self._batches)
        flat = sum(batch.num_flat for batch in self._batches) / num_groups if num_groups else 0.0
        holds = self._about_parts(shares) | self._about_groups(flat)
        if len(self._batches) < self._window:
            holds = {}
        new = [sentence for what, sentence in holds.items() if what not in self._batches_since]
        since = {what: batches + 1 for what, batches in self._batches_since.items()}
        since |= dict.fromkeys(holds, 0)
        self._batches_since = {what: batches for what, batches in since.items() if batches < self._window}
        figures = {f"{name}.variance_share": share for name, share in shares.items()}
        return GuardReport(new, {**figures, "flat_groups": flat})

    def state(self) -> dict[str, Any]:
        """What it has seen and said, as JSON has it."""
        return {"batches": [asdict(batch) for batch in self._batches], "batches_since": self._batches_since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._batches.clear()
        self._batches.extend(_Sums(**batch) for batch in state["batches"])
        self._batches_since = dict(state["batches_since"])

    def _shares(self) -> dict[str, float]:
        """Of each part in the variance of the total: Cov(part, total) / Var(total), in sum 1.

        Above 1 where the others work against it, below 0 for those; 0 for all if the total has no variance.
        """
        names = self._batches[-1].shared_with_total
        sums = {name: sum(batch.shared_with_total[name] for batch in self._batches) for name in names}
        whole = sum(sums.values())
        return {name: each / whole if whole > FLAT**2 else 0.0 for name, each in sums.items()}

    def _about_parts(self, shares: Mapping[str, float]) -> dict[str, str]:
        if len(shares) < 2:
            return {}
        return {
            f"share of {name}": (
                f"over the last {self._window} chunks, the reward {name!r} has {share:.0%} of the variance "
                f"of the total within groups, more than {self._max_share:.0%}: the policy learns next to "
                "nothing of the others; lower its weight, or normalize them"
            )
            for name, share in shares.items()
            if share > self._max_share
        }

    def _about_groups(self, flat: float) -> dict[str, str]:
        if flat <= self._max_flat:
            return {}
        return {
            "flat": (
                f"over the last {self._window} chunks, {flat:.0%} of the groups have one and the same total "
                f"for all candidates, more than {self._max_flat:.0%}: nothing is learned from these; draw "
                "larger groups or at a higher temperature, or add a reward that tells candidates apart"
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
        num_flat=int((highest_U - lowest_U <= FLAT).sum()),
    )


def _centered(reward_UG: RewardArray, is_item_UG: BoolArray) -> RewardArray:
    """Rewards less their group's mean; 0 where there is no candidate."""
    num_items_U1 = np.maximum(is_item_UG.sum(axis=1, keepdims=True), 1)
    mean_U1 = np.where(is_item_UG, reward_UG, 0.0).sum(axis=1, keepdims=True) / num_items_U1
    return np.where(is_item_UG, reward_UG - mean_U1, 0.0)
