"""When a trial ends early: the median rule, by results that were known when it was begun.

A trial whose best value after n validations is worse than the median of the best values that earlier
trials had after n ends there. This is the median stopping rule (Golovin et al., "Google Vizier", KDD
2017, section 3.2.2) but for what the median is of: there it is of the mean of each earlier trial's
values up to n, which counts what these were at the beginning, so that fewer trials end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from rayrec.pipelines.tuning.config import PruneConfig
from rayrec.pipelines.tuning.outcome import Outcome

Bounds = tuple[float | None, ...]
"""By the number of a validation, from 0: the value that a trial has to have had by then; None: any."""


def bounds_of(outcomes: Iterable[Outcome], prune: PruneConfig | None, is_larger_better: bool) -> Bounds:
    """What the next trial has to reach.

    Args:
        outcomes: of earlier trials; those that are complete count, each once: not those that repeat another.
    """
    if prune is None:
        return ()
    # Nothing is spared after the last validation: a trial that comes to it is complete.
    curves = [
        _best_so_far(each.validations[:-1], is_larger_better)
        for each in outcomes
        if each.state == "complete" and each.same_as is None
    ]
    bounds: list[float | None] = []
    for place in range(max(map(len, curves), default=0)):
        there = [curve[place] for curve in curves if len(curve) > place]
        is_judged = place + 1 >= prune.after_validations and len(there) >= prune.after_trials
        bounds.append(median(there) if is_judged else None)
    return tuple(bounds)


def stopped_at(validations: Sequence[float | None], bounds: Bounds, is_larger_better: bool) -> int | None:
    """The number of the validation, from 0, after which a trial ends; None: it goes on."""
    sign = 1.0 if is_larger_better else -1.0
    for place, best in enumerate(_best_so_far(validations, is_larger_better)):
        bound = bounds[place] if place < len(bounds) else None
        if bound is not None and sign * best < sign * bound:
            return place
    return None


def _best_so_far(validations: Sequence[float | None], is_larger_better: bool) -> list[float]:
    """What is no number is worse than any."""
    better, worst = (max, -math.inf) if is_larger_better else (min, math.inf)
    best, curve = worst, []
    for value in validations:
        best = better(best, worst if value is None or math.isnan(value) else value)
        curve.append(best)
    return curve
