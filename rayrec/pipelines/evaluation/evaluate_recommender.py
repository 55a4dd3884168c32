"""Evaluating a recommender: every user, all items ranked, beside popularity, with intervals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport, OnBatch
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, summarize, target_places
from rayrec.pipelines.tasks.next_item import check_split
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.graph import graph_of_dataset
from rayrec.samples.reading.reader import evaluation_batches

HYBRID = "model + ranker"
"""What the model gives, ranked again; see `RankingStage`."""
MODEL, MODEL_UNMASKED = "model", "model, seen items kept"
POPULARITY, POPULARITY_UNMASKED = "popularity", "popularity, seen items kept"
CO_VISITATION, SWING = "neighbors, co-visitation", "neighbors, Swing"
CO_VISITATION_UNMASKED, SWING_UNMASKED = f"{CO_VISITATION}, seen items kept", f"{SWING}, seen items kept"
CO_VISITATION_IN_TIME = "neighbors, co-visitation at the time"
"""All events of all users before the one that is to be predicted, held-out ones of other users too: what a
service would know. The others know training events alone, as models do."""

_MOST_SCORES = 1 << 28
"""Of a batch, where a model scores all items: 1 GiB."""
MOST_BASELINE_ITEMS = 200_000
"""Of catalogs with more, neighbors are judged only where they are asked for."""
logger = logging.getLogger(__name__)

Ranker = Callable[[SampleBatch, np.ndarray], RankedItems]
"""(samples, UNIX seconds at which each asks) -> the best items."""


def evaluate_recommender(
    recommender: Recommender,
    split: Split,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    stage: RankingStage | None = None,
    baselines: bool = True,
    max_users: int | None = None,
) -> EvaluationReport:
    """All items ranked for every user of a split.

    Args:
        max_users: only the first so many users, in the order of a hash of their ids: a sample, and the same
            one for every model. No others are read.
        stage: judged as well, beside the model that it takes candidates of. To it, users ask at the time of
            the event that is to be predicted, and have the same histories as the model.
        baselines: judge neighbors as well, which need no training but time on a large catalog.

    Raises:
        InputError: the split has no users, or the ranking model may have learned what is to be predicted.
    """
    dataset = recommender.dataset
    check_split(dataset, split)
    if stage is not None:
        stage.check_evaluation()
    if not recommender.num_beams(1):  # it scores every item for every user of a batch
        batch_size = max(min(batch_size, _MOST_SCORES // len(dataset.items)), 1)
    popularity = Popularity(dataset.items.train_counts_I)
    rankers: dict[str, Ranker] = {
        MODEL: lambda samples, _: recommender.recommend_samples(samples, LIST_LENGTH, exclude_seen=True)
    }
    if stage is not None:
        rankers[HYBRID] = lambda samples, times_B: stage.rerank(
            samples, LIST_LENGTH, exclude_seen=True, times_B=times_B
        )
    rankers |= {
        MODEL_UNMASKED: lambda samples, _: recommender.recommend_samples(
            samples, LIST_LENGTH, exclude_seen=False
        ),
        POPULARITY: lambda samples, _: popularity.recommend(recommender.seen(samples)),
        POPULARITY_UNMASKED: lambda samples, _: popularity.recommend(
            np.empty((samples.num_rows, 0), dtype=np.int64)
        ),
    }
    if baselines and len(dataset.items) > MOST_BASELINE_ITEMS:
        logger.info(
            "%s: neighbors are not judged beside the model, since tables of %d items take gigabytes; "
            "--neighbors %s judges them alone",
            dataset.root,
            len(dataset.items),
            dataset.root,
        )
    elif baselines:
        rankers |= _neighbors(dataset)
    batches = evaluation_batches(
        dataset,
        split,
        batch_size,
        max_users,
        with_times=recommender.needs_times,
        labels=recommender.needs_labels,
    )
    instructed = (samples.instructed(recommender.evaluation_instruction) for samples in batches)
    return EvaluationReport(
        run=recommender.run,
        split=split,
        snapshot_step=recommender.committed_step + 1,
        count=_num_users(dataset, split, max_users),
        results=_judged(dataset, split, instructed, rankers, on_batch, max_users),
        ranker=None if stage is None else stage.scorer.run,
    )


def evaluate_neighbors(
    dataset: Dataset,
    split: Split,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    max_users: int | None = None,
) -> EvaluationReport:
    """What needs no training, judged on every user of a split: neighbors and popularity.

    Co-visitation is judged at the time of each target as well, where the data set has times.

    Args:
        max_users: as of `evaluate_recommender`.

    Raises:
        InputError: the split has no users.
    """
    check_split(dataset, split)
    popularity = Popularity(dataset.items.train_counts_I)
    rankers = _neighbors(dataset)
    if dataset.has_times():
        in_time = NeighborRecommender(dataset, graph_of_dataset(dataset, "all"))
        rankers[CO_VISITATION_IN_TIME] = lambda samples, times_B: in_time.recommend_samples(
            samples, LIST_LENGTH, times_B=times_B
        )
    rankers[POPULARITY] = lambda samples, _: popularity.recommend(_seen(dataset, samples))
    rankers[POPULARITY_UNMASKED] = lambda samples, _: popularity.recommend(
        np.empty((samples.num_rows, 0), dtype=np.int64)
    )
    batches = evaluation_batches(dataset, split, batch_size, max_users)
    return EvaluationReport(
        run=str(dataset.root),
        split=split,
        snapshot_step=0,
        count=_num_users(dataset, split, max_users),
        results=_judged(dataset, split, batches, rankers, on_batch, max_users),
    )


def _neighbors(dataset: Dataset) -> dict[str, Ranker]:
    known = NeighborRecommender(dataset)
    return {
        CO_VISITATION: lambda samples, _: known.recommend_samples(samples, LIST_LENGTH),
        CO_VISITATION_UNMASKED: lambda samples, _: known.recommend_samples(
            samples, LIST_LENGTH, exclude_seen=False
        ),
        SWING: lambda samples, _: known.recommend_samples(samples, LIST_LENGTH, "swing"),
        SWING_UNMASKED: lambda samples, _: known.recommend_samples(
            samples, LIST_LENGTH, "swing", exclude_seen=False
        ),
    }


def _judged(
    dataset: Dataset,
    split: Split,
    batches: Iterable[SampleBatch],
    rankers: Mapping[str, Ranker],
    on_batch: OnBatch | None,
    max_users: int | None,
) -> dict[str, dict[str, Estimate]]:
    """Where each ranker puts the targets of all rows."""
    times_U, done = dataset.target_times(split, max_users), 0
    places: dict[str, list[np.ndarray]] = {name: [] for name in rankers}
    for samples in batches:
        assert samples.targets_B is not None
        targets_B = dataset.item_positions(samples.targets_B)
        times_B = times_U[done : done + samples.num_rows]
        for name, recommend in rankers.items():
            places[name].append(target_places(recommend(samples, times_B).items_BK, targets_B))
        done += samples.num_rows
        if on_batch is not None:
            on_batch(done, len(times_U))
    return {name: summarize(np.concatenate(parts)) for name, parts in places.items()}


def _num_users(dataset: Dataset, split: Split, max_users: int | None) -> int:
    num_users = dataset.num_evaluated(split)
    return num_users if max_users is None else min(max_users, num_users)


def _seen(dataset: Dataset, samples: SampleBatch) -> np.ndarray:
    """[B, E] catalog positions of each history's items, padded with -1."""
    lengths_B = np.diff(samples.offsets_B1)
    seen_BE = np.full((samples.num_rows, int(lengths_B.max(initial=0))), -1, dtype=np.int64)
    is_there_BE = np.arange(seen_BE.shape[1]) < lengths_B[:, None]
    seen_BE[is_there_BE] = dataset.item_positions(samples.item_ids_N)
    return seen_BE


class Popularity:
    """Ranks items by their number of training events: what a model has to beat."""

    def __init__(self, train_counts_I: np.ndarray) -> None:
        self._counts_I = train_counts_I
        self._order_I = np.argsort(-train_counts_I, kind="stable")
        self._rank_I1 = np.empty(len(train_counts_I) + 1, dtype=np.int64)
        self._rank_I1[self._order_I] = np.arange(len(train_counts_I))
        self._rank_I1[-1] = len(train_counts_I)  # of -1, which is no item

    def recommend(self, seen_BE: np.ndarray) -> RankedItems:
        """The most frequent items that a row has not seen; `seen_BE` is padded with -1."""
        # No row can need more candidates than the list and all it has seen.
        candidates_C = self._order_I[: LIST_LENGTH + seen_BE.shape[1]]
        is_seen_BC = np.zeros((len(seen_BE), len(candidates_C)), dtype=bool)
        rank_BE = self._rank_I1[seen_BE]
        row_S, column_S = np.nonzero(rank_BE < len(candidates_C))
        is_seen_BC[row_S, rank_BE[row_S, column_S]] = True
        first_BK = np.argsort(is_seen_BC, axis=1, kind="stable")[:, :LIST_LENGTH]
        missing_BK = np.take_along_axis(is_seen_BC, first_BK, axis=1)
        items_BK = candidates_C[first_BK]
        scores_BK = self._counts_I[items_BK].astype(np.float32)
        return RankedItems(np.where(missing_BK, -1, items_BK), np.where(missing_BK, -np.inf, scores_BK))
