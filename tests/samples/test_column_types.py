"""Types of columns follow from all values, wherever they stand; Parquet's many forms become one."""

import datetime
import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.samples.importers.column_types import ColumnTypes, joined, plain, typed


def kind_of(values):
    types = ColumnTypes()
    types.add(pa.table({"x": pa.array(values, pa.string())}))
    return types.kind_of("x")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", None, " 2 "], "integer"),
        (["1", "2.5"], "float"),
        (["1", "2,5"], "decimal comma"),
        (["true", "False"], "boolean"),
        (["2024-01-31"], "date"),
        (["2024-01-31 10:00:00"], "time"),
        (["00123", "4"], None),
        (["1", "x"], None),
        ([None], None),
    ],
)
def test_the_type_is_what_fits_every_value(values, kind):
    assert kind_of(values) == kind


@pytest.mark.parametrize("decimal", ["0,500", "1234,500", "1,50", "-2,5000"])
def test_commas_that_may_separate_thousands_make_no_numbers(decimal):
    assert kind_of(["1,500", "2,000", "7"]) is None
    assert kind_of(["1,500", "2,000", decimal]) == "decimal comma"


def test_typed_values():
    column = pa.chunked_array([["1", None], ["2,5"]])
    assert typed(column, "decimal comma").to_pylist() == [1.0, None, 2.5]
    dates = typed(pa.chunked_array([["2024-01-31"]]), "date")
    assert dates.to_pylist() == [datetime.date(2024, 1, 31)]


TEXTS = st.sampled_from(
    ["1", "-2", "3.5", "4,5", "1,500", "true", "2024-01-31", "2024-01-31 10:00", "007", "x", None]
)


@given(st.lists(TEXTS, max_size=8), st.lists(st.integers(0, 8), max_size=3))
def test_types_of_parts_merge_to_the_type_of_the_whole(values, cuts):
    bounds = sorted({0, *(min(cut, len(values)) for cut in cuts), len(values)})
    merged = ColumnTypes()
    for start, stop in itertools.pairwise(bounds):
        part = ColumnTypes()
        part.add(pa.table({"x": pa.array(values[start:stop], pa.string())}))
        merged.merge(part)
    if values:
        assert merged.kind_of("x") == kind_of(values)


def test_dictionaries_and_other_strings_become_strings():
    table = pa.table(
        {
            "a": pa.array(["x", "y", "x"]).dictionary_encode(),
            "b": pa.array(["x", None, "z"], pa.large_string()),
            "c": pa.array(["x", "y", "z"], pa.string_view()),
            "d": pa.array([["x"], [], None], pa.large_list(pa.large_string())),
        }
    )
    assert plain(table).schema.types == [pa.string()] * 3 + [pa.list_(pa.string())]
    assert plain(table).to_pylist() == table.to_pylist()


def test_dictionaries_of_parts_are_their_own():
    parts = [pa.table({"a": pa.array([value]).dictionary_encode()}) for value in ("x", "y")]
    assert plain(pa.concat_tables(parts))["a"].to_pylist() == ["x", "y"]


def test_parts_are_joined_under_a_type_that_fits_all():
    parts = [
        pa.table({"n": pa.array([1], pa.int32()), "t": pa.array([0], pa.timestamp("s")), "e": pa.nulls(1)}),
        pa.table({"n": pa.array([2.5]), "t": pa.array([1], pa.timestamp("ms")), "e": ["x"]}),
    ]
    table = joined(parts, ["a", "b"], "log")
    assert table.schema.types == [pa.float64(), pa.timestamp("ms"), pa.string()]


def test_columns_without_any_value_are_texts():
    table = joined([pa.table({"a": pa.nulls(2), "b": [[None], []], "c": [{"d": None}, None]})], ["a"], "log")
    assert table.schema.types == [pa.string(), pa.list_(pa.string()), pa.struct({"d": pa.string()})]
    assert table.to_pylist() == [{"a": None, "b": [None], "c": {"d": None}}, {"a": None, "b": [], "c": None}]


def test_a_column_of_two_kinds_is_refused_with_both():
    parts = [pa.table({"a": [1]}), pa.table({"a": ["x"]})]
    message = r"log: column a differs in type between the files: int64 in a.parquet and string in b.parquet"
    with pytest.raises(InputError, match=message):
        joined(parts, ["a.parquet", "b.parquet"], "log")
