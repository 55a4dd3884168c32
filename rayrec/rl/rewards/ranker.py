"""A ranking model's opinion as a reward.

Axes: U users, G candidates of a user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.rl.rewards.candidates import CandidateLists, RewardArray

if TYPE_CHECKING:
    from rayrec.pipelines.inference.recommender import Query

Ranker = Callable[["Sequence[Query]", Int64Array], np.ndarray]
"""Queries of U users and [U, G] items -> [U, G] what showing each is worth, NaN at -1."""


class LearnedRanker:
    """What a ranking model says that showing a candidate is worth, such as `RankingStage.rewards`."""

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker

    def __call__(self, lists: CandidateLists) -> RewardArray:
        """
        Raises:
            ValueError: the lists say nothing of their users.
        """
        if lists.queries is None:
            raise ValueError("a learned ranker needs the queries of the users, and the lists have none")
        reward_UG = np.asarray(self._ranker(lists.queries, lists.items_UG), dtype=np.float64)
        if reward_UG.shape != lists.items_UG.shape:
            return reward_UG  # the mix says what is wrong with it
        return np.where(lists.is_item_UG, reward_UG, 0.0)
