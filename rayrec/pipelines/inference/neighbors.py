"""Recommending without training: items that others met beside those of a history.

The baseline that every model has to pass, and an answer where a model has none. Co-visitation is computed at
the time of each question, and so may be exact in time; Swing has a table of similar items. The settings are
fixed, and were not tuned to a data set.

Axes: B rows, N events of their histories, K items of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.answers import Answer, Query
from rayrec.pipelines.inference.recommender import described
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import (
    ANY_TIME,
    Candidates,
    CoVisitation,
    Histories,
    SimilarItems,
    SimilarityConfig,
    TemporalGraph,
    co_visited,
    graph_of_dataset,
    neighbors,
    similar_items,
)
from rayrec.samples.graph.counting import FREE

Method = Literal["co_visitation", "swing"]

_MOST_NEAR = 10_000
"""Items that are looked at for rows of which the nearest may not be shown, or are not in the catalog."""
_LARGER = 8
"""Times as many as before."""
_MOST_EVENTS = CoVisitation().last
_MOST_SEEN = 1000
"""Events of a user of the graph that count as seen."""


class NeighborRecommender:
    """Answers questions about a data set's users by the neighbors of their items; from any thread."""

    def __init__(
        self,
        dataset: Dataset,
        graph: TemporalGraph | None = None,
        now: Callable[[], int] = lambda: ANY_TIME,
    ) -> None:
        """
        Args:
            graph: what is known of users and items; None: the training events of the data set.
            now: time of questions that name none, in the graph's unit; `ANY_TIME` is after everything.
        """
        self.dataset = dataset
        self.graph = graph_of_dataset(dataset) if graph is None else graph
        self._now = now
        self._tables: dict[Method, SimilarItems] = {}
        self._making_tables = threading.Lock()

    def warm_up(self) -> None:
        """Compile what events and questions take. The graph itself may be empty, so another one is asked."""
        some, user_id = self.dataset.items.ids_I[:3], 1
        graph = TemporalGraph(self.graph.config)
        for ago in (1, 2, 2):  # later ones are looked up among those before, and merged with them
            graph.append(np.full(len(some), user_id), some, np.full(len(some), self._now() - ago))
        made_up = NeighborRecommender(self.dataset, graph, self._now)
        made_up.answer([Query(history_ids) for history_ids in made_up.histories_of([user_id])], 1)

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
            exclude_seen: leave out items of the row's history.
        """
        before_B = np.full(samples.num_rows, ANY_TIME) if times_B is None else times_B
        histories = Histories(samples.item_ids_N, samples.offsets_B1, before_B)
        seen_BE = histories.padded() if exclude_seen else None
        if times_B is None:
            return self._ranked(self._table(method).answer(histories, k, left_out_BE=seen_BE))
        assert method == "co_visitation", "a table is of one time"
        return self._ranked(co_visited(self.graph, histories, k, left_out_BE=seen_BE))

    def answer(
        self,
        queries: Sequence[Query],
        k: int,
        method: Method = "co_visitation",
        exclude_seen: bool | BoolArray = True,
    ) -> list[Answer]:
        """The k nearest items for each query, best first; fewer where fewer are near.

        Swing has a table, which the first question waits for.
        """
        near = self.near(queries, k, method, exclude_seen)
        answers = []
        for query, items_K, scores_K in zip(queries, near.items_BK, near.scores_BK, strict=True):
            kept_K = items_K >= 0
            best = zip(items_K[kept_K].tolist(), scores_K[kept_K].tolist(), strict=True)
            items = [described(self.dataset.items, item, score, "neighbors") for item, score in best]
            num_read = min(len(query.history_ids), _MOST_EVENTS)
            answers.append(Answer(items, num_read, len(query.history_ids) - num_read))
        return answers

    def near(
        self,
        queries: Sequence[Query],
        k: int,
        method: Method = "co_visitation",
        exclude_seen: bool | BoolArray = True,
    ) -> RankedItems:
        """Catalog positions of the k nearest items that may be shown for each query; -1 after the last.

        Args:
            exclude_seen: leave out items of the history; of all queries alike, or of each.
        """
        excludes_B = np.broadcast_to(np.asarray(exclude_seen), len(queries))
        near, lacks_B = self._nearest(queries, k, k, method, excludes_B)
        most = k
        while lacks_B.any() and most < _MOST_NEAR:  # of those whose nearest may not be shown, others
            most = min(_LARGER * most, _MOST_NEAR)
            rows_L = np.flatnonzero(lacks_B)
            again, lacks_L = self._nearest(
                [queries[row] for row in rows_L.tolist()], k, most, method, excludes_B[rows_L]
            )
            near.items_BK[rows_L], near.scores_BK[rows_L] = again.items_BK, again.scores_BK
            lacks_B[rows_L] = lacks_L
        return near

    def _nearest(
        self, queries: Sequence[Query], k: int, most: int, method: Method, excludes_B: BoolArray
    ) -> tuple[RankedItems, BoolArray]:
        """([B, k] those of the nearest that may be shown; [B] which rows others could fill).

        Args:
            most: the nearest that are looked at.
        """
        histories = Histories(
            np.concatenate([np.zeros(0, np.int64), *(query.history_ids for query in queries)]),
            offsets_from_lengths(np.array([len(query.history_ids) for query in queries], np.int64)),
            np.full(len(queries), self._now()),
        )
        seen_BE = np.where(excludes_B[:, None], histories.padded(), FREE)
        if method == "co_visitation":
            found = co_visited(self.graph, histories, most, left_out_BE=seen_BE)
        else:
            found = self._table(method).answer(histories, most, left_out_BE=seen_BE)
        ranked = self._ranked(found, [query.allowed_I for query in queries])
        is_full_B = found.scores_BK[:, -1] > -np.inf
        near = RankedItems(ranked.items_BK[:, :k].copy(), ranked.scores_BK[:, :k].copy())
        return near, is_full_B & (near.items_BK[:, k - 1] < 0)

    def histories_of(self, user_ids: Sequence[int]) -> list[Int64Array]:
        """The newest thousand items that the graph knows of users, oldest first; of the catalog or not."""
        ids_B = np.array(user_ids, np.int64)
        found = neighbors(self.graph, "user", ids_B, np.full(len(ids_B), self._now()), _MOST_SEEN)
        return [
            ids_K[:count][::-1] for ids_K, count in zip(found.ids_FK, found.counts_F.tolist(), strict=True)
        ]

    def query_of_user(self, user_key: str) -> Query | None:
        """The query of a user of the data set with the whole stored history; None for an unknown user."""
        history_ids = self.dataset.history_of(user_key)
        return None if history_ids is None else Query(history_ids, self.dataset.user_by_key(user_key))

    def _table(self, method: Method) -> SimilarItems:
        with self._making_tables:
            if method not in self._tables:
                config = SimilarityConfig(method)
                self._tables[method] = similar_items(self.graph, self.dataset.items.ids_I, config)
            return self._tables[method]

    def _ranked(
        self, candidates: Candidates, allowed: Sequence[BoolArray | None] | None = None
    ) -> RankedItems:
        """What the catalog has of them and may be shown, by position."""
        is_there_BK = candidates.scores_BK > -np.inf
        items_BK = np.where(is_there_BK, self.dataset.item_positions(candidates.ids_BK), -1)
        for row, allowed_I in enumerate(allowed or ()):
            if allowed_I is not None:
                items_BK[row] = np.where(allowed_I[items_BK[row]], items_BK[row], -1)
        scores_BK = np.where(items_BK >= 0, candidates.scores_BK, -np.inf).astype(np.float32)
        order_BK = np.argsort(items_BK < 0, axis=1, kind="stable")
        return RankedItems(
            np.take_along_axis(items_BK, order_BK, axis=1), np.take_along_axis(scores_BK, order_BK, axis=1)
        )
