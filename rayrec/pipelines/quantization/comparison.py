"""How far a quantized model is from the one that it was made of: the same users, the same batches, in pairs.

Axes: U users, B rows of a batch, K choices, or length of a list.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayrec.pipelines.evaluation.held_out import HeldOut, model_batches
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.evaluation_report import OnBatch
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, target_places, user_scores
from rayrec.pipelines.metrics.text_metrics import mean, ratio
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.manifest import Split

COMPARED = ("recall@10", "ndcg@10")
OVERLAP_LENGTH = 10


@dataclass(frozen=True)
class Pair:
    """One figure of both models."""

    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before; its interval is over paired users."""
    ratio: Estimate
    """After by before, likewise."""
    more_is_better: bool = True

    @classmethod
    def of(cls, before_U: np.ndarray, after_U: np.ndarray) -> Pair:
        return cls(mean(before_U), mean(after_U), mean(after_U - before_U), ratio(after_U, before_U))

    @property
    def loss(self) -> float:
        """Share of the figure that is gone, or that a loss grew by; 0 where there was nothing to lose."""
        if not self.before.value > 0:
            return 0.0
        return 1.0 - self.ratio.value if self.more_is_better else self.ratio.value - 1.0

    def to_json(self) -> dict[str, Any]:
        names = ("before", "after", "difference", "ratio")
        return {name: getattr(self, name)._asdict() for name in names}


@dataclass(frozen=True)
class Comparison:
    """Of all users of a split."""

    split: Split
    num_users: int
    metrics: dict[str, Pair]
    overlap: Estimate
    """Share of the first ten items that both lists have."""
    top_moved: Estimate
    """Share of users whose first item is another."""
    kl: Estimate | None
    """Divergence of the first choice after quantization from that before, in nats; None of a model that has
    no distribution."""
    ms_per_batch: dict[str, float]
    """Medians, `before` and `after`: whole answers, in turns, of `batch_size` users."""
    batch_size: int

    def to_json(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "num_users": self.num_users,
            "metrics": {name: pair.to_json() for name, pair in self.metrics.items()},
            "overlap@10": self.overlap._asdict(),
            "top_1_moved": self.top_moved._asdict(),
            "kl_of_first_codes": None if self.kl is None else self.kl._asdict(),
            "ms_per_batch": self.ms_per_batch,
            "batch_size": self.batch_size,
        }


@dataclass
class _Answers:
    """Of one model."""

    places: list[np.ndarray] = field(default_factory=list)
    items: list[np.ndarray] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def add(
        self, recommender: Recommender, samples: SampleBatch, targets_B: np.ndarray, exclude_seen: bool
    ) -> None:
        began = time.perf_counter()
        items_BK = recommender.recommend_samples(samples, LIST_LENGTH, exclude_seen).items_BK
        self.ms.append(1000 * (time.perf_counter() - began))
        self.places.append(target_places(items_BK, targets_B))
        self.items.append(items_BK[:, :OVERLAP_LENGTH])

    @property
    def median_ms(self) -> float:
        """Without the first batch, which makes what is made once."""
        return float(np.median(self.ms[1:] or self.ms))


def compare(
    before: Recommender,
    after: Recommender,
    split: Split,
    batch_size: int,
    max_users: int | None = None,
    on_batch: OnBatch | None = None,
    exclude_seen: bool = True,
) -> Comparison:
    """Rank the catalog by both models, for every user of a split.

    Args:
        max_users: only the first so many, in the order of a hash of their ids.
        exclude_seen: whether lists are without the items of a history.

    Raises:
        InputError: the split has no users.
    """
    dataset, held_out = before.dataset, HeldOut(before.dataset, split, max_users)
    held_out.check()
    num_users = held_out.num_users
    answers, divergences, done = (_Answers(), _Answers()), list[np.ndarray](), 0
    for samples in model_batches(before, held_out, batch_size):
        assert samples.targets_B is not None
        targets_B = dataset.item_positions(samples.targets_B)
        for answer, recommender in zip(answers, (before, after), strict=True):
            answer.add(recommender, samples, targets_B, exclude_seen)
        first, second = before.first_log_probs(samples), after.first_log_probs(samples)
        if first is not None and second is not None:
            divergences.append(divergence(first, second))
        done += samples.num_rows
        if on_batch is not None:
            on_batch(done, num_users)
    scores = [user_scores(np.concatenate(answer.places)) for answer in answers]
    items = [np.concatenate(answer.items) for answer in answers]
    return Comparison(
        split=split,
        num_users=num_users,
        metrics={name: Pair.of(scores[0][name], scores[1][name]) for name in COMPARED},
        overlap=mean(shared(*items)),
        top_moved=mean((items[0][:, 0] != items[1][:, 0]).astype(np.float64)),
        kl=mean(np.concatenate(divergences)) if divergences else None,
        ms_per_batch={"before": answers[0].median_ms, "after": answers[1].median_ms},
        batch_size=batch_size,
    )


def divergence(first_BK: np.ndarray, second_BK: np.ndarray) -> np.ndarray:
    """[B] Kullback-Leibler divergence of the second distribution from the first, of log-probabilities. What
    the first holds to be impossible adds nothing."""
    first_BK, second_BK = first_BK.astype(np.float64), second_BK.astype(np.float64)
    probs_BK = np.exp(first_BK)
    differences_BK = np.subtract(first_BK, second_BK, where=probs_BK > 0, out=np.zeros_like(first_BK))
    sums_B: np.ndarray = (probs_BK * differences_BK).sum(1)
    return sums_B


def shared(first_UK: np.ndarray, second_UK: np.ndarray) -> np.ndarray:
    """[U] share of the items of the longer list that both have; 1 where both are empty."""
    found = [_shared(*pair) for pair in zip(first_UK, second_UK, strict=True)]
    return np.array(found, dtype=np.float64)


def _shared(first_K: Sequence[int], second_K: Sequence[int]) -> float:
    a, b = ({item for item in items if item >= 0} for items in (first_K, second_K))
    return len(a & b) / max(len(a), len(b)) if a or b else 1.0
