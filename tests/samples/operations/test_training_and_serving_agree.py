"""Every operation gives a row the same alone, as Python values, as in a batch read from a file."""

import pickle
import textwrap
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import rayrec.samples.operations
from rayrec.samples.graph.build import build_graph
from rayrec.samples.operations.config import OPERATIONS
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.stores.build import build_store
from tests.helpers.examples import examples
from tests.helpers.feature_operations import Declared, program
from tests.helpers.text_tokenizers import semantic_ids, tokenizer_folder

INTS = pa.list_(pa.int64())
SCHEMA = pa.schema(
    [
        ("user", pa.string()),
        ("city", pa.dictionary(pa.int32(), pa.string())),
        ("price", pa.float32()),
        ("shown_at", pa.int64()),
        ("clock", pa.timestamp("ms")),
        ("target", pa.int32()),
        ("items", pa.large_list(pa.int64())),
        ("times", INTS),
        ("behaviors", pa.list_(pa.int16())),
        ("cart_items", INTS),
        ("cart_times", INTS),
    ]
)
FUNCTION = """
import pyarrow as pa
import pyarrow.compute as pc

def items_per_price(items, price):
    return pc.divide(pc.cast(pc.list_value_length(items), pa.float32()), price)
"""


def documented():
    """The operations that the docstring of the package shows, one of each."""
    blocks = rayrec.samples.operations.__doc__.split("\n\n")
    (block,) = [block for block in blocks if block.startswith("    - {op: hash")]
    return yaml.safe_load(textwrap.dedent(block))


EXAMPLES = documented()


@pytest.fixture(scope="module", autouse=True)
def _shop(tmp_path_factory):
    """What the examples name: items of a data set, a store of events, a graph of it, a module."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "beauty").mkdir()
    titles = [f"Item {n}" for n in range(40)]
    items = pa.table({"item_id": range(40), "train_count": [n % 5 for n in range(40)], "title": titles})
    pq.write_table(items, folder / "beauty" / "items.parquet")
    semantic_ids(np.arange(40)).save(folder / "beauty" / "semantic_ids")
    tokenizer_folder(folder / "base")
    users = ["u"] * 5 + ["0"] * 5
    clicks = pa.table({"user_id": users, "item_id": range(10), "timestamp": range(0, 100, 10)})
    pq.write_table(clicks, folder / "clicks.parquet")
    build_store(folder / "clicks.parquet", str(folder / "clicks"))
    build_graph(str(folder / "clicks"), folder / "graph")
    (folder / "my_features.py").write_text(FUNCTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield


def events(*columns):
    """Parallel lists with nulls, as a row's fields; all, or one of them, may be null."""
    values = {"times": st.integers(0, 100), "cart_times": st.integers(0, 100), "behaviors": st.integers(0, 3)}
    one = st.tuples(*(st.none() | values.get(name, st.integers(0, 50)) for name in columns))

    def fields(several, missing):
        lists = zip(*several, strict=True) if several else ((),) * len(columns)
        return {name: list(of) for name, of in zip(columns, lists, strict=True) if name != missing}

    return st.just({}) | st.builds(fields, st.lists(one, max_size=5), st.none() | st.sampled_from(columns))


ROWS = st.builds(
    lambda *parts: {name: value for part in parts for name, value in part.items()},
    st.fixed_dictionaries(
        {},
        optional={
            "user": st.text(max_size=3),
            "city": st.none() | st.sampled_from(["a", "b", ""]),
            "price": st.none() | st.floats(width=32),
            "shown_at": st.none() | st.integers(-(2**40), 2**40),
            "clock": st.none() | st.integers(0, 100).map(datetime.fromtimestamp),
            "target": st.none() | st.integers(0, 50),
        },
    ),
    events("items", "times", "behaviors"),
    events("cart_items", "cart_times"),
)


def label(operation):
    return operation["op"]


def test_every_operation_has_an_example():
    assert [operation["op"] for operation in EXAMPLES] == list(OPERATIONS.names())


@pytest.mark.slow
def test_the_examples_run_one_after_the_other():
    features = program(SCHEMA, *EXAMPLES)
    row = {
        "city": "Kiel",
        "price": 10,
        "shown_at": 1_772_433_000,
        "user": "u",
        "clock": datetime(1970, 1, 1, 0, 0, 40),
        "target": 9,
        "items": [1, 2, 3],
        "times": [1_772_425_800, 1_772_429_400, 1_772_433_001],
        "behaviors": [0, 1, 2],
        "cart_items": [5],
        "cart_times": [1_772_429_400],
    }

    made = features.one(row)
    assert 0 <= made["city_id"] < 100_000
    assert len(made["city_items"]) == 3
    assert made["price_level"] == 2
    assert made["usual_price"] == 10
    assert made["log_price"] == pytest.approx(np.log(11))
    assert (made["hour"], made["weekday"]) == (7, 0)
    assert made["hours_since"] == [2, 1, 0]
    assert made["new_items"] == [2, 3]
    assert made["with_target"] == [1, 2, 3, 9]
    assert made["bought_items"] == [2, 3]
    assert made["all_items"] == [1, 2, 5, 3]
    assert made["all_behaviors"] == [0, 0, 7, 0]
    assert len(made["negatives"]) == 5
    assert made["known_items"] == [1, 2, 3]
    assert made["clicked"] == [1, 2, 3]
    assert [time.second for time in made["clicked_at"]] == [10, 20, 30]
    assert sum(made["prompt_is_completion"]) == 2
    assert made["items_per_price"] == pytest.approx(0.3)


@pytest.mark.parametrize("operation", EXAMPLES, ids=label)
@examples(40)
@given(rows=st.lists(ROWS, max_size=6), skipped=st.integers(0, 2))
def test_a_row_alone_is_as_in_any_batch(operation, rows, skipped):
    features = program(SCHEMA, operation)
    outputs = [name for name in features.schema.names if name not in SCHEMA.names]
    features = features.narrowed(outputs)
    names = features.input_schema.names
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA).slice(skipped)
    keys = np.arange(100, 100 + batch.num_rows)

    together = features(batch, RowContext(keys, seed=3, step=5)).to_pylist()

    for row, key, found in zip(rows[skipped:], keys, together, strict=True):
        fields = {name: value for name, value in row.items() if name in names}
        alone = features.one(fields, RowContext(np.array([key]), seed=3, step=0))
        assert repr(alone) == repr(found)  # which tells -0.0 from 0.0, and NaN is NaN


@pytest.mark.parametrize("operation", EXAMPLES, ids=label)
def test_a_row_of_a_file_is_served_as_it_is_trained_on(operation, tmp_path):
    rows = [ROW, {}, {**ROW, "price": None, "items": [None, 4, 4], "city": None, "target": None}]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    features = program(table.schema, operation)
    (batch,) = table.to_batches()

    trained = features(batch, RowContext(np.zeros(3, dtype=np.int64), seed=0, step=0)).to_pylist()

    assert [features.one(row) for row in rows] == trained


@pytest.mark.parametrize("operation", EXAMPLES, ids=label)
def test_programs_travel_between_processes(operation):
    features = program(SCHEMA, operation)
    arrived = pickle.loads(pickle.dumps(features))

    assert arrived.one(ROW) == features.one(ROW)
    assert arrived.fingerprint == features.fingerprint


ROW = {
    "user": "0",
    "city": "a",
    "price": 2.5,
    "shown_at": 100,
    "clock": datetime(1970, 1, 1, 0, 1, 10),
    "target": 3,
    "items": [1, 2, 3],
    "times": [10, 20, 30],
    "behaviors": [0, 1, 1],
    "cart_items": [4],
    "cart_times": [15],
}


def test_the_examples_are_what_a_config_may_hold():
    declared = Declared.parse({"features": EXAMPLES})

    assert Declared.model_validate_json(declared.model_dump_json()) == declared
