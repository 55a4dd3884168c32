"""Times of events: from a source to evaluation rows, and from columns to samples."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch, SampleBatch
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.event_times import HISTORY_TIMES, TIMES, as_type, seconds
from rayrec.samples.base.intervals import Interval, Intervals
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.reader import evaluation_batches
from tests.helpers.data import without_history_times, write_source

EVENTS = [("ann", 1, 50), ("ann", 2, 60), ("ann", 3, 70), ("ann", 4, 80)]
EVENTS += [("bob", 2, 10), ("bob", 1, 30), ("bob", 3, 20)]


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    prepare(write_source(tmp_path / "source", EVENTS), tmp_path / "data", PrepareConfig())
    return Dataset.open(tmp_path / "data")


def rows(times: pa.Array, items=((1, 2), (), (3,))) -> RowBatch:
    columns = {
        "user_id": pa.array(range(len(items))),
        "item_ids": pa.array([list(row) for row in items], pa.list_(pa.int64())),
        TIMES: times,
    }
    return RowBatch(
        np.arange(len(items)), pa.record_batch(columns), Intervals.of([Interval("a.parquet", 7, 10)])
    )


@pytest.mark.parametrize(
    ("split", "expected"),
    [("valid", {"ann": [50, 60], "bob": [10]}), ("test", {"ann": [50, 60, 70], "bob": [10, 20]})],
)
def test_histories_to_evaluate_on_carry_the_times_of_their_events(dataset, split, expected):
    times = {}
    for batch in evaluation_batches(dataset, split, batch_size=1, with_times=True):
        times[int(batch.user_ids_B[0])] = batch.times_N.tolist()

    assert times == {dataset.user_by_key(user): mine for user, mine in expected.items()}


def test_nobody_gets_times_who_does_not_ask(dataset):
    assert dataset.evaluation_rows("test").times_N is None
    assert all(batch.times_N is None for batch in evaluation_batches(dataset, "test", batch_size=2))


def test_a_users_whole_history_has_its_times(dataset):
    assert dataset.history_times_of("ann").tolist() == [50, 60, 70, 80]
    assert dataset.history_times_of("bob").tolist() == [10, 20, 30]
    assert dataset.history_times_of("nobody") is None


@pytest.mark.parametrize("name", ["history", "valid", "test"])
def test_a_data_set_of_an_earlier_version_says_that_it_has_no_times(dataset, name):
    dataset.check_times()
    old = without_history_times(dataset, f"{name}.parquet")

    with pytest.raises(InputError, match=rf"{name}\.parquet: the times of the histories .* prepare it again"):
        old.check_times()
    assert len(old.evaluation_rows("test")) == 2
    assert old.history_of("bob").tolist() == dataset.history_of("bob").tolist()


def test_files_have_the_columns_that_the_names_say(dataset):
    assert pq.read_schema(dataset.root / "history.parquet").names == ["user_id", "item_ids", TIMES]
    assert HISTORY_TIMES in pq.read_schema(dataset.root / "test.parquet").names


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_and_times_become_seconds_and_back(unit):
    moment = datetime(2024, 3, 1, 12, 0, 1, tzinfo=UTC)
    column = pa.array([moment.replace(tzinfo=None)], pa.timestamp(unit))

    (found,) = seconds(column, "here").tolist()

    assert found == int(moment.timestamp())
    assert as_type(np.array([found]), column.type).equals(column)


def test_parts_of_a_second_are_cut_off_also_before_1970():
    assert seconds(pa.array([1999, -1], pa.timestamp("ms")), "here").tolist() == [1, -1]


def test_times_come_with_their_events():
    times = pa.array([[10, 20], None, [30]], pa.list_(pa.int32()))

    batch = SampleBatch.of(0, rows(times))

    assert batch.times_N.tolist() == [10, 20, 30]
    assert batch.times_N.dtype == np.int64


def test_rows_without_times_have_none():
    columns = rows(pa.nulls(3, pa.list_(pa.int64()))).rows.drop_columns([TIMES])

    assert SampleBatch.of(0, RowBatch(np.arange(3), columns)).times_N is None


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (
            [[10, 20], [], []],
            r"a row has 1 item_ids and 0 timestamps: number 3 of the rows of step 5, which begin",
        ),
        (
            [[10, 20, 21], [], [30]],
            "a row has 2 item_ids and 3 timestamps: number 1 of .* row 7 of a.parquet",
        ),
        ([[10, None], [], [30]], "the column 'timestamps' has 1 nulls"),
        ([[10, 20], [], [1_700_000_000_000]], "has 1700000000000, which is no time in seconds"),
    ],
)
def test_times_that_do_not_fit_are_refused(times, message):
    with pytest.raises(InputError, match=message):
        SampleBatch.of(5, rows(pa.array(times, pa.list_(pa.int64()))))
