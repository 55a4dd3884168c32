"""How much of their semantic IDs items share.

Axes: I items of the catalog, L code levels; the items that are compared come in any shape.
"""

from __future__ import annotations

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.rl.rewards.candidates import RewardArray


class CommonCodes:
    """Compares items by the codes that their semantic IDs begin with."""

    def __init__(self, codes_IL: np.ndarray) -> None:
        """
        Args:
            codes_IL: [I, L] in catalog order.
        """
        if codes_IL.ndim != 2 or not codes_IL.shape[1]:
            raise ValueError(f"codes_IL must be items by code levels, got the shape {codes_IL.shape}")
        self._codes_IL = codes_IL

    def share(self, items: Int64Array, others: Int64Array) -> RewardArray:
        """Of L leading codes, the share that an item and the other one have in common; 0 where one of them
        is -1. The shapes broadcast against each other."""
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
