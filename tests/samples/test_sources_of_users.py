"""Sources as people have them: what is recognized and refused, and what became of every row and column."""

import csv
import io
import itertools
import json
import re
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare

ROWS = [
    (f"u{user}", f"i{(user + step) % 5}", 1_700_000_000 + 100 * user + step)
    for user in range(3)
    for step in range(4)
]


TABLE = {name: [row[at] for row in ROWS] for at, name in enumerate(("user_id", "item_id", "timestamp"))}


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def text(rows, header="user_id,item_id,timestamp", delimiter=","):
    lines = [header, *(delimiter.join(map(str, row)) for row in rows)]
    return "\n".join(line for line in lines if line) + "\n"


def prepared(source, **settings):
    out = source.parent / f"{source.name}.data{len(list(source.parent.iterdir()))}"
    return prepare(source, out, PrepareConfig.parse(settings))


def refusal(source, **settings):
    with pytest.raises(InputError) as caught:
        prepared(source, **settings)
    return str(caught.value)


def uses(report):
    return {(use.file, use.column): use.use for use in report.uses}


FINGERPRINT_OF = {
    "csv": {"interactions__csv": text(ROWS)},
    "semicolons": {"interactions__csv": text(ROWS, "user_id;item_id;timestamp", ";")},
    "tabs": {"interactions__tsv": text(ROWS, "user_id\titem_id\ttimestamp", "\t")},
    "other names": {"log__csv": text(ROWS, "customer_id,sku,event_time")},
    "blanks": {"interactions__csv": text(ROWS, "user_id, item_id, timestamp", ", ")},
    "recbole": {"s__inter": text(ROWS, "user_id:token\titem_id:token\ttimestamp:float", "\t")},
    "dates": {
        "log__csv": text(
            [(user, item, np.datetime64(time, "s")) for user, item, time in ROWS], "user,item,date"
        )
    },
}


@pytest.mark.parametrize("files", FINGERPRINT_OF.values(), ids=FINGERPRINT_OF)
def test_the_same_content_in_any_dialect_is_the_same_data_set(tmp_path, files):
    expected = prepared(write(tmp_path / "a", **FINGERPRINT_OF["csv"])).manifest.fingerprint
    assert prepared(write(tmp_path / "b", **files)).manifest.fingerprint == expected


def test_a_log_without_a_header_needs_names(tmp_path):
    source = write(tmp_path / "s", interactions__csv=text(ROWS, ""))
    plain = prepared(write(tmp_path / "t", interactions__csv=text(ROWS)))
    assert "first line looks like values" in refusal(
        write(tmp_path / "n", log__csv="1,2,3\n1,3,4\n") / "log.csv"
    )
    report = prepared(source, names=["user_id", "item_id", "timestamp"])
    assert report.manifest.fingerprint == plain.manifest.fingerprint


def test_several_files_with_the_same_columns_are_one_log(tmp_path):
    source = write(tmp_path / "s", a__csv=text(ROWS[:5]), b__csv=text(ROWS[5:]), _hidden__csv="nothing")
    plain = prepared(write(tmp_path / "t", interactions__csv=text(ROWS)))
    assert prepared(source).manifest.fingerprint == plain.manifest.fingerprint


@pytest.mark.parametrize(
    ("files", "columns"),
    [
        ({"interactions__csv": text(ROWS, "session,item_id,timestamp")}, {"user_id": "session"}),
        (
            {"a__inter": text(ROWS, "session:token\titem_id:token\ttimestamp:float", "\t")},
            {"user_id": "session"},
        ),
        (
            {"log__csv": text(ROWS, "session,artikel,t"), "items__csv": "item_id,title\ni1,One\n"},
            {"user_id": "session", "item_id": "artikel", "timestamp": "t"},
        ),
    ],
    ids=["folder", "recbole", "events"],
)
def test_columns_can_be_named_in_every_layout(tmp_path, files, columns):
    report = prepared(write(tmp_path / "s", **files), columns=columns)
    assert report.manifest.counts["events"] == 12
    if "items__csv" in files:
        assert report.manifest.counts["undescribed_items"] == 4


def test_names_that_have_no_effect_are_refused(tmp_path):
    source = write(tmp_path / "s", interactions__csv=text(ROWS))
    message = refusal(source, columns={"behavior": "kind"})
    assert "says that behavior is called 'kind', but there is no such column; found user_id" in message
    movies = write(tmp_path / "m", ratings__dat="1::2::5::3\n1::3::5::4\n1::4::5::5\n")
    assert "has no effect on the layout movielens" in refusal(movies, columns={"user_id": "who"})


def test_the_title_of_a_log_is_the_title_of_its_items(tmp_path):
    rows = [(*row, f"Title of {row[1]}", 9.5) for row in ROWS]
    source = write(tmp_path / "s", log__csv=text(rows, "user_id,item_id,timestamp,product_name,price"))
    report = prepared(source)
    items = Dataset.open(report.path).items
    assert items.label(0) == f"Title of {pq.read_table(report.path / 'items.parquet')['item_key'][0].as_py()}"
    assert uses(report)["log.csv", "product_name"] == "title and text of the items"
    assert uses(report)["log.csv", "price"] == "kept"


def test_what_became_of_every_file_and_column_is_said(tmp_path):
    source = write(
        tmp_path / "s",
        interactions__csv=text([(*row, 4) for row in ROWS], "user_id,sku,timestamp,stars"),
        items__csv="sku;name;color\ni1;One;red\n",
        notes__txt="hello",
    )
    report = prepared(source)
    assert uses(report) == {
        ("interactions.csv", "user_id"): "user_id",
        ("interactions.csv", "sku"): "item_id",
        ("interactions.csv", "timestamp"): "timestamp",
        ("interactions.csv", "stars"): "kept",
        ("items.csv", None): "values separated by ';' in items.csv",
        ("items.csv", "sku"): "item_id",
        ("items.csv", "name"): "title and text",
        ("items.csv", "color"): "kept",
        ("notes.txt", None): "ignored: only interactions, items and users are read",
    }
    shown = dict(report.rows())
    assert shown["interactions.csv"] == "user_id; sku: item_id; timestamp; stars: kept"
    assert shown["times"] == "from 2023-11-14 22:13:20 to 2023-11-14 22:16:43 UTC"
    assert json.loads(json.dumps(report.to_json()))["uses"][0]["use"] == "user_id"


def test_all_that_is_wrong_is_said_at_once_and_can_be_accepted(tmp_path):
    rows = [*ROWS, ROWS[0], ("", "i1", 5), ("u9", "i1", "soon"), ("u8", "i1", -1), ("u7", "i1", 6)]
    items = "item_id,title\ni1,One\ni1,Again\ni77,Never\n"
    source = write(tmp_path / "s", interactions__csv=text(rows), items__csv=items)
    message = refusal(source)
    for part in (
        "interactions.csv line 15: user_id is missing (1 rows without an id)",
        "allow missing-ids",
        "line 16: timestamp is soon",
        "(2 rows without a usable time)",
        "items.csv line 3: item 'i1' is described a second time",
        "a second time (1 duplicate events in all)",
        "'u7' has only this event",
        "item 'i77' has no interactions",
        "--clean allows all of it",
    ):
        assert part in message
    allow = ["missing-ids", "bad-times", "repeated-descriptions", "duplicates", "short-users", "cold-items"]
    counts = prepared(source, allow=allow).manifest.counts
    assert counts == prepared(source, clean=True).manifest.counts
    assert [counts[name] for name in ("events", "missing_ids", "bad_times", "repeated_descriptions")] == [
        13,
        1,
        2,
        1,
    ]
    assert len(rows) == counts["events"] + counts["duplicates"] + counts["missing_ids"] + counts["bad_times"]


@pytest.mark.parametrize(
    ("key", "example"),
    [
        (lambda item: f"0{item[1:]}", "'0' there, '00' in"),
        (lambda item: f"{item[1:]}.0", "'0' there, '0.0' in"),
    ],
)
def test_ids_that_never_meet_are_refused_with_an_example_of_each(tmp_path, key, example):
    rows = [(user, key(item), time) for user, item, time in ROWS]
    items = "item_id,title\n" + "".join(f"{number},Thing\n" for number in range(5))
    source = write(tmp_path / "s", interactions__csv=text(rows), items__csv=items)
    message = refusal(source, allow=["cold-items"])
    assert f"none of its 5 item ids is in the log: {example}" in message
    assert prepared(source, allow=["cold-items", "unmatched-ids"]).manifest.counts["items"] == 10


def test_blanks_around_ids_are_cut_off_and_counted(tmp_path):
    rows = [(user, f" {item} ", time) for user, item, time in ROWS]
    source = write(tmp_path / "s", interactions__csv=text(rows), items__csv="item_id,title\ni1,One\n")
    counts = prepared(source).manifest.counts
    assert (counts["trimmed_ids"], counts["undescribed_items"]) == (12, 4)


@pytest.mark.parametrize(
    ("times", "settings", "message"),
    [
        (pa.array([20240101 + n for n in range(12)]), {}, "dates written as numbers, such as 20240101"),
        (pa.array([float(row[2]) for row in ROWS], pa.float32()), {}, "holds such times to 128 s only"),
        (pa.array(["31/01/2024"] * 12), {}, "needs time_format"),
        (
            pa.array(["31/01/2024"] * 12),
            {"time_format": "%Y/%m/%d"},
            r"timestamp is 31/01/2024, expected a date like",
        ),
    ],
)
def test_times_that_would_be_misread_are_refused(tmp_path, times, settings, message):
    source = tmp_path / "s"
    source.mkdir()
    pq.write_table(pa.table(TABLE | {"timestamp": times}), source / "interactions.parquet")
    assert message in refusal(source, **settings)


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ("31/01/2024 12:00", {"time_format": "%d/%m/%Y %H:%M"}),
        ("2024-01-31 12:00:00 UTC", {}),
        ("2024-01-31 13:00:00 Europe/Berlin", {}),
        ("2024-01-31T13:00:00[Europe/Berlin]", {}),
        ("202401311200", {"time_format": "%Y%m%d%H%M"}),
    ],
)
def test_dates_in_other_forms(tmp_path, written, settings):
    rows = [("u", f"i{number}", written) for number in range(3)]
    source = write(tmp_path / "s", interactions__csv=text(rows))
    counts = prepared(source, **settings).manifest.counts
    assert (counts["earliest"], counts["latest"]) == (1_706_702_400, 1_706_702_400)


@pytest.mark.parametrize(
    "lines", ["1 5 6 7\n2 6 5 8\n", "1 5\n1 6\n2 6\n1 7\n2 5\n2 8\n"], ids=["users", "events"]
)
def test_sequences_without_times_keep_their_order_and_say_so(tmp_path, lines):
    source = write(tmp_path / "s", Beauty__txt=lines)
    report = prepared(source)
    dataset = Dataset.open(report.path)
    assert [dataset.history_of(user).tolist() for user in ("1", "2")] == [[5, 6, 7], [6, 5, 8]]
    assert report.manifest.counts["ordered_without_times"] == 6
    assert dict(report.rows())["times"] == "none in the source: the order of its events is believed"
    assert "the source has no times" in refusal(source, split="time")


def test_files_for_training_validation_and_test_are_the_split(tmp_path):
    by_step = [
        [row for number, row in enumerate(ROWS) if number % 4 in steps] for steps in ((0, 1), (2,), (3,))
    ]
    files = {f"{name}__csv": text(rows) for name, rows in zip(("train", "val", "test"), by_step, strict=True)}
    report = prepared(write(tmp_path / "s", **files))
    usual = prepared(write(tmp_path / "t", interactions__csv=text(ROWS)))
    assert report.manifest.split.kind == "given"
    assert report.manifest.fingerprint == usual.manifest.fingerprint
    assert "its files are split already" in refusal(tmp_path / "s", split="time")


def test_a_given_split_goes_before_the_times(tmp_path):
    """Somebody else's test events may be older than training events of the user."""
    files = {
        "train__csv": text([("u", "a", 50), ("u", "b", 60)]),
        "test__csv": text([("u", "c", 10)]),
    }
    dataset = Dataset.open(prepared(write(tmp_path / "s", **files)).path)
    rows = dataset.evaluation_rows("test")
    items = pq.read_table(dataset.root / "items.parquet")
    keys = dict(zip(items["item_id"].to_pylist(), items["item_key"].to_pylist(), strict=True))
    assert [keys[item] for item in rows.history_ids_N.tolist()] == ["a", "b"]
    assert [keys[item] for item in rows.targets_B.tolist()] == ["c"]


def test_titles_of_movielens_in_both_encodings(tmp_path):
    rows = "".join(f"1::{movie}::4::{movie}\n" for movie in range(1, 4))
    movies = "".join(f"{movie}::Les Misérables {movie}::Drama\n" for movie in range(1, 4))
    for encoding in ("utf-8", "latin-1"):
        source = write(tmp_path / encoding, ratings__dat=rows, movies__dat=movies.encode(encoding))
        titles = pq.read_table(prepared(source).path / "items.parquet")["title"].to_pylist()
        assert sorted(titles) == [f"Les Misérables {movie}" for movie in range(1, 4)]


@pytest.mark.parametrize("name", ["title", "behavior"])
@pytest.mark.parametrize("value", [[1, 2], {"a": 1}], ids=["list", "struct"])
def test_types_that_cannot_be_what_a_column_is_called_are_refused(tmp_path, name, value):
    source = tmp_path / "s"
    source.mkdir()
    table = {
        "user_id": [row[0] for row in ROWS],
        "item_id": [row[1] for row in ROWS],
        "timestamp": [row[2] for row in ROWS],
    }
    pq.write_table(pa.table(table | {name: [value] * 12}), source / "interactions.parquet")
    assert f"column {name} has the type" in refusal(source)


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string", "binary_view", "null"])
def test_columns_of_any_form_that_arrow_has(tmp_path, kind):
    source = tmp_path / "s"
    source.mkdir()
    values = {
        "dictionary": pa.array(list("aabbccddeeff")).dictionary_encode(),
        "string_view": pa.array(["x"] * 12, pa.string_view()),
        "large_string": pa.array(["x"] * 12, pa.large_string()),
        "binary_view": pa.array([b"x"] * 12, pa.binary_view()),
        "null": pa.nulls(12),
    }[kind]
    names = {"note"} if kind == "binary_view" else {"note", "title", "behavior"}
    pq.write_table(pa.table(TABLE | dict.fromkeys(names, values)), source / "interactions.parquet")
    items = {"item_id": [f"i{item}" for item in range(5)], **dict.fromkeys(names - {"behavior"}, values[:5])}
    pq.write_table(pa.table(items), source / "items.parquet", row_group_size=2)
    counts = prepared(source).manifest.counts
    assert (counts["events"], counts["undescribed_items"]) == (12, 0)
    (source / "items.parquet").unlink()
    assert prepared(source).manifest.counts["events"] == 12


@pytest.mark.parametrize("left", ["more__CSV", "more__csv.bz2", "more__parq", "2024/more__csv"])
def test_no_part_of_a_table_stays_behind(tmp_path, left):
    folder = write(tmp_path / "s/interactions", a__csv=text(ROWS[:6]))
    path = folder / left.replace("__", ".")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text(ROWS[6:]))
    assert f"{folder / left.split('/')[0].replace('__', '.')}: seems to be part" in refusal(tmp_path / "s")


def test_what_is_no_table_is_said_to_be_ignored(tmp_path):
    write(tmp_path / "s/interactions", a__csv=text(ROWS), README__md="hello")
    assert uses(prepared(tmp_path / "s"))["interactions", None] == "README.md ignored: no table"
    source = write(tmp_path / "t", log__csv=text(ROWS), README__md="hello")
    write(source / "old", log__csv=text(ROWS))
    found = uses(prepared(source))
    assert all(found[name, None].startswith("ignored") for name in ("README.md", "old"))


def test_a_row_without_any_id_is_one_row(tmp_path):
    source = write(tmp_path / "s", interactions__csv=text([*ROWS, ("", "", 5)]))
    assert prepared(source, clean=True).manifest.counts["missing_ids"] == 1


def test_a_column_of_the_source_does_not_decide_the_split(tmp_path):
    rows = [(*row, number % 3) for number, row in enumerate(ROWS)]
    header = "user_id,item_id,timestamp,__part"
    report = prepared(write(tmp_path / "s", interactions__csv=text(rows, header)))
    assert report.manifest.split.kind == "leave_one_out"
    assert report.manifest.counts["train_events"] == 6
    assert uses(report)["interactions.csv", "__part"] == "kept as __part_of_source"
    given = write(tmp_path / "t", train__csv=text(rows[:9], header), test__csv=text(rows[9:], header))
    report = prepared(given)
    assert report.manifest.split.kind == "given"
    assert [use.use for use in report.uses if use.column == "__part"] == ["kept as __part_of_source"]


def test_held_out_events_that_are_no_targets_are_counted(tmp_path):
    by_half = [[row for number, row in enumerate(ROWS) if number % 4 // 2 == half] for half in (0, 1)]
    source = write(tmp_path / "s", train__csv=text(by_half[0]), test__csv=text(by_half[1]))
    counts = prepared(source).manifest.counts
    assert (counts["train_events"], counts["test_rows"], counts["unused_events"]) == (6, 3, 3)


def test_titles_of_the_log_that_are_not_taken_are_said(tmp_path):
    source = write(
        tmp_path / "s",
        interactions__csv=text([(*row, "Of the log") for row in ROWS], "user_id,item_id,timestamp,title"),
        items__csv=text([(f"i{number}", "One") for number in range(5)], "item_id,title"),
    )
    assert (
        uses(prepared(source))["interactions.csv", "title"]
        == "ignored: its titles, since items.csv has one for every item"
    )


def test_messages_about_several_files_name_their_folder(tmp_path):
    source = write(tmp_path / "s", a__csv=text(ROWS[:5]), b__csv=text(ROWS[5:]))
    assert refusal(source, columns={"behavior": "kind"}).startswith(f"{source}: ")


@pytest.mark.parametrize(
    ("times", "settings", "message"),
    [
        (["0"] + [f"202401{day:02d}" for day in range(1, 12)], {}, "--time-format %Y%m%d)"),
        ([f"202401{day:02d}1200" for day in range(1, 13)], {"time_unit": "ms"}, "%Y%m%d%H%M)"),
        ([f"202401{day:02d}120000" for day in range(1, 13)], {"time_unit": "ms"}, "%Y%m%d%H%M%S)"),
        (["31/01/2024"] * 12, {"time_format": "%Q"}, "which no date can be written in"),
    ],
)
def test_dates_in_digits_are_no_times_in_any_unit(tmp_path, times, settings, message):
    rows = [(*row[:2], time) for row, time in zip(ROWS, times, strict=True)]
    assert message in refusal(write(tmp_path / "s", interactions__csv=text(rows)), **settings)


def test_a_time_format_that_has_no_effect_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    table = pa.table(TABLE | {"timestamp": pa.array(TABLE["timestamp"], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "s/interactions.parquet")
    assert "has no effect" in refusal(tmp_path / "s", time_format="%d/%m/%Y")


def test_names_that_no_file_needs_are_refused(tmp_path):
    names = ["user_id", "item_id", "timestamp"]
    assert "layout s3rec" in refusal(write(tmp_path / "s", Beauty__txt="1 5 6 7\n"), names=names)
    pq.write_table(pa.table(TABLE), tmp_path / "log.parquet")
    assert "no effect on Parquet" in refusal(tmp_path / "log.parquet", names=names)


@pytest.mark.parametrize(
    "files",
    [
        {"u__data": "".join(f"1\t{movie}\t4\t{movie}\n" for movie in range(3))},
        {"x__inter": text(ROWS, "user_id:token\titem_id:token\ttimestamp:float", "\t")},
    ],
    ids=["movielens", "recbole"],
)
def test_other_files_of_published_data_sets_are_said(tmp_path, files):
    report = prepared(write(tmp_path / "s", **files, README__md="hello"))
    assert uses(report)["README.md", None].startswith("ignored: only ")


@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"x"] * 12, pa.binary_view()),
        pa.array([{"a": "b"}] * 12, pa.struct([("a", pa.string_view())])),
        pa.array([["b"]] * 12, pa.list_(pa.string_view())),
    ],
    ids=["binary", "struct", "list"],
)
def test_views_in_parquet_are_kept(tmp_path, values):
    (tmp_path / "s").mkdir()
    pq.write_table(pa.table(TABLE | {"x": values}), tmp_path / "s/interactions.parquet")
    assert prepared(tmp_path / "s").manifest.counts["events"] == 12


@pytest.mark.parametrize(
    ("times", "example"),
    [
        ([2010 + row % 5 for row in range(12)], "such as 2010, which look like years; set time_format"),
        ([202401 + row % 5 for row in range(12)], "such as 202401, which look like months"),
        ([45321 + row for row in range(12)], "such as 45321, which look like days as Excel"),
        ([45321.5 + row for row in range(12)], "such as 45321.5, which look like days as Excel"),
    ],
    ids=["years", "months", "excel", "excel with hours"],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_years_months_and_days_of_excel_are_not_seconds(tmp_path, times, example, kind):
    (tmp_path / "s").mkdir()
    if kind == "csv":
        rows = [(*row[:2], time) for row, time in zip(ROWS, times, strict=True)]
        write(tmp_path / "s", interactions__csv=text(rows))
    else:
        pq.write_table(pa.table(TABLE | {"timestamp": times}), tmp_path / "s/interactions.parquet")
    assert example in refusal(tmp_path / "s")
    counts = prepared(tmp_path / "s", time_unit="s").manifest.counts
    assert counts["earliest"] == int(min(times))


def test_years_and_months_are_read_by_their_format(tmp_path):
    for name, times, time_format in (("a", [2024] * 12, "%Y"), ("b", [202401.0] * 11 + [None], "%Y%m")):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(TABLE | {"timestamp": times}), tmp_path / name / "interactions.parquet")
        counts = prepared(tmp_path / name, time_format=time_format, clean=True).manifest.counts
        assert counts["latest"] == 1_704_067_200


def test_seconds_are_not_believed_to_be_milliseconds(tmp_path):
    source = write(tmp_path / "s", interactions__csv=text(ROWS))
    assert "would be of 1970, and in s 2023-11-14; set time_unit (--time-unit) to s" in refusal(
        source, time_unit="ms"
    )


def test_a_time_unit_that_has_no_effect_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    table = pa.table(TABLE | {"timestamp": pa.array(TABLE["timestamp"], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "s/interactions.parquet")
    dates = write(tmp_path / "t", interactions__csv=text([(*row[:2], "2024-01-31") for row in ROWS]))
    for source in (tmp_path / "s", dates):
        assert "time_unit (--time-unit) has no effect" in refusal(source, time_unit="s")
    sequences = write(tmp_path / "u", Beauty__txt="1 5 6 7\n2 6 5 8\n")
    for settings in ({"time_unit": "ms"}, {"time_format": "%Y"}):
        assert "the source has no times" in refusal(sequences, **settings)


@pytest.mark.parametrize(
    "items",
    [
        "item_id,color\ni0,red\ni1,blue\n",
        "item_id,title\ni0,\ni1,\n",
        "item_id,title\ni0,Title of i0\n",
    ],
    ids=["no column", "empty", "not all items"],
)
def test_titles_of_the_log_fill_what_the_items_lack(tmp_path, items):
    rows = [(user, f" {item}", time, f"Title of {item}") for user, item, time in ROWS]
    rows.append(("u0", "i1", 5, "An older title"))
    source = write(
        tmp_path / "s",
        interactions__csv=text(rows, "user_id,item_id,timestamp,product"),
        items__csv=items,
    )
    report = prepared(source, columns={"title": "product"})
    table = pq.read_table(report.path / "items.parquet")
    titles = dict(zip(table["item_key"].to_pylist(), table["title"].to_pylist(), strict=True))
    assert titles == {f"i{item}": f"Title of i{item}" for item in range(5)}
    if "color" in items:
        assert sorted(filter(None, table["color"].to_pylist())) == ["blue", "red"]
    filled = 4 if "of i0" in items else 5
    assert uses(report)["interactions.csv", "product"] == f"title of {filled} items without one in items.csv"


def test_ids_that_partly_meet_are_told_apart_by_how_they_are_written(tmp_path):
    rows = [(user, f"000{item[1:]}", time) for user, item, time in ROWS]
    items = "item_id,title\n0001,One\n" + "".join(f"{number},Thing\n" for number in (0, 2, 3, 4))
    source = write(tmp_path / "s", interactions__csv=text(rows), items__csv=items)
    message = refusal(source)
    assert (
        "4 of its item ids differ from the log's only in how they are written: '0' there, '0000' in"
        in message
    )
    report = prepared(source, allow=["unmatched-ids", "cold-items"])
    assert uses(report)["items.csv", None].startswith(
        "has 1 of the log's 5 item ids: '0' is in items.csv alone"
    )


def test_tables_that_share_few_ids_are_said_with_examples(tmp_path):
    items = "item_id,title\ni1,One\n" + "".join(f"x{number},Thing\n" for number in range(9))
    source = write(tmp_path / "s", interactions__csv=text(ROWS), items__csv=items)
    assert uses(prepared(source, allow=["cold-items"]))["items.csv", None] == (
        "has 1 of the log's 5 item ids: 'x0' is in items.csv alone, 'i0' in interactions.csv alone"
    )


def test_folders_of_hive_name_missing_and_written_values(tmp_path):
    source = tmp_path / "s"
    for number, shop in enumerate(("a%2Fb c", "__HIVE_DEFAULT_PARTITION__")):
        rows = ROWS[:8] if number == 0 else ROWS[8:]
        write(source / "interactions" / f"the%20shop={shop}", a__csv=text(rows))
    report = prepared(source)
    train = pq.read_table(report.path / "train")
    assert {shop for shops in train["the shop"].to_pylist() for shop in shops} == {"a/b c", None}


def test_given_splits_of_sequences(tmp_path):
    files = {"train__txt": "1 5 6\n2 6 5\n", "validation__txt": "1 7\n2 8\n", "test__txt": "1 8\n2 7\n"}
    report = prepared(write(tmp_path / "s", **files))
    plain = prepared(write(tmp_path / "t", Shop__txt="1 5 6 7 8\n2 6 5 8 7\n"))
    assert report.manifest.split.kind == "given"
    assert report.manifest.counts["ordered_without_times"] == 8
    assert report.manifest.fingerprint == plain.manifest.fingerprint
    again = write(tmp_path / "u", **files | {"test__txt": "1 5 6 7 8\n2 7\n"})
    assert "test.txt: the line of user '1' begins with all items" in refusal(again)
    mixed = write(tmp_path / "v", train__csv=text(ROWS), test__txt="1 8\n2 7\n")
    assert "train.csv: a table, but test.txt has lines of ids" in refusal(mixed)


NOTES = st.sampled_from(["", "view", "1,5", "1,500", '"', "a/b", "x=1"])
KEYS = st.sampled_from(["a", "b", "7", "007", "x y", "ü", "", ' "', "long;one", "t\tab"])
TIMES = st.one_of(
    st.integers(0, 2_000_000_000).map(str),
    st.sampled_from(["", "soon", "-5", "2024-01-31", "1e9", "2024", "202401", "45321.5"]),
)
COLUMNS = ("user_id", "item_id", "timestamp", "note")


def write_text(path, rows, order=COLUMNS, delimiter=","):
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, order, delimiter=delimiter, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(dict(zip(COLUMNS, row, strict=True)) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(buffer.getvalue())


def folder_of(note):
    return f"note={quote(note, safe='')}" if note else "note=__HIVE_DEFAULT_PARTITION__"


def outcome(source):
    """The manifest, or why there is none."""
    try:
        return prepared(source, clean=True).manifest, ""
    except InputError as error:
        return None, str(error)


@pytest.mark.slow
@given(
    rows=st.lists(st.tuples(KEYS, KEYS, TIMES, NOTES), min_size=1, max_size=25),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    order=st.permutations(COLUMNS),
    cut=st.integers(0, 25),
)
def test_every_row_is_in_the_data_set_or_counted_in_any_dialect(
    tmp_path_factory, rows, delimiter, order, cut
):
    folder = tmp_path_factory.mktemp("source")
    rows = sorted(rows, key=lambda row: folder_of(row[3]))  # of duplicates, the first is kept
    write_text(folder / "plain" / "interactions.csv", rows)
    write_text(folder / "dialect" / "interactions.csv", rows, order, delimiter)
    write_text(folder / "parts" / "interactions" / "a.csv", rows[:cut], order, delimiter)
    write_text(folder / "parts" / "interactions" / "b.tsv", rows[cut:], delimiter="\t")
    for note, own in itertools.groupby(rows, key=lambda row: row[3]):
        path = folder / "hive" / "interactions" / folder_of(note) / "part.csv"
        write_text(path, list(own), COLUMNS[:3], delimiter)
    manifest, why = outcome(folder / "plain")
    for dialect in ("dialect", "parts", "hive"):
        other, _ = outcome(folder / dialect)
        assert (other and other.fingerprint) == (manifest and manifest.fingerprint)
    if manifest is None:
        # Every row lacks something, or most times are none in seconds.
        event(why.partition(": ")[2][:40])
        wrong = ("", "soon", "-5", "2024-01-31")  # a date among numbers, that is
        are_wrong = [not (row[0].strip() and row[1].strip()) or row[2] in wrong for row in rows]
        assert all(are_wrong) or "which look like" in why
        return
    counts = manifest.counts
    lost = counts["duplicates"] + counts["missing_ids"] + counts["bad_times"]
    assert counts["events"] + lost == len(rows)


@pytest.mark.parametrize("column", [0, 1])
def test_a_number_that_one_column_writes_in_two_ways_is_refused_with_an_example(tmp_path, column):
    """Two users with half of a history each, or two items with half of the events."""
    rows = [list(map(str, row)) for row in ROWS]
    for number, row in enumerate(rows):
        row[column] = row[column][1:].zfill(5 if number % 2 else 1)
    source = write(tmp_path / "s", interactions__csv=text(rows))
    message = refusal(source)
    name = ("user_id", "item_id")[column]
    found = re.search(rf"interactions\.csv: {name} has '(\d+)' and '(\d+)', which are two ids \(", message)
    assert found is not None
    assert (int(found[1]), len(found[1]) == len(found[2])) == (int(found[2]), False)
    assert "--allow ids-alike) to keep them apart" in message
    assert prepared(source, clean=True).manifest.counts["events"] == len(ROWS)


def test_ids_that_only_look_like_numbers_may_differ_in_case_and_zeros(tmp_path):
    rows = [(user, ("a0", "A0", "0a", "00a", "7")[int(item[1:])], time) for user, item, time in ROWS]
    assert prepared(write(tmp_path / "s", log__csv=text(rows))).manifest.counts["items"] == 5


def test_a_table_that_describes_one_number_twice_is_refused(tmp_path):
    rows = [(user, item[1:], time) for user, item, time in ROWS]
    items = "item_id,title\n" + "".join(f"{number},Thing\n" for number in range(5)) + "03,Thing\n"
    message = refusal(write(tmp_path / "s", interactions__csv=text(rows), items__csv=items), clean=False)
    assert "items.csv: item_id has '3' and '03'" in message


def test_parts_with_ids_as_texts_and_as_numbers_are_read_alike(tmp_path):
    rows = [(user[1:], item[1:], time) for user, item, time in ROWS]
    whole = prepared(write(tmp_path / "a", interactions__csv=text(rows)))
    parts = write(tmp_path / "b" / "interactions", a__csv=text(rows[:6]))
    numbers = [[int(row[at]) for row in rows[6:]] for at in range(3)]
    table = pa.table(dict(zip(("user_id", "item_id", "timestamp"), numbers, strict=True)))
    pq.write_table(table, parts / "b.parquet")

    assert prepared(tmp_path / "b").manifest.fingerprint == whole.manifest.fingerprint

    write(parts, a__csv=text([(user.zfill(3), item, time) for user, item, time in rows[:6]]))
    assert "user_id has '001' and '1', which are two ids" in refusal(tmp_path / "b")
