"""What is evaluated: a model, with a ranking stage behind it, and baselines that need no training.

Axes: B rows of a batch, K items of a list, I items of the catalog, E items of a history.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.evaluation.lists import (
    CO_VISITATION,
    CO_VISITATION_IN_TIME,
    CO_VISITATION_UNMASKED,
    HYBRID,
    MODEL,
    MODEL_UNMASKED,
    POPULARITY,
    POPULARITY_UNMASKED,
    REPEATS,
    SWING,
    SWING_UNMASKED,
)
from rayrec.pipelines.inference.neighbors import Method, NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.positions import ListInfo, SeenItems
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, MOST_DEPTH
from rayrec.platform.arrays import Int64Array
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import graph_of_dataset

EVERY_ITEM = "every item is scored"
MOST_BASELINE_ITEMS = 200_000
"""Of catalogs with more, neighbors are judged only where they are asked for."""
logger = logging.getLogger(__name__)

Recommend = Callable[[SampleBatch, Int64Array], RankedItems]
"""(samples, UNIX seconds at which each asks) -> the best items."""


@dataclass(frozen=True)
class Ranker:
    """One method, and what its lists are."""

    recommend: Recommend
    info: ListInfo


def model_rankers(
    recommender: Recommender, stage: RankingStage | None = None, depth: int | None = None
) -> dict[str, Ranker]:
    """A model, masked and not, and what a ranking stage makes of its candidates.

    Args:
        depth: items of a list; None: `MOST_DEPTH`, and of a generative model as many as it has beams, so
            that its lists are those that it gives in service.
    """
    num_items = len(recommender.dataset.items)
    beams = recommender.num_beams(LIST_LENGTH if depth is None else depth)
    length = (beams or MOST_DEPTH) if depth is None else depth
    search = f"{beams} beams" if beams else EVERY_ITEM

    def ranker(exclude_seen: bool) -> Ranker:
        return Ranker(
            lambda samples, _: recommender.recommend_samples(samples, length, exclude_seen=exclude_seen),
            _info(length, num_items, exclude_seen, search),
        )

    found = {MODEL: ranker(exclude_seen=True)}
    if stage is not None:
        found[HYBRID] = _stage_ranker(stage, num_items)
    return found | {MODEL_UNMASKED: ranker(exclude_seen=False)}


def _stage_ranker(stage: RankingStage, num_items: int) -> Ranker:
    # Not deeper when the model is asked for more: other candidates would be another method.
    length = max(stage.config.candidates, LIST_LENGTH)
    return Ranker(
        lambda samples, times_B: stage.rerank(samples, length, exclude_seen=True, times_B=times_B),
        _info(length, num_items, True, f"{length} candidates of the model are ranked again"),
    )


def popularity_rankers(
    dataset: Dataset, seen: Callable[[SampleBatch], Int64Array], depth: int | None = None
) -> dict[str, Ranker]:
    """The most popular items, masked and not.

    Args:
        seen: [B, E] catalog positions of each history's items, padded with -1.
    """
    length = MOST_DEPTH if depth is None else depth
    popularity = Popularity(dataset.items.train_counts_I)
    num_items = len(dataset.items)
    return {
        POPULARITY: Ranker(
            lambda samples, _: popularity.recommend(seen(samples), length),
            _info(length, num_items, True, EVERY_ITEM),
        ),
        POPULARITY_UNMASKED: Ranker(
            lambda samples, _: popularity.recommend(_nothing_seen(samples), length),
            _info(length, num_items, False, EVERY_ITEM),
        ),
    }


def repeats_ranker(dataset: Dataset, depth: int | None = None) -> dict[str, Ranker]:
    """The items of each history, the newest first."""
    length = MOST_DEPTH if depth is None else depth
    return {
        REPEATS: Ranker(
            lambda samples, _: newest_first(seen_items(dataset, samples), length),
            _info(length, len(dataset.items), False, "items of the history, and no others"),
        )
    }


def neighbor_rankers(
    dataset: Dataset, depth: int | None = None, at_the_time: bool = False
) -> dict[str, Ranker]:
    """Co-visitation and Swing, masked and not.

    Args:
        at_the_time: co-visitation at the time of each target as well, where the data set has times.
    """
    length = MOST_DEPTH if depth is None else depth
    num_items = len(dataset.items)
    known = NeighborRecommender(dataset)

    def ranker(method: Method, exclude_seen: bool) -> Ranker:
        return Ranker(
            lambda samples, _: known.recommend_samples(samples, length, method, exclude_seen=exclude_seen),
            _info(length, num_items, exclude_seen, "items near the history, and no others"),
        )

    found = {
        CO_VISITATION: ranker("co_visitation", exclude_seen=True),
        CO_VISITATION_UNMASKED: ranker("co_visitation", exclude_seen=False),
        SWING: ranker("swing", exclude_seen=True),
        SWING_UNMASKED: ranker("swing", exclude_seen=False),
    }
    if at_the_time and dataset.has_times() and not dataset.has_order_alone():
        in_time = NeighborRecommender(dataset, graph_of_dataset(dataset, "all"))
        found[CO_VISITATION_IN_TIME] = Ranker(
            lambda samples, times_B: in_time.recommend_samples(samples, length, times_B=times_B),
            found[CO_VISITATION].info,
        )
    return found


def baselines_of(dataset: Dataset, depth: int | None = None) -> dict[str, Ranker]:
    """Neighbors beside a model; none of a catalog on which they would take long."""
    if len(dataset.items) > MOST_BASELINE_ITEMS:
        logger.info(
            "%s: neighbors are not judged beside the model, since tables of %d items take gigabytes; "
            "--neighbors %s judges them alone",
            dataset.root,
            len(dataset.items),
            dataset.root,
        )
        return {}
    return neighbor_rankers(dataset, depth)


def _info(length: int, num_items: int, exclude_seen: bool, search: str) -> ListInfo:
    # What is not in a list of everything is nowhere: no cutoff is too deep.
    depth = max(length, MOST_DEPTH) if length >= num_items else length
    seen_items: SeenItems = "left out" if exclude_seen else "kept"
    return ListInfo(depth=depth, seen_items=seen_items, search=search)


def seen_items(dataset: Dataset, samples: SampleBatch) -> Int64Array:
    """[B, E] catalog positions of each history's items, padded with -1."""
    lengths_B = np.diff(samples.offsets_B1)
    seen_BE = np.full((samples.num_rows, int(lengths_B.max(initial=0))), -1, dtype=np.int64)
    is_there_BE = np.arange(seen_BE.shape[1]) < lengths_B[:, None]
    seen_BE[is_there_BE] = dataset.item_positions(samples.item_ids_N)
    return seen_BE


def newest_first(items_BE: Int64Array, length: int) -> RankedItems:
    """The distinct items of each row, the last first; -1 is no item, here and where a row has fewer."""
    newest_BE = np.pad(items_BE[:, ::-1], ((0, 0), (0, length)), constant_values=-1)
    order_BE = np.argsort(newest_BE, axis=1, kind="stable")
    is_again_BE = np.diff(np.take_along_axis(newest_BE, order_BE, axis=1), axis=1, prepend=-1) == 0
    is_left_BE = newest_BE < 0
    is_left_BE |= np.take_along_axis(is_again_BE, np.argsort(order_BE, axis=1), axis=1)
    first_BK = np.argsort(is_left_BE, axis=1, kind="stable")[:, :length]
    items_BK = np.where(is_left_BE, -1, newest_BE)[np.arange(len(newest_BE))[:, None], first_BK]
    scores_BK = np.where(items_BK < 0, -np.inf, -np.arange(length)).astype(np.float32)
    return RankedItems(items_BK, scores_BK)


def _nothing_seen(samples: SampleBatch) -> Int64Array:
    return np.empty((samples.num_rows, 0), dtype=np.int64)


class Popularity:
    """Ranks items by their number of training events: what a model has to beat."""

    def __init__(self, train_counts_I: Int64Array) -> None:
        self._counts_I = train_counts_I
        self._order_I = np.argsort(-train_counts_I, kind="stable")
        self._rank_I1 = np.empty(len(train_counts_I) + 1, dtype=np.int64)
        self._rank_I1[self._order_I] = np.arange(len(train_counts_I))
        self._rank_I1[-1] = len(train_counts_I)  # of -1, which is no item

    def recommend(self, seen_BE: Int64Array, length: int = LIST_LENGTH) -> RankedItems:
        """The most frequent items that a row has not seen; `seen_BE` is padded with -1."""
        # No row can need more candidates than the list and all it has seen.
        candidates_C = self._order_I[: length + seen_BE.shape[1]]
        is_seen_BC = np.zeros((len(seen_BE), len(candidates_C)), dtype=bool)
        rank_BE = self._rank_I1[seen_BE]
        row_S, column_S = np.nonzero(rank_BE < len(candidates_C))
        is_seen_BC[row_S, rank_BE[row_S, column_S]] = True
        first_BK = np.argsort(is_seen_BC, axis=1, kind="stable")[:, :length]
        missing_BK = np.take_along_axis(is_seen_BC, first_BK, axis=1)
        items_BK = candidates_C[first_BK]
        scores_BK = self._counts_I[items_BK].astype(np.float32)
        return RankedItems(np.where(missing_BK, -1, items_BK), np.where(missing_BK, -np.inf, scores_BK))
