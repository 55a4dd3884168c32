"""Before and after: what reinforcement learning has made of a policy, and what it has cost.

The supervised policy is judged at several temperatures: a policy that is sharper than before gets better
lists without having learned anything, so the best of these is what has to be beaten. Temperatures are chosen
on users that validate, for either policy alike, and never on those that are reported.

Axes: U users, T temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.pipelines.estimate import Estimate
from rayrec.rl.config import RlConfig
from rayrec.rl.judging import JudgedLists, Lists, diversity, relative_change, table_of
from rayrec.rl.prompts import Prompts, evaluation_prompts, is_held_out, labels_of, some_rows
from rayrec.rl.rewards.mix import TOTAL
from rayrec.samples.dataset import Dataset
from rayrec.samples.manifest import Split
from rayrec.samples.reader import evaluation_batches

LIST_SEED = 0x11_57
"""Of the noise of lists that are judged: the same for all policies."""


def prompts_of(
    dataset: Dataset,
    split: Split,
    batch_size: int,
    max_users: int | None = None,
    with_times: bool = False,
    held_out_share: float | None = None,
) -> list[Prompts]:
    """Users of a split, batch by batch.

    Args:
        held_out_share: those held out alone; None is all.
    """
    labels = labels_of(dataset)
    rows = dataset.evaluation_rows(split, labels=labels)
    batches = evaluation_batches(dataset, split, batch_size, max_users, with_times, labels)
    found = list(evaluation_prompts(dataset, batches, rows.target_labels))
    if held_out_share is None:
        return found
    return [part for each in found if len(part := _held_out(each, held_out_share))]


def _held_out(prompts: Prompts, share: float) -> Prompts:
    rows_U = np.flatnonzero(is_held_out(prompts.samples.user_ids_B, share))
    return Prompts(
        some_rows(prompts.samples, rows_U),
        prompts.targets_U[rows_U],
        prompts.chunk,
        {label: codes_U[rows_U] for label, codes_U in prompts.target_labels.items()},
    )


def validation_prompts(dataset: Dataset, config: RlConfig, with_times: bool) -> list[Prompts]:
    """By whom the best snapshot is chosen: nobody that the policy learns from."""
    share = config.prompts.held_out_share if config.prompts.split == "valid" else None
    evaluation = config.evaluation
    return prompts_of(dataset, "valid", evaluation.batch_size, evaluation.max_users, with_times, share)


def lists_of(config: RlConfig, temperatures: Sequence[float]) -> Lists:
    return Lists(config.evaluation.list_size, tuple(temperatures), LIST_SEED)


def best_temperature(judged: JudgedLists) -> int:
    """Place of the temperature whose lists are worth most."""
    return int(judged.rewards[TOTAL].mean(axis=0).argmax())


@dataclass(frozen=True)
class Comparison:
    """Two policies, user by user."""

    before: JudgedLists
    """The supervised policy; lists at the one temperature that was best where it was chosen."""
    after: JudgedLists
    codes_IL: np.ndarray
    behaviors: Sequence[str] = ()
    """Names of the codes of behaviours; empty where the data set has none."""

    def report(self) -> dict[str, Any]:
        """Every metric before and after with intervals, and the relative change of it."""
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
        """Of the users whose logged event was of each."""
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


def worsened(report: dict[str, Any]) -> list[str]:
    """Sentences about what is worse than before, with the whole interval below 0."""
    found = []
    for name, change in report["change"].items():
        if change["high"] < 0:
            found.append(
                f"{name} is worse than that of the supervised policy: {change['value']:+.1%} "
                f"({change['low']:+.1%} to {change['high']:+.1%})"
            )
    return found
