import importlib
import math
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rayrec.platform.errors import InputError
from tests.helpers.feature_operations import column, computed, program

INTS, FLOATS = pa.list_(pa.int64()), pa.list_(pa.float32())


def test_a_value_stands_for_nulls_and_nan():
    assert column([1.0, None, math.nan], pa.float32(), op="fill", value=0) == [1, 0, 0]
    assert column(["a", None], pa.string(), op="fill", value="?") == ["a", "?"]
    assert column([True, None], pa.bool_(), op="fill", value=False) == [True, False]


def test_a_value_stands_for_nulls_in_lists_and_a_list_for_null_lists():
    lists = [[1, None], None, [], [2]]

    assert column(lists, INTS, op="fill", value=0) == [[1, 0], None, [], [2]]
    assert column(lists, INTS, op="fill", value=[]) == [[1, None], [], [], [2]]
    assert column(lists, INTS, op="fill", value=[8, 9]) == [[1, None], [8, 9], [], [2]]
    assert column([[math.nan], None], FLOATS, op="fill", value=1.5) == [[1.5], None]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), "1"),
        (pa.int64(), True),
        (pa.bool_(), 1),
        (pa.string(), 1),
        (pa.int64(), [1]),
        (INTS, ["a"]),
        (pa.timestamp("s"), 0),
    ],
)
def test_a_value_must_be_of_the_type_that_it_fills(dtype, value):
    with pytest.raises(InputError, match=r"column 'x' is .*cannot fill|expected numbers, texts"):
        column([None], dtype, op="fill", value=value)


def price_per_item(price, items):
    return pc.divide(price, pc.cast(pc.list_value_length(items), pa.float32()))


def two_columns(price, items):
    return {"double": pc.multiply(price, pa.scalar(2, pa.float32())), "first": pc.list_slice(items, 0, 1)}


def one_short(price, items):
    return price.slice(1) if len(price) else price


def wrong_type(price, items):
    return pc.cast(price, pa.float64())


def fails_on_nulls(price, items):
    if price.null_count:
        raise RuntimeError("no price")
    return price


def as_list(price, items):
    return price.to_pylist()


not_a_function = 3
COLUMNS = {"price": pa.array([6, 2], pa.float32()), "items": pa.array([[1, 2], [3]], pa.list_(pa.int16()))}


def call(name, outputs=None, columns=COLUMNS):
    outputs = outputs or {"made": "float32"}
    operation = {
        "op": "python",
        "function": f"{__name__}:{name}",
        "inputs": ["price", "items"],
        "outputs": outputs,
    }
    return computed(columns, operation).select(list(outputs)).to_pydict()


def test_a_function_of_the_user_gives_columns():
    assert call("price_per_item") == {"made": [3, 2]}
    outputs = {"first": "list<int64>", "double": "float32"}
    assert call("two_columns", outputs) == {"first": [[1], [3]], "double": [12, 4]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_short", "one_short must give 2 values of float for 'made', and gave 1 of float"),
        ("wrong_type", "wrong_type must give 0 values of float for 'made', and gave 0 of double"),
        ("two_columns", "two_columns must give a mapping with arrays for made, and gave double, first"),
        ("as_list", "as_list must give a pyarrow.Array for 'made', and gave list"),
        ("missing", "has no function 'missing'"),
        ("not_a_function", "has no function 'not_a_function'"),
    ],
)
def test_what_a_function_must_give_is_said_with_its_name(name, message):
    with pytest.raises(InputError, match=rf"data\.features\.0 \(python\): .*{message}"):
        call(name)


def test_a_function_that_fails_is_named():
    columns = COLUMNS | {"price": pa.array([None, 1], pa.float32())}

    with pytest.raises(InputError, match="fails_on_nulls failed on 2 rows: RuntimeError: no price"):
        call("fails_on_nulls", columns=columns)


def test_functions_and_types_are_checked_as_the_config_is_read():
    with pytest.raises(InputError, match=r"function must be 'module:function', got 'nowhere'"):
        column(
            [1], pa.int64(), op="python", function="nowhere", inputs=["x"], outputs={"y": "int64"}, input=0
        )
    with pytest.raises(InputError, match="output 'made' has no type 'int'; types are bool, int64"):
        call("price_per_item", {"made": "int"})
    with pytest.raises(
        InputError, match=r"cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    ):
        computed(
            COLUMNS,
            {"op": "python", "function": "nowhere:f", "inputs": ["price"], "outputs": {"made": "float32"}},
        )


def test_an_edited_function_has_another_fingerprint(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    operation = {
        "op": "python",
        "function": "edited_features:same",
        "inputs": ["x"],
        "outputs": {"y": "int64"},
    }

    def fingerprint(source):
        (tmp_path / "edited_features.py").write_text(source)
        sys.modules.pop("edited_features", None)
        importlib.invalidate_caches()
        return program(pa.schema([("x", pa.int64())]), operation).fingerprint

    before = fingerprint("def same(x):\n    return x\n")
    assert fingerprint("def same(x):\n    return x\n") == before
    assert fingerprint("def same(x):\n    return x  # again\n") != before
