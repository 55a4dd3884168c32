"""Lists of ten items of a policy and of the controls that train nothing: temperature, and the best of many.

    beam          the likeliest ten, which is what is served
    temperature   ten that are sampled, at the temperature whose lists were best on validation
    best of N     N distinct items are sampled, and a reward chooses ten of them

Axes: U users, K positions of a list, N candidates, I items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.rl.config import RlConfig
from rayrec.rl.evaluation import LIST_SEED, prompts_of
from rayrec.rl.list_metrics import ListSettings
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import Prompts, is_held_out
from rayrec.rl.rewards.config import RewardsConfig, build_rewards
from rayrec.rl.scoring import RewardInputs
from rayrec.samples.dataset.manifest import Split

K, BATCH = 10, 512
Scores = dict[str, Float64Array]
"""By metric, a number per user."""
Choose = Callable[[Prompts, Int64Array], Float64Array]
"""(prompts, [U, N] items) -> [U, N] by which the best ten are chosen."""


class ListMaker:
    """Lists of one policy, and what they are worth."""

    def __init__(self, run: str, snapshot: str, rewards: RewardsConfig, held_out_share: float) -> None:
        """
        Args:
            rewards: what lists are worth: the truth, where there is one.
            held_out_share: of users that no policy was trained on by rewards.
        """
        self._held_out_share = held_out_share
        config = RlConfig(init_from=run, snapshot=snapshot, rewards=rewards)
        self.policy = Policy.load(config)
        self._inputs = RewardInputs(self.policy, rewards.needs_queries)
        self._mix = build_rewards(rewards, self._inputs.context())

    def prompts(self, split: Split, held_out_share: float | None = None) -> list[Prompts]:
        """Users of a split, batch by batch; all of them, or those held out."""
        dataset = self.policy.task.dataset
        return prompts_of(dataset, split, BATCH, None, dataset.has_times(), held_out_share)

    def of_test(self, metric: str, score_U: Float64Array) -> Scores:
        """A metric of all test users, and of those held out; NaN for the others."""
        held_out_U = np.concatenate(
            [is_held_out(each.samples.user_ids_B, self._held_out_share) for each in self.prompts("test")]
        )
        return {metric: score_U, f"{metric}, users held out": np.where(held_out_U, score_U, np.nan)}

    def beam(self) -> Scores:
        """The likeliest items."""

        def lists(prompts: Prompts) -> Int64Array:
            found: Int64Array = self._sampled(prompts, 1, 1.0)[0][:, :K]
            return found

        return self._tested(lists)

    def temperature(self, tried: Sequence[float], metric: str) -> tuple[float, Scores]:
        """Sampled lists at the temperature that is best on held-out validation users."""
        valid = self.prompts("valid", self._held_out_share)

        def lists(temperature: float) -> Callable[[Prompts], Int64Array]:
            return lambda prompts: self._sampled(prompts, K, temperature)[1]

        best = max(tried, key=lambda each: self._scores(valid, lists(each))[metric].mean())
        return best, self._tested(lists(best))

    def best_of(self, num: int, choose: Choose) -> Scores:
        """The ten of `num` distinct sampled items that are worth most by `choose`."""

        def lists(prompts: Prompts) -> Int64Array:
            items_UN = self._sampled(prompts, num, 1.0)[1]
            value_UN = np.where(items_UN >= 0, choose(prompts, items_UN), -np.inf)
            order_UN = np.argsort(-value_UN, axis=1, kind="stable")
            return np.take_along_axis(items_UN, order_UN[:, :K], axis=1)

        return self._tested(lists)

    def worth(self, prompts: Prompts, items_UK: Int64Array) -> Float64Array:
        """[U, K] the reward of each item; 0 where there is none."""
        # Lists are in their order, so a position has a smaller log-probability than the one before.
        log_probs_UK = np.where(items_UK >= 0, -np.arange(1.0, items_UK.shape[1] + 1.0), -np.inf)
        lists = self._inputs.lists(prompts, items_UK, log_probs_UK)
        mixed = self._mix.mix(lists, learns=False, normalizes=False)
        return np.where(items_UK >= 0, mixed.total_UG, 0.0)

    def _sampled(self, prompts: Prompts, size: int, temperature: float) -> tuple[Int64Array, Int64Array]:
        """([U, LIST_LENGTH] items ranked, [U, size] items sampled, likeliest first)."""
        found = self.policy.sample_lists(prompts, ListSettings(size, (temperature,), LIST_SEED))
        return found.ranked_UK, found.lists[0][0]

    def _tested(self, lists: Callable[[Prompts], Int64Array]) -> Scores:
        found = self._scores(self.prompts("test"), lists)
        return found | self.of_test("worth", found["worth"])

    def _scores(self, batches: Sequence[Prompts], lists: Callable[[Prompts], Int64Array]) -> Scores:
        parts = [self._scores_of(prompts, lists(prompts)) for prompts in batches]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _scores_of(self, prompts: Prompts, items_UK: Int64Array) -> Scores:
        is_hit_UK = (items_UK == prompts.targets_U[:, None]) & (items_UK >= 0)
        gain_K = 1.0 / np.log2(2.0 + np.arange(items_UK.shape[1]))
        return {
            "recall@10": is_hit_UK.any(axis=1).astype(np.float64),
            "ndcg@10": (is_hit_UK * gain_K).sum(axis=1),
            "worth": self.worth(prompts, items_UK).mean(axis=1),
        }


@dataclass
class ItemMeans:
    """A reward model: the mean answer of each item, shrunk towards the mean of all."""

    sum_I: Float64Array
    count_I: Float64Array
    shrinkage: float = 10.0

    @classmethod
    def of(cls, items: Int64Array, answers: Float64Array, num_items: int) -> ItemMeans:
        """Of answers that were given to items."""
        is_item = items >= 0
        return cls(
            np.bincount(items[is_item], answers[is_item], num_items).astype(np.float64),
            np.bincount(items[is_item], minlength=num_items).astype(np.float64),
        )

    def __call__(self, prompts: Prompts, items_UN: Int64Array) -> Float64Array:
        mean = self.sum_I.sum() / max(self.count_I.sum(), 1.0)
        value_I: Float64Array = (self.sum_I + self.shrinkage * mean) / (self.count_I + self.shrinkage)
        return value_I[np.maximum(items_UN, 0)]
