import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.operations.operation import RowContext
from tests.helpers.feature_operations import context, program

INTS = pa.list_(pa.int64())


def draw(columns, of=None, **settings):
    rows = pa.RecordBatch.from_pydict(columns)
    operation = {"op": "negatives", "output": "negatives", "exclude": [*columns][1:], **settings}
    return program(rows.schema, operation)(rows, of or context(rows.num_rows)).column("negatives").to_pylist()


def rows(num):
    return {"row": pa.array(range(num))}


@pytest.mark.slow
def test_items_are_drawn_in_proportion_to_their_counts():
    drawn = np.concatenate(draw(rows(2000), counts=[1, 0, 5, 4], num=50))

    frequencies = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.allclose(frequencies, [0.1, 0, 0.5, 0.4], atol=0.01)  # six standard deviations


def test_a_row_gets_the_same_items_in_any_batch():
    everyone = draw(rows(100), counts=[1] * 50, num=5)
    keys = np.array([42, 7, 42])

    assert draw(rows(3), of=RowContext(keys, seed=0, step=9), counts=[1] * 50, num=5) == [
        everyone[key] for key in keys
    ]
    assert draw(rows(100), of=context(100, seed=1), counts=[1] * 50, num=5) != everyone


def test_two_outputs_are_drawn_independently():
    schema = pa.schema([("row", pa.int64())])
    both = program(
        schema, *({"op": "negatives", "output": name, "counts": [1] * 50, "num": 5} for name in ("a", "b"))
    )
    made = both(pa.RecordBatch.from_pydict(rows(20)), context(20))
    assert made.column("a").to_pylist() != made.column("b").to_pylist()


@pytest.mark.parametrize("num_items", [8, 100])
def test_own_items_are_not_drawn(num_items):
    own = [[0, 1, None], None, list(range(1, num_items)), list(range(num_items)), []]
    columns = rows(5) | {"items": pa.array(own, INTS), "target": pa.array([2, 3, None, None, None])}

    drawn = draw(columns, counts=[1] * num_items, num=40)
    assert not {0, 1, 2} & set(drawn[0])
    assert 3 not in drawn[1]
    assert drawn[2] == [0] * 40
    assert drawn[3] == []
    assert [len(items) for items in drawn] == [40, 40, 40, 0, 40]


def test_items_come_from_a_parquet_file(tmp_path):
    path = tmp_path / "items.parquet"
    table = pa.table({"item_id": [-5, 2**40, 7], "train_count": pa.array([1, 0, 3], pa.int32())})
    pq.write_table(table, path)

    alike = draw(rows(50), items={"path": str(path)}, num=20)
    assert set(np.concatenate(alike)) == {-5, 2**40, 7}
    popular = np.concatenate(draw(rows(50), items={"path": str(path), "counts": "train_count"}, num=20))
    assert set(popular) == {-5, 7}
    assert 0.65 < np.mean(popular == 7) < 0.85


def fingerprint(path):
    operation = {"op": "negatives", "output": "n", "items": {"path": str(path)}, "num": 1}
    return program(pa.schema([]), operation).fingerprint


def test_other_items_are_another_fingerprint(tmp_path):
    path = tmp_path / "items.parquet"
    pq.write_table(pa.table({"item_id": [1, 2]}), path)
    before = fingerprint(path)
    pq.write_table(pa.table({"item_id": [1, 3]}), path)

    assert fingerprint(path) != before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"item": [1]}, "no column 'item_id'"),
        ({"item_id": ["a"]}, "column 'item_id' is string, expected integers"),
        ({"item_id": [1, None]}, "column 'item_id' has 1 nulls"),
        ({"item_id": [1, 1]}, "an item stands there twice"),
        ({"item_id": pa.array([], pa.int64())}, "there is no item to sample"),
    ],
)
def test_tables_that_cannot_be_drawn_from_are_refused(tmp_path, table, message):
    path = tmp_path / "items.parquet"
    pq.write_table(pa.table(table), path)

    with pytest.raises(InputError, match=rf"items\.parquet: .*{message}"):
        fingerprint(path)


def test_other_mistakes_are_refused(tmp_path):
    with pytest.raises(InputError, match="not a readable Parquet file of items"):
        fingerprint(tmp_path / "missing.parquet")
    with pytest.raises(InputError, match=r"needs items .* or counts, one of the two"):
        draw(rows(1), num=1)
    with pytest.raises(InputError, match="counts: an item has the negative count -1"):
        draw(rows(1), counts=[1, -1], num=1)
    with pytest.raises(InputError, match="counts: there is no item to sample"):
        draw(rows(1), counts=[0], num=1)
