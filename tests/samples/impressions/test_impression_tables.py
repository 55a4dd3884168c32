"""Tables under whatever names become data sets: checked, divided, hashed."""

import json
import logging
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.ids import id_of, ids_of, rare_id
from rayrec.samples.impressions.prepare import prepare_impressions
from rayrec.samples.impressions.query_rows import QueryRows
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import small_dataset, write_source

NUM_ROWS = 50


def columns(num_rows=NUM_ROWS):
    random = np.random.default_rng(0)
    return {
        "click": [int(n) for n in random.integers(0, 2, num_rows)],
        "price": [None if n % 7 == 0 else n / 4 for n in range(num_rows)],
        "item": [f"i{n % 9}" for n in range(num_rows)],
        "history": [[f"i{n % 9}", f"i{n % 5}"][: n % 3] for n in range(num_rows)],
        "user": [n % 4 for n in range(num_rows)],
        "time": [1000 + n // 5 for n in range(num_rows)],
    }


def settings(**changes):
    given = {
        "layout": "table",
        "labels": ("click",),
        "numbers": ("price",),
        "ids": {"item": "item"},
        "lists": {"history": "item"},
        "group": "user",
        "rows_per_group": 8,
        "rows_per_file": 16,
    }
    return ImpressionsConfig.parse(given | changes)


def write_csv(path, values):
    def text(value):
        return "" if value is None else "|".join(value) if isinstance(value, list) else str(value)

    rows = [",".join(values), *(",".join(map(text, row)) for row in zip(*values.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path


def prepared(tmp_path, values=None, **changes):
    path = tmp_path / "log.parquet"
    tmp_path.mkdir(exist_ok=True)
    pq.write_table(pa.table(values or columns()), path)
    prepare_impressions(path, tmp_path / "data", settings(**changes))
    return ImpressionDataset.open(tmp_path / "data")


def train_table(dataset):
    return pa.concat_tables([pq.read_table(dataset.root / name) for name in dataset.train_files])


def test_rows_in_order_with_ids_and_types(tmp_path):
    dataset = prepared(tmp_path)
    values = columns()

    assert dataset.schema == ImpressionSchema(
        ("click",), ("price",), {"item": "item"}, {"history": "item"}, "user"
    )
    train = train_table(dataset)
    assert train.schema.types == [pa.int8(), pa.float32(), pa.int64(), pa.list_(pa.int64()), pa.int64()]
    assert train.column_names == ["click", "price", "item", "history", "user"]
    whole = pa.concat_tables([train, dataset.split_table("valid"), dataset.split_table("test")])
    assert whole["click"].to_pylist() == values["click"]
    assert whole["price"].to_pylist() == values["price"]
    assert whole["item"].to_pylist() == [id_of("item", key) for key in values["item"]]
    assert whole["history"].to_pylist() == [
        ids_of("item", pa.array(keys, pa.string())).to_pylist() for keys in values["history"]
    ]
    assert whole["user"].to_pylist() == [id_of("user", key) for key in values["user"]]
    assert dataset.num_ids == {"item": 9, "user": 4}
    assert dataset.manifest.rows == {"train": 40, "valid": 5, "test": 5}
    assert dataset.manifest.positives["click"]["train"] == sum(values["click"][:40])


def test_files_have_full_row_groups(tmp_path):
    dataset = prepared(tmp_path)
    files = [pq.ParquetFile(dataset.root / name).metadata for name in dataset.train_files]
    sizes = [[file.row_group(g).num_rows for g in range(file.num_row_groups)] for file in files]
    assert sizes == [[8, 8], [8, 8], [8]]


def test_text_and_parquet_give_the_same_rows(tmp_path):
    dataset = prepared(tmp_path)
    path = write_csv(tmp_path / "log.csv", columns())
    report = prepare_impressions(path, tmp_path / "from_text", settings())
    assert report.manifest.fingerprint == dataset.fingerprint


def test_a_split_by_time_keeps_rows_of_one_time_together(tmp_path):
    dataset = prepared(tmp_path, time="time", split="time", valid_fraction=0.13, test_fraction=0.1)
    assert dataset.manifest.rows == {"train": 35, "valid": 10, "test": 5}
    assert dataset.manifest.split.valid_start == 1007


def test_a_random_split_hangs_on_the_seed_alone(tmp_path):
    shares = {"split": "random", "valid_fraction": 0.3, "test_fraction": 0.3}
    first = prepared(tmp_path / "a", **shares)
    again = prepared(tmp_path / "b", **shares, rows_per_group=3)
    other = prepared(tmp_path / "c", **shares, seed=1)
    assert train_table(first).equals(train_table(again))
    assert train_table(first) != train_table(other)
    assert all(rows > 5 for rows in first.manifest.rows.values())


def test_files_for_each_split(tmp_path):
    for name, num_rows in {"train": 20, "dev": 5, "test": 4}.items():
        (tmp_path / "log").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns(num_rows)), tmp_path / "log" / f"{name}.parquet")
    report = prepare_impressions(tmp_path / "log", tmp_path / "data", settings())
    assert report.manifest.rows == {"train": 20, "valid": 5, "test": 4}
    assert report.manifest.split.kind == "files"
    with pytest.raises(InputError, match=r"has files for each split; leave split \(--split\) out"):
        prepare_impressions(tmp_path / "log", tmp_path / "other", settings(split="order"))


def test_counts_are_those_of_training_rows(tmp_path):
    values = columns() | {
        "item": ["a"] * 38 + ["b", "c"] + ["b"] * 5 + ["new"] * 5,
        "history": [[]] * NUM_ROWS,
    }
    dataset = prepared(tmp_path, values, min_count=2)
    rare = rare_id("item")
    assert train_table(dataset)["item"].to_pylist() == [id_of("item", "a")] * 38 + [rare] * 2
    assert set(dataset.split_table("valid")["item"].to_pylist()) == {rare}
    assert dataset.manifest.num_ids["item"] == 2
    assert dataset.manifest.num_rare["item"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"click": 2}, "log.csv line 5: click is '2'; expected 0, 1 or nothing"),
        ({"click": "yes"}, "log.csv line 5: click is 'yes'; expected 0, 1 or nothing"),
        ({"price": "cheap"}, "log.csv line 5: price is 'cheap'; expected a number or nothing"),
        ({"price": "1e99"}, "log.csv line 5: price is '1e99'; expected a finite number"),
    ],
)
def test_wrong_values_are_refused_by_line(tmp_path, change, message):
    values = columns()
    for name, value in change.items():
        values[name][3] = value
    path = write_csv(tmp_path / "log.csv", values)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        prepare_impressions(path, tmp_path / "data", settings())
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]


def test_unknown_labels_are_kept_and_counted(tmp_path):
    values = columns()
    values["click"][:3] = [None, None, 1]
    dataset = prepared(tmp_path, values)
    assert train_table(dataset)["click"].to_pylist()[:3] == [None, None, 1]
    assert dataset.manifest.known["click"]["train"] == 38


def test_what_is_missing_in_lists_is_left_out(tmp_path):
    values = columns() | {"history": [["i1", None], None, ["", "i2"]] + [[]] * (NUM_ROWS - 3)}
    dataset = prepared(tmp_path, values)
    found = train_table(dataset)["history"].to_pylist()[:3]
    assert found == [[id_of("item", "i1")], [], [id_of("item", "i2")]]


def test_a_line_of_another_width_is_named(tmp_path):
    path = write_csv(tmp_path / "log.csv", columns())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], lines[6] + ",", *lines[7:]]))
    with pytest.raises(InputError, match=r"log.csv line 7: 7 values, expected 6 separated by ','"):
        prepare_impressions(path, tmp_path / "data", settings())


def test_a_missing_column_is_named(tmp_path):
    path = write_csv(tmp_path / "log.csv", columns())
    with pytest.raises(InputError, match=r"log.csv: no column brand; found click, price, item"):
        prepare_impressions(path, tmp_path / "data", settings(ids={"brand": "brand"}))


def test_a_header_alone_is_refused(tmp_path):
    (tmp_path / "log.csv").write_text(",".join(columns()) + "\n")
    with pytest.raises(InputError, match="no row to train on"):
        prepare_impressions(tmp_path / "log.csv", tmp_path / "data", settings())


def test_no_training_row_is_refused(tmp_path):
    values = {name: column[:1] for name, column in columns().items()}
    with pytest.raises(InputError, match="no row to train on"):
        prepared(tmp_path, values, valid_fraction=0.5, test_fraction=0.4)


def test_a_label_that_never_changes_is_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        prepared(tmp_path, columns() | {"click": [0] * NUM_ROWS})
    assert "the label click is 0 in all training rows" in caplog.text


@pytest.mark.parametrize(("separator", "is_warned"), [("|", False), (" ", True)])
def test_lists_split_in_the_wrong_places_are_warned_of(tmp_path, caplog, separator, is_warned):
    texts = [separator.join(["i1", "i2", f"i{n % 9}"]) for n in range(NUM_ROWS)]

    with caplog.at_level(logging.WARNING):
        prepared(tmp_path, columns() | {"history": texts})

    assert ("none of the ids in lists of history is one of the column item" in caplog.text) == is_warned


def test_lists_of_those_who_ask_are_separated_as_at_preparation(tmp_path):
    tags = ["a,b", "b,c", "c", "a|b"]
    rows = {"click": [0, 1] * 20, "item": [f"i{n % 4}" for n in range(40)], "tags": tags * 10}
    origins = {"item": "item", "tags": "item.tags"}
    own = {"ids": {"item": "item"}, "lists": {"tags": "tag"}, "numbers": (), "group": None}
    impressions = prepared(tmp_path, rows, list_separator=",", origins=origins, **own)
    items = {"item_id": [f"i{n}" for n in range(4)], "tags": tags}
    source = write_source(tmp_path / "log", [("u", f"i{n}", n) for n in range(4)], items=items)
    prepare(source, tmp_path / "histories", PrepareConfig())
    dataset = Dataset.open(tmp_path / "histories")
    nobody, places = np.zeros(4, dtype=np.int64), np.arange(4)
    found = QueryRows(impressions, dataset, ["item", "tags"]).rows(
        np.array([-1]), nobody[:0], nobody[:2], nobody[:1], nobody, places
    )
    learned = impressions.read(impressions.train_files[0], ["item", "tags"]).to_pylist()
    assert {row["item"]: row["tags"] for row in found.rows.to_pylist()} == {
        row["item"]: row["tags"] for row in learned
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ()}, "at least one column of labels"),
        ({"numbers": ("click",)}, "the column 'click' is named twice"),
        ({"group": "click"}, "the column 'click' is named twice"),
        ({"layout": "criteo"}, r"labels \(--label\) belongs to the layout table"),
        ({"valid_start": "2020-01-01"}, "belongs to the split by time"),
        ({"valid_fraction": 0.6, "test_fraction": 0.4}, "leaves no row to train on"),
    ],
)
def test_settings_that_cannot_be_meant(changes, message):
    with pytest.raises(InputError, match=message):
        settings(**changes)


NO_COLUMNS = {"labels": (), "numbers": (), "ids": {}, "lists": {}, "group": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positive_rating": 3.0}, "positive_rating (--positive-rating) has no effect in the layout table"),
        ({"history_events": "all"}, "history_events (--history-events) has no effect in the layout table"),
        ({"history_length": 9}, "history_length (--history-length) has no effect without a column whose"),
        ({"lists": {}, "list_separator": ";"}, "list_separator (--list-separator) has no effect without"),
        ({"seed": 1}, "seed (--seed) has no effect on a split that is not random"),
        ({"seed": 1, "split": "order"}, "seed (--seed) has no effect on a split that is not random"),
        ({"split": "files", "valid_fraction": 0.2}, "valid_fraction (--valid-fraction) has no effect where"),
        (
            {"split": "time", "time": "at", "valid_start": 1.0, "test_start": 2.0, "test_fraction": 0.2},
            "test_fraction (--test-fraction) has no effect where",
        ),
        (
            {"layout": "movielens", "held_out_of": "data", "test_fraction": 0.2} | NO_COLUMNS,
            "test_fraction (--test-fraction) has no effect where",
        ),
        ({"split": "random", "time": "at"}, "time (--time) has no effect on the split random"),
        ({"split": "order", "time": "at", "time_unit": "s"}, "time (--time) has no effect on the split"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        settings(**changes)


def test_settings_that_have_an_effect_beside_others_are_taken():
    settings(seed=1, split="random", valid_fraction=0.2)
    settings(time="at", kept={"at": "when"}, split="random", time_unit="s")
    settings(history_length=9, origins={"history": "history"})
    settings(list_separator=";")
    ImpressionsConfig(layout="movielens", positive_rating=3.0, history_length=9, test_fraction=0.2)


def test_fractions_of_a_source_that_has_a_file_for_each_split_are_refused(tmp_path):
    (tmp_path / "log").mkdir()
    for split in ("train", "valid", "test"):
        write_csv(tmp_path / "log" / f"{split}.csv", columns())
    with pytest.raises(InputError, match=r"test_fraction .* has no effect: log has files for each split"):
        prepare_impressions(tmp_path / "log", tmp_path / "data", settings(test_fraction=0.2))


def test_the_wrong_kind_of_data_set_is_named(tmp_path):
    histories, impressions = small_dataset(tmp_path / "h"), prepared(tmp_path)
    with pytest.raises(InputError, match="a data set of histories, expected one of impressions"):
        ImpressionDataset.open(histories.root)
    with pytest.raises(InputError, match="a data set of impressions, expected one of histories"):
        Dataset.open(impressions.root)
    with pytest.raises(InputError, match="a data set of histories is there; give a new folder"):
        prepare_impressions(tmp_path / "log.parquet", histories.root, settings(overwrite=True))


def test_damage_is_found_and_a_data_set_is_not_replaced_unasked(tmp_path):
    dataset = prepared(tmp_path)
    with pytest.raises(InputError, match=r"set overwrite \(--overwrite\)"):
        prepared(tmp_path)
    prepared(tmp_path, overwrite=True)
    path = dataset.root / "impressions.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"columns": manifest["columns"] | {"group": None}}))
    with pytest.raises(InputError, match="its fingerprint does not fit"):
        ImpressionDataset.open(dataset.root)
    path.write_text(json.dumps(manifest))
    test_file = dataset.root / "test.parquet"
    test_file.write_bytes(test_file.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"test.parquet: its checksum is not the one"):
        ImpressionDataset.open(dataset.root)
    ImpressionDataset.open(dataset.root, checksums=False)


ROWS = [(number % 2, f"i{number % 7}", 1_700_000_000 + number) for number in range(20)]


def table_text(rows):
    return "\n".join(["click,item,at", *(",".join(map(str, row)) for row in rows)]) + "\n"


def write_parts(folder, first, second):
    """A part of text and one of Parquet."""
    folder.mkdir()
    (folder / "a.csv").write_text(table_text(first))
    columns = zip(("click", "item", "at"), zip(*second, strict=True), strict=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns}), folder / "b.parquet")
    return folder


def of_table(source, out, **settings):
    config = {"layout": "table", "labels": ("click",), "ids": {"item": "item"}, "time": "at"} | settings
    return prepare_impressions(source, out, ImpressionsConfig.parse(config)).manifest


def test_parts_of_text_and_of_parquet_are_one_table(tmp_path):
    (tmp_path / "plain.csv").write_text(table_text(ROWS))
    mixed = write_parts(tmp_path / "mixed", [(y, f" {item} ", at) for y, item, at in ROWS[:9]], ROWS[9:])
    assert (
        of_table(mixed, tmp_path / "a").fingerprint
        == of_table(tmp_path / "plain.csv", tmp_path / "b").fingerprint
    )


@pytest.mark.parametrize("form", ["00{}", "{}.0"])
def test_parts_that_write_ids_in_two_ways_are_told(tmp_path, caplog, form):
    rows = [(y, int(item[1:]) + 1, at) for y, item, at in ROWS]
    first = [(y, form.format(item), at) for y, item, at in rows[:9]]
    of_table(write_parts(tmp_path / "mixed", first, rows[9:]), tmp_path / "a")
    assert "7 ids of the space item differ from others only in how they are written" in caplog.text


def test_files_for_validation_have_any_usual_name(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    for number, name in enumerate(("training", "validation", "test")):
        (folder / f"{name}.csv").write_text(table_text(ROWS[6 * number : 6 * number + 6]))
    manifest = of_table(folder, tmp_path / "a")
    assert (manifest.split.kind, manifest.rows) == ("files", {"train": 6, "valid": 6, "test": 6})


def test_a_time_unit_without_times_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"time_unit .* has no effect without a column of times"):
        of_table(tmp_path, tmp_path / "a", time=None, time_unit="s")
