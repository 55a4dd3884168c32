"""Warnings about rewards that give nothing to learn, or that dominate the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayrec.rl.rewards.guard import GuardConfig, GuardReport, RewardGuard
from rayrec.rl.rewards.mix import MixedRewards, RewardMix, WeightedReward
from tests.rl.rewards.rl_lists import Told, lists_of


def mixed(items: list[list[int]] | None = None, **parts: Any) -> MixedRewards:
    """Rewards of each part, of weight 1; of lists of full length unless they are given."""
    first = next(iter(parts.values()))
    items = [list(range(len(row))) for row in first] if items is None else items
    return RewardMix([WeightedReward(name, Told(rewards)) for name, rewards in parts.items()]).mix(
        lists_of(items)
    )


def watched(guard: RewardGuard, *batches: MixedRewards) -> list[GuardReport]:
    return [guard.watch(batch) for batch in batches]


LOUD = {"a": [[0, 10]], "b": [[0, 1]]}
"""Distances to the group's mean: 5 and 0.5 of parts, 5.5 of the total; a has 5 / 5.5 = 91 %."""
EVEN = {"a": [[0, 8]], "b": [[0, 1]]}
"""4 / 4.5 = 89 %."""
EQUAL = {"a": [[1, 1]], "b": [[0, 0]]}


def test_a_part_that_has_nearly_all_variance_is_named():
    report = RewardGuard(GuardConfig(window=1)).watch(mixed(**LOUD))

    assert len(report.warnings) == 1
    assert "over the last 1 chunks, the reward 'a' has 91% of the variance" in report.warnings[0]
    assert report.metrics == pytest.approx(
        {"a.variance_share": 10 / 11, "b.variance_share": 1 / 11, "zero_variance_groups": 0.0}
    )


def test_a_part_with_less_is_not():
    report = RewardGuard(GuardConfig(window=1)).watch(mixed(**EVEN))

    assert report.warnings == []
    assert report.metrics["a.variance_share"] == pytest.approx(8 / 9)


def test_the_only_part_may_have_all_of_it():
    report = RewardGuard(GuardConfig(window=1)).watch(mixed(a=[[0, 10]]))

    assert report.warnings == []
    assert report.metrics["a.variance_share"] == pytest.approx(1.0)


def test_a_part_without_weight_does_not_count_as_another():
    mix = RewardMix([WeightedReward("a", Told([[0, 1]])), WeightedReward("b", Told([[0, 1]]), weight=0.0)])

    assert RewardGuard(GuardConfig(window=1)).watch(mix.mix(lists_of([[0, 1]]))).warnings == []


def test_differences_between_users_do_not_count():
    # b differs by 100 between the groups, and by 1 within, as a does.
    report = RewardGuard(GuardConfig(window=1)).watch(mixed(a=[[0, 1], [0, 1]], b=[[0, 1], [100, 101]]))

    assert report.warnings == []
    assert report.metrics["b.variance_share"] == pytest.approx(0.5)


def test_a_part_that_works_against_the_others_has_a_negative_share():
    # The total is [0, 2]: 3 / 2 of it are a's, and -1 / 2 b's.
    report = RewardGuard(GuardConfig(window=1)).watch(mixed(a=[[0, 3]], b=[[0, -1]]))

    assert report.metrics["a.variance_share"] == pytest.approx(1.5)
    assert report.metrics["b.variance_share"] == pytest.approx(-0.5)
    assert "150%" in report.warnings[0]


def test_batches_of_the_window_count_together_and_older_ones_do_not():
    guard = RewardGuard(GuardConfig(window=2, max_share=0.7))
    # Sums of distance times the total's: batch one 45 and 5 (of 50); batch two 0 and 12.5.
    first, second, third = watched(
        guard,
        mixed(a=[[0, 9]], b=[[0, 1]]),
        mixed(a=[[0, 0]], b=[[0, 5]]),
        mixed(a=[[0, 0]], b=[[0, 5]]),
    )

    assert first.warnings == []  # the window is not full, though a has 90 %
    assert first.metrics["a.variance_share"] == pytest.approx(0.9)
    assert second.metrics["a.variance_share"] == pytest.approx(45 / 62.5)
    assert "'a' has 72%" in second.warnings[0]
    assert "'b' has 100%" in third.warnings[0]


def test_zero_variance_groups_are_counted_and_reported():
    report = RewardGuard(GuardConfig(window=1)).watch(mixed(a=[[1, 1], [2, 2], [0, 1]]))

    assert report.metrics["zero_variance_groups"] == pytest.approx(2 / 3)
    assert "67% of the groups have the same total" in report.warnings[0]


def test_half_of_the_groups_may_have_no_variance():
    assert RewardGuard(GuardConfig(window=1)).watch(mixed(a=[[1, 1], [0, 1]])).warnings == []


def test_missing_candidates_add_no_variance():
    report = RewardGuard(GuardConfig(window=1)).watch(
        mixed(items=[[3, 4, -1], [3, -1, -1], [-1, -1, -1], [3, 4, -1]], a=[[1, 1, 0]] * 3 + [[1, 2, 0]])
    )

    assert report.metrics["zero_variance_groups"] == pytest.approx(3 / 4)
    assert report.metrics["a.variance_share"] == pytest.approx(1.0)


def test_without_any_spread_no_part_has_the_variance():
    report = RewardGuard(GuardConfig(window=1, max_zero_variance=1.0)).watch(mixed(**EQUAL))

    assert report.warnings == []
    assert report.metrics["a.variance_share"] == 0.0


def test_each_warning_is_given_once_until_its_cause_ends():
    guard = RewardGuard(GuardConfig(window=1))
    loud, even, equal = mixed(**LOUD), mixed(**EVEN), mixed(**EQUAL)

    said = [len(report.warnings) for report in watched(guard, loud, loud, even, loud, equal, equal, loud)]

    assert said == [1, 0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_share": 1.1}, "max_share"),
        ({"max_zero_variance": -0.1}, "max_zero_variance"),
        ({"window": 0}, "window"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GuardConfig(**settings)


def test_a_value_around_its_bound_is_not_reported_repeatedly():
    guard = RewardGuard(GuardConfig(window=2, max_zero_variance=0.5))
    equal, even = mixed(**EQUAL), mixed(**EVEN)
    batches = [equal, equal, even, equal, even, even, even, equal, equal]
    # Zero-variance groups of two batches: 100 % at the second, half at the next ones, none at the seventh.
    said = [len(report.warnings) for report in watched(guard, *batches)]
    assert said == [0, 1, 0, 0, 0, 0, 0, 0, 1]
    guard = RewardGuard(GuardConfig(window=3, max_zero_variance=0.5))
    batches = [equal, equal, even, even, equal, equal, even, even, even, equal, equal]
    # It holds at the third, not at the next two, which is less than a window, and at the sixth.
    assert [len(report.warnings) for report in watched(guard, *batches)] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def test_a_guard_continues_from_its_state():
    guard, batches = (
        RewardGuard(GuardConfig(window=2)),
        [mixed(**each) for each in (EQUAL, EQUAL, LOUD, EQUAL, LOUD, LOUD)],
    )
    expected = watched(guard, *batches)
    for done in range(len(batches)):
        begun, goes_on = RewardGuard(GuardConfig(window=2)), RewardGuard(GuardConfig(window=2))
        watched(begun, *batches[:done])
        goes_on.load(json.loads(json.dumps(begun.state())))
        assert watched(goes_on, *batches[done:]) == expected[done:]


def test_a_state_of_version_0_1_is_read():
    guard = RewardGuard(GuardConfig(window=2))
    watched(guard, mixed(**EQUAL), mixed(**EQUAL))
    state = guard.state()
    old = {
        "batches": [
            {"num_flat" if key == "num_zero_variance" else key: value for key, value in batch.items()}
            for batch in state["batches"]
        ],
        "batches_since": {"flat": 0},
    }
    resumed = RewardGuard(GuardConfig(window=2))

    resumed.load(old)

    assert resumed.state() == state
