"""The policy before and after reinforcement learning: gains, and what has become worse.

Both policies are evaluated at several temperatures: a policy that is merely sharper than before samples
better lists without having learned anything, so the baseline is the supervised policy at its best
temperature. The temperature of either policy is chosen on validation users, never on those that are reported.

Axes: U users, T temperatures.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from rayrec.rl.list_metrics import EvaluatedLists, ListSettings, diversity, relative_change, table_of
from rayrec.rl.prompts import Prompts, evaluation_prompts, is_held_out, labels_of
from rayrec.rl.rewards.config import RewardsConfig
from rayrec.rl.rewards.mix import TOTAL
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.reading.reader import evaluation_batches

logger = logging.getLogger(__name__)

LIST_SEED = 0x11_57
"""Seed of the noise of evaluated lists: the same for all policies."""


def prompts_of(
    dataset: Dataset,
    split: Split,
    batch_size: int,
    max_users: int | None = None,
    with_times: bool = False,
    held_out_share: float | None = None,
    are_held_out: bool = True,
) -> list[Prompts]:
    """Read users of a split, batch by batch.

    Args:
        held_out_share: only users held out from training; None: all users.
        are_held_out: False for only the others.
    """
    labels = labels_of(dataset)
    rows = dataset.evaluation_rows(split, labels=labels)
    batches = evaluation_batches(dataset, split, batch_size, None, with_times, labels)
    found: list[Prompts] = []
    left = sys.maxsize if max_users is None else max_users
    for prompts in evaluation_prompts(dataset, batches, rows.target_labels):
        is_meant_U = np.full(len(prompts), True)
        if held_out_share is not None:
            is_meant_U = is_held_out(prompts.samples.user_ids_B, held_out_share) == are_held_out
        if len(part := prompts.some(np.flatnonzero(is_meant_U)[:left])):
            found.append(part)
            left -= len(part)
        if not left:
            break
    return found


def validation_prompts(dataset: Dataset, config: RlConfig, with_times: bool) -> list[Prompts]:
    """Read the users on whom the best snapshot is chosen, by events that the policy does not learn from.

    Where it learns from training events, these are not the users that are held out: rewards of theirs have
    no part in the policy, so the report on them is of users whom nobody asked.

    Raises:
        InputError: there are none.
    """
    share, asks_valid = config.prompts.held_out_share, config.prompts.split == "valid"
    evaluation = config.evaluation
    found = prompts_of(
        dataset,
        "valid",
        evaluation.batch_size,
        evaluation.max_users,
        with_times,
        share,
        are_held_out=asks_valid,
    )
    if not found:
        raise InputError(
            f"{dataset.root}: no users are left to choose the best snapshot on: of the validation users, "
            f"{'none is' if asks_valid else 'all are'} held out; {'raise' if asks_valid else 'lower'} "
            "prompts.held_out_share"
        )
    return found


def lists_of(config: RlConfig, temperatures: Sequence[float]) -> ListSettings:
    """Settings of evaluated lists at some temperatures."""
    return ListSettings(config.evaluation.list_size, tuple(temperatures), LIST_SEED)


def best_temperature(evaluated: EvaluatedLists, tried: Sequence[float], whose: str) -> float:
    """Choose the temperature whose lists have the highest reward.

    Args:
        whose: name of the policy in warnings.
    """
    best = tried[int(evaluated.rewards[TOTAL].mean(axis=0).argmax())]
    if len(tried) > 1 and best in (min(tried), max(tried)):
        logger.warning(
            "lists of %s have the highest reward at %s, the %s of evaluation.temperatures: a better one may "
            "lie beyond it",
            whose,
            best,
            "lowest" if best == min(tried) else "highest",
        )
    return best


@dataclass(frozen=True)
class Comparison:
    """Two policies, user by user."""

    before: EvaluatedLists
    """The supervised policy, at its best temperature."""
    after: EvaluatedLists
    codes_IL: np.ndarray
    behaviors: Sequence[str] = ()
    """Names of behavior codes; empty if the data set has none."""

    def report(self) -> dict[str, Any]:
        """Return every metric before and after with its interval, and its relative change."""
        before, after = self.before.scores(), self.after.scores()
        num_items = len(self.codes_IL)
        return {
            "num_users": len(self.before.user_ids_U),
            "before": _plain(table_of(self.before)),
            "after": _plain(table_of(self.after)),
            "change": _plain({name: relative_change(after[name], before[name]) for name in before}),
            "diversity": {
                "before": diversity(self.before.top_UK, self.codes_IL, num_items),
                "after": diversity(self.after.top_UK, self.codes_IL, num_items),
            },
            "recall@10 by behavior": self._by_behavior(before["recall@10"], after["recall@10"]),
        }

    def _by_behavior(self, before_U: np.ndarray, after_U: np.ndarray) -> dict[str, Any]:
        """Recall of the users whose logged event was of each behavior."""
        found = {}
        for code, name in enumerate(self.behaviors):
            chosen_U = self.before.behavior_U == code
            if chosen_U.any():
                found[name] = {
                    "num_users": int(chosen_U.sum()),
                    "before": float(before_U[chosen_U].mean()),
                    "after": float(after_U[chosen_U].mean()),
                    "change": relative_change(after_U[chosen_U], before_U[chosen_U])._asdict(),
                }
        return found


def _plain(estimates: dict[str, Estimate] | Any) -> dict[str, dict[str, float]]:
    return {name: estimate._asdict() for name, estimate in estimates.items()}


def worsened(report: dict[str, Any], rewards: RewardsConfig) -> list[str]:
    """Describe metrics that became worse: those whose whole interval is below 0, and of costs above it.

    A reward that is one in some scenarios and a cost in others is neither better nor worse.
    """
    parts = rewards.parts
    weights = {f"reward/{part.label}": (part.weight, *part.by_scenario.values()) for part in parts}
    found = []
    for name, change in report["change"].items():
        is_cost = any(weight < 0 for weight in weights.get(name, ()))
        if is_cost and any(weight > 0 for weight in weights[name]):
            continue
        if change["low"] > 0 if is_cost else change["high"] < 0:
            found.append(
                f"{name} is worse than that of the supervised policy: {change['value']:+.1%} "
                f"({change['low']:+.1%} to {change['high']:+.1%})"
            )
    return found
