"""Coverage, novelty and diversity of lists, by hand."""

import numpy as np
import pytest

from rayrec.pipelines.metrics import beyond_accuracy
from rayrec.pipelines.metrics.beyond_accuracy import diversity, list_metrics, novelty, users_of_items

NO_USERS = users_of_items(np.zeros(0, np.int64), np.zeros(0, np.int64), 4)


def test_coverage_is_the_share_of_the_catalog_that_anybody_is_shown():
    lists = np.array([[0, 1, -1], [1, 0, -1], [-1, -1, -1]])

    found = list_metrics(lists, np.array([1, 1, 1, 1]), NO_USERS)

    assert found.coverage == 0.5
    assert found.num_diverse == 2


def test_novelty_is_the_surprise_of_an_item_by_its_training_events():
    counts_I = np.array([3, 0, 0])  # with one more of each: 4, 1 and 1 of 6

    found = novelty(np.array([[0, 1], [2, -1], [-1, -1]]), counts_I)

    assert found[:2].tolist() == pytest.approx([(np.log2(6 / 4) + np.log2(6)) / 2, np.log2(6)])
    assert np.isnan(found[2])


def test_diversity_is_one_minus_the_cosine_of_the_users_of_two_items():
    # Item 0 has users 7 and 8, item 1 users 8 and 9 (one of them twice), item 2 user 5, item 3 nobody.
    users_E, items_E = np.array([7, 8, 8, 9, 9, 5, 6]), np.array([0, 0, 1, 1, 1, 2, -1])
    of_items = users_of_items(users_E, items_E, 4)

    found = diversity(np.array([[0, 1, -1], [0, 2, -1], [0, 1, 2], [2, 3, -1], [0, -1, -1]]), of_items)

    # The cosine of items 0 and 1 is 1 / (sqrt(2) * sqrt(2)).
    assert found[:4].tolist() == pytest.approx([0.5, 1.0, 1 - 0.5 / 3, 1.0])
    assert np.isnan(found[4])


def test_diversity_agrees_with_all_pairs():
    random = np.random.default_rng(0)
    users_E, items_E = random.integers(0, 60, 800), random.integers(0, 40, 800)
    of_items = users_of_items(users_E, items_E, 40)
    lists = np.stack([random.permutation(40)[:10] for _ in range(30)])

    vectors = of_items.toarray()
    cosines = vectors @ vectors.T
    expected = [1 - np.mean([cosines[a, b] for a in row for b in row if a != b]) for row in lists]
    assert diversity(lists, of_items).tolist() == pytest.approx(expected)


def test_long_lists_of_users_are_read_for_the_first_lists_alone(monkeypatch):
    users_E, items_E = np.arange(100), np.repeat([0, 1], 50)
    of_items = users_of_items(users_E, items_E, 2)
    monkeypatch.setattr(beyond_accuracy, "MOST_READ", 250)
    monkeypatch.setattr(beyond_accuracy, "_ROWS_AT_ONCE", 2)

    assert len(diversity(np.array([[0, 1]] * 6), of_items)) == 2  # each reads 100
    monkeypatch.setattr(beyond_accuracy, "MOST_READ", 10)
    assert len(diversity(np.array([[0, 1]] * 6), of_items)) == 1


def test_lists_are_read_in_parts_of_so_many_training_events(monkeypatch):
    random = np.random.default_rng(1)
    of_items = users_of_items(random.integers(0, 60, 800), random.integers(0, 40, 800), 40)
    lists = np.stack([random.permutation(40)[:10] for _ in range(30)])
    expected = diversity(lists, of_items).tolist()
    read = np.diff(of_items.indptr)[lists].sum(axis=1)
    most = int(read.max()) * 2
    sizes = []
    distances = beyond_accuracy._distances

    def seen(part, vectors):
        sizes.append(int(np.diff(vectors.indptr)[part].sum()))
        return distances(part, vectors)

    monkeypatch.setattr(beyond_accuracy, "_distances", seen)
    monkeypatch.setattr(beyond_accuracy, "_READ_AT_ONCE", most)

    assert diversity(lists, of_items).tolist() == pytest.approx(expected)
    assert len(sizes) >= 15
    assert max(sizes) <= most
    assert sum(sizes) == read.sum()

    monkeypatch.setattr(beyond_accuracy, "_READ_AT_ONCE", 1)  # no list is so small: each is a part
    assert diversity(lists, of_items).tolist() == pytest.approx(expected)


def test_lists_without_items_have_neither():
    found = list_metrics(np.full((3, 2), -1), np.array([1, 1, 1, 1]), NO_USERS)

    assert (found.coverage, found.novelty, found.diversity) == (0.0, None, None)
    assert found.to_json()["novelty@10"] is None
