import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers import load_source
from tests.helpers.data import real_data, write_source

EVENTS = [("a", "x", 10), ("a", "y", 20), ("b", "x", 30)]


def load(source, **settings):
    raw, layout = load_source(source, PrepareConfig.parse(settings))
    return raw, layout


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_folder_of_interactions_and_items(tmp_path, kind):
    source = write_source(
        tmp_path / "shop",
        EVENTS,
        items={"item_id": ["x", "y"], "title": ["X", None]},
        kind=kind,
        rating=[1, 2, 3],
    )
    raw, layout = load(source)
    assert (layout, raw.name) == ("folder", "shop")
    assert raw.interactions.table["user_id"].to_pylist() == ["a", "a", "b"]
    assert raw.interactions.table["rating"].to_pylist() == [1, 2, 3]
    assert raw.items.table["title"].to_pylist() == ["X", None]
    assert raw.users is None


def test_a_folder_of_parts_traces_rows_to_their_file(tmp_path):
    folder = tmp_path / "source" / "interactions"
    folder.mkdir(parents=True)
    header = "user_id,item_id,timestamp\n"
    (folder / "b.csv").write_text(header + "2,3,4\n")
    (folder / "a.csv").write_text(header + "1,2,3\n1,3,4\n")
    raw, _ = load(tmp_path / "source")
    assert raw.interactions.table["user_id"].to_pylist() == ["1", "1", "2"]
    assert raw.interactions.where(1) == f"{folder / 'a.csv'} line 3"
    assert raw.interactions.where(2) == f"{folder / 'b.csv'} line 2"


def test_parts_with_other_columns_are_refused_by_name(tmp_path):
    write(
        tmp_path / "s" / "interactions",
        a__csv="user_id,item_id,timestamp\n1,2,3\n",
        b__csv="user_id,item,t\n1,2,3\n",
    )
    with pytest.raises(InputError, match=r"b.csv: its columns are user_id, item, t, but those of a.csv"):
        load(tmp_path / "s")


def test_only_empty_cells_of_a_csv_are_missing(tmp_path):
    source = write(
        tmp_path / "s",
        interactions__csv="user_id,item_id,timestamp\n1,2,3\n",
        items__csv='item_id,title,country\n007,"NA, null",NA\n8,,\n',
    )
    items = load(source)[0].items.table
    assert items.to_pydict() == {
        "item_id": ["007", "8"],
        "title": ["NA, null", None],
        "country": ["NA", None],
    }


def test_renamed_columns_are_refused_with_what_was_found(tmp_path):
    source = write(tmp_path / "s", interactions__csv="userid,item_id,when\n1,2,3\n")
    with pytest.raises(
        InputError, match=r"interactions.csv: no column timestamp; found userid, item_id, when.*need times"
    ):
        load(source)
    source = write(tmp_path / "t", interactions__csv="userid,thing,timestamp\n1,2,3\n")
    with pytest.raises(InputError, match=r"no column item_id; found .*user_id=customer\)$"):
        load(source)


def test_recbole_headers_are_typed_and_titles_found(tmp_path):
    source = write(
        tmp_path / "s",
        ml__inter="user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t2\t3.5\t9\n",
        ml__item='item_id:token\tmovie_title:token_seq\tclass:token_seq\n2\t"Quoted\tDrama War\n',
        ml__user="user_id:token\tage:token\n1\t024\n",
    )
    raw, layout = load(source)
    assert (layout, raw.name) == ("recbole", "ml")
    assert raw.interactions.table["rating"].to_pylist() == [3.5]
    assert raw.items.table.to_pydict() == {"item_id": ["2"], "title": ['"Quoted'], "class": ["Drama War"]}
    assert raw.users.table["age"].to_pylist() == ["024"]


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("user_id:token\titem_id:token", "1\t2", "no column timestamp; found user_id, item_id"),
        ("user_id\titem_id:token", "1\t2", "line 1: 'user_id' is not a typed column"),
        (
            "user_id:token\titem_id:token\ttimestamp:float\tr:float",
            "1\t2\t3\tx",
            "column r is declared float",
        ),
    ],
)
def test_wrong_recbole_files_are_refused(tmp_path, header, row, message):
    source = write(tmp_path / "s", ml__inter=f"{header}\n{row}\n")
    with pytest.raises(InputError, match=message):
        load(source)


def test_s3rec_lines_become_events_with_their_times(tmp_path):
    source = write(
        tmp_path / "s",
        Shop__txt="1 5 6\n2 6\n",
        Shop_time__txt="1 10 20\n2 30\n",
        items__tsv='item_id\tasin\ttitle\n5\tB5\t12" mirror\n6\tB6\t\n',
        Shop_item2attributes__json=json.dumps({"5": [1, 2]}),
    )
    raw, layout = load(source)
    assert (layout, raw.name) == ("s3rec", "Shop")
    assert raw.interactions.table.to_pydict() == {
        "user_id": ["1", "1", "2"],
        "item_id": ["5", "6", "6"],
        "timestamp": ["10", "20", "30"],
    }
    assert raw.interactions.where(2) == f"{source / 'Shop.txt'} line 2 entry 1"
    assert raw.items.table["title"].to_pylist() == ['12" mirror', None]
    assert raw.items.table["attributes"].to_pylist() == [[1, 2], None]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("1 10\n2 30\n", "line 1: 1 times for 2 items"),
        ("1 10 20\n3 30\n", "line 2: user '3', but Shop.txt has user '2'"),
        ("1 10 20\n", "1 lines, but Shop.txt has 2"),
    ],
)
def test_s3rec_times_that_do_not_fit_are_refused(tmp_path, times, message):
    source = write(tmp_path / "s", Shop__txt="1 5 6\n2 6\n", Shop_time__txt=times)
    with pytest.raises(InputError, match=f"Shop_time.txt:? ?{message}"):
        load(source)


def test_an_event_log_is_read_under_the_names_it_uses(tmp_path):
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(b"timestamp,eventType,contentId,personId,country\n5,VIEW,-7,8,\n"))
    raw, layout = load(path)
    assert (layout, raw.name) == ("events", "log")
    assert raw.interactions.table.to_pydict() == {
        "timestamp": ["5"],
        "behavior": ["VIEW"],
        "item_id": ["-7"],
        "user_id": ["8"],
        "country": [None],
    }


def test_columns_of_an_event_log_can_be_configured(tmp_path):
    source = write(tmp_path, log__csv="who,user_id,what,at\n1,9,2,3\n")
    columns = {"user_id": "who", "item_id": "what", "timestamp": "at"}
    raw, _ = load(source / "log.csv", columns=columns)
    assert raw.interactions.table.to_pydict() == {
        "user_id": ["1"],
        "user_id_of_source": [9],
        "item_id": ["2"],
        "timestamp": ["3"],
    }


def test_a_column_that_gives_way_takes_no_name_that_is_there(tmp_path):
    source = write(tmp_path, log__csv="who,user_id,user_id_of_source,what,at\n1,9,8,2,3\n")
    columns = {"user_id": "who", "item_id": "what", "timestamp": "at"}
    raw, _ = load(source / "log.csv", columns=columns)
    assert raw.interactions.table.to_pydict() == {
        "user_id": ["1"],
        "user_id_of_source_": [9],
        "user_id_of_source": [8],
        "item_id": ["2"],
        "timestamp": ["3"],
    }


def test_a_folder_with_a_log_and_descriptions(tmp_path):
    source = write(
        tmp_path / "s",
        ratings__csv="userId,movieId,rating,timestamp\n1,2,3.5,4\n",
        movies__csv="movieId,title\n2,Two\n",
    )
    raw, layout = load(source)
    assert layout == "events"
    assert raw.interactions.table["rating"].to_pylist() == [3.5]
    assert raw.items.table.to_pydict() == {"item_id": ["2"], "title": ["Two"]}


def test_an_event_log_without_a_user_is_refused_with_what_was_found(tmp_path):
    source = write(tmp_path / "s", log__csv="item,timestamp\n1,2\n")
    with pytest.raises(InputError, match=r"log.csv: no column user_id; found item, timestamp"):
        load(source)


def test_a_missing_source_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such file or folder"):
        load(tmp_path / "nowhere")


def test_a_folder_of_something_else_is_refused_with_what_is_in_it(tmp_path):
    source = write(tmp_path / "s", notes__txt="hello")
    with pytest.raises(InputError, match=r"no known layout; .* found notes.txt"):
        load(source)


@pytest.mark.parametrize("attributes", [r'{"5\ud800": [1]}', '{"5": ["x"]}', "[1]", "{"])
def test_s3rec_attributes_that_are_none_are_refused(tmp_path, attributes):
    source = write(tmp_path, Shop__txt="1 5 6\n", Shop_item2attributes__json=attributes)
    with pytest.raises(InputError, match=r"item2attributes\.json: expected \{item: \[attribute number"):
        load(source)


@pytest.mark.parametrize("layout", ["folder", "recbole", "s3rec", "events"])
def test_a_layout_that_is_asked_for_but_not_there_is_refused(tmp_path, layout):
    with pytest.raises(InputError, match=r"found .*notes.txt"):
        load(write(tmp_path / "s", notes__txt="hello"), layout=layout)


def test_files_that_are_no_tables_are_refused_by_name(tmp_path):
    source = write(tmp_path / "s", interactions__parquet="no parquet")
    with pytest.raises(InputError, match=r"interactions.parquet: cannot be read as a table"):
        load(source)
    empty = write(tmp_path / "empty", interactions__csv="")
    with pytest.raises(InputError, match=r"interactions.csv: the file is empty"):
        load(empty)


def test_two_files_for_one_table_are_refused(tmp_path):
    source = write_source(tmp_path / "s", EVENTS)
    write_source(source, EVENTS, kind="csv")
    with pytest.raises(InputError, match=r"interactions.parquet and interactions.csv are both there"):
        load(source)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = pa.table([[1], [2], [3], [4]], names=["user_id", "item_id", "timestamp", "user_id"])
    (tmp_path / "s").mkdir()
    pq.write_table(table, tmp_path / "s" / "interactions.parquet")
    with pytest.raises(InputError, match="twice"):
        load(tmp_path / "s")


@pytest.mark.parametrize(
    ("name", "layout", "events", "items"),
    [
        ("movielens-100k", "recbole", 100_000, 1_682),
        pytest.param("amazon14-beauty", "s3rec", 198_502, 12_101, marks=pytest.mark.slow),
        pytest.param("amazon14-sports", "s3rec", 296_337, 18_357, marks=pytest.mark.slow),
        ("deskdrop", "events", 72_312, None),
    ],
)
def test_public_data_is_recognized(name, layout, events, items):
    raw, found = load(real_data(name))
    assert found == layout
    assert len(raw.interactions.table) == events
    assert (None if raw.items is None else len(raw.items.table)) == items


def test_a_column_that_no_table_has_is_named(tmp_path):
    for part in ("a", "b"):
        table = pa.table({"user_id": [1, 1], "item_id": [1, 2], "timestamp": [1, 2]})
        pq.write_table(table, tmp_path / f"{part}.parquet")
    with pytest.raises(InputError, match="no table has a column 'kunde', which is said to be user_id; there"):
        load(tmp_path, columns={"user_id": "kunde"})
