"""Recommending without training: items that others met beside those of a history.

The baseline that every model has to pass, and an answer where a model has none. Co-visitation is computed at
the time of each question, and so may be exact in time; Swing has a table of similar items. The settings are
fixed, and were not tuned to a data set.

Axes: B rows, N events of their histories, K items of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.recommender import Answer, Query, described
from rayrec.platform.arrays import Int64Array
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import (
    ANY_TIME,
    Candidates,
    Histories,
    SimilarItems,
    SimilarityConfig,
    TemporalGraph,
    co_visited,
    graph_of_dataset,
    similar_items,
)

Method = Literal["co_visitation", "swing"]


class NeighborRecommender:
    """Answers questions about a data set's users by the neighbors of their items. Not thread-safe."""

    def __init__(self, dataset: Dataset, graph: TemporalGraph | None = None) -> None:
        """
        Args:
            graph: what is known of users and items; None: the training events of the data set.
        """
        self.dataset = dataset
        self.graph = graph_of_dataset(dataset) if graph is None else graph
        self._tables: dict[Method, SimilarItems] = {}

    def recommend_samples(
        self,
        samples: SampleBatch,
        k: int,
        method: Method = "co_visitation",
        times_B: Int64Array | None = None,
        exclude_seen: bool = True,
    ) -> RankedItems:
        """Catalog positions of the k nearest items of each row; -1 after the last.

        Args:
            times_B: when each row asks, for co-visitation: only what was before counts. None: after all that
                the graph knows, by a table that is made for all rows.
        """
        before_B = np.full(samples.num_rows, ANY_TIME) if times_B is None else times_B
        histories = Histories(samples.item_ids_N, samples.offsets_B1, before_B)
        left_out_BE = histories.padded() if exclude_seen else None
        if times_B is None:
            return self._ranked(self._table(method).answer(histories, k, left_out_BE=left_out_BE))
        assert method == "co_visitation", "a table is of one time"
        return self._ranked(co_visited(self.graph, histories, k, left_out_BE=left_out_BE))

    def answer(self, queries: Sequence[Query], k: int, method: Method = "co_visitation") -> list[Answer]:
        """The k nearest unseen items for each query, best first; fewer where fewer are near."""
        lengths = [len(query.history_ids) for query in queries]
        items_N = np.concatenate([np.zeros(0, np.int64), *(query.history_ids for query in queries)])
        histories = Histories(
            items_N, offsets_from_lengths(np.array(lengths, np.int64)), np.full(len(queries), ANY_TIME)
        )
        restricted = any(query.allowed_I is not None for query in queries)
        most, seen_BE = len(self.dataset.items) if restricted else k, histories.padded()
        if method == "co_visitation":
            found = co_visited(self.graph, histories, most, left_out_BE=seen_BE)
        else:
            found = self._table(method).answer(histories, most, left_out_BE=seen_BE)
        ranked = self._ranked(found)
        answers = []
        for query, items_K, scores_K in zip(queries, ranked.items_BK, ranked.scores_BK, strict=True):
            kept_K = items_K >= 0
            if query.allowed_I is not None:
                kept_K &= query.allowed_I[items_K]
            best = zip(items_K[kept_K][:k].tolist(), scores_K[kept_K][:k].tolist(), strict=True)
            items = [described(self.dataset.items, item, score) for item, score in best]
            num_read = min(len(query.history_ids), 20)
            answers.append(Answer(items, num_read, len(query.history_ids) - num_read))
        return answers

    def query_of_user(self, user_key: str) -> Query | None:
        """The query of a user of the data set with the whole stored history; None for an unknown user."""
        history_ids = self.dataset.history_of(user_key)
        return None if history_ids is None else Query(history_ids, self.dataset.user_by_key(user_key))

    def _table(self, method: Method) -> SimilarItems:
        if method not in self._tables:
            config = SimilarityConfig(method)
            self._tables[method] = similar_items(self.graph, self.dataset.items.ids_I, config)
        return self._tables[method]

    def _ranked(self, candidates: Candidates) -> RankedItems:
        """What the catalog has of them, by position."""
        is_there_BK = candidates.scores_BK > -np.inf
        items_BK = np.where(is_there_BK, self.dataset.item_positions(candidates.ids_BK), -1)
        scores_BK = np.where(items_BK >= 0, candidates.scores_BK, -np.inf).astype(np.float32)
        order_BK = np.argsort(items_BK < 0, axis=1, kind="stable")
        return RankedItems(
            np.take_along_axis(items_BK, order_BK, axis=1), np.take_along_axis(scores_BK, order_BK, axis=1)
        )
