"""Rewards for finding the logged next item. They are 0 where it is unknown.

Axes: U users, G candidates of a user.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import model_validator

from rayrec.rl.rewards.base import CandidateLists, RewardArray, RewardContext, RewardSettings
from rayrec.rl.rewards.list_quality import CommonCodes


class HitConfig(RewardSettings):
    """1 for the logged next item."""

    kind: Literal["hit"] = "hit"

    def build(self, context: RewardContext) -> Hit:
        return Hit()


class PrefixMatchConfig(RewardSettings):
    """Share of the logged item's leading codes that a candidate has."""

    kind: Literal["prefix_match"] = "prefix_match"

    def build(self, context: RewardContext) -> PrefixMatch:
        return PrefixMatch(context.codes_IL)


class RankPositionConfig(RewardSettings):
    """1 / log2(2 + p) for the logged item at position p by probability."""

    kind: Literal["rank_position"] = "rank_position"
    penalty: bool = False
    """Penalize wrong items instead: 0 for the logged item, and for every other one a cost that grows with its
    probability. Meant to be combined with `hit`."""
    only_with_hit: bool = False
    """With `penalty`: 0 for all candidates of lists without the logged item."""

    @model_validator(mode="after")
    def _there_is_a_penalty_to_restrict(self) -> RankPositionConfig:
        if self.only_with_hit and not self.penalty:
            raise ValueError(
                "rank_position.only_with_hit is true and penalty false: it says which lists are penalized, "
                "and none is; set penalty to true, or leave it out"
            )
        return self

    def build(self, context: RewardContext) -> RankPosition:
        return RankPosition(self.penalty, self.only_with_hit)


class Hit:
    """1 for the logged next item, else 0."""

    def __call__(self, lists: CandidateLists) -> RewardArray:
        return lists.is_hit_UG.astype(np.float64)


class PrefixMatch:
    """The share of the logged item's codes, from the first on, that a candidate has: 1 for the item itself.

    Distinguishes lists without a hit.
    """

    def __init__(self, codes_IL: np.ndarray) -> None:
        """
        Args:
            codes_IL: [I, L] semantic IDs in catalog order.
        """
        self._common = CommonCodes(codes_IL)

    def __call__(self, lists: CandidateLists) -> RewardArray:
        return self._common.share(lists.items_UG, lists.targets_U[:, None])


class RankPosition:
    """1 / log2(2 + p) for the logged item at position p (from 0) of its list: its gain in NDCG.

    With `penalty`, the other items are scored instead: the one at position p gets -1 / log2(2 + p), divided
    by the sum of 1 / log2(2 + p) over the candidates of the list, so that likelier wrong items cost more; the
    logged item gets 0. Meant to be combined with `Hit`.

    Source: Järvelin and Kekäläinen, ACM TOIS 2002 (discounted gain); the penalty is the ranking reward of
    MiniOneRec, arXiv:2510.24431. Its equation penalizes every list, its published code those with a hit,
    which is `only_with_hit`.
    """

    def __init__(self, penalty: bool = False, only_with_hit: bool = False) -> None:
        """
        Args:
            only_with_hit: whether the penalty is 0 in lists without the logged item.
        """
        if only_with_hit and not penalty:
            raise ValueError("only_with_hit says which lists are penalized; set penalty, too")
        self._penalty, self._only_with_hit = penalty, only_with_hit

    def __call__(self, lists: CandidateLists) -> RewardArray:
        gain_UG = np.where(lists.is_item_UG, 1.0 / np.log2(2.0 + positions(lists)), 0.0)
        if not self._penalty:
            return np.where(lists.is_hit_UG, gain_UG, 0.0)
        sum_U1 = gain_UG.sum(axis=1, keepdims=True)
        penalized_UG = lists.is_item_UG & ~lists.is_hit_UG & (lists.targets_U >= 0)[:, None]
        if self._only_with_hit:
            penalized_UG &= lists.is_hit_UG.any(axis=1, keepdims=True)
        return np.where(penalized_UG, -gain_UG / np.where(sum_U1 > 0, sum_U1, 1.0), 0.0)


def positions(lists: CandidateLists) -> np.ndarray:
    """[U, G] position of each candidate by descending log-probability, from 0; undefined where there is none.

    Items of equal log-probability keep their order in the list. An item that was sampled several times has
    one position, so that equal candidates have equal rewards.
    """
    order_UG = np.argsort(-lists.log_probs_UG, axis=1, kind="stable")
    items_UG = np.take_along_axis(lists.items_UG, order_UG, axis=1)
    # [U, G, G] whether two positions of the sorted list have the same item.
    is_same_UGG = items_UG[:, :, None] == items_UG[:, None, :]
    first_UG = is_same_UGG.argmax(axis=2)
    is_first_UG = (first_UG == np.arange(items_UG.shape[1])) & (items_UG >= 0)
    num_before_UG = np.cumsum(is_first_UG, axis=1) - is_first_UG
    position_UG = np.empty_like(order_UG)
    np.put_along_axis(position_UG, order_UG, np.take_along_axis(num_before_UG, first_UG, axis=1), axis=1)
    return position_UG
