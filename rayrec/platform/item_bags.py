"""Numbered features of the items of a catalog, each item's with weights: what rooms that read the catalog
hand to those that learn from it.

Axes: I items, P pairs of an item and a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import Float32Array, Int64Array


@dataclass(frozen=True)
class ItemBags:
    """Item i has the features `offsets_I1[i]` to `offsets_I1[i + 1]` (exclusive)."""

    offsets_I1: Int64Array
    features_P: Int64Array
    weights_P: Float32Array

    @classmethod
    def joined(cls, parts: Sequence[tuple[Int64Array, Int64Array, Float32Array]], num_items: int) -> ItemBags:
        """Of parts that have ([P] items, [P] features, [P] weights)."""
        empty = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
        items_P, features_P, weights_P = (
            np.concatenate(arrays) for arrays in zip(empty, *parts, strict=True)
        )
        order_P = np.argsort(items_P, kind="stable")
        counts_I = np.bincount(items_P, minlength=num_items)
        offsets_I1 = np.concatenate([[0], np.cumsum(counts_I)]).astype(np.int64)
        return cls(offsets_I1, features_P[order_P], weights_P[order_P])

    def transposed(self, num_features: int) -> ItemBags:
        """The same pairs by feature: which items have each."""
        items_P = np.repeat(np.arange(len(self.offsets_I1) - 1), np.diff(self.offsets_I1))
        return ItemBags.joined([(self.features_P, items_P, self.weights_P)], num_features)
