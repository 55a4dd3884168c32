"""Two recommenders on the same users of a data set, of which each user has a pair of scores.

Axes: U users, B rows of a batch, K items of a list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayrec.pipelines.evaluation.held_out import HeldOut
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.evaluation_report import OnBatch
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, target_places, user_scores
from rayrec.platform.arrays import Float64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import Split

LEAST_KNOWN = 0.1
"""Share of the items to be predicted that the catalogs know; below it they are of something else."""


class PairedScores(NamedTuple):
    """By user."""

    before_U: Float64Array
    after_U: Float64Array


def paired_scores(
    before: Recommender,
    after: Recommender,
    dataset: Dataset,
    split: Split,
    metric: str = "ndcg@10",
    batch_size: int = 256,
    max_users: int | None = None,
    on_batch: OnBatch | None = None,
    exclude_seen: bool = True,
) -> PairedScores:
    """Score the lists of two models, whose catalogs need not be the same, for every user of a split.

    Args:
        dataset: with what is to be predicted; published versions have their catalog alone.
        max_users: only the first so many, in the order of a hash of their ids.
        exclude_seen: leave out the items of a history, as `evaluation.exclude_seen` of a run says it.

    Raises:
        InputError: the split has no users, or the data set is of other items.
    """
    held_out = HeldOut(dataset, split, max_users)
    held_out.check()
    places: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    labels = tuple(dict.fromkeys([*before.needs_labels, *after.needs_labels]))
    batches = held_out.batches(batch_size, before.needs_times or after.needs_times, labels)
    done, num_known = 0, 0
    for samples in batches:
        assert samples.targets_B is not None, "it is of an evaluation split"
        for found, recommender in zip(places, (before, after), strict=True):
            targets_B = recommender.dataset.item_positions(samples.targets_B)
            num_known += int(np.count_nonzero(targets_B >= 0))
            instructed = samples.instructed(recommender.evaluation_instruction)
            lists = recommender.recommend_samples(instructed, LIST_LENGTH, exclude_seen=exclude_seen)
            found.append(target_places(lists.items_BK, targets_B))
        done += samples.num_rows
        if on_batch is not None:
            on_batch(done, held_out.num_users)
    if num_known < LEAST_KNOWN * 2 * done:
        raise InputError(
            f"{dataset.root}: of {done:,} items to be predicted, the versions' catalogs know "
            f"{num_known // 2:,}, so they are of something else; name the data set that they were trained on"
        )
    scores = [user_scores(np.concatenate(found))[metric] for found in places]
    return PairedScores(*scores)
