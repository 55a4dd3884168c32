"""What neighbors add to the candidates of a model, at the same number of candidates.

Axes: U users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.pipelines.evaluation.held_out import HeldOut, model_batches
from rayrec.pipelines.inference.merged_candidates import MergedCandidates
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.evaluation_report import OnBatch
from rayrec.pipelines.metrics.slices import FEW_EVENTS
from rayrec.samples.dataset.manifest import Split

_RESAMPLES = 1000


@dataclass(frozen=True)
class CandidateReport:
    """Recall of two lists of as many candidates each."""

    run: str
    split: Split
    num_candidates: int
    count: int
    """Users."""
    num_rare: int
    """Users whose target has fewer than `FEW_EVENTS` training events."""
    results: dict[str, dict[str, Estimate]]
    """`all items`, `rare items` to `generated`, `with neighbors`, and the `ratio` of the second to the
    first."""

    def to_json(self) -> dict[str, Any]:
        results = {
            group: {name: estimate._asdict() for name, estimate in estimates.items()}
            for group, estimates in self.results.items()
        }
        return {**vars(self), "results": results}


def evaluate_candidates(
    recommender: Recommender,
    split: Split,
    num_candidates: int = 100,
    batch_size: int = 256,
    on_batch: OnBatch | None = None,
) -> CandidateReport:
    """Compare so many generated candidates with half as many of them and as many neighbors.

    Neighbors know the training events alone, as the model does.

    Raises:
        InputError: the split has no users.
    """
    dataset = recommender.dataset
    held_out = HeldOut(dataset, split)
    held_out.check()
    both = MergedCandidates(recommender, NeighborRecommender(dataset))
    generated_hits, merged_hits, rare = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    num_users, done = held_out.num_users, 0
    for samples in model_batches(recommender, held_out, batch_size):
        assert samples.targets_B is not None
        targets_B = dataset.item_positions(samples.targets_B)
        for hits, source in (
            (generated_hits, recommender.recommend_samples(samples, num_candidates, exclude_seen=True)),
            (merged_hits, both.recommend_samples(samples, num_candidates)),
        ):
            hits.append(((source.items_BK == targets_B[:, None]) & (targets_B >= 0)[:, None]).any(axis=1))
        rare.append((targets_B < 0) | (dataset.items.train_counts_I[targets_B] < FEW_EVENTS))
        done += samples.num_rows
        if on_batch is not None:
            on_batch(done, num_users)
    generated_U, merged_U, rare_U = (np.concatenate(parts) for parts in (generated_hits, merged_hits, rare))
    groups = {"all items": np.ones_like(rare_U), "rare items": rare_U}
    return CandidateReport(
        run=recommender.run,
        split=split,
        num_candidates=num_candidates,
        count=num_users,
        num_rare=int(rare_U.sum()),
        results={name: _compared(generated_U[of_U], merged_U[of_U]) for name, of_U in groups.items()},
    )


def _compared(generated_U: np.ndarray, merged_U: np.ndarray) -> dict[str, Estimate]:
    """Recalls and their ratio, with intervals of resampled users: the same ones for both."""
    if not len(generated_U):
        return {}
    # Four kinds of users: whom neither list serves, one of them, or both.
    kinds, counts = np.unique(2 * generated_U + merged_U, return_counts=True)
    draws = np.random.default_rng(0).multinomial(len(generated_U), counts / len(generated_U), _RESAMPLES)
    of_generated, of_merged = kinds >= 2, kinds % 2 == 1
    found = {
        name: _estimate(counts[which].sum() / counts.sum(), draws[:, which].sum(axis=1) / counts.sum())
        for name, which in (("generated", of_generated), ("with neighbors", of_merged))
    }
    if (draws[:, of_generated].sum(axis=1) > 0).all():
        ratios = draws[:, of_merged].sum(axis=1) / draws[:, of_generated].sum(axis=1)
        found["ratio"] = _estimate(counts[of_merged].sum() / counts[of_generated].sum(), ratios)
    return found


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))
