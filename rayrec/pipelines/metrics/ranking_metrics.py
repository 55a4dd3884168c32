"""Recall, NDCG and MRR of ranked lists with one relevant item each, with intervals.

A list may be shorter than a cutoff: a beam search finds as many items as it has beams. What is not in it may
be anywhere behind, so that a metric at that cutoff would be understated, and there is none.

Axes: U users, K length of the lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate

CUTOFFS = (1, 3, 5, 10, 50, 100, 500)
MOST_DEPTH = max(CUTOFFS)
LIST_LENGTH = 50
"""Of lists in validation, and where only the first items matter."""


def metric_names(depth: int) -> tuple[str, ...]:
    """Metrics that lists of so many items have; at 1, all three are the same."""
    cutoffs = [k for k in CUTOFFS if k <= depth]
    return (
        *(f"recall@{k}" for k in cutoffs),
        *(f"{name}@{k}" for name in ("ndcg", "mrr") for k in cutoffs if k > 1),
    )


def metrics_beyond(depth: int) -> tuple[str, ...]:
    """Metrics that lists of so many items are too short for."""
    return tuple(name for name in metric_names(MOST_DEPTH) if name not in metric_names(depth))


def target_places(items_UK: np.ndarray, targets_U: np.ndarray, depth: int = LIST_LENGTH) -> np.ndarray:
    """[U] place of each user's target in the list, from 0; `depth` where it is missing.

    Args:
        items_UK: [U, K] catalog positions, -1 after the last; K is at most `depth`, less where
            the catalog is smaller.
        targets_U: [U] catalog positions; a target of -1 is not in the catalog, hence in no list.
    """
    hit_UK = (items_UK == targets_U[:, None]) & (targets_U >= 0)[:, None]
    return np.where(hit_UK.any(axis=1), hit_UK.argmax(axis=1), depth)


def user_scores(places_U: np.ndarray, depth: int = LIST_LENGTH) -> dict[str, np.ndarray]:
    """[U] per-user values of every metric that lists of this depth have.

    With one relevant item per user, recall@k is the hit rate, the ideal DCG is 1, so that
    NDCG@k = 1 / log2(2 + place) for a hit (Järvelin & Kekäläinen, TOIS 2002), and MRR@k is the mean of
    1 / (1 + place), 0 without a hit (Voorhees, TREC-8, 1999).
    """
    return {name: score_of(name, places_U) for name in metric_names(depth)}


def score_of(metric: str, places_U: np.ndarray) -> np.ndarray:
    """[U] per-user values of one of `metric_names`."""
    name, _, cutoff = metric.partition("@")
    is_hit_U = places_U < int(cutoff)
    if name == "recall":
        return is_hit_U.astype(np.float64)
    gain_U = 1.0 / np.log2(2.0 + places_U) if name == "ndcg" else 1.0 / (1.0 + places_U)
    return np.where(is_hit_U, gain_U, 0.0)


def summarize(
    places_U: np.ndarray,
    depth: int = LIST_LENGTH,
    metrics: Sequence[str] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Every metric's mean over users and its percentile bootstrap interval (Efron, 1979).

    A user's scores depend on the place of the target alone, so a resample of
    users is a multinomial draw of places: exact, and fast for any number of users.

    Args:
        metrics: None for all that lists of this depth have.
    """
    distinct, counts = np.unique(places_U, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(places_U), counts / len(places_U), num_resamples)
    summary = {}
    for name in metric_names(depth) if metrics is None else metrics:
        score_of_place = score_of(name, distinct)
        means = draws @ score_of_place / len(places_U)
        low, high = np.quantile(means, [0.025, 0.975])
        summary[name] = Estimate(float(counts @ score_of_place / len(places_U)), float(low), float(high))
    return summary
