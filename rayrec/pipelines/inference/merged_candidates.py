"""Candidates from two sources: what a recommender generates, and neighbors of the history.

A model misses items that it learned little of, and the graph misses what nobody has met beside a history yet.
Each gives a part of the candidates; where one has too few, the other fills up. An item that the catalog of
the recommender lacks is never among them.

Axes: B rows, K candidates of each, G of them generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import pandas as pd

from rayrec.models.decoding.beam_policy import Beams
from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.answers import FULL_BUDGET, Answer, Budget, Query, Wanted
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.recommender import Recommender, described
from rayrec.platform.arrays import Int64Array
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset


class MergedCandidates:
    """Candidates of a model and of neighbors, for a ranking stage. Not thread-safe, as the model is not."""

    def __init__(self, recommender: Recommender, neighbors: NeighborRecommender, share: float = 0.5) -> None:
        """
        Args:
            share: of the candidates, those that neighbors give.
        """
        self.recommender, self._neighbors, self._share = recommender, neighbors, share

    @property
    def dataset(self) -> Dataset:
        return self.recommender.dataset

    def num_beams(self, k: int, budget: Budget = FULL_BUDGET) -> int:
        """As `Recommender.num_beams`."""
        return self.recommender.num_beams(k, budget)

    def beams_of(self, wanted: Wanted) -> Beams:
        """As `Recommender.beams_of`."""
        return self.recommender.beams_of(wanted)

    def recommend_samples(self, samples: SampleBatch, k: int, exclude_seen: bool = True) -> RankedItems:
        """k candidates of each row, those of the model first; -1 where there are fewer.

        A neighbor that the model did not name has the lowest score of its row's generated items: it was not
        better than they.
        """
        generated = self.recommender.recommend_samples(samples, k, exclude_seen)
        near = self._neighbors.recommend_samples(samples, k, exclude_seen=exclude_seen)
        return merged(generated, near.items_BK, k, self._num_generated(k))

    def answer_each(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        """As `Recommender.answer_each`; each item says what named it. What both named is the model's."""
        answers = self.recommender.answer_each(queries, wanted)
        excludes_B = np.array([each.exclude_seen for each in wanted])
        near = self._neighbors.near(queries, max(each.k for each in wanted), exclude_seen=excludes_B)
        found, merged_answers = self._by_position(answers), list(answers)
        for k in {each.k for each in wanted}:
            rows = [row for row, each in enumerate(wanted) if each.k == k]
            generated = RankedItems(found.items_BK[rows], found.scores_BK[rows])
            both = merged(generated, near.items_BK[rows, :k], k, self._num_generated(k))
            for row, items_K, scores_K in zip(rows, both.items_BK, both.scores_BK, strict=True):
                named = dict(zip(found.items_BK[row].tolist(), answers[row].items, strict=False))
                items = [
                    named.get(item) or described(self.dataset.items, item, score, "neighbors")
                    for item, score in zip(items_K.tolist(), scores_K.tolist(), strict=True)
                    if item >= 0
                ]
                merged_answers[row] = replace(answers[row], items=items)
        return merged_answers

    def _by_position(self, answers: Sequence[Answer]) -> RankedItems:
        most = max(1, *(len(answer.items) for answer in answers))
        items_BK = np.full((len(answers), most), -1)
        scores_BK = np.full((len(answers), most), -np.inf, np.float32)
        for row, answer in enumerate(answers):
            keys = [item.item_key for item in answer.items]
            items_BK[row, : len(keys)] = self._positions.get_indexer(keys)
            scores_BK[row, : len(keys)] = [item.score for item in answer.items]
        return RankedItems(items_BK, scores_BK)

    @cached_property
    def _positions(self) -> pd.Index:
        return pd.Index(self.dataset.items.keys.to_pandas())

    def _num_generated(self, k: int) -> int:
        return max(1, round(k * (1.0 - self._share)))


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
