import errno
import fcntl
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.hashing import mix64
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.prepare import writer
from rayrec.samples.prepare.partitions import run_partitions_locally
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.prepare.times import parse_times
from rayrec.samples.prepare.writer import whole_folder
from tests.helpers.data import random_events, real_data, small_dataset, write_source

EVENTS = [(1, 10, 5), (1, 30, 7), (1, 20, 6), (1, 40, 8), (2, 20, 5), (2, 10, 9), (2, 40, 6)]


def prepared(tmp_path, events, run_partitions=run_partitions_locally, source=None, **settings):
    """Prepare events and open the result; `source` holds more arguments of `write_source`."""
    number = len(list(tmp_path.iterdir()))
    folder = write_source(tmp_path / f"source{number}", events, **(source or {}))
    out = tmp_path / f"data{number}"
    report = prepare(folder, out, PrepareConfig.parse(settings), run_partitions)
    return Dataset.open(out), report


def training_rows(dataset):
    tables = [pq.read_table(dataset.root / name) for name in dataset.train_files]
    return pa.concat_tables(tables)


def sequences(dataset):
    rows = training_rows(dataset)
    return dict(zip(rows["user_id"].to_pylist(), rows["item_ids"].to_pylist(), strict=True))


def targets(dataset, split):
    """User -> (history, target, time)."""
    rows = dataset.evaluation_rows(split)
    times_B = pq.read_table(dataset.root / f"{split}.parquet")["timestamp"].to_pylist()
    return {
        int(user): (rows.history_ids_N[start:stop].tolist(), int(target), time)
        for user, start, stop, target, time in zip(
            rows.user_ids_B,
            rows.offsets_B1,
            rows.offsets_B1[1:],
            rows.targets_B,
            times_B,
            strict=False,
        )
    }


def items_by_key(dataset, column):
    """Key of the source -> value of a column of the data set's items."""
    table = pq.read_table(dataset.root / "items.parquet")
    return dict(zip(table["item_key"].to_pylist(), table[column].to_pylist(), strict=True))


def refusal(tmp_path, events, **settings):
    with pytest.raises(InputError) as caught:
        prepared(tmp_path, events, **settings)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("source")] == []
    return str(caught.value)


def test_leave_one_out_holds_the_last_two_events_out(tmp_path):
    dataset, report = prepared(tmp_path, EVENTS)
    assert sequences(dataset) == {1: [10, 20], 2: [20]}
    assert targets(dataset, "valid") == {1: ([10, 20], 30, 7), 2: ([20], 40, 6)}
    assert targets(dataset, "test") == {1: ([10, 20, 30], 40, 8), 2: ([20, 40], 10, 9)}
    assert dataset.history_of("1").tolist() == [10, 20, 30, 40]
    assert dataset.history_of("nobody") is None
    rows = training_rows(dataset)
    assert dict(zip(rows["user_id"].to_pylist(), rows["timestamps"].to_pylist(), strict=True)) == {
        1: [5, 6],
        2: [5],
    }
    assert report.manifest.counts["events"] == 7
    assert report.manifest.counts["train_events"] == 3


def test_users_with_fewer_than_three_events_train_only(tmp_path):
    dataset, _ = prepared(tmp_path, [*EVENTS, (3, 10, 1), (3, 20, 2)])
    assert sequences(dataset)[3] == [10, 20]
    assert 3 not in targets(dataset, "valid")
    assert 3 not in targets(dataset, "test")
    assert dataset.history_of("3").tolist() == [10, 20]


def test_a_split_by_time_takes_the_first_event_on_or_after_each_boundary(tmp_path):
    events = [(1, 10, 1), (1, 20, 5), (1, 30, 6), (1, 40, 9), (2, 10, 2), (2, 20, 8), (3, 30, 7), (3, 40, 8)]
    dataset, _ = prepared(tmp_path, events, split="time", valid_start=5, test_start=8)
    assert sequences(dataset) == {1: [10], 2: [10]}
    # User 2 has no event between the boundaries; user 3 has no history before the first.
    assert targets(dataset, "valid") == {1: ([10], 20, 5)}
    assert targets(dataset, "test") == {1: ([10, 20, 30], 40, 9), 2: ([10], 20, 8), 3: ([30], 40, 8)}


@pytest.mark.parametrize("start", ["1970-01-01T00:00:05", "1970-01-01T01:00:05+01:00", "5", 5])
def test_boundaries_may_be_dates(tmp_path, start):
    settings = {"split": "time", "valid_start": start, "test_start": "1970-01-01 00:00:08Z"}
    dataset, _ = prepared(tmp_path, [(1, 50, 4), *EVENTS], **settings)
    assert (dataset.manifest.split.valid_start, dataset.manifest.split.test_start) == (5, 8)
    assert sequences(dataset) == {1: [50]}
    assert PrepareConfig.parse(
        settings | {"valid_start": "1970-01-02", "test_start": 90_000}
    ).valid_start == (86_400)


def test_boundaries_by_fraction_are_quantiles_of_the_events(tmp_path):
    events = [(user, item, 10 * item + user) for user in range(2) for item in range(10)]
    dataset, _ = prepared(tmp_path, events, split="time", valid_fraction=0.2, test_fraction=0.3)
    split = dataset.manifest.split
    assert (split.valid_start, split.test_start) == (50, 70)  # times 0, 1, 10, 11, ..., 91
    assert dataset.manifest.counts["train_events"] == 10


def test_positions_are_in_order_of_a_hash_and_counts_are_of_training_events(tmp_path):
    items = {
        "item_id": [40, 10, 20, 30],
        "title": ["Forty", "Ten", "", None],
        "year": ["1990", None, "1991", None],
    }
    dataset, _ = prepared(
        tmp_path, EVENTS, source={"items": items | {"price": [4, 1, 2, 3], "asin": ["B"] * 4}}
    )
    ids_I = dataset.items.ids_I
    assert np.all(np.diff(mix64(ids_I).astype(object)) > 0)
    assert dataset.item_positions(np.array([[ids_I[2], 99], [ids_I[0], ids_I[3]]])).tolist() == [
        [2, -1],
        [0, 3],
    ]
    place = {int(item): position for position, item in enumerate(ids_I)}
    titles = dataset.items.titles.to_pylist()
    assert [titles[place[item]] for item in (10, 20, 30, 40)] == ["Ten", None, None, "Forty"]
    texts = dataset.items.texts.to_pylist()
    assert [texts[place[item]] for item in (10, 20, 30, 40)] == ["Ten", "1991", None, "Forty. 1990"]
    assert [dataset.items.label(place[item]) for item in (10, 20)] == ["Ten", "20"]
    counts_I = dataset.items.train_counts_I
    assert [int(counts_I[place[item]]) for item in (10, 20, 30, 40)] == [1, 2, 0, 0]
    assert items_by_key(dataset, "price") == {"10": 1, "20": 2, "30": 3, "40": 4}
    assert items_by_key(dataset, "asin") == dict.fromkeys(["10", "20", "30", "40"], "B")


def test_items_without_a_description_are_there_and_counted(tmp_path):
    dataset, report = prepared(tmp_path, EVENTS, source={"items": {"item_id": [10], "title": ["Ten"]}})
    assert len(dataset.items) == 4
    assert report.manifest.counts["undescribed_items"] == 3


def test_the_index_that_pandas_writes_is_no_column(tmp_path):
    source = write_source(tmp_path / "source", random_events(20, 12))
    events = pd.read_parquet(source / "interactions.parquet").sort_values("item_id")
    events.to_parquet(source / "interactions.parquet")
    items = events[["item_id"]].drop_duplicates().assign(title="a title")
    items.to_parquet(source / "items.parquet")
    assert "__index_level_0__" in pq.read_schema(source / "items.parquet").names

    prepare(source, tmp_path / "data", PrepareConfig())

    columns = {name for file in (tmp_path / "data").rglob("*.parquet") for name in pq.read_schema(file).names}
    assert "title" in columns
    assert not [name for name in columns if "index" in name]


def test_users_keep_their_columns(tmp_path):
    users = {"user_id": [2, 7, 1], "age": [20, 70, 10]}
    dataset, report = prepared(tmp_path, EVENTS, source={"users": users})
    assert sorted(
        zip(dataset.users["user_key"].to_pylist(), dataset.users["age"].to_pylist(), strict=True)
    ) == [
        ("1", 10),
        ("2", 20),
    ]
    assert report.manifest.counts["users_without_events"] == 1


def test_further_columns_and_behaviors_follow_their_events(tmp_path):
    behaviors = ["view", "buy", "like", "view", "view", "view", "buy"]
    source = {"behavior": behaviors, "rating": [5, 7, 6, 8, 5, 9, 6]}
    dataset, _ = prepared(tmp_path, EVENTS, source=source)
    assert dataset.manifest.behaviors == ("buy", "like", "view")
    rows = {row["user_id"]: row for row in training_rows(dataset).to_pylist()}
    assert rows[1]["behaviors"] == [2, 1]
    assert rows[1]["rating"] == rows[1]["timestamps"] == [5, 6]


def test_only_the_behaviors_asked_for_are_kept(tmp_path):
    source = {"behavior": ["view", "view", "view", "buy", "view", "view", "view"]}
    dataset, report = prepared(tmp_path, EVENTS, source=source, behaviors=["view"])
    assert dataset.history_of("1").tolist() == [10, 20, 30]
    assert dataset.manifest.behaviors == ("view",)
    assert report.manifest.counts["events_filtered"] == 1
    with pytest.raises(InputError, match="no event has the behavior 'purchase'; those that occur: buy, view"):
        prepared(tmp_path, EVENTS, source=source, behaviors=["purchase"])


def same_content(first, second):
    """Row for row; every file is covered by the fingerprint."""
    return first.fingerprint == second.fingerprint


def test_ties_are_shuffled_whatever_the_order_of_the_file_and_the_partitions(tmp_path):
    events = random_events(30, 25)
    first, _ = prepared(tmp_path, events)
    random.Random(1).shuffle(events)
    shuffled, _ = prepared(tmp_path, events, num_partitions=5)
    other_seed, _ = prepared(tmp_path, events, seed=1)
    assert same_content(first, shuffled)
    assert not same_content(first, other_seed)


def test_ties_are_counted_and_can_keep_the_order_of_the_file(tmp_path):
    events = [(1, item, 5) for item in range(8)] + [(2, 3, 1), (2, 1, 1), (2, 2, 2)]
    kept, report = prepared(tmp_path, events, ties="file")
    assert kept.history_of("1").tolist() == list(range(8))
    assert kept.history_of("2").tolist() == [3, 1, 2]
    assert (report.manifest.ties.neighbors, report.manifest.ties.users) == (8, 2)
    shuffled, report = prepared(tmp_path, events)
    assert shuffled.history_of("1").tolist() != list(range(8))
    assert sorted(shuffled.history_of("1").tolist()) == list(range(8))
    assert (report.manifest.ties.neighbors, report.manifest.ties.users) == (8, 2)


def test_times_are_ordered_below_the_second(tmp_path):
    dataset, report = prepared(tmp_path, [(1, 1, 5.75), (1, 2, 5.25), (1, 3, 5.5)])
    assert dataset.history_of("1").tolist() == [2, 3, 1]
    assert report.manifest.ties.neighbors == 0
    milliseconds, _ = prepared(tmp_path, [(1, 1, 5750), (1, 2, 5250), (1, 3, 5500)], time_unit="ms")
    assert same_content(dataset, milliseconds)


def test_dates_are_times(tmp_path):
    dates = ["1970-01-01 00:00:07", "1970-01-01 00:00:05", "1970-01-01 00:00:06"]
    events = [(1, number, date) for number, date in enumerate(dates)]
    for kind in ("parquet", "csv"):
        dataset, _ = prepared(tmp_path, events, source={"kind": kind})
        assert dataset.history_of("1").tolist() == [1, 2, 0]


def test_dates_may_have_offsets_and_fractions_of_any_length(tmp_path):
    dates = [
        "2020-01-01T00:00:00Z",
        "2020-01-01T00:30:00+01:00",
        "2019-12-31T23:59:59.123456789Z",
        "2020-01-01 00:00:01",
        "2020-01-01T00:00:02.5Z",
    ]
    events = [(1, number, date) for number, date in enumerate(dates)]
    dataset, _ = prepared(tmp_path, events, source={"kind": "csv"})
    assert dataset.history_of("1").tolist() == [1, 2, 0, 3, 4]
    assert targets(dataset, "test") == {1: ([1, 2, 0, 3], 4, 1_577_836_802)}


def test_dates_of_a_table_are_cut_to_the_microsecond(tmp_path):
    ns = np.array([5_000_001_999, 5_000_001_000, 5_000_000_999], dtype="datetime64[ns]")
    raw = RawTable(pa.table({"timestamp": ns}), "log.parquet", str)
    assert parse_times(raw, None).tolist() == [5_000_001, 5_000_001, 5_000_000]
    days = RawTable(pa.table({"timestamp": pa.array([1, 2], pa.date32())}), "log.parquet", str)
    assert parse_times(days, None).tolist() == [86_400_000_000, 2 * 86_400_000_000]
    late = RawTable(pa.table({"timestamp": np.array([10**12], dtype="datetime64[s]")}), "log.parquet", str)
    with pytest.raises(InputError, match="which lies beyond the year 5138"):
        parse_times(late, None)
    before = RawTable(pa.table({"timestamp": np.array([-1], dtype=ns.dtype)}), "log.parquet", str)
    with pytest.raises(InputError, match="expected a time since 1970"):
        parse_times(before, None)


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        (pa.array(["1970-01-02T00:00:05.0000007", "1970-01-02T00:00:05.0000030"]), None),
        (pa.array(["86405.0000007", "86405.000003"]), "s"),
        (pa.array([86405.0000007, 86405.000003]), "s"),
        (pa.array([86_405_000.0007, 86_405_000.003]), "ms"),
        (pa.array([86_405_000_000.7, 86_405_000_003.0]), "us"),
        (pa.array([86_405_000_000_700, 86_405_000_003_000], pa.float64()), "ns"),
        (pa.array([86_405_000_000_700, 86_405_000_003_000]), "ns"),
        (pa.array([86_405_000_000_700, 86_405_000_003_000], pa.timestamp("ns")), None),
    ],
)
def test_whatever_times_are_written_as_they_are_cut_to_the_microsecond(column, unit):
    """Floats were rounded, and the others cut."""
    raw = RawTable(pa.table({"timestamp": column}), "log.parquet", str)
    assert parse_times(raw, unit).tolist() == [86_405_000_000, 86_405_000_003]


@pytest.mark.parametrize(("kind", "stop"), [(pa.float64(), 5000), (pa.float32(), 80)])
def test_a_float_that_stands_for_a_microsecond_is_that_one(kind, stop):
    """Most decimals have no float of their own: that of 0.7 lies below it, or above."""
    decimals = [number / 10 for number in range(stop)]
    raw = RawTable(pa.table({"timestamp": pa.array(decimals, kind)}), "log.parquet", str)
    assert parse_times(raw, "s").tolist() == [number * 100_000 for number in range(stop)]
    if kind == pa.float64():
        now = np.arange(1_700_000_000_123_000, 1_700_000_000_124_000)
        raw = RawTable(pa.table({"timestamp": now / 1e6}), "log.parquet", str)
        assert parse_times(raw, "s").tolist() == now.tolist()
        # In nanoseconds, the float of a microsecond of today may lie below it.
        raw = RawTable(pa.table({"timestamp": (now * 1000).astype(np.float64)}), "log.parquet", str)
        assert parse_times(raw, "ns").tolist() == now.tolist()
        whole = np.array([9_007_199_255.0, 20_000_000_001.0, 99_999_999_999.0])
        raw = RawTable(pa.table({"timestamp": whole}), "log.parquet", str)
        assert parse_times(raw, "s").tolist() == [int(each) * 1_000_000 for each in whole]


def test_training_files_hold_full_row_groups_in_order_of_a_hash(tmp_path):
    dataset = small_dataset(tmp_path)
    metadata = [pq.read_metadata(dataset.root / name) for name in dataset.train_files]
    groups = [[data.row_group(number).num_rows for number in range(data.num_row_groups)] for data in metadata]
    assert groups == [[4] * 4, [4] * 4, [4, 4]]
    users = training_rows(dataset)["user_id"].to_numpy()
    assert np.all(np.diff(mix64(users).astype(object)) > 0)


def test_integer_and_string_ids_are_told_apart(tmp_path):
    integers, _ = prepared(tmp_path, EVENTS, source={"kind": "csv"})
    assert integers.manifest.id_kinds == {"user": "integer", "item": "integer"}
    strings, _ = prepared(tmp_path, [(f"u{user}", item, time) for user, item, time in EVENTS])
    assert strings.manifest.id_kinds == {"user": "string", "item": "integer"}
    assert strings.history_of("u1").tolist() == [10, 20, 30, 40]
    assert strings.user_by_key("u1") in strings.users["user_id"].to_pylist()


def test_the_report_prints_and_serializes(tmp_path):
    _, report = prepared(tmp_path, EVENTS)
    rows = dict(report.rows())
    assert rows["users"] == "2"
    assert rows["neighboring events at the same time"] == "0 pairs, of 0 users, shuffled by seed 0"
    assert "duplicate events dropped" not in rows
    assert json.loads(json.dumps(report.to_json()))["counts"]["items"] == 4


def test_progress_ends_when_all_events_are_done(tmp_path):
    seen = []
    prepare(
        write_source(tmp_path / "source", EVENTS),
        tmp_path / "data",
        progress=lambda phase, done, total: seen.append((phase, done, total)),
    )
    assert seen[-1] == ("sequences", 7, 7)


# What is refused, and what may be allowed


def test_duplicates_are_refused_and_the_first_can_be_kept(tmp_path):
    events = [*EVENTS, (2, 20, 5), (1, 10, 5), (1, 10, 5)]
    message = refusal(tmp_path, events)
    assert "interactions.parquet row 8: user 2 has item 20 at 5 a second time (3 duplicate events" in message
    assert "--allow duplicates" in message
    allowed, report = prepared(tmp_path, events, allow=["duplicates"])
    assert report.manifest.counts["duplicates"] == 3
    plain, _ = prepared(tmp_path, EVENTS)
    assert same_content(allowed, plain)


def test_the_same_item_with_another_behavior_is_no_duplicate(tmp_path):
    events = [(1, 10, 5), (1, 10, 5), (1, 20, 6)]
    dataset, _ = prepared(tmp_path, events, source={"behavior": ["view", "like", "view"]})
    assert dataset.history_of("1").tolist() == [10, 10, 20]


def test_users_with_one_event_are_refused_or_trained_on_only(tmp_path):
    events = [*EVENTS, (3, 20, 1)]
    message = refusal(tmp_path, events)
    assert "row 8: user 3 has only this event (1 such users)" in message
    assert "--allow short-users" in message
    dataset, report = prepared(tmp_path, events, allow=["short-users"])
    assert sequences(dataset)[3] == [20]
    assert 3 not in targets(dataset, "test")
    assert report.manifest.counts["short_users"] == 1


def test_items_without_interactions_are_refused_or_kept(tmp_path):
    items = {"items": {"item_id": [10, 50, 20], "title": ["Ten", "Fifty", "Twenty"]}}
    message = refusal(tmp_path, EVENTS, source=items)
    assert "items.parquet row 2: item 50 has no interactions (1 such items)" in message
    assert "--allow cold-items" in message
    dataset, report = prepared(tmp_path, EVENTS, source=items, allow=["cold-items"])
    assert items_by_key(dataset, "title")["50"] == "Fifty"
    assert items_by_key(dataset, "train_count")["50"] == 0
    assert report.manifest.counts["cold_items"] == 1


def test_everything_that_needs_a_decision_is_said_at_once(tmp_path):
    message = refusal(tmp_path, [*EVENTS, (1, 10, 5), (3, 20, 1)])
    assert "--allow duplicates" in message
    assert "--allow short-users" in message


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("time", "message"),
    [
        (float("nan"), "timestamp is nan, expected a number"),
        (float("inf"), "timestamp is inf, expected a number"),
        (-3.5, "timestamp is -3.5, expected a time since 1970, which is not negative"),
        (1.5e12, "lies beyond the year 5138; set time_unit"),
    ],
)
def test_impossible_times_are_refused_with_their_row(tmp_path, kind, time, message):
    found = refusal(tmp_path, [(1, 10, 1.5), (1, 20, 2.5), (1, 30, time)], source={"kind": kind})
    assert message in found
    assert ("interactions.parquet row 3" if kind == "parquet" else "interactions.csv line 4") in found


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (["5", "soon", "7"], "row 2: timestamp is soon, expected a number of seconds since 1970 or a date"),
        (["2020-01-01", "2020-01-02", "soon"], "row 3: timestamp is soon, expected a date such as"),
        (["nan", "2020-01-01", "2020-01-02"], "row 1: timestamp is nan, expected a date such as"),
        (
            ["2020-01-01T00:00:00Z", "x", "2020-01-01T00:00:00+01:00"],
            "row 2: timestamp is x, expected a date",
        ),
        (["2020-01-01", "5", "2020-01-02"], "row 2: timestamp is 5, expected a date"),
        (["2020-01-01", "1960-01-01", "2020-01-02"], "row 2: timestamp is 1960-01-01, expected a time since"),
        (["5", "nan", "7"], "row 2: timestamp is nan"),
        (["5", None, "7"], "row 2: timestamp is missing"),
        ([True, False, True], "interactions.parquet: column timestamp has the type bool"),
        (
            [timedelta(seconds=seconds) for seconds in range(3)],
            "interactions.parquet: column timestamp has the type duration[us]; expected numbers",
        ),
    ],
)
def test_times_that_are_none_are_refused(tmp_path, times, message):
    assert message in refusal(tmp_path, [(1, number, time) for number, time in enumerate(times)])


@pytest.mark.parametrize("allow", [[], ["bad-times"]])
def test_a_log_without_a_usable_time_is_not_advised_to_allow_that(tmp_path, allow):
    rows = [(1, number, None) for number in range(3)]

    said = refusal(tmp_path, rows, allow=allow)

    assert "timestamp is missing (3 rows without a usable time); mend or remove the rows. Without" in said
    assert "--allow" not in said


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ([1, None, 1], "row 2: user_id is missing (1 rows without an id)"),
        (["a", "", "a"], "row 2: user_id is empty"),
        ([1.5, 2.5, 3.5], "column user_id has the type double; expected integers or strings"),
        (["1", str(2**70), "1"], f"user id {2**70} is outside 64 bits"),
    ],
)
def test_ids_that_are_none_are_refused(tmp_path, users, message):
    assert message in refusal(tmp_path, [(user, 10 + time, time) for time, user in enumerate(users)])


def test_an_empty_source_is_refused(tmp_path):
    assert "no events in it" in refusal(tmp_path, [])


def test_items_described_twice_are_refused(tmp_path):
    message = refusal(tmp_path, EVENTS, source={"items": {"item_id": [10, 20, 10]}})
    assert "items.parquet row 3: item 10 is described a second time" in message


def test_a_boundary_that_leaves_nothing_to_train_on_is_refused(tmp_path):
    message = refusal(tmp_path, EVENTS, split="time", valid_start=5, test_start=6)
    assert "no event is before the validation boundary 1970-01-01 00:00:05 UTC (5 s)" in message
    assert "move valid_start (--valid-start)" in message


def test_a_boundary_that_leaves_nothing_to_test_on_is_refused(tmp_path):
    message = refusal(tmp_path, EVENTS, split="time", valid_start=6, test_start="1970-01-01T00:00:10")
    assert "no event is on or after the test boundary 1970-01-01 00:00:10 UTC (10 s)" in message
    assert "move test_start (--test-start)" in message


def test_columns_with_a_name_of_ours_are_kept_under_another(tmp_path):
    items = {"item_id": [10, 20, 30, 40], "train_count": [3, 4, 5, 6]}
    dataset, report = prepared(tmp_path, EVENTS, source={"items": items, "item_ids": list("abcdefg")})
    assert items_by_key(dataset, "train_count_of_source") == {"10": 3, "20": 4, "30": 5, "40": 6}
    assert items_by_key(dataset, "train_count")["10"] == 1
    assert "item_ids_of_source" in training_rows(dataset).schema.names
    uses = {(use.file, use.column): use.use for use in report.uses}
    assert uses["items.parquet", "train_count"] == "kept as train_count_of_source"
    assert uses["interactions.parquet", "item_ids"] == "kept as item_ids_of_source"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allow": ["dups"]}, "allow"),
        ({"valid_start": 3, "test_start": 4}, r"valid_start \(--valid-start\) belongs to the split by time"),
        ({"test_fraction": 0.2}, r"test_fraction \(--test-fraction\) belongs to the split by time"),
        (
            {"split": "time", "valid_start": 3, "test_start": 4, "test_fraction": 0.2},
            "either boundaries or fractions",
        ),
        ({"split": "time", "valid_start": "soon", "test_start": 4}, "is 'soon'; expected a date such as"),
        ({"split": "time", "valid_start": 3, "test_start": 1_577_836_800_000}, "test_start: input should be"),
        ({"split": "time", "valid_start": 3}, "go together"),
        ({"split": "time", "valid_start": 5, "test_start": 3}, "lies after"),
        ({"split": "time", "valid_fraction": 0.5, "test_fraction": 0.5}, "no event to train on"),
        ({"rows_per_group": 10, "rows_per_file": 5}, "less than rows_per_group"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        PrepareConfig.parse(settings)


# The folder


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    source = write_source(tmp_path / "source", EVENTS)
    with pytest.raises(InputError, match="not empty and holds no data set"):
        prepare(source, source, PrepareConfig(overwrite=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file of this name"):
        prepare(source, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    prepare(source, tmp_path / "empty")
    with pytest.raises(InputError, match="a data set is there already"):
        prepare(source, tmp_path / "empty")


def test_an_interrupted_preparation_leaves_the_old_data_set(tmp_path):
    source = write_source(tmp_path / "source", EVENTS)
    out = tmp_path / "data"
    before = prepare(source, out).manifest.fingerprint

    def interrupted(*arguments):
        yield next(run_partitions_locally(*arguments))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, PrepareConfig(seed=1, overwrite=True), interrupted)
    assert Dataset.open(out).fingerprint == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "source"]

    more = write_source(tmp_path / "source", [*EVENTS, (2, 30, 10)])
    assert prepare(more, out, PrepareConfig(overwrite=True)).manifest.fingerprint != before
    assert Dataset.open(out).manifest.counts["events"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "source"]


def test_what_a_killed_preparation_has_left_is_deleted_by_the_next_of_the_same_data_set(tmp_path):
    program = """
import os, sys
from pathlib import Path
from rayrec.samples.prepare.writer import whole_folder
with whole_folder(Path(sys.argv[1])) as folder:
    (folder / "train.parquet").touch()
    os._exit(1)
"""
    for name in ("data", "database"):
        subprocess.run([sys.executable, "-c", program, tmp_path / name], check=False)
    killed, others = sorted(tmp_path.iterdir())
    assert (killed / "data" / "train.parquet").exists()

    with whole_folder(tmp_path / "data") as alive:
        assert not killed.exists()
        with whole_folder(tmp_path / "data") as folder:
            (folder / "dataset.json").touch()
        assert alive.exists()
    assert others.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, "data"]


def test_what_a_process_writes_whose_locks_are_not_seen_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_sharers_of_locks", lambda folder: "others")
    with whole_folder(tmp_path / "data") as alive:
        (alive.parent / "lock").unlink()
        (alive.parent / "lock").touch()  # which nobody holds, as far as is seen here
        monkeypatch.undo()
        with whole_folder(tmp_path / "data") as folder:
            (folder / "dataset.json").touch()
        assert alive.exists()


def test_a_folder_that_is_deleted_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    flock, deleted = fcntl.flock, []

    def deleted_first(lock, operation):
        if not deleted:
            deleted.append(Path(lock.name).parent)
            shutil.rmtree(deleted[0])
        flock(lock, operation)

    monkeypatch.setattr("fcntl.flock", deleted_first)
    with whole_folder(tmp_path / "data") as folder:
        assert folder.parent != deleted[0]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_file_system_that_numbers_open_files_differently_is_written_to(tmp_path, monkeypatch):
    fstat = os.fstat

    def numbered(descriptor):
        found = fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            return found
        return os.stat_result((found.st_mode, found.st_ino + 1, *found[2:10]))

    monkeypatch.setattr("os.fstat", numbered)
    monkeypatch.setattr(writer, "_TRIES", 3)
    with whole_folder(tmp_path / "data") as folder:
        (folder / "dataset.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_file_system_on_which_every_file_is_locked_is_refused(tmp_path, monkeypatch):
    def locked(lock, operation):
        raise BlockingIOError(errno.EWOULDBLOCK, "locked")

    monkeypatch.setattr("fcntl.flock", locked)
    with (
        pytest.raises(InputError, match=rf"{tmp_path}: in 100 tries no new file there"),
        whole_folder(tmp_path / "data"),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_written_to_and_one_that_fails_is_not(tmp_path, monkeypatch, number):
    def refused(lock, operation):
        raise OSError(number, "refused")

    monkeypatch.setattr("fcntl.flock", refused)
    if number == errno.ENOLCK:
        with whole_folder(tmp_path / "data") as alive, whole_folder(tmp_path / "data"):
            assert alive.exists()
    else:
        with pytest.raises(OSError, match="refused"), whole_folder(tmp_path / "data"):
            pass
        assert not list(tmp_path.iterdir())


def test_a_data_set_that_is_not_whole_is_refused_by_file(tmp_path):
    with pytest.raises(InputError, match="nothing: no such data set"):
        Dataset.open(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"dataset.json is missing"):
        Dataset.open(tmp_path)
    root = small_dataset(tmp_path).root
    items = root / "items.parquet"
    content = items.read_bytes()
    items.write_bytes(content[:-1])
    with pytest.raises(
        InputError, match=rf"items.parquet: {len(content) - 1} bytes, {len(content)} were written"
    ):
        Dataset.open(root)
    items.write_bytes(content[:-1] + b"!")
    Dataset.open(root, checksums=False)
    with pytest.raises(InputError, match=r"items.parquet: its checksum"):
        Dataset.open(root)
    items.unlink()
    with pytest.raises(InputError, match=r"items.parquet: missing"):
        Dataset.open(root)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format": 1', '"format": 9', "data set format 9, this version reads 1"),
        ('"rows": 16', '"rows": 17', "its fingerprint does not fit"),
        ("{", "", "not valid JSON"),
        ('"seed"', '"sed"', "there is no setting 'sed'"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(tmp_path, old, new, message):
    path = small_dataset(tmp_path).root / "dataset.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        Dataset.open(path.parent)


# Ray, and real data


@pytest.mark.slow
@pytest.mark.ray
def test_ray_data_writes_the_same_files(ray_cluster, tmp_path):
    from rayrec.samples.prepare.ray_jobs import run_partitions_on_ray

    events = [*random_events(60, 40), ("u0", "i0", 1), ("u0", "i0", 1)]
    local, local_report = prepared(tmp_path, events, allow=["duplicates"])
    on_ray, ray_report = prepared(
        tmp_path, events, run_partitions_on_ray, allow=["duplicates"], num_partitions=4
    )
    assert on_ray.manifest.files == local.manifest.files
    assert ray_report.manifest.counts == local_report.manifest.counts
    assert ray_report.manifest.ties == local_report.manifest.ties


def test_movielens(tmp_path):
    report = prepare(real_data("movielens-100k"), tmp_path / "data")
    counts = report.manifest.counts
    assert [counts[name] for name in ("users", "items", "events", "test_rows")] == [943, 1_682, 100_000, 943]
    dataset = Dataset.open(tmp_path / "data")
    assert items_by_key(dataset, "title")["1"] == "Toy Story"
    assert items_by_key(dataset, "text")["1"] == "Toy Story. 1995. Animation Children's Comedy"


def test_beauty_has_the_published_counts_and_forgets_the_order_within_a_day(tmp_path):
    source = real_data("amazon14-beauty")
    report = prepare(source, tmp_path / "data")
    counts = report.manifest.counts
    assert [counts[name] for name in ("users", "items", "events")] == [22_363, 12_101, 198_502]
    assert report.manifest.ties.neighbors == 77_402
    assert counts["train_rows"] == counts["valid_rows"] == counts["test_rows"] == 22_363
    assert counts["train_events"] == 198_502 - 2 * 22_363

    # The source has every same-day pair in ascending order of ASIN; shuffled, half of them are.
    dataset = Dataset.open(tmp_path / "data")
    asins = pq.read_table(dataset.root / "items.parquet")["asin"].to_numpy()
    assert items_by_key(dataset, "text")["2"] == (
        "OPI Red Shatter Crackle Nail Polish E55 New. red shatter crackle nail polish e55"
    )
    history = pq.read_table(dataset.root / "history.parquet")["item_ids"].combine_chunks()
    ranks = np.argsort(np.argsort(asins))[dataset.item_positions(history.flatten().to_numpy())]
    lines = (source / "Beauty_time.txt").read_text().splitlines()
    times_of_user = {line.split()[0]: np.array(line.split()[1:], dtype=np.int64) for line in lines}
    times = np.concatenate([times_of_user[key] for key in dataset.users["user_key"].to_pylist()])
    same_user = np.ones(len(ranks), dtype=bool)
    same_user[history.offsets.to_numpy()[:-1]] = False
    tied = np.flatnonzero(same_user & (np.diff(times, prepend=-1) == 0))
    assert len(tied) == 77_402
    assert abs(np.mean(ranks[tied] > ranks[tied - 1]) - 0.5) < 0.01


@pytest.mark.slow
def test_deskdrop_needs_two_decisions(tmp_path):
    source = real_data("deskdrop")
    with pytest.raises(InputError, match=r"allow duplicates .* allow short-users "):
        prepare(source, tmp_path / "data", PrepareConfig(split="time"))
    allow = frozenset({"duplicates", "short-users"})
    report = prepare(source, tmp_path / "data", PrepareConfig(split="time", allow=allow))
    assert report.manifest.behaviors == ("BOOKMARK", "COMMENT CREATED", "FOLLOW", "LIKE", "VIEW")
    counts = report.manifest.counts
    assert counts["events"] + counts["duplicates"] == 72_312
    assert [counts["users"], counts["items"]] == [1_895, 2_987]
