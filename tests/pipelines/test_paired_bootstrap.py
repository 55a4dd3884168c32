"""Differences of two methods on the same users: known answers."""

import numpy as np
import pytest

from rayrec.pipelines.metrics.paired_bootstrap import compare_scores

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


def test_seeds_add_to_the_interval_and_as_much_as_their_variance_says():
    """Each seed of B has another mean, whoever the users are: 0.1, 0.2, 0.3 of every user's score."""
    b_SU = np.repeat([[0.1], [0.2], [0.3]], 500, axis=1)
    a_SU = np.full((1, 500), 0.2)

    found = compare_scores(a_SU, b_SU, num_resamples=20_000)

    assert found.b.value == pytest.approx(0.2)
    # Two of three are drawn: all means from 0.1 to 0.3, of which each end has one chance in nine.
    assert (found.b.low, found.b.high) == pytest.approx((0.1, 0.3))
    assert found.mcnemar_p is None
    alike = compare_scores(a_SU, np.full((3, 500), 0.2))
    assert alike.difference == pytest.approx((0, 0, 0))


def test_resampled_means_of_seeds_have_the_variance_of_a_mean_of_seeds():
    seeds = UNIFORM.normal(0.2, 0.01, 5)
    b_SU = np.repeat(seeds[:, None], 50, axis=1)

    found = compare_scores(np.full((1, 50), 0.2), b_SU, num_resamples=20_000)

    assert width(found.b) == pytest.approx(2 * 1.96 * seeds.std(ddof=1) / np.sqrt(5), rel=0.15)


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
