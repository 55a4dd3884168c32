"""The median rule, in worked numbers."""

from __future__ import annotations

from dataclasses import replace

from rayrec.pipelines.tuning.config import PruneConfig
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.pruning import bounds_of, stopped_at

CURVES = [(0.1, 0.3, 0.4), (0.2, 0.1, 0.4), (0.3, 0.5, 0.6)]


def outcomes(*curves):
    return [Outcome("complete", curve[-1], curve) for curve in curves]


def test_a_trial_has_to_reach_the_median_of_the_best_values_before_the_last_validation():
    rule = PruneConfig(after_trials=3)

    assert bounds_of(outcomes(*CURVES), rule, True) == (0.2, 0.3)
    assert bounds_of(outcomes(*CURVES[:2]), rule, True) == (None, None)
    assert bounds_of(outcomes(*CURVES), PruneConfig(after_trials=3, after_validations=2), True) == (None, 0.3)
    assert bounds_of(outcomes(*CURVES), None, True) == ()


def test_of_losses_the_smallest_so_far_counts():
    assert bounds_of(outcomes(*CURVES), PruneConfig(after_trials=3), False) == (0.2, 0.1)


def test_trials_that_failed_or_ended_early_are_no_measure():
    others = [Outcome("pruned", 0.9, (0.9, 0.9, 0.9)), Outcome("failed", None, (0.9, 0.9))]

    assert bounds_of([*outcomes(*CURVES), *others], PruneConfig(after_trials=3), True) == (0.2, 0.3)


def test_a_trial_that_repeats_another_does_not_count_again():
    again = [replace(outcomes(CURVES[0])[0], same_as=0) for _ in range(3)]

    assert bounds_of([*outcomes(*CURVES), *again], PruneConfig(after_trials=3), True) == (0.2, 0.3)
    assert bounds_of([*outcomes(*CURVES[:2]), *again], PruneConfig(after_trials=3), True) == (None, None)


def test_a_trial_ends_after_the_first_validation_that_its_best_value_does_not_reach():
    assert stopped_at((0.1,), (0.2, 0.3), True) == 0
    assert stopped_at((0.25, 0.1), (0.2, 0.3), True) == 1
    assert (
        stopped_at((0.35, 0.1, 0.0), (0.2, 0.3), True) is None
    )  # it was better once, and the third has no bound
    assert stopped_at((0.2, 0.3), (0.2, 0.3), True) is None
    assert stopped_at((0.25, 0.15), (0.2, 0.1), False) == 0


def test_what_is_no_number_is_worse_than_any():
    assert stopped_at((None, 0.4), (0.2, 0.3), True) == 0
    assert stopped_at((None, 0.4), (None, 0.3), True) is None
    assert (
        bounds_of(outcomes((None, 0.4, 0.4), (0.1, 0.2, 0.3)), PruneConfig(after_trials=2), True)[1]
        == 0.30000000000000004
    )
