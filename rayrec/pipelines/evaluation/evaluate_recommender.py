"""Evaluating a recommender: every user, all items ranked, beside popularity, with intervals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport, OnBatch
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, summarize, target_places
from rayrec.pipelines.tasks.next_item import check_split
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.reading.reader import evaluation_batches

HYBRID = "model + ranker"
"""What the model gives, ranked again; see `RankingStage`."""
MODEL, MODEL_UNMASKED = "model", "model, seen items kept"
POPULARITY, POPULARITY_UNMASKED = "popularity", "popularity, seen items kept"


def evaluate_recommender(
    recommender: Recommender,
    split: Split,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    stage: RankingStage | None = None,
) -> EvaluationReport:
    """All items ranked for every user of a split.

    Args:
        stage: judged as well, beside the model that it takes candidates of. To it, users ask at the time of
            the event that is to be predicted, and have the same histories as the model.

    Raises:
        InputError: the split has no users, or the ranking model may have learned what is to be predicted.
    """
    dataset = recommender.dataset
    check_split(dataset, split)
    if stage is not None:
        stage.check_evaluation()
    times_U, done = dataset.target_times(split), 0
    popularity = Popularity(dataset.items.train_counts_I)
    rankers: dict[str, Callable[[SampleBatch], RankedItems]] = {
        MODEL: lambda samples: recommender.recommend_samples(samples, LIST_LENGTH, exclude_seen=True)
    }
    if stage is not None:
        rankers[HYBRID] = lambda samples: stage.rerank(
            samples, LIST_LENGTH, exclude_seen=True, times_B=times_U[done : done + samples.num_rows]
        )
    rankers |= {
        MODEL_UNMASKED: lambda samples: recommender.recommend_samples(
            samples, LIST_LENGTH, exclude_seen=False
        ),
        POPULARITY: lambda samples: popularity.recommend(recommender.seen(samples)),
        POPULARITY_UNMASKED: lambda samples: popularity.recommend(
            np.empty((samples.num_rows, 0), dtype=np.int64)
        ),
    }
    places: dict[str, list[np.ndarray]] = {name: [] for name in rankers}
    num_users = len(times_U)
    batches = evaluation_batches(
        dataset,
        split,
        batch_size,
        with_times=recommender.needs_times,
        labels=recommender.needs_labels,
    )
    for uninstructed in batches:
        samples = uninstructed.instructed(recommender.evaluation_instruction)
        assert samples.targets_B is not None
        targets_B = dataset.item_positions(samples.targets_B)
        for name, recommend in rankers.items():
            places[name].append(target_places(recommend(samples).items_BK, targets_B))
        done += samples.num_rows
        if on_batch is not None:
            on_batch(done, num_users)
    return EvaluationReport(
        run=recommender.run,
        split=split,
        snapshot_step=recommender.committed_step + 1,
        count=num_users,
        results={name: summarize(np.concatenate(parts)) for name, parts in places.items()},
        ranker=None if stage is None else stage.scorer.run,
    )


class Popularity:
    """Ranks items by their number of training events: what a model has to beat."""

    def __init__(self, train_counts_I: np.ndarray) -> None:
        self._counts_I = train_counts_I
        self._order_I = np.argsort(-train_counts_I, kind="stable")

    def recommend(self, seen_BE: np.ndarray) -> RankedItems:
        """The most frequent items that a row has not seen; `seen_BE` is padded with -1."""
        # No row can need more candidates than the list and all it has seen.
        candidates_C = self._order_I[: LIST_LENGTH + seen_BE.shape[1]]
        is_seen_BI = np.zeros((len(seen_BE), len(self._counts_I) + 1), dtype=bool)
        np.put_along_axis(is_seen_BI, seen_BE, True, axis=1)  # -1 marks the last column, which is no item
        is_seen_BC = is_seen_BI[:, candidates_C]
        first_BK = np.argsort(is_seen_BC, axis=1, kind="stable")[:, :LIST_LENGTH]
        missing_BK = np.take_along_axis(is_seen_BC, first_BK, axis=1)
        items_BK = candidates_C[first_BK]
        scores_BK = self._counts_I[items_BK].astype(np.float32)
        return RankedItems(np.where(missing_BK, -1, items_BK), np.where(missing_BK, -np.inf, scores_BK))
