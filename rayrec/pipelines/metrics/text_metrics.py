"""How good a language model is on records of text, with intervals over records.

Axes: R records, S resamples.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.arrays import Float64Array
from rayrec.samples.text.records import Span

NUM_RESAMPLES = 1000


def mean(values_R: Sequence[float] | Float64Array) -> Estimate:
    """The mean over records, such as the share that is right of ones and zeros."""
    values = np.asarray(values_R, dtype=np.float64)
    return ratio(values, np.ones_like(values))


def ratio(above_R: Float64Array, below_R: Float64Array, seed: int = 0) -> Estimate:
    """A sum over records divided by another, such as loss by tokens; percentiles of a bootstrap over records
    (Efron, 1979). NaN where the divisor is 0."""
    if not len(above_R) or not below_R.sum():
        return Estimate(np.nan, np.nan, np.nan)
    random = np.random.default_rng(seed)
    found_S = np.empty(NUM_RESAMPLES)
    for resample in range(NUM_RESAMPLES):
        chosen = random.integers(0, len(above_R), len(above_R))
        below = below_R[chosen].sum()
        found_S[resample] = above_R[chosen].sum() / below if below else np.nan
    low, high = np.nanquantile(found_S, [0.025, 0.975])
    return Estimate(float(above_R.sum() / below_R.sum()), float(low), float(high))


def span_f1(found: Sequence[Collection[Span]], right: Sequence[Collection[Span]]) -> Estimate:
    """F1 of spans over all records: one counts if start, stop and label are right (CoNLL-2003's measure)."""
    both_R = np.array([len({*a} & {*b}) for a, b in zip(found, right, strict=True)], dtype=np.float64)
    of_R = np.array([len({*a}) + len({*b}) for a, b in zip(found, right, strict=True)], dtype=np.float64)
    return ratio(2 * both_R, of_R)


def is_json(text: str) -> bool:
    """Whether a text is one value of JSON and nothing else."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
