"""How far two models agree on the same requests, and how good each is where the right answer is known.

Axes: Q requests, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate

Output = Sequence[str]
"""Of one request: items, best first; or one text."""
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Failed:
    """In the place of an output: a request that could not be answered."""

    reason: str
    may_pass: bool = False
    """Whether the same request may be answered later."""


def agreement(
    first: Sequence[Output | None],
    second: Sequence[Output | None],
    expected: Sequence[frozenset[str]],
    are_lists: bool = True,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Compare the answers of two models to the same requests.

    Args:
        first, second: None for a request that failed; it counts as different and wrong, so that no model
            looks better for what it does not answer.
        expected: what would have been right, any of it; empty where that is not known.
        are_lists: whether outputs are lists of items; else each is one text.

    Returns:
        `equal`, the share of requests whose outputs are the same in the same order; `equal first`, likewise
        of the best ones alone; `overlap`, the mean share of outputs that both have, of the longer list (of
        texts, `equal` alone). `failed A` and `failed B`, the shares of requests that failed, if any did.
        Where some right answers are known, over these requests: `accuracy A` and `accuracy B`, the share
        whose outputs have a right one, and `accuracy B - A`, whose interval is over paired requests: of what
        both get right or wrong it is not the wider. Intervals are percentiles of a bootstrap (Efron, 1979).

    Raises:
        ValueError: there is no request, or there are not equally many answers.
    """
    if not first or not len(first) == len(second) == len(expected):
        raise ValueError(f"{len(first)}, {len(second)} and {len(expected)} answers cannot be compared")
    pairs = list(zip(first, second, strict=True))
    figures: dict[str, list[float]] = {"equal": [_both(_equal, a, b) for a, b in pairs]}
    if are_lists:
        figures["equal first"] = [_both(_equal_first, a, b) for a, b in pairs]
        figures["overlap"] = [_both(_overlap, a, b) for a, b in pairs]
    for name, outputs in (("failed A", first), ("failed B", second)):
        if any(one is None for one in outputs):
            figures[name] = [float(one is None) for one in outputs]
    found = {
        name: _estimate(np.array(values_Q, dtype=np.float64), seed) for name, values_Q in figures.items()
    }
    known = [place for place, right in enumerate(expected) if right]
    if known:
        right_A, right_B = (
            np.array([bool(expected[place] & {*(outputs[place] or ())}) for place in known], dtype=np.float64)
            for outputs in (first, second)
        )
        found["accuracy A"] = _estimate(right_A, seed)
        found["accuracy B"] = _estimate(right_B, seed)
        found["accuracy B - A"] = _estimate(right_B - right_A, seed)
    return found


def _both(figure: Callable[[Output, Output], float], first: Output | None, second: Output | None) -> float:
    return 0.0 if first is None or second is None else figure(first, second)


def _equal(first: Output, second: Output) -> float:
    return float(list(first) == list(second))


def _equal_first(first: Output, second: Output) -> float:
    return float(list(first[:1]) == list(second[:1]))


def _overlap(first: Output, second: Output) -> float:
    a, b = {*first}, {*second}
    return len(a & b) / max(len(a), len(b)) if a or b else 1.0


def _estimate(values_Q: np.ndarray, seed: int) -> Estimate:
    """The mean. How often each distinct value is drawn is multinomial: exact, and fast for many requests."""
    distinct, counts = np.unique(values_Q, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(values_Q), counts / len(values_Q), NUM_RESAMPLES)
    low, high = np.quantile(draws @ distinct / len(values_Q), [0.025, 0.975])
    return Estimate(float(values_Q.mean()), float(low), float(high))
