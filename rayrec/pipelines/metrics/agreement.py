"""How far two models agree on the same requests, and how good each is where the right answer is known.

Axes: Q requests, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate

Output = Sequence[str]
"""Of one request: items, best first; or one text."""
NUM_RESAMPLES = 1000


def agreement(
    first: Sequence[Output], second: Sequence[Output], expected: Sequence[frozenset[str]], seed: int = 0
) -> dict[str, Estimate]:
    """Compare the answers of two models to the same requests.

    Args:
        expected: what would have been right, any of it; empty where that is not known.

    Returns:
        `equal`, the share of requests whose outputs are the same in the same order; `equal first`, likewise
        of the best ones alone; `overlap`, the mean share of outputs that both have, of the longer list. Where
        some right answers are known, over these requests: `accuracy A` and `accuracy B`, the share whose
        outputs have a right one, and `accuracy B - A`, whose interval is over paired requests: of what both
        get right or wrong it is not the wider. Intervals are percentiles of a bootstrap (Efron, 1979).

    Raises:
        ValueError: there is no request, or there are not equally many answers.
    """
    if not first or not len(first) == len(second) == len(expected):
        raise ValueError(f"{len(first)}, {len(second)} and {len(expected)} answers cannot be compared")
    pairs = list(zip(first, second, strict=True))
    figures = {
        "equal": [list(a) == list(b) for a, b in pairs],
        "equal first": [list(a[:1]) == list(b[:1]) for a, b in pairs],
        "overlap": [len({*a} & {*b}) / max(len({*a}), len({*b}), 1) if a or b else 1.0 for a, b in pairs],
    }
    found = {
        name: _estimate(np.array(values_Q, dtype=np.float64), seed) for name, values_Q in figures.items()
    }
    known = [place for place, right in enumerate(expected) if right]
    if known:
        right_A, right_B = (
            np.array([bool(expected[place] & {*outputs[place]}) for place in known], dtype=np.float64)
            for outputs in (first, second)
        )
        found["accuracy A"] = _estimate(right_A, seed)
        found["accuracy B"] = _estimate(right_B, seed)
        found["accuracy B - A"] = _estimate(right_B - right_A, seed)
    return found


def _estimate(values_Q: np.ndarray, seed: int) -> Estimate:
    """The mean. How often each distinct value is drawn is multinomial: exact, and fast for many requests."""
    distinct, counts = np.unique(values_Q, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(values_Q), counts / len(values_Q), NUM_RESAMPLES)
    low, high = np.quantile(draws @ distinct / len(values_Q), [0.025, 0.975])
    return Estimate(float(values_Q.mean()), float(low), float(high))
