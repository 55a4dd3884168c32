import threading
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.reading.read_plan import Batching, ReadPlan, ReadSettings
from rayrec.samples.reading.reader import SampleReader
from rayrec.samples.reading.stream import Jagged, SampleStream, arrays
from tests.helpers.data import write_log

COLUMNS = ("user_id", "item_ids", "price")


def plan_of(folder, batch_size=5, window_rows=8, columns=COLUMNS):
    return ReadPlan.over(
        folder, ReadSettings(Batching(batch_size), window_rows=window_rows, first_window_rows=4), columns
    )


@pytest.fixture
def plan(tmp_path):
    write_log(tmp_path, {"a.parquet": 21, "b.parquet": 30})
    return plan_of(tmp_path)


def columns_of(batch):
    items = batch.columns["item_ids"]
    return {
        "user_id": batch.columns["user_id"].tolist(),
        "item_ids": [part.tolist() for part in np.split(items.values_N, items.offsets_B1[1:-1])],
        "price": batch.columns["price"].tolist(),
    }


def test_a_stream_gives_what_readers_give_in_the_order_of_steps(plan):
    reader = SampleReader(plan.spec)
    steps = range(3, 2 * plan.steps_per_epoch + 2)
    with SampleStream(plan, first_step=3, stop_step=steps.stop, threads=2) as stream:
        batches = list(stream)
    assert [batch.step for batch in batches] == list(steps)
    for batch in batches:
        expected = reader.read_batch(plan.batch(batch.step)).rows
        assert columns_of(batch) == expected.to_pydict()
        assert (batch.epoch, batch.num_rows) == (plan.locate(batch.step)[0], expected.num_rows)


def test_batches_that_are_kept_stay_as_they_are_while_windows_use_memory_again(plan):
    with SampleStream(plan, stop_step=4 * plan.steps_per_epoch) as stream:
        kept = [(batch, columns_of(batch)) for batch in stream if batch.step % 3]
    assert all(columns_of(batch) == before for batch, before in kept)


def test_without_an_end_epoch_follows_epoch(plan):
    with SampleStream(plan) as stream:
        epochs = [batch.epoch for batch, _ in zip(stream, range(3 * plan.steps_per_epoch), strict=False)]
    assert epochs == [epoch for epoch in range(3) for _ in range(plan.steps_per_epoch)]


def test_bounds_at_their_ends_give_all_batches_or_none(plan):
    with SampleStream(plan, 0, 3, windows_ahead=0, queue_depth=1) as stream:
        assert [batch.step for batch in stream] == [0, 1, 2]
    with SampleStream(plan, 5, 3) as stream:  # a run that has gone past the end before
        assert list(stream) == []
    with pytest.raises(ValueError, match="queue_depth must be at least 1, got 0"):
        SampleStream(plan, 0, 3, queue_depth=0)


def test_a_row_program_sees_the_step_and_the_rows_and_decides_the_columns(plan):
    def program(step, batch):
        doubled = pa.array(batch.rows["user_id"].to_numpy() * 2 + step)
        return replace(batch, rows=pa.record_batch({"doubled": doubled}))

    with SampleStream(plan, stop_step=4, program=program) as stream, SampleStream(plan, stop_step=4) as plain:
        for with_program, without in zip(stream, plain, strict=True):
            assert list(with_program.columns) == ["doubled"]
            assert with_program.columns["doubled"].tolist() == (
                (without.columns["user_id"] * 2 + without.step).tolist()
            )


def test_an_error_of_the_program_comes_out_of_the_stream(plan):
    def program(step, batch):
        if step == 2:
            raise ZeroDivisionError("of the program")
        return batch

    with SampleStream(plan, program=program) as stream:
        batches = iter(stream)
        assert [next(batches).step, next(batches).step] == [0, 1]
        with pytest.raises(ZeroDivisionError, match="of the program"):
            next(batches)


def test_no_more_is_begun_than_the_queue_holds_while_a_consumer_is_slow(plan):
    begun, all_there = [], threading.Event()

    def program(step, batch):
        begun.append(step)
        if len(begun) == 3:
            all_there.set()
        return batch

    with SampleStream(plan, program=program, queue_depth=3, windows_ahead=1) as stream:
        batches = iter(stream)
        next(batches)
        assert all_there.wait(30)
        assert sorted(begun) == [0, 1, 2]  # the first is taken: the fourth is begun when another is asked for
        assert len(stream._held) <= 3
        for _ in range(20):
            next(batches)
            assert len(stream._held) <= 2


def test_arrays_are_ready_for_torch(plan):
    torch = pytest.importorskip("torch")
    with SampleStream(plan, stop_step=3) as stream:
        for batch in stream:
            for values in batch.columns.values():
                for array in values if isinstance(values, Jagged) else [values]:
                    assert array.flags.writeable
                    assert torch.from_numpy(array).tolist() == array.tolist()


def test_slices_and_nulls_of_numbers_become_arrays():
    rows = pa.record_batch(
        {
            "lists": pa.array([[1], [2, 3], [], [4]]),
            "nan": pa.array([0.5, None, 1.5, 2.5]),
            "flag": pa.array([True, False, True, True]),
            "at": pa.array([1, 2, 3, 4], pa.timestamp("s")),
        }
    ).slice(1, 3)
    found = arrays(rows)
    assert found["lists"].values_N.tolist() == [2, 3, 4]
    assert found["lists"].offsets_B1.tolist() == [0, 2, 2, 3]
    assert np.isnan(found["nan"][0])
    assert found["nan"][1:].tolist() == [1.5, 2.5]
    assert found["flag"].tolist() == [False, True, True]
    assert found["at"].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["x"]), "column 'c' is string, of which there are no arrays; hash it"),
        (pa.array([1, None]), "column 'c': 1 of a batch are null; fill or filter them out"),
        (pa.array([[1], None]), "column 'c': lists of a batch are null"),
        (pa.array([["x"]]), "column 'c' is string"),
    ],
)
def test_what_no_array_can_hold_is_refused(column, message):
    with pytest.raises(InputError, match=message):
        arrays(pa.record_batch({"c": column}))


def test_columns_of_every_type_come_in_the_same_order(tmp_path):
    """Those that compiled loops move, and those that are left to Arrow."""
    count = 23
    random = np.random.default_rng(0)
    number = np.arange(count)
    table = pa.table(
        {
            "number": number,
            "small": number.astype(np.int8),
            "short": number.astype(np.uint16),
            "single": number.astype(np.float32),
            "at": pa.array(number, pa.timestamp("us")),
            "text": [f"text {row}" * (row % 3) for row in number],
            "some_texts": [None if row % 4 == 0 else f"{row}" for row in number],
            "some_numbers": [None if row % 5 == 0 else int(row) for row in number],
            "flag": number % 2 == 0,
            "lists": [random.integers(0, 9, row % 4).tolist() for row in number],
            "some_lists": [None if row % 3 == 0 else [int(row)] for row in number],
            "lists_of_some": [[None, int(row)] for row in number],
            "lists_of_texts": [[f"{row}"] for row in number],
            "small_lists": pa.array([[row % 7] * (row % 5) for row in number], pa.list_(pa.int8())),
            "large_lists": pa.array([[int(row)] for row in number], pa.large_list(pa.int64())),
            "struct": [{"a": int(row), "b": "x"} for row in number],
            "category": pa.array([f"{row % 3}" for row in number]).dictionary_encode(),
            "money": pa.array(number.tolist(), pa.decimal128(9, 2)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    plan = plan_of(tmp_path, batch_size=6, window_rows=13, columns=None)
    reader = SampleReader(plan.spec)
    expected = {row["number"]: row for row in table.to_pylist()}
    found = [row for step in range(4) for row in reader.read_batch(plan.batch(step)).rows.to_pylist()]
    assert sorted(row["number"] for row in found) == number.tolist()
    assert found == [expected[row["number"]] for row in found]


def test_batches_hold_no_more_memory_than_their_rows(plan):
    """They travel between processes: a slice would take its window along."""
    reader = SampleReader(plan.spec)
    rows = reader.read_batch(plan.batch(0)).rows
    held = sum(buffer.size for column in rows.columns for buffer in column.buffers() if buffer is not None)
    assert held <= rows.nbytes + 64 * 8
