"""Differences of two methods on the same users: known answers."""

import numpy as np
import pytest

from rayrec.pipelines.metrics.paired_bootstrap import compare_scores, seed_deviations

UNIFORM = np.random.default_rng(7)


def hits(*shares: float, num_users: int = 1000) -> np.ndarray:
    """[S, U] of each seed, the first users hit."""
    return np.stack([(np.arange(num_users) < share * num_users).astype(float) for share in shares])


def width(estimate) -> float:
    return estimate.high - estimate.low


def test_a_method_is_no_better_than_itself():
    found = compare_scores(hits(0.3), hits(0.3))

    assert found.difference == (0.0, 0.0, 0.0)
    assert found.ratio == (1.0, 1.0, 1.0)
    assert (found.only_a, found.only_b, found.mcnemar_p) == (0, 0, 1.0)
    assert found.a.low < 0.3 < found.a.high


def test_the_interval_is_that_of_the_users_who_differ():
    """40 users more of 1,000: each user's difference has the variance 0.04 * 0.96."""
    found = compare_scores(hits(0.3), hits(0.34))

    assert found.difference.value == pytest.approx(0.04)
    assert width(found.difference) == pytest.approx(2 * 1.96 * np.sqrt(0.04 * 0.96 / 1000), rel=0.1)
    assert width(found.difference) < width(found.a) / 2
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(0.34 / 0.3)
    assert (found.only_a, found.only_b) == (0, 40)
    assert found.mcnemar_p == pytest.approx(2 * 0.5**40)


def test_seeds_add_to_the_interval_as_much_as_students_t_says():
    """Each seed of B has another mean, for all users alike: 0.49, 0.5, 0.51 of every user's score."""
    b_SU = np.repeat([[0.49], [0.5], [0.51]], 500, axis=1)
    a_SU = np.full((1, 500), 0.5)

    found = compare_scores(a_SU, b_SU, num_resamples=20_000)

    half = 4.303 * 0.01 / np.sqrt(3)  # two degrees of freedom
    assert found.b == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-4)
    assert found.difference == pytest.approx((0, -half, half), abs=1e-4)
    assert found.mcnemar_p is None
    alike = compare_scores(a_SU, np.full((3, 500), 0.5))
    assert alike.difference == pytest.approx((0, 0, 0))


@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_limits_of_seeds_cover_95_times_in_100(num_seeds):
    random = np.random.default_rng(3)
    means_TS = random.normal(size=(50_000, num_seeds))
    unit_S = means_TS[0] / means_TS[0].std(ddof=1)
    low, high = np.quantile(seed_deviations(unit_S, 1000, random), [0.025, 0.975])

    middle_T, spread_T = means_TS.mean(axis=1), means_TS.std(axis=1, ddof=1)
    covered_T = (middle_T + low * spread_T <= 0) & (middle_T + high * spread_T >= 0)
    assert covered_T.mean() == pytest.approx(0.95, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("num_a", "num_b", "of_users"), [(1, 2, 0.0), (1, 3, 0.1), (3, 3, 0.0), (5, 5, 0.1)])
def test_intervals_of_a_difference_cover_about_as_often_as_they_say(num_a, num_b, of_users):
    random = np.random.default_rng(4)
    covered, num_trials = 0, 200
    for _ in range(num_trials):
        a_SU, b_SU = (
            0.5 + of_users * random.normal(size=(1, 60)) + 0.01 * random.normal(size=(num_seeds, 1))
            for num_seeds in (num_a, num_b)
        )
        if num_a == 1:
            a_SU = 0.5 + of_users * random.normal(size=(1, 60))  # of its seeds nothing is known
        found = compare_scores(a_SU, b_SU, num_resamples=150).difference
        covered += found.low <= 0.0 <= found.high

    assert covered / num_trials >= 0.92


def test_a_ratio_to_what_seeds_hardly_tell_from_zero_is_left_out():
    b_SU = np.full((1, 50), 0.5)

    assert compare_scores(np.repeat([[0.1], [0.3]], 50, axis=1), b_SU).ratio is None
    assert compare_scores(np.repeat([[0.3], [0.3]], 50, axis=1), b_SU).ratio == pytest.approx((5 / 3,) * 3)


def test_intervals_cover_the_true_difference_about_95_times_in_100():
    covered = 0
    for _ in range(100):
        skill_U = UNIFORM.random(300)
        a_SU = (UNIFORM.random((3, 300)) < 0.3 * skill_U).astype(float)
        b_SU = (UNIFORM.random((3, 300)) < 0.4 * skill_U).astype(float)
        found = compare_scores(a_SU, b_SU, num_resamples=200).difference
        covered += found.low <= 0.05 <= found.high

    assert covered >= 92  # of crossed users and seeds, the interval is rather too wide than too narrow


def test_hits_of_several_seeds_are_counted_over_their_pairs():
    a_SU = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    b_SU = np.array([[0.0, 0.0, 1.0]])

    found = compare_scores(a_SU, b_SU)

    assert (found.only_a, found.only_b) == (1.5, 1.0)


def test_without_hits_there_is_no_ratio():
    assert compare_scores(hits(0.0), hits(0.3)).ratio is None


def test_the_same_every_time_and_for_other_users_not_at_all():
    assert compare_scores(hits(0.3), hits(0.4)) == compare_scores(hits(0.3), hits(0.4))
    with pytest.raises(ValueError, match="cannot be compared"):
        compare_scores(hits(0.3), hits(0.3, num_users=5))
