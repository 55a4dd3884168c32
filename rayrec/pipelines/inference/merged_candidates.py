"""Candidates from two sources: what a recommender generates, and neighbors of the history.

A model misses items that it learned little of, and the graph misses what nobody has met beside a history yet.
Each gives a part of the candidates; where one has too few, the other fills up. An item that the catalog of
the recommender lacks is never among them.

Axes: B rows, K candidates of each, G of them generated.
"""

from __future__ import annotations

import numpy as np

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.arrays import Int64Array
from rayrec.samples.base.batches import SampleBatch


class MergedCandidates:
    """Candidates of a model and of neighbors. Not thread-safe."""

    def __init__(self, recommender: Recommender, neighbors: NeighborRecommender, share: float = 0.5) -> None:
        """
        Args:
            share: of the candidates, those that neighbors give.
        """
        self.recommender, self._neighbors, self._share = recommender, neighbors, share

    def recommend_samples(self, samples: SampleBatch, k: int) -> RankedItems:
        """k unseen candidates of each row, those of the model first; -1 where there are fewer.

        A neighbor that the model did not name has the lowest score of its row's generated items: it was not
        better than they.
        """
        generated = self.recommender.recommend_samples(samples, k, exclude_seen=True)
        near = self._neighbors.recommend_samples(samples, k)
        return merged(generated, near.items_BK, k, max(1, round(k * (1.0 - self._share))))


def merged(generated: RankedItems, near_BK: Int64Array, k: int, num_generated: int) -> RankedItems:
    """The first generated items, then neighbors that are not among them, then further generated ones.

    Args:
        near_BK: catalog positions of neighbors, best first; -1 after the last.
        num_generated: generated items that come before any neighbor.
    """
    all_BN = np.concatenate(
        [generated.items_BK[:, :num_generated], near_BK, generated.items_BK[:, num_generated:]], axis=1
    )
    lowest_B1 = np.where(generated.items_BK >= 0, generated.scores_BK, np.inf).min(
        axis=1, keepdims=True, initial=np.inf
    )
    lowest_B1 = np.where(np.isinf(lowest_B1), 0.0, lowest_B1)
    num_near = near_BK.shape[1]
    scores_BN = np.concatenate(
        [
            generated.scores_BK[:, :num_generated],
            np.broadcast_to(lowest_B1, (len(all_BN), num_near)),
            generated.scores_BK[:, num_generated:],
        ],
        axis=1,
    )
    # A neighbor that was generated too has the model's score.
    for items_N, scores_N, named_K, given_K in zip(
        all_BN, scores_BN, generated.items_BK, generated.scores_BK, strict=True
    ):
        order_K = np.argsort(named_K)
        place_N = order_K[np.searchsorted(named_K, items_N, sorter=order_K).clip(max=len(named_K) - 1)]
        is_both_N = named_K[place_N] == items_N
        scores_N[is_both_N] = given_K[place_N[is_both_N]]
    kept_BN = (all_BN >= 0) & _is_first(all_BN)
    order_BK = np.argsort(~kept_BN, axis=1, kind="stable")[:, :k]
    is_kept_BK = np.take_along_axis(kept_BN, order_BK, axis=1)
    return RankedItems(
        np.where(is_kept_BK, np.take_along_axis(all_BN, order_BK, axis=1), -1),
        np.where(is_kept_BK, np.take_along_axis(scores_BN, order_BK, axis=1), -np.inf).astype(np.float32),
    )


def _is_first(items_BN: Int64Array) -> np.ndarray:
    """[B, N] whether an item stands in its row for the first time."""
    order_BN = np.argsort(items_BN, axis=1, kind="stable")
    sorted_BN = np.take_along_axis(items_BN, order_BN, axis=1)
    first_BN = np.ones_like(sorted_BN, dtype=np.bool_)
    first_BN[:, 1:] = sorted_BN[:, 1:] != sorted_BN[:, :-1]
    is_first_BN = np.empty_like(first_BN)
    np.put_along_axis(is_first_BN, order_BN, first_BN, axis=1)
    return is_first_BN
