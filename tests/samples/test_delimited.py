"""How a text file is written is found out, and no row of it is lost."""

import csv
import io

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.samples.importers.delimited import DelimitedFile
from rayrec.samples.importers.tables import read_table


def write(folder, content, name="log.csv"):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(path, **settings):
    file = DelimitedFile.detect(path, **settings)
    return [tuple(row.values()) for batch in file.read() for row in batch.to_pylist()]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_the_delimiter_is_the_one_of_the_first_line(tmp_path, delimiter, suffix):
    path = write(tmp_path, f"user{delimiter}item\n1{delimiter}2\n", f"log{suffix}")
    assert rows_of(path) == [("1", "2")]


def test_a_name_in_quotes_does_not_decide_the_delimiter(tmp_path):
    path = write(tmp_path, 'user;"price, in EUR, net"\n1;2\n')
    assert DelimitedFile.detect(path).columns == ("user", "price, in EUR, net")


@pytest.mark.parametrize("name", ["log.csv", "log.tsv"])
def test_quotes_that_never_close_are_ordinary_signs(tmp_path, name):
    delimiter = "," if name == "log.csv" else "\t"
    lines = [f'u{n}{delimiter}"query {n}' for n in range(5)]
    path = write(tmp_path, "\n".join([f"user{delimiter}query", *lines]) + "\n", name)
    file = DelimitedFile.detect(path)
    assert rows_of(path) == [(f"u{n}", f'"query {n}') for n in range(5)]
    assert file.notes == ("double quotes are ordinary signs, since some are not closed",)


def test_one_quote_that_never_closes_loses_no_row(tmp_path):
    path = write(tmp_path, 'user,query\na,1\nb,"2\nc,3\nd,4\n')
    assert rows_of(path) == [("a", "1"), ("b", '"2'), ("c", "3"), ("d", "4")]


def test_pairs_of_open_quotes_do_not_swallow_a_row(tmp_path):
    """Read with quotes, the second column would be one value of two lines."""
    path = write(tmp_path, 'user,query\na,"\nb,"\nc,"\nd,"\n')
    with pytest.raises(InputError, match=r"line 2: a value in double quotes reaches over"):
        rows_of(path)


def test_values_of_several_lines_are_one_row(tmp_path):
    path = write(tmp_path, 'user,text\na,"two\nlines and ""more"""\nb,c\n')
    assert rows_of(path) == [("a", 'two\nlines and "more"'), ("b", "c")]


def test_what_neither_reading_makes_whole_is_refused_with_its_line(tmp_path):
    path = write(tmp_path, 'user,text\na,"a, b"\nb,"c\nd,e\n')
    with pytest.raises(InputError, match=r"log.csv line 3: a double quote that is not closed"):
        rows_of(path)


@pytest.mark.parametrize("value", ["2", '"2"'])
@pytest.mark.parametrize("before", ["\n", "\r\n\n", "\ufeff\n"])
def test_blank_lines_before_the_header_are_no_header(tmp_path, before, value):
    path = write(tmp_path, f"{before}user,item\n\n1,{value}\n3,4\n")
    file = DelimitedFile.detect(path)
    rows = [row for span in file.spans(4) for batch in file.read(span=span) for row in batch.to_pylist()]
    assert rows == [{"user": "1", "item": "2"}, {"user": "3", "item": "4"}]
    assert file.where(1).endswith(f"line {before.count(chr(10)) + 4}")


def test_a_header_may_have_several_lines(tmp_path):
    path = write(tmp_path, '"user\nid",item\n1,2\n')
    assert rows_of(path) == [("1", "2")]


def test_names_for_a_file_without_a_header(tmp_path):
    path = write(tmp_path, "1,2\n3,4\n")
    assert rows_of(path, names=("user", "item")) == [("1", "2"), ("3", "4")]
    assert DelimitedFile.detect(path, ("user", "item")).where(1) == f"{path} line 2"
    with pytest.raises(InputError, match=r"line 1: 2 values separated by ',', but 1 names are given"):
        rows_of(path, names=("user",))


VALUES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")) | st.just("\n"), max_size=6)


@given(
    rows=st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=20),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_what_a_csv_writer_writes_is_read_back(tmp_path_factory, rows, delimiter, quoting):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator="\n")
    writer.writerow(("u", "v", "w"))
    writer.writerows(("x" + first, second, third) for first, second, third in rows)
    lines = text.getvalue().splitlines()
    assume(len(lines) == len(rows) + 1 or any(line.count(delimiter) != 2 for line in lines))  # else ambiguous
    path = write(tmp_path_factory.mktemp("csv"), text.getvalue())
    expected = [("x" + first, second or None, third or None) for first, second, third in rows]
    assert rows_of(path) == expected


def test_parts_of_a_table_may_differ_in_what_does_not_matter(tmp_path):
    folder = tmp_path / "log"
    (folder / "day=2024-01-01").mkdir(parents=True)
    (folder / "day=2024-01-02").mkdir()
    write(folder / "day=2024-01-01", "user,price,note\n1,4,\n", "a.csv")
    write(folder / "day=2024-01-02", "note;price;user\n;4,5;2\n", "b.csv")
    write(folder, "a program's own", "._a.csv")
    write(folder, "", "_SUCCESS")
    raw = read_table(folder, as_text=("user",))
    assert raw.table.schema.field("day").type == pa.date32()
    assert raw.table.select(["user", "price", "note"]).to_pydict() == {
        "user": ["1", "2"],
        "price": [4.0, 4.5],
        "note": [None, None],
    }
    assert raw.where(1) == f"{folder / 'day=2024-01-02' / 'b.csv'} line 2"
