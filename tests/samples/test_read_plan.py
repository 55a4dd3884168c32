import datetime
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.samples.reading.read_plan import Batching, ReadPlan, ReadSettings, readings
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.data import write_log
from tests.helpers.examples import examples

COLUMNS = ["user_id", "item_ids", "price", "country"]


def plan_of(folder, batching=None, seed=0, window_rows=9, **more):
    reading = {key: more.pop(key) for key in ("columns", "filters", "on_corrupt") if key in more}
    return ReadPlan.over(
        folder, ReadSettings(batching or Batching(batch_size=5), seed, window_rows, **more), **reading
    )


def rows_of(batch):
    """What a batch read, as (file, row) in no particular order."""
    return [(interval.file, row) for interval in batch.cursor for row in range(interval.start, interval.stop)]


def read_steps(plan, steps, num_readers=1):
    """Batches as the pipeline reads them: every window by one of the readers."""
    readers = [SampleReader(plan.spec) for _ in range(num_readers)]
    return [
        [
            readers[one.reader].read(one.part, one.ahead)
            for one in readings(plan, plan.batch(step), num_readers)
        ]
        for step in steps
    ]


def keys(parts):
    return [key for part in parts for key in part.row_keys_B.tolist()]


def frame(parts):
    return pd.concat([part.rows.to_pandas() for part in parts], ignore_index=True)


def same_rows(found, expected):
    """As sets of rows: the order of reading is another test's subject."""

    def sortable(rows):
        return sorted(
            (int(user), tuple(items), float(price), str(country))
            for user, items, price, country in rows[COLUMNS].itertuples(index=False)
        )

    return sortable(found) == sortable(expected)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    rows = write_log(
        folder, {f"hour={hour:02}/part-{part}.parquet": 17 for hour in range(2) for part in "ab"}
    )
    return folder, rows


batchings = st.one_of(
    st.builds(Batching, batch_size=st.integers(1, 40)),
    st.builds(Batching, batch_tokens=st.integers(1, 60), length_of=st.just("item_ids")),
    st.builds(
        Batching, batch_size=st.integers(1, 9), batch_tokens=st.integers(1, 60), length_of=st.just("item_ids")
    ),
)
FILTERS = {
    "none": ((), lambda rows: rows.price > -1),
    "one": ([["price", ">", 4.0]], lambda rows: rows.price > 4.0),
    "both": (
        [["price", "<=", 8.0], ["country", "==", "de"]],
        lambda rows: (rows.price <= 8.0) & (rows.country == "de"),
    ),
    "either": (
        [[["price", "<", 2.0]], [["country", "in", ["fr"]]]],
        lambda rows: (rows.price < 2.0) | (rows.country == "fr"),
    ),
    "unlike": ([["country", "not in", ["de"]]], lambda rows: rows.country == "fr"),
}


@examples(40)
@given(
    rows_of_files=st.lists(st.integers(0, 23), min_size=1, max_size=4).filter(any),
    rows_per_group=st.integers(1, 9),
    window_rows=st.integers(1, 40),
    first_window_rows=st.integers(1, 40),
    batching=batchings,
    filters=st.sampled_from(sorted(FILTERS)),
    num_readers=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_each_row_that_passes_comes_once_per_epoch_and_a_resumed_run_reads_the_same(
    rows_of_files, rows_per_group, window_rows, first_window_rows, batching, filters, num_readers, seed
):
    folder = Path(tempfile.mkdtemp())
    try:
        names = {f"hour={number}/x.parquet": count for number, count in enumerate(rows_of_files)}
        rows = write_log(folder, names, rows_per_group)
        conditions, passes = FILTERS[filters]
        expected = rows[passes(rows)]
        if expected.empty:
            with pytest.raises(InputError, match="there are no rows to read"):
                plan_of(folder, batching, seed, window_rows, filters=conditions)
            return

        def plan():
            return plan_of(
                folder,
                batching,
                seed,
                window_rows,
                first_window_rows=first_window_rows,
                filters=conditions,
            )

        ours = plan()
        assert ours.groups.num_rows == len(expected)
        batches = read_steps(ours, range(ours.first_step(2)))
        for epoch in range(2):
            mine = batches[ours.first_step(epoch) : ours.first_step(epoch + 1)]
            found = [row for parts in mine for part in parts for row in rows_of(part)]
            assert sorted(found) == sorted(zip(expected.file, expected.row, strict=True))
            assert same_rows(frame([part for parts in mine for part in parts]), expected)
        all_keys = [keys(parts) for parts in batches[: ours.first_step(1)]]
        assert len({key for batch in all_keys for key in batch}) == len(expected)

        again, start = plan(), len(batches) // 3
        assert again.position(start) == ours.position(start)
        resumed = read_steps(again, range(start, len(batches)), num_readers)
        assert [keys(parts) for parts in resumed] == [keys(parts) for parts in batches[start:]]
        assert frame(resumed[0]).equals(frame(batches[start]))
    finally:
        shutil.rmtree(folder)


@examples(40)
@given(
    batch_tokens=st.integers(1, 60),
    batch_size=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 9),
)
def test_batches_by_length_are_full_and_never_too_long_unless_one_row_is(log, batch_tokens, batch_size, seed):
    folder, _ = log
    plan = plan_of(folder, Batching(batch_size, batch_tokens, "item_ids"), seed)
    lengths = [
        [len(items) for items in frame(parts).item_ids]
        for parts in read_steps(plan, range(plan.first_step(1)))
    ]
    for batch, following in zip(lengths, [*lengths[1:], [10**9]], strict=True):
        assert sum(batch) <= batch_tokens or len(batch) == 1
        full = sum(batch) + following[0] > batch_tokens or len(batch) == batch_size
        assert full
        assert batch_size is None or len(batch) <= batch_size


@pytest.mark.parametrize(("min_batches", "most_rows"), [(1, 5), (13, 5), (14, 4), (10**6, 1)])
def test_a_small_log_is_cut_into_smaller_batches(log, min_batches, most_rows):
    folder, rows = log

    cuts_S1 = plan_of(folder, Batching(5, min_batches=min_batches)).epoch(0).cuts_S1

    assert np.diff(cuts_S1).max() == most_rows
    assert len(cuts_S1) > min(min_batches, len(rows))
    assert cuts_S1[-1] == len(rows) == 68


def test_a_step_of_any_epoch_is_found_where_epochs_differ_in_length(log):
    folder, _ = log
    plan = plan_of(folder, Batching(batch_tokens=11, length_of="item_ids"))
    firsts = [plan.first_step(epoch) for epoch in range(4)]
    assert len(set(np.diff(firsts))) > 1
    fresh = plan_of(folder, Batching(batch_tokens=11, length_of="item_ids"))
    assert [fresh.locate(step) for step in reversed(firsts)] == [(3, 0), (2, 0), (1, 0), (0, 0)]
    assert fresh.locate(firsts[2] - 1) == (1, firsts[2] - firsts[1] - 1)


def test_windows_grow_to_their_size_so_that_the_first_is_there_soon(tmp_path):
    write_log(tmp_path, {"a.parquet": 32, "b.parquet": 64})
    plan = plan_of(tmp_path, window_rows=32, first_window_rows=4)
    assert [window.num_rows for window in plan.windows(0)] == [4, 8, 16, 32, 32, 4]


def test_neighboring_windows_belong_to_different_readers_each_with_its_next_window(log):
    folder, _ = log
    plan = plan_of(folder, window_rows=8, first_window_rows=8)
    windows = plan.windows(0)
    seen = [
        (one.part.window.number, one.reader, one.ahead and (one.ahead.epoch, one.ahead.number))
        for step in range(plan.steps_per_epoch)
        for one in readings(plan, plan.batch(step), 2)
    ]
    for number, reader, ahead in seen:
        assert reader == number % 2
        assert ahead == ((0, number + 2) if number + 2 < len(windows) else (1, 1 - reader))
    first_of_next = plan.batch(plan.steps_per_epoch)
    assert readings(plan, first_of_next, 2)[0].reader == 1


def test_columns_that_are_not_asked_for_are_not_read(log):
    folder, _ = log
    plan = plan_of(folder, columns=["price", "user_id"], filters=[["country", "==", "fr"]])
    ((part,), *_) = read_steps(plan, [0])
    assert part.rows.schema.names == ["price", "user_id"]


def test_what_does_not_change_the_order_does_not_change_its_fingerprint(log, tmp_path):
    folder, _ = log
    moved = shutil.copytree(folder, tmp_path / "moved")
    base = plan_of(folder).order_fingerprint
    assert plan_of(moved).order_fingerprint == base
    assert plan_of(folder, Batching(batch_tokens=9, length_of="item_ids")).order_fingerprint == base
    assert plan_of(folder, columns=["price"]).order_fingerprint == base
    others = [
        plan_of(folder, seed=1),
        plan_of(folder, window_rows=10),
        plan_of(folder, first_window_rows=2),
        plan_of(folder, filters=[["price", ">", 1.0]]),
        plan_of(folder, filters=[["price", ">", 1.1]]),
    ]
    assert len({base, *(plan.order_fingerprint for plan in others)}) == 6


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        (Batching(), "batches need a bound; give batch_size, batch_tokens, or both"),
        (Batching(batch_size=0), "batch_size must be at least 1, got 0"),
        (Batching(batch_size=5, min_batches=0), "min_batches must be at least 1, got 0"),
        (Batching(batch_tokens=5), "batch_tokens needs length_of"),
        (Batching(batch_tokens=5, length_of="nothing"), "'nothing' is not there"),
        (Batching(batch_tokens=5, length_of="price"), "'price' is float"),
    ],
)
def test_batches_without_a_usable_bound_are_refused(log, batching, message):
    with pytest.raises(InputError, match=message):
        plan_of(log[0], batching)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([["cost", ">", 1]], "a filter asks for column 'cost', which is not there; found user_id, "),
        ([["price", "~", 1]], r"the filter price ~ 1 cannot be applied to a column of type float"),
        ([["price", ">", "much"]], r"the filter price > 'much' cannot be applied"),
        ([["item_ids", ">", 1]], r"the filter item_ids > 1 cannot be applied"),
        ([["country", "in", "de"]], r"'in' takes a list of values"),
        ([["price", ">"]], "a condition has a column, an operator and a value"),
        (["price > 1"], "expected filters like"),
    ],
)
def test_filters_that_cannot_be_applied_are_refused(log, filters, message):
    with pytest.raises(InputError, match=message):
        plan_of(log[0], filters=filters)


@pytest.mark.parametrize(
    "value",
    ["2026-01-02", "2026-01-02T00:00:00", datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2)],
)
def test_times_are_filtered_by_iso_texts_and_by_what_yaml_makes_of_them(tmp_path, value):
    days = [datetime.datetime(2026, 1, day) for day in (1, 2, 3)]
    pq.write_table(pa.table({"at": pa.array(days, pa.timestamp("s"))}), tmp_path / "a.parquet")

    plan = plan_of(tmp_path, filters=[["at", "<", value]])
    (other,) = read_steps(plan_of(tmp_path, filters=[["at", "in", [value]]]), [0])
    (parts,) = read_steps(plan, [0])

    assert frame(parts)["at"].tolist() == days[:1]
    assert frame(other)["at"].tolist() == days[1:2]
    json.dumps(plan.spec.filters)  # a run's snapshots have them


def test_row_groups_that_statistics_rule_out_are_not_read(tmp_path):
    """They may even be damaged: nobody looks at them."""
    rows = write_log(tmp_path, {"a.parquet": 4, "b.parquet": 4}, seed=5)
    damaged = tmp_path / "b.parquet"
    content = bytearray(damaged.read_bytes())
    content[4:300] = bytes(296)
    damaged.write_bytes(content)
    mine, theirs = (rows[rows.file == name] for name in ("a.parquet", "b.parquet"))
    bound = float(theirs.price.max())
    expected = mine[mine.price > bound]
    assert 0 < len(expected) < 4

    plan = plan_of(tmp_path, filters=[["price", ">", bound]])

    assert plan.groups.num_rows == len(expected)
    (parts,) = read_steps(plan, range(plan.steps_per_epoch))
    assert same_rows(frame(parts), expected)
