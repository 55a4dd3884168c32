import shutil
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.reading.read_plan import ReadPlan, readings
from rayrec.samples.reading.reader import SampleReader, evaluation_batches
from tests.helpers.data import small_dataset
from tests.helpers.examples import examples


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("reader"))  # 40 rows: files of 16, 16, 8; groups of 4


def copy_of(dataset, folder):
    shutil.copytree(dataset.root, folder)
    return Dataset(folder, dataset.manifest)


def rows_in_file_order(dataset):
    tables = [pq.read_table(dataset.root / name) for name in dataset.train_files]
    return pa.concat_tables(tables)


def read_epoch(plan, epoch):
    reader = SampleReader(plan.spec)
    first = epoch * plan.steps_per_epoch
    return [read(reader, plan, step) for step in range(first, first + plan.steps_per_epoch)]


def read(reader, plan, step):
    return SampleBatch.of(step, reader.read_batch(plan.batch(step)))


def rows_of(batches):
    return [(interval.file, row) for b in batches for interval in b.cursor for row in range(*interval[1:])]


def test_within_one_window_the_order_is_one_permutation_of_file_order(dataset):
    plan = ReadPlan.of(dataset, batch_size=16, seed=5)
    table = rows_in_file_order(dataset)
    for epoch in (0, 1):
        order = np.random.default_rng([5, epoch, 1]).permutation(40)
        batches = read_epoch(plan, epoch)
        assert [batch.num_rows for batch in batches] == [16, 16, 8]
        assert np.concatenate([batch.user_ids_B for batch in batches]).tolist() == (
            table["user_id"].to_numpy()[order].tolist()
        )
        items = [
            batch.item_ids_N[start:stop].tolist()
            for batch in batches
            for start, stop in zip(batch.offsets_B1, batch.offsets_B1[1:], strict=False)
        ]
        assert items == [table["item_ids"][int(row)].as_py() for row in order]


def test_windows_are_drawn_from_permuted_row_groups(dataset):
    plan = ReadPlan.of(dataset, batch_size=16, seed=5, window_rows=7)
    windows = plan.windows(epoch=3)
    drawn = np.random.default_rng([5, 3, 0]).permutation(10).tolist()
    assert [window.groups for window in windows] == [
        tuple(plan.groups.groups[one] for one in sorted(drawn[start : start + 2]))
        for start in range(0, 10, 2)
    ]
    assert [window.start for window in windows] == [0, 8, 16, 24, 32]


@examples(25)
@given(
    batch_size=st.integers(1, 45),
    window_rows=st.integers(1, 50),
    seed=st.integers(0, 5),
    num_readers=st.integers(1, 4),
    epoch=st.integers(0, 2),
)
def test_each_row_comes_once_per_epoch_for_any_number_of_readers(
    dataset, batch_size, window_rows, seed, num_readers, epoch
):
    plan = ReadPlan.of(dataset, batch_size=batch_size, seed=seed, window_rows=window_rows)
    first = epoch * plan.steps_per_epoch
    reader = SampleReader(plan.spec)
    batches = [reader.read_batch(plan.batch(first + number)) for number in range(plan.steps_per_epoch)]
    assert sorted(rows_of(batches)) == sorted(
        (name, row) for name in plan.files for row in range(dataset.manifest.files[name].rows)
    )
    assert len({key for batch in batches for key in batch.row_keys_B.tolist()}) == 40

    readers = [SampleReader(plan.spec) for _ in range(num_readers)]
    for number, expected in enumerate(batches):
        again = readers[number % num_readers].read_batch(plan.batch(first + number))
        assert again.rows == expected.rows
        assert again.cursor == expected.cursor


def test_steps_can_be_read_in_any_order(dataset):
    plan = ReadPlan.of(dataset, batch_size=6, window_rows=8)
    forwards = [read(SampleReader(plan.spec), plan, step) for step in range(14)]
    reader = SampleReader(plan.spec)
    for step in reversed(range(14)):
        batch = read(reader, plan, step)
        assert batch.step == step
        assert batch.row_keys_B.tolist() == forwards[step].row_keys_B.tolist()
        assert batch.item_ids_N.tolist() == forwards[step].item_ids_N.tolist()


def test_batches_do_not_mix_epochs(dataset):
    plan = ReadPlan.of(dataset, batch_size=16)
    assert plan.steps_per_epoch == 3
    assert [plan.locate(step) for step in (0, 2, 3, 8)] == [(0, 0), (0, 2), (1, 0), (2, 2)]


def test_a_position_is_the_epoch_and_what_was_read_of_it(dataset):
    plan = ReadPlan.of(dataset, batch_size=16)  # epochs of 16, 16 and 8 rows
    positions = [(plan.position(step).epoch, plan.position(step).rows) for step in range(5)]
    assert positions == [(0, 0), (0, 16), (0, 32), (1, 0), (1, 16)]


def test_plans_have_one_position_only_if_they_read_the_same_rows(dataset, tmp_path):
    def position(data=dataset, step=4, **settings):
        return ReadPlan.of(data, **({"batch_size": 8, "seed": 5, "window_rows": 7} | settings)).position(step)

    moved = copy_of(dataset, tmp_path / "moved")
    assert position(moved) == position()
    assert position(batch_size=16, step=2) == position()
    assert len({position(), position(seed=6), position(window_rows=9), position(batch_size=16)}) == 4
    other = tmp_path / "other"
    regrouped = copy_of(dataset, other)
    path = regrouped.root / regrouped.train_files[0]
    pq.write_table(pq.read_table(path), path, row_group_size=8)
    assert position(regrouped) != position()


def test_the_cache_of_windows_is_bounded(dataset):
    plan = ReadPlan.of(dataset, batch_size=3, window_rows=4)
    reader = SampleReader(plan.spec)
    for step in range(30):
        for reading in readings(plan, plan.batch(step), 1):
            reader.read(reading.part, reading.ahead)
            assert len(reader._held) <= 2


def test_evaluation_rows_carry_their_target_and_keys_of_their_own(dataset):
    plan = ReadPlan.of(dataset, batch_size=40)
    keys = read(SampleReader(plan.spec), plan, 0).row_keys_B.tolist()
    for split in ("valid", "test"):
        rows = dataset.evaluation_rows(split)
        batches = list(evaluation_batches(dataset, split, batch_size=15))
        assert [batch.num_rows for batch in batches] == [15, 15, 10]
        assert np.concatenate([batch.targets_B for batch in batches]).tolist() == rows.targets_B.tolist()
        assert np.concatenate([batch.item_ids_N for batch in batches]).tolist() == rows.history_ids_N.tolist()
        first = list(evaluation_batches(dataset, split, batch_size=15, max_rows=22))
        assert [batch.num_rows for batch in first] == [15, 7]
        assert np.concatenate([batch.targets_B for batch in first]).tolist() == rows.targets_B[:22].tolist()
        keys += [key for batch in batches for key in batch.row_keys_B.tolist()]
    assert len(set(keys)) == 120


def test_a_file_with_other_columns_is_refused_by_name(dataset, tmp_path):
    copy = copy_of(dataset, tmp_path / "copy")
    path = copy.root / copy.train_files[1]
    pq.write_table(pq.read_table(path).append_column("extra", pa.array(range(16))), path)
    with pytest.raises(
        InputError, match=r"part-00001.parquet: column 'extra' \(int64\) is not in train/part-00000"
    ):
        ReadPlan.of(copy, batch_size=4)


def test_a_column_of_the_wrong_type_is_refused_by_name(dataset, tmp_path):
    copy = copy_of(dataset, tmp_path / "copy")
    for name in copy.train_files:
        table = pq.read_table(copy.root / name)
        pq.write_table(table.set_column(0, "user_id", table["user_id"].cast(pa.string())), copy.root / name)
    with pytest.raises(InputError, match=r"part-00000.parquet: column 'user_id' is string, expected int64"):
        ReadPlan.of(copy, batch_size=4)


def test_a_truncated_file_is_refused_by_name(dataset, tmp_path):
    copy = copy_of(dataset, tmp_path / "copy")
    path = copy.root / copy.train_files[2]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"part-00002.parquet: not a readable Parquet file"):
        ReadPlan.of(copy, batch_size=4)


def test_a_damaged_row_group_is_refused_by_name(dataset, tmp_path):
    copy = copy_of(dataset, tmp_path / "copy")
    plan = ReadPlan.of(copy, batch_size=4)
    path = copy.root / copy.train_files[0]
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"part-00000.parquet"):
        read_epoch(plan, 0)


def test_an_empty_training_set_is_refused(dataset, tmp_path):
    copy = copy_of(dataset, tmp_path / "copy")
    for name in copy.train_files:
        pq.write_table(pq.read_table(copy.root / name).slice(0, 0), copy.root / name)
    with pytest.raises(InputError, match="the training set is empty"):
        ReadPlan.of(copy, batch_size=4)


def test_a_batch_size_of_nothing_is_refused(dataset):
    with pytest.raises(InputError, match="batch_size must be at least 1"):
        ReadPlan.of(dataset, batch_size=0)


def test_a_reader_that_is_closed_has_no_threads_any_more(dataset):
    plan, before = ReadPlan.of(dataset, batch_size=16, seed=5), set(threading.enumerate())
    with SampleReader(plan.spec) as reader:
        read(reader, plan, 0)
        threads = set(threading.enumerate()) - before
        assert threads

    for thread in threads:
        thread.join(60)  # they end their work first
    assert not any(thread.is_alive() for thread in threads)
    assert reader is not None, "it is not the end of the reader that ends them"
