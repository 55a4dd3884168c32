"""Rewards that look at nothing but the list.

Axes: U users, G candidates of a user.
"""

from __future__ import annotations

import numpy as np

from rayrec.rl.rewards.candidates import CandidateLists, RewardArray
from rayrec.rl.rewards.common_codes import CommonCodes


class Validity:
    """1 for an item, 0 where a list has none."""

    def __call__(self, lists: CandidateLists) -> RewardArray:
        return lists.is_item_UG.astype(np.float64)


class Diversity:
    """1 less the mean share of leading codes that an item has in common with the others of its list.

    1: its first code is that of no other; 0: all others are the same item, drawn again. An item that is alone
    resembles none and has 1. The mean over a list is its intra-list diversity.

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
        # Of itself, an item has all codes.
        of_others_UG = share_UGG.sum(axis=2) - is_item_UG
        num_others_U1 = np.maximum(is_item_UG.sum(axis=1, keepdims=True) - 1, 1)
        return np.where(is_item_UG, 1.0 - of_others_UG / num_others_U1, 0.0)
