import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, summarize, target_places, user_scores


def test_places_count_from_zero_and_missing_targets_come_after_every_list():
    items_UK = np.array([[5, 3, 9], [5, 3, 9], [5, 3, 9]])

    assert target_places(items_UK, np.array([5, 9, 4])).tolist() == [0, 2, LIST_LENGTH]


def test_a_target_outside_the_catalog_does_not_hit_the_padding():
    assert target_places(np.array([[2, -1, -1]]), np.array([-1])).tolist() == [LIST_LENGTH]


def test_a_miss_in_a_short_list_is_a_miss_at_every_cutoff():
    """Of a catalog of three items, a list cannot be longer than three."""
    scores = user_scores(target_places(np.array([[0, 1, 2]]), np.array([7])))

    assert all(values_U.tolist() == [0.0] for values_U in scores.values())


def test_scores_of_worked_places():
    scores = user_scores(np.array([0, 2, 6, 49, 50]))

    assert scores["recall@5"].tolist() == [1, 1, 0, 0, 0]
    assert scores["recall@10"].tolist() == [1, 1, 1, 0, 0]
    assert scores["recall@50"].tolist() == [1, 1, 1, 1, 0]
    assert scores["ndcg@5"].tolist() == pytest.approx([1, 0.5, 0, 0, 0])  # 1 / log2(2 + 2)
    assert scores["ndcg@10"].tolist() == pytest.approx([1, 0.5, 1 / np.log2(8), 0, 0])
    assert scores["ndcg@50"].tolist() == pytest.approx([1, 0.5, 1 / 3, 1 / np.log2(51), 0])


@given(st.lists(st.integers(0, LIST_LENGTH), min_size=1, max_size=50))
def test_means_are_those_of_the_users_and_lie_in_their_interval(places):
    places_U = np.array(places)

    summary = summarize(places_U, num_resamples=50)

    for name, values_U in user_scores(places_U).items():
        assert summary[name].value == pytest.approx(values_U.mean())
        # Fifty resamples of a skewed sample may miss the mean by a hair, never by its own size.
        assert 0.0 <= summary[name].low <= summary[name].high <= 1.0 + 1e-9


def test_intervals_have_the_width_of_the_standard_error():
    """1,000 users of whom 300 hit: the interval is 0.3 -+ 1.96 * sqrt(0.3 * 0.7 / 1,000)."""
    places_U = np.repeat([0, LIST_LENGTH], [300, 700])

    estimate = summarize(places_U)["recall@10"]

    assert estimate.value == pytest.approx(0.3)
    assert estimate.low == pytest.approx(0.3 - 0.0284, abs=0.004)
    assert estimate.high == pytest.approx(0.3 + 0.0284, abs=0.004)


def test_intervals_cover_the_truth_about_95_times_in_100():
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        hit_U = random.random(400) < 0.2
        estimate = summarize(np.where(hit_U, 0, LIST_LENGTH), num_resamples=300)["recall@10"]
        covered += estimate.low <= 0.2 <= estimate.high

    assert 180 <= covered <= 199


def test_a_sample_without_spread_has_an_interval_without_width():
    assert summarize(np.zeros(7, dtype=np.int64))["ndcg@10"] == (1.0, 1.0, 1.0)
    assert summarize(np.full(7, LIST_LENGTH))["recall@50"] == (0.0, 0.0, 0.0)


def test_the_interval_is_the_same_every_time():
    places_U = np.random.default_rng(0).integers(0, 60, size=100)

    assert summarize(places_U) == summarize(places_U)
