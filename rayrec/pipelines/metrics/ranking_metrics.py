"""Recall and NDCG of ranked lists with one relevant item each, with intervals.

Axes: U users, K length of the lists.
"""

from __future__ import annotations

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate

CUTOFFS = (5, 10, 50)
LIST_LENGTH = max(CUTOFFS)


def target_places(items_UK: np.ndarray, targets_U: np.ndarray) -> np.ndarray:
    """[U] place of each user's target in the list, from 0; LIST_LENGTH where it is missing.

    Args:
        items_UK: [U, K] catalog positions, -1 after the last; K is at most LIST_LENGTH, less where
            the catalog is smaller.
        targets_U: [U] catalog positions; a target of -1 is not in the catalog, hence in no list.
    """
    hit_UK = (items_UK == targets_U[:, None]) & (targets_U >= 0)[:, None]
    return np.where(hit_UK.any(axis=1), hit_UK.argmax(axis=1), LIST_LENGTH)


def user_scores(places_U: np.ndarray) -> dict[str, np.ndarray]:
    """[U] per-user values of every metric.

    With one relevant item per user, recall@k is the hit rate and the ideal
    DCG is 1, so that NDCG@k = 1 / log2(2 + place) for a hit (Järvelin &
    Kekäläinen, TOIS 2002).
    """
    gain_U = 1.0 / np.log2(2.0 + places_U)
    scores = {f"recall@{k}": (places_U < k).astype(np.float64) for k in CUTOFFS}
    scores |= {f"ndcg@{k}": np.where(places_U < k, gain_U, 0.0) for k in CUTOFFS}
    return scores


def summarize(places_U: np.ndarray, num_resamples: int = 1000, seed: int = 0) -> dict[str, Estimate]:
    """Every metric's mean over users and its percentile bootstrap interval (Efron, 1979).

    A user's scores depend on the place of the target alone, so a resample of
    users is a multinomial draw of places: exact, and fast for any number of users.
    """
    distinct, counts = np.unique(places_U, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(places_U), counts / len(places_U), num_resamples)
    summary = {}
    for name, score_of_place in user_scores(distinct).items():
        means = draws @ score_of_place / len(places_U)
        low, high = np.quantile(means, [0.025, 0.975])
        summary[name] = Estimate(float(counts @ score_of_place / len(places_U)), float(low), float(high))
    return summary
