"""Rewards that call other code: a ranking model, also times a value per item, or a function of the user's.

# my_rewards.py
def fresh(lists):
    return np.where(lists.items_UG >= 0, freshness[lists.items_UG], 0.0)

{kind: function, function: "my_rewards:fresh", folder: rewards}

Axes: U users, G candidates of a user.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.platform.functions import FunctionName, import_function
from rayrec.platform.remote_files import absolute
from rayrec.rl.rewards.base import (
    CandidateLists,
    Ranker,
    Reward,
    RewardArray,
    RewardContext,
    RewardSettings,
)
from rayrec.rl.rewards.item_facts import BusinessValue, ItemValue


class RankerConfig(RewardSettings):
    """The value that a ranking model predicts for showing a candidate."""

    needs_queries: ClassVar[bool] = True

    kind: Literal["ranker"] = "ranker"
    ranking: RankingConfig
    """Which model, and the weights of its labels. The number of candidates and the weight of the
    recommender's own score do not apply here."""

    def build(self, context: RewardContext) -> LearnedRanker:
        assert context.load_ranker is not None, "the context can load ranking models"
        return LearnedRanker(context.load_ranker(self.ranking))

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"ranking": _with_absolute_paths(self.ranking)})


class ExpectedValueConfig(RewardSettings):
    """What an item is worth, times what a ranking model predicts: the value that showing it should bring."""

    needs_queries: ClassVar[bool] = True

    kind: Literal["expected_value"] = "expected_value"
    ranking: RankingConfig
    """Which model, and the weights of its labels: with one label of weight 1, its probability."""
    path: str = Field(min_length=1)
    """A Parquet, CSV or TSV file with a value per item, or a folder of such files."""
    key_column: str = "item_id"
    """Column of item keys, as the source of the data writes them."""
    column: str
    """Column of numbers; items without one are worth 0."""

    def build(self, context: RewardContext) -> ExpectedValue:
        assert context.load_ranker is not None, "the context can load ranking models"
        value = BusinessValue.read(self.path, self.key_column, self.column, context.item_keys)
        return ExpectedValue(LearnedRanker(context.load_ranker(self.ranking)), value)

    def with_absolute_paths(self) -> Self:
        found = {"ranking": _with_absolute_paths(self.ranking), "path": absolute(self.path)}
        return self.model_copy(update=found)


class FunctionConfig(RewardSettings):
    """A function of yours: it takes `CandidateLists` and returns [U, G] numbers."""

    kind: Literal["function"] = "function"
    function: FunctionName
    """`module:function`."""
    folder: Path | None = None
    """Folder of its module, if it is not installed."""

    def build(self, context: RewardContext) -> Reward:
        return import_function("the reward", self.function, self.folder)

    def with_absolute_paths(self) -> Self:
        return self if self.folder is None else self.model_copy(update={"folder": self.folder.resolve()})


class LearnedRanker:
    """The value that a ranking model predicts for showing a candidate, such as `RankingStage.rewards`."""

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker

    def __call__(self, lists: CandidateLists) -> RewardArray:
        """Score the candidates of users whose queries are given.

        Raises:
            ValueError: the lists have no queries.
        """
        if lists.queries is None:
            raise ValueError("a learned ranker needs the queries of the users, and the lists have none")
        reward_UG = np.asarray(self._ranker(lists.queries, lists.items_UG), dtype=np.float64)
        if reward_UG.shape != lists.items_UG.shape:
            return reward_UG  # the mix says what is wrong with it
        return np.where(lists.is_item_UG, reward_UG, 0.0)


class ExpectedValue:
    """Value of an item, times the prediction of a ranking model."""

    def __init__(self, ranker: LearnedRanker, value: ItemValue) -> None:
        self._ranker, self._value = ranker, value

    def __call__(self, lists: CandidateLists) -> RewardArray:
        """Score the candidates of users whose queries are given.

        Raises:
            ValueError: the lists have no queries.
        """
        predicted_UG = self._ranker(lists)
        if predicted_UG.shape != lists.items_UG.shape:
            return predicted_UG  # the mix says what is wrong with it
        return predicted_UG * self._value(lists)


def _with_absolute_paths(ranking: RankingConfig) -> RankingConfig:
    data = None if ranking.data is None else absolute(ranking.data)
    return ranking.model_copy(update={"run": absolute(ranking.run), "data": data})
