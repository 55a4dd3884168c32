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

    def some(self, items_J: Int64Array) -> ItemBags:
        """Those of some items, in the given order."""
        counts_J = np.diff(self.offsets_I1)[items_J]
        offsets_J1 = np.concatenate([[0], np.cumsum(counts_J)]).astype(np.int64)
        pairs_Q = np.repeat(self.offsets_I1[:-1][items_J] - offsets_J1[:-1], counts_J) + np.arange(
            offsets_J1[-1]
        )
        return ItemBags(offsets_J1, self.features_P[pairs_Q], self.weights_P[pairs_Q])

    def differ_from(self, others: ItemBags) -> np.ndarray:
        """[I] bool: which items have other features there, whatever their weights."""
        counts_I = np.diff(self.offsets_I1)
        is_other_I = counts_I != np.diff(others.offsets_I1)
        same_J = np.flatnonzero(~is_other_I)
        mine, theirs = self.some(same_J), others.some(same_J)
        is_other_P = mine.features_P != theirs.features_P
        is_other_I[np.repeat(same_J, counts_I[same_J])[is_other_P]] = True
        return is_other_I

    def transposed(self, num_features: int) -> ItemBags:
        """The same pairs by feature: which items have each."""
        items_P = np.repeat(np.arange(len(self.offsets_I1) - 1), np.diff(self.offsets_I1))
        return ItemBags.joined([(self.features_P, items_P, self.weights_P)], num_features)

    def share_features_with(self, some_I: np.ndarray) -> np.ndarray:
        """[I] bool: which items have a feature that one of some items has.

        Args:
            some_I: bool, of every item.
        """
        items_P = np.repeat(np.arange(len(some_I)), np.diff(self.offsets_I1))
        is_theirs_P = np.isin(self.features_P, self.features_P[some_I[items_P]])
        return np.bincount(items_P[is_theirs_P], minlength=len(some_I)) > 0

    def of_groups(self, groups_I: Int64Array, num_groups: int) -> ItemBags:
        """The features of groups of items: sums, scaled to the length that those of an item have on average.

        Args:
            groups_I: the group of each item; -1: it is in none.
        """
        items_P = np.repeat(np.arange(len(groups_I)), np.diff(self.offsets_I1))
        lengths_I = np.sqrt(np.bincount(items_P, np.square(self.weights_P), minlength=len(groups_I)))
        in_group_I, in_group_P = groups_I >= 0, groups_I[items_P] >= 0
        num_features = int(self.features_P.max(initial=0)) + 1
        pairs_Q, inverse_P = np.unique(
            groups_I[items_P[in_group_P]] * num_features + self.features_P[in_group_P], return_inverse=True
        )
        groups_Q, features_Q = pairs_Q // num_features, pairs_Q % num_features
        sums_Q = np.bincount(inverse_P, self.weights_P[in_group_P].astype(np.float64), len(pairs_Q))
        num_items_G = np.bincount(groups_I[in_group_I], minlength=num_groups)
        sums_G = np.bincount(groups_I[in_group_I], lengths_I[in_group_I], minlength=num_groups)
        wanted_G = sums_G / np.maximum(num_items_G, 1)
        lengths_G = np.sqrt(np.bincount(groups_Q, np.square(sums_Q), minlength=num_groups))
        weights_Q = sums_Q * (wanted_G / np.maximum(lengths_G, 1e-12))[groups_Q]
        return ItemBags.joined([(groups_Q, features_Q, weights_Q.astype(np.float32))], num_groups)
