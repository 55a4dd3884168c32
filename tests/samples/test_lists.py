"""Lists of items by user in JSON, as LETTER, LC-Rec and MiniOneRec publish them."""

from __future__ import annotations

import gzip
import json

import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import real_data

LISTS = {"0": [5, 3, 4], "1": [3, 4, 5, 6], "2": [6, 5]}


def written(folder, lists=LISTS, items=None, packed=False):
    folder.mkdir()
    (folder / "Shop.inter.json").write_text(json.dumps(lists))
    (folder / "Shop.index.json").write_text("{}")
    if items is not None and packed:
        (folder / "Shop.item.json.gz").write_bytes(gzip.compress(json.dumps(items).encode()))
    elif items is not None:
        (folder / "Shop.item.json").write_text(json.dumps(items))
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_lists_are_read_in_their_order_with_what_describes_items(tmp_path, packed):
    items = {
        str(item): {"title": f"Item {item}", "brand": "", "categories": ["Tools", "Saws"]}
        for item in range(3, 7)
    }
    source = written(tmp_path / "s", items=items, packed=packed)

    report = prepare(source, tmp_path / "data", PrepareConfig())

    dataset = Dataset.open(tmp_path / "data")
    assert report.manifest.layout == "lists"
    assert report.manifest.name == "Shop"
    assert [dataset.history_of(user).tolist() for user in LISTS] == list(LISTS.values())
    assert dict(report.rows())["times"] == "none in the source: the order of its events is believed"
    assert dataset.items.texts[dataset.position_by_key("5")].as_py() == "Item 5. Tools, Saws"
    assert ("Shop.index.json", "ignored: only lists and descriptions of items are read") in [
        (use.file, use.use) for use in report.uses
    ]


def test_items_may_be_undescribed_and_the_file_may_be_given_itself(tmp_path):
    source = written(tmp_path / "s")
    prepare(source / "Shop.inter.json", tmp_path / "data", PrepareConfig())
    assert len(Dataset.open(tmp_path / "data").items) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "expected a JSON object"),
        ("{", "not JSON"),
        ('{"1": {"2": 3}}', r"user '1' has \{'2': 3\}; expected a list of items"),
        ('{"1": [2.5]}', r"user '1' has \[2.5\]; expected a list of items"),
        ('{"1": [2], "1": [3]}', "'1' stands there twice"),
        ('{"1": [2, null]}', "expected a list of items"),
        ('{"1":' + "[" * 100_000, "too deep to be read"),
        (r'{"1": ["2\ud800"]}', "half a surrogate pair, which is no Unicode"),
        (r'{"1\uDFFF": [2]}', "half a surrogate pair, which is no Unicode"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, text, message):
    (tmp_path / "A.inter.json").write_text(text)
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, tmp_path / "data", PrepareConfig())


@pytest.mark.parametrize(
    "described", [r'{"3\ud800": {}}', r'{"3": {"title": "\ud800"}}', r'{"3": {"\ud800": "x"}}']
)
def test_descriptions_with_half_a_surrogate_pair_are_refused(tmp_path, described):
    source = written(tmp_path / "s")
    (source / "Shop.item.json").write_text(described)
    with pytest.raises(InputError, match=r"Shop\.item\.json: .*half a surrogate pair"):
        prepare(source, tmp_path / "data", PrepareConfig())


def test_a_whole_surrogate_pair_is_a_sign(tmp_path):
    source = written(tmp_path / "s", items={"3": {"title": "\N{GRINNING FACE}"}})
    assert "\\ud83d" in (source / "Shop.item.json").read_text()
    prepare(source, tmp_path / "data", PrepareConfig())
    dataset = Dataset.open(tmp_path / "data")
    assert dataset.items.texts[dataset.position_by_key("3")].as_py() == "\N{GRINNING FACE}"


def test_two_files_and_a_split_by_time_are_refused(tmp_path):
    source = written(tmp_path / "s")
    with pytest.raises(InputError, match="no times, only an order"):
        prepare(source, tmp_path / "data", PrepareConfig(split="time"))
    (source / "Other.inter.json").write_text("{}")
    with pytest.raises(InputError, match=r"exactly one NAME\.inter\.json, found 2"):
        prepare(source, tmp_path / "data", PrepareConfig())


def test_a_row_is_named_by_its_user(tmp_path):
    source = written(tmp_path / "s", {"7": [1, 2], "8": [3, ""]})
    with pytest.raises(InputError, match=r"Shop\.inter\.json user '8' entry 2"):
        prepare(source, tmp_path / "data", PrepareConfig())


@pytest.mark.slow
def test_instruments(tmp_path):
    prepare(real_data("amazon14-instruments"), tmp_path / "data", PrepareConfig())
    counts = Dataset.open(tmp_path / "data").manifest.counts
    assert (counts["users"], counts["items"], counts["events"]) == (24_772, 9_922, 206_153)
