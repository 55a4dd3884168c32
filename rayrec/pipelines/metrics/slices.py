"""Users by what they are to be predicted and by what is known of them: where a model is good, and where not.

Axes: U users, I items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.positions import EvaluatedUsers, Positions
from rayrec.pipelines.metrics.ranking_metrics import summarize
from rayrec.platform.arrays import BoolArray, Int64Array

FEW_EVENTS = 5
"""Items with fewer training events are cold."""
HEAD_SHARE = 0.8
"""Of the training events, which the head has."""
LENGTHS = (0, 1, 5, 10, 20, 50)
"""Histories are told apart by how long they are: from one of these to the next."""
SLICED = ("recall@10", "recall@50", "recall@500", "ndcg@10")
"""Metrics of slices in reports."""


@dataclass(frozen=True)
class UserSlice:
    """Some of the users."""

    name: str
    rule: str
    chosen_U: BoolArray

    def __len__(self) -> int:
        return int(np.count_nonzero(self.chosen_U))


@dataclass(frozen=True)
class SliceReport:
    """Metrics of one slice."""

    rule: str
    num_users: int
    results: Mapping[str, Mapping[str, Estimate]]
    """By list and metric."""

    def to_json(self) -> dict[str, object]:
        results = {
            name: {metric: estimate._asdict() for metric, estimate in metrics.items()}
            for name, metrics in self.results.items()
        }
        return {"rule": self.rule, "num_users": self.num_users, "results": results}


def head_from(train_counts_I: Int64Array) -> int:
    """Training events from which on an item is of the head: the most frequent items that make up `HEAD_SHARE`
    of all events, and those that are as frequent as the last of them; the others are the tail."""
    counts_I = np.sort(train_counts_I)[::-1]
    share_I = np.cumsum(counts_I) / max(int(counts_I.sum()), 1)
    last = int(np.searchsorted(share_I, HEAD_SHARE))
    return max(int(counts_I[min(last, len(counts_I) - 1)]), 1)


def slices_of(users: EvaluatedUsers, head: int, behaviors: Sequence[str]) -> list[UserSlice]:
    """All slices, those without users as well.

    Args:
        head: training events from which on an item is of the head.
        behaviors: names of the codes.
    """
    counts_U, lengths_U = users.train_counts_U, users.history_lengths_U
    by_target = {
        "unseen items": ("the target has no training event", counts_U == 0),
        "cold items": (f"the target has fewer than {FEW_EVENTS} training events", counts_U < FEW_EVENTS),
        "warm items": (f"the target has at least {FEW_EVENTS} training events", counts_U >= FEW_EVENTS),
        "head items": (
            f"the target is one of the most frequent items, which have {HEAD_SHARE:.0%} of the training "
            f"events: {head:,} or more each",
            counts_U >= head,
        ),
        "tail items": (f"the target has fewer than {head:,} training events", counts_U < head),
    }
    found = [UserSlice(name, rule, chosen_U) for name, (rule, chosen_U) in by_target.items()]
    found += _by_length(lengths_U)
    for code, behavior in enumerate(behaviors):
        assert users.behaviors_U is not None, "they have names"
        rule = f"the behavior of the target is {behavior}"
        found.append(UserSlice(f"behavior {behavior}", rule, users.behaviors_U == code))
    return found


def _by_length(lengths_U: Int64Array) -> Iterator[UserSlice]:
    for first, behind in zip(LENGTHS, (*LENGTHS[1:], None), strict=True):
        if behind is None:
            said, chosen_U = f"{first} or more", lengths_U >= first
        else:
            said = f"{first}" if behind == first + 1 else f"{first} to {behind - 1}"
            chosen_U = (lengths_U >= first) & (lengths_U < behind)
        yield UserSlice(f"history of {said}", f"the history has {said} events", chosen_U)


def slice_reports(positions: Positions) -> tuple[dict[str, SliceReport], list[str]]:
    """Metrics of every slice that has users, and the names of the slices that have none."""
    header = positions.header
    assert positions.users is not None, "slices are made of them"
    found, empty = dict[str, SliceReport](), list[str]()
    for each in slices_of(positions.users, header.head_from, header.behaviors):
        if not len(each):
            empty.append(each.name)
            continue
        results = {
            name: summarize(
                places_U[each.chosen_U],
                header.lists[name].depth,
                [metric for metric in SLICED if metric in header.lists[name].metrics],
            )
            for name, places_U in positions.places.items()
        }
        found[each.name] = SliceReport(each.rule, len(each), results)
    return found, empty
