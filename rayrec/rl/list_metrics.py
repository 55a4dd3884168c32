"""Metrics of a policy per user: how it ranks logged targets, and the rewards of lists that it samples.

    SampledLists: items ranked, lists sampled at some temperatures ─► scored ─► EvaluatedLists: a row per user

Results are kept per user, so that two policies can be compared user by user: their difference has a much
smaller variance than either.

Axes: U users, K positions of a list, T temperatures, I items of the catalog, L code levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.ranking_metrics import score_of, target_places
from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import UNKNOWN
from rayrec.rl.prompts import Prompts
from rayrec.rl.rewards.mix import TOTAL

CUTOFFS = (1, 5, 10, 50)
NUM_RESAMPLES = 1000

ListScorer = Callable[[Int64Array, np.ndarray], Mapping[str, np.ndarray]]
"""([U, K] items, [U, K] log-probabilities) -> [U, K] reward of each: `TOTAL`, and its parts by name."""


@dataclass(frozen=True)
class ListSettings:
    """How lists are sampled for evaluation."""

    size: int
    temperatures: tuple[float, ...]
    seed: int


@dataclass(frozen=True)
class SampledLists:
    """Rankings and sampled lists of some users."""

    prompts: Prompts
    ranked_UK: Int64Array
    """The likeliest items of each user."""
    lists: tuple[tuple[Int64Array, np.ndarray], ...]
    """For each temperature: distinct items, likeliest first, and their log-probabilities."""

    def evaluated(self, score: ListScorer) -> EvaluatedLists:
        """Compute metrics, with the mean reward of every list's items."""
        found = [
            {name: _means(reward_UK, items_UK) for name, reward_UK in score(items_UK, log_probs_UK).items()}
            for items_UK, log_probs_UK in self.lists
        ]
        names = found[0] if found else ()
        unknown_U = np.full(len(self.prompts), UNKNOWN)
        return EvaluatedLists(
            user_ids_U=self.prompts.samples.user_ids_B,
            positions_U=target_places(self.ranked_UK, self.prompts.targets_U),
            top_UK=self.ranked_UK[:, :10],
            behavior_U=self.prompts.target_labels.get("behavior", unknown_U),
            rewards={name: np.stack([each[name] for each in found], axis=1) for name in names},
        )


@dataclass(frozen=True)
class EvaluatedLists:
    """Metrics of some users, or of all."""

    user_ids_U: Int64Array
    positions_U: Int64Array
    """Position of the logged target among the ranked items; their number where it is not among them."""
    top_UK: Int64Array
    """The first ten of these."""
    behavior_U: Int64Array
    """Code of the logged event's behavior; -1 where it is unknown."""
    rewards: Mapping[str, np.ndarray]
    """[U, T] mean reward of the items in the list sampled at each temperature, 0 where there are none:
    `TOTAL`, and its parts by name."""

    @staticmethod
    def concatenate(parts: Sequence[EvaluatedLists]) -> EvaluatedLists:
        return EvaluatedLists(
            np.concatenate([part.user_ids_U for part in parts]),
            np.concatenate([part.positions_U for part in parts]),
            np.concatenate([part.top_UK for part in parts]),
            np.concatenate([part.behavior_U for part in parts]),
            {name: np.concatenate([part.rewards[name] for part in parts]) for name in parts[0].rewards},
        )

    def some(self, chosen_U: np.ndarray) -> EvaluatedLists:
        return EvaluatedLists(
            self.user_ids_U[chosen_U],
            self.positions_U[chosen_U],
            self.top_UK[chosen_U],
            self.behavior_U[chosen_U],
            {name: reward_UT[chosen_U] for name, reward_UT in self.rewards.items()},
        )

    def scores(self, temperature: int = 0) -> dict[str, np.ndarray]:
        """[U] the value of every metric for each user.

        Args:
            temperature: index into the temperatures.
        """
        names = [f"recall@{k}" for k in CUTOFFS] + [f"ndcg@{k}" for k in CUTOFFS[1:]]
        scores = {name: score_of(name, self.positions_U) for name in names}
        for name, reward_UT in self.rewards.items():
            scores["reward" if name == TOTAL else f"reward/{name}"] = reward_UT[:, temperature]
        return scores


def _means(reward_UK: np.ndarray, items_UK: Int64Array) -> np.ndarray:
    """[U] mean of the places that have an item: were the others 0, a short list would hide penalties."""
    is_item_UK = items_UK >= 0
    means_U: np.ndarray = np.where(is_item_UK, reward_UK, 0.0).sum(axis=1)
    return means_U / np.maximum(is_item_UK.sum(axis=1), 1)


def summarized(scores_U: np.ndarray, seed: int = 0) -> Estimate:
    """Mean over users with its percentile bootstrap interval (Efron, 1979)."""
    means = _resampled(scores_U, seed)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(scores_U.mean()), float(low), float(high))


def relative_change(after_U: np.ndarray, before_U: np.ndarray, seed: int = 0) -> Estimate:
    """Relative change of the mean, (after - before) / |before|, with a bootstrap interval over paired users.

    NaN where `before` is 0. Penalties have negative means, so a smaller penalty is a gain.
    """
    if not before_U.mean():
        return Estimate(np.nan, np.nan, np.nan)
    after_R, before_R = _resampled(after_U, seed), _resampled(before_U, seed)
    is_there_R = before_R != 0
    change_R = (after_R - before_R)[is_there_R] / np.abs(before_R[is_there_R])
    low, high = np.quantile(change_R, [0.025, 0.975])
    value = (after_U.mean() - before_U.mean()) / abs(before_U.mean())
    return Estimate(float(value), float(low), float(high))


def _resampled(scores_U: np.ndarray, seed: int) -> np.ndarray:
    """[R] means over users resampled with replacement; a function of seed and number of users."""
    random = np.random.default_rng(seed)
    found = np.empty(NUM_RESAMPLES)
    for resample in range(NUM_RESAMPLES):
        found[resample] = scores_U[random.integers(0, len(scores_U), len(scores_U))].mean()
    return found


def diversity(top_UK: Int64Array, codes_IL: np.ndarray, num_items: int) -> dict[str, float]:
    """Compute intra-list distance and catalog coverage.

    `distance`: 1 minus the mean share of leading codes that two items of a list have in common (intra-list
    diversity, Ziegler et al., WWW 2005); `coverage`: share of the catalog that is in any list (Ge et al.,
    RecSys 2010).
    """
    shown = np.unique(top_UK[top_UK >= 0])
    size = top_UK.shape[1]
    common, pairs = 0.0, 0
    codes_UKL = codes_IL[np.maximum(top_UK, 0)]
    for first in range(size):
        for second in range(first + 1, size):
            both_U = (top_UK[:, first] >= 0) & (top_UK[:, second] >= 0)
            equal_UL = codes_UKL[:, first] == codes_UKL[:, second]
            share_U = np.cumprod(equal_UL, axis=1).mean(axis=1)
            common += float(share_U[both_U].sum())
            pairs += int(both_U.sum())
    return {"distance": 1.0 - common / max(pairs, 1), "coverage": len(shown) / num_items}


def table_of(evaluated: EvaluatedLists, temperature: int = 0) -> Mapping[str, Estimate]:
    """Every metric with its interval."""
    return {name: summarized(scores_U) for name, scores_U in evaluated.scores(temperature).items()}
