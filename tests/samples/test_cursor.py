from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.samples.base.intervals import Interval
from rayrec.samples.reading.cursor import SCHEMA, Cursor, FileProgress
from rayrec.samples.reading.read_plan import Batching, ReadPlan, ReadSettings
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.data import write_log


def a(start, stop):
    return Interval("a", start, stop)


def b(start, stop):
    return Interval("b", start, stop)


def test_intervals_that_touch_become_one():
    cursor = Cursor("data")
    cursor.commit(0, [a(4, 6), a(0, 2), b(1, 3)])
    cursor.commit(0, [a(2, 4), a(9, 10)])
    assert cursor.intervals(0) == [a(0, 6), a(9, 10), b(1, 3)]
    assert cursor.num_rows(0) == 9


@pytest.mark.parametrize(
    ("read", "unreadable", "row"),
    [
        ([a(0, 11)], [], 10),
        ([a(15, 16)], [], 15),
        ([a(19, 30)], [], 19),
        ([a(0, 10), a(12, 13)], [], 12),
        ([], [a(11, 12)], 11),
        ([a(30, 33)], [], 32),
        ([a(0, 4), a(3, 6)], [], 3),
        ([a(0, 4)], [a(1, 2)], 1),
    ],
)
def test_a_row_is_not_consumed_twice(read, unreadable, row):
    cursor = Cursor("data")
    cursor.commit(2, [a(10, 20)], [a(32, 40)])
    cursor.commit(1, [a(0, 40)])  # another epoch
    before = cursor.to_table()
    with pytest.raises(ValueError, match=rf"row {row} of a was to be consumed twice in epoch 2"):
        cursor.commit(2, [*read, b(0, 5)], unreadable)
    assert cursor.to_table().equals(before)


@pytest.mark.parametrize("bad", [a(3, 3), a(4, 3), a(-1, 3)])
def test_what_is_no_interval_is_refused(bad):
    with pytest.raises(ValueError, match="are no interval"):
        Cursor("data").commit(0, [bad])


@given(st.permutations(range(30)), st.lists(st.integers(1, 9), min_size=1))
def test_any_order_of_commits_gives_the_intervals_of_the_set_of_rows(order, sizes):
    cursor, rows, taken = Cursor("data"), list(order), set()
    for size in sizes:
        batch, rows = rows[:size], rows[size:]
        cursor.commit(0, [a(row, row + 1) for row in batch])
        taken |= set(batch)
    found = cursor.intervals(0)
    assert {row for one in found for row in range(one.start, one.stop)} == taken
    assert all(left.stop < right.start for left, right in pairwise(found))
    assert cursor.num_rows(0) == len(taken)


def test_a_table_holds_all_of_it(tmp_path):
    cursor = Cursor("data")
    cursor.commit(1, [a(0, 2), b(5, 9)], [b(9, 10)])
    cursor.commit(0, [a(4, 6)])
    pq.write_table(cursor.to_table(), tmp_path / "cursor.parquet")
    again = Cursor.from_table(pq.read_table(tmp_path / "cursor.parquet"), "cursor.parquet")
    assert again.dataset == "data"
    assert again.to_table().equals(cursor.to_table(), check_metadata=True)
    assert again.to_table().to_pylist()[0] == {
        "epoch": 0,
        "file": "a",
        "start": 4,
        "stop": 6,
        "unreadable": False,
    }
    assert Cursor.from_table(Cursor("data").to_table(), "x").epochs == []


def test_a_table_that_is_no_cursor_is_refused():
    with pytest.raises(InputError, match=r"x\.parquet: not a cursor of format 1; found columns y"):
        Cursor.from_table(pa.table({"y": [1]}), "x.parquet")
    twice = pa.Table.from_pylist(
        [{"epoch": 0, "file": "a", "start": 0, "stop": 3, "unreadable": kind} for kind in (False, True)],
        schema=SCHEMA.with_metadata(Cursor("data").to_table().schema.metadata),
    )
    with pytest.raises(InputError, match=r"x\.parquet: the cursor is damaged: row 0 of a"):
        Cursor.from_table(twice, "x.parquet")


def test_a_cursor_of_another_data_set_is_refused():
    cursor = Cursor("0123456789abcdef")
    cursor.check_belongs_to("0123456789abcdef", "run")
    with pytest.raises(InputError, match=r"run: belongs to another data set \(fingerprint 0123456789ab"):
        cursor.check_belongs_to("f" * 64, "run")


def test_progress_is_told_by_epoch_and_file():
    cursor = Cursor("data")
    cursor.commit(0, [a(0, 4), b(0, 2)], [b(4, 5)])
    cursor.commit(1, [b(1, 2)])
    assert cursor.progress(lambda epoch: {"a": 4, "b": 6}) == [
        FileProgress(0, "a", 4, 0, 4),
        FileProgress(0, "b", 2, 1, 6),
        FileProgress(1, "a", 0, 0, 4),
        FileProgress(1, "b", 1, 0, 6),
    ]
    assert cursor.progress()[-1] == FileProgress(1, "b", 1, 0, None)


def test_the_batches_of_an_epoch_make_whole_files(tmp_path):
    write_log(tmp_path, {"x.parquet": 37, "y.parquet": 20})
    plan = ReadPlan.over(tmp_path, ReadSettings(Batching(7), window_rows=10))
    reader, cursor = SampleReader(plan.spec), Cursor(plan.source.fingerprint)
    for step in np.random.default_rng(0).permutation(plan.steps_per_epoch).tolist():
        batch = reader.read_batch(plan.batch(step))
        cursor.commit(0, batch.cursor, batch.unreadable)
    assert cursor.intervals(0) == [Interval("x.parquet", 0, 37), Interval("y.parquet", 0, 20)]
