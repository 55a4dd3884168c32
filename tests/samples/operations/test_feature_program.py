import numpy as np
import pyarrow as pa
import pytest

from rayrec.platform.errors import InputError
from tests.helpers.feature_operations import Declared, context, program

SCHEMA = pa.schema(
    [
        pa.field("user", pa.string(), nullable=False),
        ("city", pa.dictionary(pa.int32(), pa.string())),
        ("price", pa.float32()),
        ("items", pa.large_list(pa.int32())),
        ("note", pa.string()),
    ]
)
CITY = {"op": "hash", "input": "city", "output": "city_id", "buckets": 100}
CLIP = {"op": "clip", "input": "price", "low": 0, "high": 10}
LOG = {"op": "log", "input": "price", "output": "log_price"}
PAIR = {"op": "cross", "inputs": ["city_id", "items"], "output": "pair"}


def rows(*values):
    return pa.RecordBatch.from_pylist([{"user": "u", **row} for row in values], SCHEMA)


def test_operations_see_what_those_before_them_wrote():
    features = program(SCHEMA, CITY, CLIP, LOG, PAIR)
    found = features(rows({"city": "a", "price": 99, "items": [1, 2]}), context(1))

    assert found.schema == features.schema
    assert found.schema.names == [*SCHEMA.names, "city_id", "log_price", "pair"]
    (row,) = found.to_pylist()
    assert row["price"] == 10
    assert row["log_price"] == pytest.approx(np.log(11))
    assert len(row["pair"]) == 2


def test_columns_that_nothing_writes_pass_unchanged():
    given = rows({"city": "a", "items": [1]}, {"note": "n"})
    found = program(SCHEMA, CITY)(given, context(2))

    for name in SCHEMA.names:
        assert found.schema.field(name) == SCHEMA.field(name)
        assert found.column(name).equals(given.column(name))


def test_only_columns_that_the_wanted_ones_depend_on_are_read():
    features = program(SCHEMA, CITY, CLIP, LOG, PAIR)

    assert features.narrowed(["pair"]).input_schema.names == ["city", "items"]
    assert features.unused(["pair"]) == ("data.features.1 (clip)", "data.features.2 (log)")
    assert features.narrowed(["log_price", "user"]).input_schema.names == ["user", "price"]
    assert not features.narrowed([]).input_schema.names
    assert features.unused(["pair", "log_price"]) == ()


def test_a_narrowed_program_gives_what_the_whole_one_gives():
    features = program(SCHEMA, CITY, CLIP, LOG, PAIR)
    narrow = features.narrowed(["pair", "user"])
    given = rows({"city": "a", "price": 2, "items": [1, 2]}, {"items": None})

    assert narrow.input_schema.names == ["user", "city", "items"]
    found = narrow(given.select(narrow.input_schema.names), context(2))
    assert found.schema.names == ["pair", "user"]
    assert found.equals(features(given, context(2)).select(["pair", "user"]))


def test_the_fingerprint_changes_with_operations_and_types_only():
    same = program(SCHEMA, CITY, LOG).fingerprint

    assert program(SCHEMA.with_metadata({"a": "b"}), CITY, LOG).fingerprint == same
    assert program(SCHEMA, LOG, CITY).fingerprint != same
    assert program(SCHEMA, {**CITY, "salt": "x"}, LOG).fingerprint != same
    other = SCHEMA.set(2, pa.field("price", pa.float64()))
    assert program(other, CITY, LOG).fingerprint != same


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            {**CITY, "input": "citi"},
            r"data\.features\.0 \(hash\): there is no column 'citi'; did you mean 'city'",
        ),
        ({**LOG, "input": "user"}, r"data\.features\.0 \(log\): column 'user' is string, expected numbers"),
        ({**LOG, "input": "city", "output": "x"}, "column 'city' is string, expected numbers"),
        ({**LOG, "output": "note"}, "there is a column 'note' already, which this operation does not read"),
        ({**LOG, "shft": 1}, r"there is no setting 'features\.0\.shft'; did you mean 'shift'"),
        ({"op": "hsh", "input": "city"}, r"features\.0\.op: expected one of .*'hash'.*, got 'hsh'"),
        ({"input": "city"}, r"the setting 'features\.0\.op' is missing"),
    ],
)
def test_mistakes_are_found_before_any_row(operation, message):
    with pytest.raises(InputError, match=message):
        program(SCHEMA, operation)


def test_unknown_columns_cannot_be_wanted():
    with pytest.raises(InputError, match="no column 'citi_id'; did you mean 'city_id'"):
        program(SCHEMA, CITY).narrowed(["citi_id"])


def test_a_batch_without_rows_has_the_columns_too():
    features = program(SCHEMA, CITY, CLIP, LOG, PAIR)
    found = features(rows(), context(0))

    assert found.schema == features.schema
    assert found.num_rows == 0


def test_one_row_comes_and_goes_as_python_values():
    features = program(SCHEMA, CITY, CLIP).narrowed(["city_id", "price"])

    assert features.one({"price": 20.5}) == {"city_id": None, "price": 10.0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"user": "u", "prise": 1}, "there is no field 'prise'; did you mean 'price'"),
        ({"city": "a"}, r"the field 'user' \(string\) is missing, and may not be null"),
        ({"user": 5}, "the field 'user' must be string, got 5"),
        ({"user": "u", "price": "cheap"}, "the field 'price' must be float, got 'cheap'"),
        (
            {"user": "u", "items": [1, "x"]},
            r"the field 'items' must be large_list<item: int32>, got \[1, 'x'\]",
        ),
        ({"user": "u", "items": 3}, r"the field 'items' must be large_list<item: int32>, got 3"),
        ({"user": "u", "items": [1.5]}, r"the field 'items' must be large_list<item: int32>, got \[1.5\]"),
        ({"user": "u", "items": "12"}, r"the field 'items' must be large_list<item: int32>, got '12'"),
        ({"user": "u", "price": True}, "the field 'price' must be float, got True"),
        ({"user": "u", "items": [2**40]}, r"the field 'items' must be"),
    ],
)
def test_fields_of_the_wrong_kind_are_named(row, message):
    with pytest.raises(InputError, match=message):
        program(SCHEMA, CITY).one(row)


def test_two_columns_of_one_name_are_refused():
    schema = SCHEMA.append(pa.field("price", pa.int64()))

    with pytest.raises(InputError, match="2 columns have the name 'price'"):
        program(schema, CITY)


def test_a_program_may_need_no_column_at_all():
    features = program(SCHEMA, {"op": "negatives", "output": "drawn", "num": 3, "counts": [1, 1]})

    assert len(features.narrowed(["drawn"]).one({})["drawn"]) == 3


def test_a_config_survives_its_own_yaml():
    declared = Declared.parse({"features": [CITY, CLIP, LOG, PAIR]})

    assert Declared.model_validate(declared.model_dump(mode="json")) == declared
