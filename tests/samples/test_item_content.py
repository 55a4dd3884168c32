"""Words and values of items as weighted buckets."""

import numpy as np
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.item_content import item_content
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import write_source

EVENTS = [("a", item, time) for time, item in enumerate("wxyz")]
ITEMS = {
    "item_id": ["w", "x", "y", "z"],
    "title": ["Red soap, red", "Blue soap!", "red lamp", None],
    "attributes": [[1, 2], [1], None, [2]],
}


def dataset(tmp_path, items=ITEMS) -> Dataset:
    prepare(write_source(tmp_path / "source", EVENTS, items=items), tmp_path / "data", PrepareConfig())
    return Dataset.open(tmp_path / "data")


def by_item(data, bags):
    """Item -> bucket -> weight."""
    return {
        key: dict(zip(bags.features_P[first:stop].tolist(), bags.weights_P[first:stop].tolist(), strict=True))
        for key, first, stop in zip(
            data.items.keys.to_pylist(), bags.offsets_I1[:-1], bags.offsets_I1[1:], strict=True
        )
    }


def test_items_with_the_same_words_share_buckets_whatever_their_case_and_signs(tmp_path):
    data = dataset(tmp_path)

    bags = by_item(data, item_content(data, ["text"], 1 << 40, min_items=1))

    w, x, y, z = (bags[key] for key in "wxyz")
    assert [len(each) for each in (w, x, y, z)] == [2, 2, 2, 0]  # a word twice is one
    (soap,), (red,) = w.keys() & x.keys(), w.keys() & y.keys()
    assert soap != red
    for each in (w, x, y):
        assert np.square(list(each.values())).sum() == pytest.approx(1.0)
    assert x[soap] < max(x.values())  # a word of two items weighs less than one of one item


def test_values_of_lists_are_features_of_their_column_alone(tmp_path):
    data = dataset(tmp_path)

    bags = by_item(data, item_content(data, ["attributes"], 1 << 40, min_items=1))

    assert [len(bags[key]) for key in "wxyz"] == [2, 1, 0, 1]
    assert bags["w"].keys() == bags["x"].keys() | bags["z"].keys()
    both = by_item(data, item_content(data, None, 1 << 40, min_items=1))
    assert [len(both[key]) for key in "wxyz"] == [4, 3, 2, 1]


def test_what_few_items_have_is_left_out(tmp_path):
    data = dataset(tmp_path)

    bags = by_item(data, item_content(data, ["text"], 1 << 40, min_items=2))

    assert [len(bags[key]) for key in "wxyz"] == [2, 1, 1, 0]


def test_a_word_has_its_bucket_whatever_the_catalog(tmp_path):
    data = dataset(tmp_path)
    fewer = {name: values[1:2] for name, values in ITEMS.items()}
    other = dataset(tmp_path / "other", items=fewer)

    assert (
        by_item(other, item_content(other, ["text"], 64, 1))["x"].keys()
        == by_item(data, item_content(data, ["text"], 64, 1))["x"].keys()
    )


def test_a_catalog_that_says_nothing_has_no_features(tmp_path):
    data = dataset(tmp_path, items=None)

    bags = item_content(data, None, 64, 1)

    assert bags.offsets_I1.tolist() == [0] * 5


def test_a_column_that_is_not_there_is_named(tmp_path):
    data = dataset(tmp_path)

    with pytest.raises(InputError, match="no column 'brand'; they have item_id"):
        item_content(data, ["brand"], 64, 1)


def test_items_that_are_not_counted_neither_keep_a_word_nor_weigh_it(tmp_path):
    data = dataset(tmp_path)
    is_counted_I = np.isin(data.items.keys.to_pylist(), ["w", "y", "z"])
    others = ITEMS | {"title": ["Red soap, red", "soap soap lamp red", "red lamp", None]}
    changed = dataset(tmp_path / "changed", items=others)

    one, two = (item_content(each, ["text"], 1 << 40, 1, is_counted_I) for each in (data, changed))

    first, second = by_item(data, one), by_item(changed, two)
    assert [first[key] for key in "wyz"] == [second[key] for key in "wyz"]
    assert len(first["x"]) == 1  # "blue" is a word of no item that counts
