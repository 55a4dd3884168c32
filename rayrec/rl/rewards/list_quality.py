"""Rewards that look at the list alone.

Axes: U users, G candidates of a user, I items of the catalog, L code levels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.rl.rewards.base import CandidateLists, RewardArray, RewardContext, RewardSettings


class ValidityConfig(RewardSettings):
    """1 for an item, 0 for none."""

    kind: Literal["validity"] = "validity"

    def build(self, context: RewardContext) -> Validity:
        return Validity()


class DiversityConfig(RewardSettings):
    """1 minus the mean share of leading codes in common with the other candidates of the list."""

    kind: Literal["diversity"] = "diversity"

    def build(self, context: RewardContext) -> Diversity:
        return Diversity(context.codes_IL)


class Validity:
    """1 for an item, 0 where a list has none."""

    def __call__(self, lists: CandidateLists) -> RewardArray:
        return lists.is_item_UG.astype(np.float64)


class Diversity:
    """1 minus the mean share of leading codes that an item has in common with the others of its list.

    1: no other candidate has its first code; 0: all others are the same item, sampled again. An item that is
    alone has 1. The mean over a list is its intra-list diversity.

    Source: intra-list similarity, Ziegler et al., "Improving recommendation lists through topic
    diversification", WWW 2005; here the mean over pairs.
    """

    def __init__(self, codes_IL: np.ndarray) -> None:
        """
        Args:
            codes_IL: [I, L] semantic IDs in catalog order.
        """
        self._common = CommonCodes(codes_IL)

    def __call__(self, lists: CandidateLists) -> RewardArray:
        items_UG, is_item_UG = lists.items_UG, lists.is_item_UG
        share_UGG = self._common.share(items_UG[:, :, None], items_UG[:, None, :])
        # An item has all codes in common with itself.
        of_others_UG = share_UGG.sum(axis=2) - is_item_UG
        num_others_U1 = np.maximum(is_item_UG.sum(axis=1, keepdims=True) - 1, 1)
        return np.where(is_item_UG, 1.0 - of_others_UG / num_others_U1, 0.0)


class CommonCodes:
    """Compares items by the leading codes of their semantic IDs."""

    def __init__(self, codes_IL: np.ndarray) -> None:
        """
        Args:
            codes_IL: [I, L] in catalog order.
        """
        if codes_IL.ndim != 2 or not codes_IL.shape[1]:
            raise ValueError(f"codes_IL must be items by code levels, got the shape {codes_IL.shape}")
        self._codes_IL = codes_IL

    def share(self, items: Int64Array, others: Int64Array) -> RewardArray:
        """Share of leading codes that two items have in common; 0 where one of them is -1.

        The shapes broadcast against each other.
        """
        alike = (items >= 0) & (others >= 0)
        num_common = np.zeros(alike.shape)
        num_levels = self._codes_IL.shape[1]
        # Level by level: codes of all pairs at once would take L times the memory.
        for level in range(num_levels):
            codes_I = self._codes_IL[:, level]
            alike &= codes_I[items] == codes_I[others]
            num_common += alike
        share: RewardArray = num_common / num_levels
        return share
