"""Text files as other systems write them: line ends, byte order marks, quotes, encodings, nothing at all."""

import gzip

import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers import load_source
from rayrec.samples.prepare.validation import validate

MARK = b"\xef\xbb\xbf"

SOURCES = {
    "folder": {
        "interactions.csv": b"user_id,item_id,timestamp\n1,2,3\n",
        "items.csv": b'item_id,title\n2,"Two, ""too"""\n',
    },
    "events": {
        "log.csv": b"userId,itemId,time\n1,2,3\n",
        "items.csv": b'itemId,title\n2,"Two, ""too"""\n',
    },
    "recbole": {
        "s.inter": b"user_id:token\titem_id:token\ttimestamp:float\n1\t2\t3\n",
        "s.item": b'item_id:token\ttitle:token_seq\n2\tTwo, "too"\n',
    },
    "s3rec": {
        "S.txt": b"1 2\n",
        "S_time.txt": b"1 3\n",
        "items.tsv": b'item_id\ttitle\n2\tTwo, "too"\n',
        "S_item2attributes.json": b'{"2": [1]}\n',
    },
    "movielens": {"ratings.dat": b"1::2::5::3\n", "movies.dat": b'2::Two, "too"::Drama\n'},
}


def write(folder, files):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def check(source):
    raw, _ = load_source(source, PrepareConfig())
    validate(raw, PrepareConfig())


@pytest.mark.parametrize("layout", SOURCES)
@pytest.mark.parametrize("mark", [b"", MARK], ids=["no mark", "mark"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_line_ends_marks_and_quotes_do_not_show(tmp_path, layout, mark, line_end):
    files = {name: mark + text.replace(b"\n", line_end) for name, text in SOURCES[layout].items()}
    raw, found = load_source(write(tmp_path / "s", files), PrepareConfig())
    assert found == layout
    events = raw.interactions.table.select(["user_id", "item_id", "timestamp"]).to_pylist()
    assert events == [{"user_id": "1", "item_id": "2", "timestamp": "3"}]
    items = raw.items.table.select(["item_id", "title"]).to_pylist()
    assert items == [{"item_id": "2", "title": 'Two, "too"'}]


@pytest.mark.parametrize("layout", SOURCES)
@pytest.mark.parametrize("file", [0, -1], ids=["log", "descriptions"])
def test_empty_files_are_refused_by_name(tmp_path, layout, file):
    name = list(SOURCES[layout])[file]
    files = SOURCES[layout] | {name: b""}
    if name == "S.txt":
        files["S_time.txt"] = b""
    with pytest.raises(InputError, match=rf"{name}: (the file is empty|no events in it); expected "):
        check(write(tmp_path / "s", files))


@pytest.mark.parametrize(
    "content", [MARK, b"\n", b"user_id,item_id,timestamp", b"user_id,item_id,timestamp\r\n"]
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_tables_without_rows_are_refused(tmp_path, content, compress):
    name = "interactions.csv" if compress is bytes else "interactions.csv.gz"
    with pytest.raises(InputError, match=rf"{name}: (there is no table in it|no events in it); expected "):
        check(write(tmp_path / "s", {name: compress(content)}))


def test_a_recbole_header_alone_has_no_events(tmp_path):
    header = SOURCES["recbole"]["s.inter"].split(b"\n")[0]
    with pytest.raises(InputError, match=r"s\.inter: no events in it"):
        check(write(tmp_path / "s", {"s.inter": header}))


@pytest.mark.parametrize(
    ("layout", "name", "content"),
    [
        ("folder", "items.csv", "item_id,title\n2,Café\n".encode("latin-1")),
        ("folder", "items.csv", "item_id,description\n2,Café\n".encode("latin-1")),
        ("folder", "items.csv", "item_id,title\n2,Two\n".encode("utf-16")),
        ("recbole", "s.item", "item_id:token\ttitle:token_seq\n2\tCafé\n".encode("latin-1")),
        ("s3rec", "S.txt", "Café 2\n".encode("latin-1")),
    ],
)
def test_other_encodings_are_refused(tmp_path, layout, name, content):
    source = write(tmp_path / "s", SOURCES[layout] | {name: content})
    with pytest.raises(InputError, match=f"{name}: not in UTF-8"):
        load_source(source, PrepareConfig())


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_lines_are_counted_as_an_editor_does(tmp_path, compress):
    name = "interactions.csv" if compress is bytes else "interactions.csv.gz"
    content = b'user_id,item_id,timestamp,note\r\n\r\n1,2,3,"a ""b""\r\nc"\r\n1,3,-4,d\r\n'
    raw, _ = load_source(write(tmp_path / "s", {name: compress(content)}), PrepareConfig())
    assert raw.interactions.where(0).endswith(f"{name} line 3")
    with pytest.raises(InputError, match=f"{name} line 5: timestamp is -4"):
        validate(raw, PrepareConfig()).findings.refuse(())
