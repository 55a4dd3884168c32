import math

import numpy as np
import pytest

from rayrec.models.tokenizers.report import collision_counts, level_statistics, prefix_purity

# Two prefixes of four items each; under the first, one tuple has two items.
CODES_IL = np.array([[0, 0], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [1, 3]])


def test_entropy_and_size_of_prefixes_are_the_worked_numbers():
    first, second = level_statistics(CODES_IL, (3, 4))

    assert (first["size"], first["used"], first["prefixes"], first["largest_prefix"]) == (3, 2, 2, 4)
    assert first["prefix_entropy"] == pytest.approx(1.0)  # one of two, equally often
    assert first["perplexity"] == pytest.approx(2.0)
    assert (second["used"], second["prefixes"], second["largest_prefix"]) == (4, 7, 2)
    assert second["prefix_entropy"] == pytest.approx(0.25 * 2 + 0.75 * 3)
    assert second["perplexity"] == pytest.approx(
        math.exp(-3 / 8 * math.log(3 / 32) - 5 / 8 * math.log(1)), rel=1
    )
    assert collision_counts(CODES_IL) == {"items": 2, "groups": 1, "largest_group": 2}


def test_purity_is_the_share_of_the_commonest_label_where_items_share_a_prefix():
    # First prefix: three of kind 0, one of kind 1. Second: one of each of four kinds. Item 6 has none.
    items_P = np.array([0, 1, 2, 3, 4, 5, 7])
    labels_P = np.array([0, 0, 0, 1, 0, 1, 2])

    one, two = prefix_purity(CODES_IL, items_P, labels_P)

    assert (one["items"], one["purity"]) == (7, pytest.approx((3 + 1) / 7))
    assert (two["items"], two["purity"]) == (2, 1.0)  # other tuples have one item


def test_an_item_may_have_several_labels():
    # All four items of a prefix have label 5, each besides one of its own.
    items_P = np.repeat(np.arange(4), 2)
    labels_P = np.array([5, 0, 5, 1, 5, 2, 5, 3])
    assert prefix_purity(np.zeros((4, 1), dtype=int), items_P, labels_P)[0]["purity"] == 1.0


def test_prefixes_that_mean_nothing_are_as_pure_as_chance():
    rng = np.random.default_rng(0)
    labels_I = rng.integers(0, 4, 2000)
    random = prefix_purity(rng.integers(0, 100, (2000, 1)), np.arange(2000), labels_I)[0]
    meant = prefix_purity(labels_I[:, None], np.arange(2000), labels_I)[0]

    assert random["purity"] == pytest.approx(random["by_chance"], abs=0.02)
    assert random["by_chance"] > 0.3  # though a quarter of all items have any one label
    assert meant["purity"] == 1.0
    assert meant["by_chance"] < 0.3


def test_purity_where_there_is_nothing_to_measure():
    nothing = np.zeros(0, dtype=np.int64)
    assert prefix_purity(CODES_IL, nothing, nothing) == []
    alone = prefix_purity(np.arange(3)[:, None], np.arange(3), np.zeros(3, dtype=np.int64))
    assert alone == [{"items": 0, "purity": None, "by_chance": None}]
