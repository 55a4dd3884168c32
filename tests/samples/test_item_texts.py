"""Which columns of a table of items become the items' text."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import write_source

EVENTS = [("a", "x", 1), ("a", "y", 2), ("a", "x", 3), ("b", "y", 1), ("b", "x", 2), ("b", "y", 3)]


def prepared(tmp_path, items, text_columns=()):
    source = write_source(tmp_path / "source", EVENTS, items=items)
    return prepare(source, tmp_path / "data", PrepareConfig(text_columns=text_columns))


def texts(report):
    table = pq.read_table(report.path / "items.parquet")
    return dict(zip(table["item_key"].to_pylist(), table["text"].to_pylist(), strict=True))


def test_strings_that_are_no_words_stay_out_of_the_text(tmp_path):
    items = {
        "item_id": ["x", "y"],
        "sku": ["SKU-1", "SKU-2"],
        "Brand": ["Acme", None],
        "title": ["X1", "Y1"],
        "parent": ["y", "x"],
    }
    report = prepared(tmp_path, items)
    assert texts(report) == {"x": "X1. Acme", "y": "Y1"}
    assert report.manifest.text_columns == ("title", "Brand")
    assert dict(report.rows())["columns that are the items' text"] == "title, Brand"
    assert pq.read_table(report.path / "items.parquet")["sku"].to_pylist() != [None, None]


def test_items_may_have_no_text(tmp_path):
    report = prepared(tmp_path, {"item_id": ["x", "y"], "sku": ["SKU-1", "SKU-2"]})
    assert texts(report) == {"x": None, "y": None}
    assert dict(report.rows())["columns that are the items' text"] == "none"


def test_other_columns_can_be_named(tmp_path):
    items = {"item_id": ["x", "y"], "ingredients": ["salt", "oil"], "shelf": [3, None], "name": ["X", "Y"]}
    report = prepared(tmp_path, items, ("shelf", "ingredients"))
    assert texts(report) == {"x": "X. salt. 3", "y": "Y. oil"}  # a name is a title


def test_lists_of_words_are_text(tmp_path):
    items = {"item_id": ["x", "y"], "title": ["X", "Y"], "categories": [["Food", None, "Snacks"], None]}
    assert texts(prepared(tmp_path, items)) == {"x": "X. Food Snacks", "y": "Y"}


def test_numbers_under_a_usual_name_are_no_text(tmp_path):
    report = prepared(tmp_path, {"item_id": ["x", "y"], "title": ["X", "Y"], "category": [1, 2]})
    assert texts(report) == {"x": "X", "y": "Y"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ingredient", "names 'ingredient', but there is no such column; did you mean 'ingredients'?"),
        ("zzz", "names 'zzz', but there is no such column; found ingredients, price"),
        ("item_id", "names item_id, but an item's number is not text"),
        ("price", "names 'price', which has the type double; expected strings"),
    ],
)
def test_named_columns_that_are_no_text_are_refused(tmp_path, name, message):
    items = {"item_id": ["x", "y"], "ingredients": ["salt", "oil"], "price": pa.array([1.5, 2.5])}
    with pytest.raises(InputError) as caught:
        prepared(tmp_path, items, (name,))
    assert f"text_columns (--text-column) {message}" in str(caught.value)


def test_a_named_column_needs_a_table_of_items(tmp_path):
    with pytest.raises(
        InputError, match=r"--text-column\) names 'plot', but the source has no table of items"
    ):
        prepared(tmp_path, None, ("plot",))
