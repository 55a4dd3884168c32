"""A log of events becomes an event store, and the store becomes samples."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import ANY_TIME, graph_of_store, neighbors
from rayrec.samples.operations.join_history import JoinHistoryConfig
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.operations.sequences import ConcatConfig
from rayrec.samples.prepare.ids import hash_strings
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.stores import build as build_module
from rayrec.samples.stores import open_store
from rayrec.samples.stores.build import StoreBuildConfig, build_store
from rayrec.samples.stores.key_samples import write_key_samples
from rayrec.samples.stores.store import check_sides
from tests.helpers.data import random_events, write_source

DAY = 86_400
SECOND = 1_000_000
T0 = 1_577_836_800  # 2020-01-01


def write_log(folder, name="part-0.parquet", **columns):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return folder


def build(source, address, **settings):
    return build_store(source, str(address), StoreBuildConfig.parse(settings))


def histories(address):
    """key -> [(time, item), ...] and the further columns."""
    store = open_store(str(address))
    try:
        result = {}
        for keys_K in store.key_batches(1000):
            found = store.get_many(keys_K)
            for place, key in enumerate(keys_K.tolist()):
                rows = slice(found.offsets_K1[place], found.offsets_K1[place + 1])
                result[key] = list(
                    zip(*(column[rows].tolist() for column in found.columns.values()), strict=True)
                )
        return result
    finally:
        store.close()


def refusal(source, address, **settings):
    with pytest.raises(InputError) as caught:
        build(source, address, **settings)
    return str(caught.value)


def test_a_log_by_any_column_names_becomes_histories(tmp_path):
    source = write_log(
        tmp_path / "log",
        visitorid=[2, 1, 1],
        movieId=[20, 11, 10],
        ts=[T0, T0 + 5, T0],
        event=["b", "a", "b"],
    )
    report = build(source, tmp_path / "store")
    assert histories(tmp_path / "store") == {
        1: [(T0 * SECOND, 10, 1), ((T0 + 5) * SECOND, 11, 0)],
        2: [(T0 * SECOND, 20, 1)],
    }
    assert (report.files, report.events, report.added, report.duplicates, report.late) == (1, 3, 3, 0, 0)
    assert report.out_of_order == 1


def test_the_side_by_item_is_built_beside_the_other(tmp_path):
    columns = {
        "user": [2, 1, 1],
        "item": [20, 20, 10],
        "timestamp": [T0, T0 + 5, T0],
        "event": ["b", "a", "b"],
    }
    source = write_log(tmp_path / "log", **columns)
    build(source, tmp_path / "store")

    report = build(source, tmp_path / "store", by="item")

    assert (report.added, report.files) == (3, 1), "each side knows its own files"
    by_item = open_store(str(tmp_path / "store"), by="item")
    graph = graph_of_store(by_item)
    by_user = open_store(str(tmp_path / "store"))
    same = graph_of_store(by_user)
    for which in (graph, same):
        found = neighbors(which, "item", np.array([20, 10]), np.full(2, ANY_TIME), 5)
        assert found.ids_FK[:, :2].tolist() == [[1, 2], [1, -1]]
        assert found.kinds_FK[:, 0].tolist() == [0, 1]
    graph.check_log(by_user.manifest.log_fingerprint, "store")
    for each in (by_item, by_user):
        each.close()
    texts = write_log(tmp_path / "texts", user=["x"], item=[1], timestamp=[T0], event=["a"])
    build(texts, tmp_path / "third", name="log")
    assert "build both sides from the same files" in refusal(source, tmp_path / "third", by="item")


def test_behaviors_have_the_same_codes_on_both_sides_however_files_came(tmp_path):
    parts = [
        write_log(tmp_path / name, f"{name}.parquet", user=[1], item=[2], timestamp=[T0 + n], event=[name])
        for n, name in enumerate(["view", "like", "buy"])
    ]
    for part in parts:
        build(part, tmp_path / "store", name="log")
    assert build(parts[0], tmp_path / "store", name="log", by="item").other_side_lacks == 0
    behind = build(parts[2], tmp_path / "store", name="log")
    assert ("side by item", "lacks 1 of these files: run this again with --by item") in behind.rows()

    for part in parts[:0:-1]:
        build(part, tmp_path / "store", name="log", by="item")

    both = [open_store(str(tmp_path / "store"), by=by) for by in ("user", "item")]
    assert both[0].manifest.behaviors == both[1].manifest.behaviors == ("view", "like", "buy")
    check_sides(*both)
    for each in both:
        each.close()


def test_names_given_and_columns_kept(tmp_path):
    source = write_log(
        tmp_path / "log", who=[1, 1], what=[10, 11], when=[5, 6], price=[1.5, None], count=[3, 4]
    )
    columns = {"user_id": "who", "item_id": "what", "timestamp": "when"}
    build(source, tmp_path / "store", columns=columns, keep=["price", "count"])
    (first, second) = histories(tmp_path / "store")[1]
    assert first == (5 * SECOND, 10, 1.5, 3)
    assert second[:2] + second[3:] == (6 * SECOND, 11, 4)
    assert np.isnan(second[2])


@pytest.mark.parametrize("prefix", ["", "u"])
def test_ids_are_those_of_a_prepared_data_set(tmp_path, prefix):
    events = [
        (f"{prefix}{user[1:]}", f"{prefix}{item[1:]}", time) for user, item, time in random_events(20, 30)
    ]
    source = write_source(tmp_path / "source", events)
    prepare(source, tmp_path / "data", PrepareConfig(allow=frozenset({"duplicates"})))
    build(source / "interactions.parquet", tmp_path / "store")

    dataset = Dataset.open(tmp_path / "data")
    stored = histories(tmp_path / "store")
    rows = pq.read_table(tmp_path / "data" / "history.parquet").to_pylist()
    assert {row["user_id"]: sorted(row["item_ids"]) for row in rows} == {
        user: sorted(event[1] for event in history) for user, history in stored.items()
    }
    kind = "string" if prefix else "integer"
    assert dataset.manifest.id_kinds == {"user": kind, "item": kind}


def test_a_second_run_adds_new_files_only(tmp_path):
    source = write_log(tmp_path / "log", user_id=[1, 2], item_id=[10, 20], timestamp=[T0, T0])
    build(source, tmp_path / "store")
    again = build(source, tmp_path / "store")
    assert (again.files, again.files_known, again.events, again.added) == (0, 1, 0, 0)

    write_log(
        source, "hour=1/part.parquet", user_id=[1, 1, 2], item_id=[11, 10, 5], timestamp=[T0 + 9, T0, T0 - 1]
    )
    more = build(source, tmp_path / "store")
    assert (more.files, more.files_known) == (1, 1)
    assert (more.events, more.added, more.duplicates, more.late) == (3, 2, 1, 1)
    assert [item for _, item in histories(tmp_path / "store")[1]] == [10, 11]


def test_a_run_that_was_cut_short_is_run_again(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    source = write_log(
        tmp_path / "log",
        user_id=random.integers(0, 40, 2000),
        item_id=random.integers(0, 90, 2000),
        timestamp=T0 + random.integers(0, 50, 2000),
    )
    build(source, tmp_path / "whole")
    calls = []

    def cut_short(store):
        calls.append(store)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "_APPEND_EVENTS", 300)
    with pytest.raises(KeyboardInterrupt):
        build_store(
            source,
            str(tmp_path / "store"),
            StoreBuildConfig(name="log", events_per_partition=600),
            lambda phase, done, total: cut_short(phase) if phase == "storing" else None,
        )
    assert 0 < sum(map(len, histories(tmp_path / "store").values())) < 2000
    report = build(source, tmp_path / "store", events_per_partition=600)
    assert report.added + report.duplicates == 2000
    assert histories(tmp_path / "store") == histories(tmp_path / "whole")


def test_the_store_does_not_depend_on_partitions_or_files(tmp_path):
    random = np.random.default_rng(1)
    columns = {
        "user_id": random.integers(0, 40, 3000),
        "item_id": random.integers(0, 9, 3000),
        "timestamp": T0 + random.integers(0, 20, 3000),
    }
    one = write_log(tmp_path / "one" / "log", **columns)
    for part in range(3):
        many = write_log(
            tmp_path / "many" / "log",
            f"{part}.parquet",
            **{name: column[part::3] for name, column in columns.items()},
        )
    build(one, tmp_path / "a")
    build(many, tmp_path / "b", events_per_partition=100)
    assert histories(tmp_path / "a") == histories(tmp_path / "b")


def test_a_file_that_changed_is_refused(tmp_path):
    source = write_log(tmp_path / "log", user_id=[1], item_id=[10], timestamp=[T0])
    build(source, tmp_path / "store")
    write_log(source, user_id=[1], item_id=[11], timestamp=[T0])
    assert "part-0.parquet: a file of this name is in the store, with other content" in refusal(
        source, tmp_path / "store"
    )


def test_a_store_of_another_log_is_refused(tmp_path):
    build(write_log(tmp_path / "log", user_id=[1], item_id=[10], timestamp=[T0]), tmp_path / "store")
    other = write_log(tmp_path / "other", user_id=[1], item_id=[10], timestamp=[T0])
    assert "its manifest has name 'log', this log 'other'; give the name" in refusal(
        other, tmp_path / "store"
    )
    kinds = write_log(tmp_path / "x" / "log", user_id=[1], item_id=[10], timestamp=[T0], event=["a"])
    assert "its manifest has columns {}, this log {'behaviors': 'int16'}" in refusal(
        kinds, tmp_path / "store"
    )


def test_texts_do_not_join_a_store_of_integers(tmp_path):
    source = write_log(tmp_path / "log", user_id=["1"], item_id=[10], timestamp=[T0])
    build(source, tmp_path / "store")
    assert list(histories(tmp_path / "store")) == [1]
    write_log(source, "b.parquet", user_id=["2", "ann"], item_id=[10, 10], timestamp=[T0, T0])
    assert "b.parquet row 2: user id 'ann' is no integer, but all user ids were" in refusal(
        source, tmp_path / "store"
    )
    write_log(source, "b.parquet", user_id=["2", "3"], item_id=["10", str(2**64)], timestamp=[T0, T0])
    assert f"b.parquet row 2: item id {2**64} is outside 64 bits" in refusal(source, tmp_path / "store")


def test_codes_of_behaviors_stay_as_new_ones_come(tmp_path):
    source = write_log(tmp_path / "log", user_id=[1], item_id=[1], timestamp=[T0], event=["view"])
    build(source, tmp_path / "store")
    write_log(
        source, "b.parquet", user_id=[1, 1], item_id=[2, 3], timestamp=[T0 + 1] * 2, event=["buy", "view"]
    )
    build(source, tmp_path / "store")
    assert {item: code for _, item, code in histories(tmp_path / "store")[1]} == {1: 0, 2: 1, 3: 0}


@pytest.mark.parametrize(
    ("times", "unit", "expected"),
    [
        ([T0, T0 * 1000], "s", f"column ts: {T0 * 1000} in row 2 is said to be in s.*2020-01-01 in ms"),
        ([T0 * 1000, T0], "ms", f"column ts: {T0} in row 2 is said to be in ms.*2020-01-01 in s"),
        ([float(T0), T0 * 1e6], "s", r"column ts: 1577836800000000 in row 2.*in us \(1 of 2 values\)"),
        ([5, T0 * 10**9], "us", "2020-01-01 in ns"),
        ([T0, None], "s", "part-0.parquet row 2: timestamp is missing"),
        ([T0, -5], "s", "part-0.parquet row 2: timestamp is -5"),
        ([0.5, float("nan")], "s", "part-0.parquet row 2: timestamp is nan"),
    ],
)
def test_impossible_times_are_refused_and_leave_no_store(tmp_path, times, unit, expected):
    source = write_log(tmp_path / "log", user_id=[1, 1], item_id=[1, 2], ts=times)
    with pytest.raises(InputError, match=expected):
        build(source, tmp_path / "store", time_unit=unit)
    assert not (tmp_path / "store").exists()


def test_clocks_of_their_own_and_dates_are_taken(tmp_path):
    build(write_log(tmp_path / "log", user_id=[1], item_id=[1], ts=[7]), tmp_path / "store")
    dates = pa.array([7], pa.timestamp("ns"))
    write_log(tmp_path / "log", "b.parquet", user_id=[1], item_id=[2], ts=dates)
    build(tmp_path / "log", tmp_path / "store")
    assert histories(tmp_path / "store")[1] == [(0, 2), (7 * SECOND, 1)]


def test_events_far_in_the_future_are_told(tmp_path):
    times = [T0 + second for second in range(5000)] + [T0 + 5000 * DAY]
    source = write_log(tmp_path / "log", user_id=[1] * 5001, item_id=list(range(5001)), ts=times)
    report = build(source, tmp_path / "store")
    assert (report.far_future, report.far_future_from, report.newest_before) == (
        1,
        "2033-09-09",
        "2020-01-01",
    )
    assert report.added == 5001
    assert "1, from 2033-09-09; the others end 2020-01-01" in dict(report.rows())["far in the future"]


def test_a_pause_in_the_log_is_no_future(tmp_path):
    times = [T0] * 500 + [T0 + 800 * DAY] * 500
    source = write_log(tmp_path / "log", user_id=[1] * 1000, item_id=list(range(1000)), ts=times)
    assert build(source, tmp_path / "store").far_future == 0


def test_sources_that_are_no_log_are_refused(tmp_path):
    assert "no such file or folder" in refusal(tmp_path / "nothing", tmp_path / "store")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "log.pdf").write_text("user_id,item_id,timestamp\n")
    assert "no known layout" in refusal(tmp_path / "texts", tmp_path / "store")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.parquet").write_bytes(b"PAR1 and then nothing")
    assert "x.parquet: cannot be read as a table" in refusal(tmp_path / "bad", tmp_path / "store")
    source = write_log(tmp_path / "log", user_id=[1], timestamp=[T0])
    assert "no column item_id; found user_id, timestamp" in refusal(source, tmp_path / "store")


def test_samples_name_a_user_and_a_time_and_join_to_what_was_before(tmp_path):
    source = write_log(
        tmp_path / "log",
        user_id=[1, 1, 1, 1, 2],
        item_id=[10, 11, 12, 13, 20],
        ts=[T0, T0, T0 + 1, T0 + 2, T0],
    )
    build(source, tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    report = write_key_samples(store, tmp_path / "samples")
    store.close()
    rows = pq.read_table(tmp_path / "samples")
    assert (report.users, report.events, report.samples) == (2, 5, 2)
    assert rows["user_id"].to_pylist() == [1, 1]
    assert rows["item_id"].to_pylist() == [12, 13]

    history = JoinHistoryConfig(store=str(tmp_path / "store"))
    target = ConcatConfig(inputs=("item_ids", "item_id"), output="item_ids")
    program = FeatureProgram.compile([history, target], rows.schema)
    joined = program(rows.to_batches()[0], RowContext(np.arange(2), 0, 0))["item_ids"].to_pylist()
    assert [sorted(items[:2]) + items[2:] for items in joined] == [[10, 11, 12], [10, 11, 12, 13]]


def test_samples_are_not_written_over_something_else(tmp_path):
    source = write_log(tmp_path / "log", user_id=[1], item_id=[10], ts=[T0])
    build(source, tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(InputError, match="something is there already"):
        write_key_samples(store, source)
    with pytest.raises(InputError, match="no event has another one before it"):
        write_key_samples(store, tmp_path / "samples")
    assert not (tmp_path / "samples").exists()
    store.close()


def test_hashes_of_texts_are_those_of_the_ids(tmp_path):
    build(write_log(tmp_path / "log", user_id=["ann"], item_id=["hat"], ts=[T0]), tmp_path / "store")
    assert histories(tmp_path / "store") == {
        int(hash_strings(["ann"])[0]): [(T0 * SECOND, int(hash_strings(["hat"])[0]))]
    }


def test_blanks_around_ids_are_cut_off_as_prepare_does(tmp_path):
    for name, user, item in (("plain", "u", "i"), ("blank", " u ", "i ")):
        write_log(tmp_path / name, user_id=[user], item_id=[item], timestamp=[5])
        build(tmp_path / name, tmp_path / f"{name}.store")
    assert histories(tmp_path / "blank.store") == histories(tmp_path / "plain.store")


@pytest.mark.parametrize("name", ["user_id", "item_id"])
def test_a_column_of_lists_has_no_ids(tmp_path, name):
    """It ended the build with an error of Arrow's."""
    columns = {"user_id": [[1], [2]], "item_id": [[1], [2]], "timestamp": [T0, T0]}
    other = "item_id" if name == "user_id" else "user_id"
    log = write_log(tmp_path / "log", **columns | {other: [1, 2]})
    expected = f"column {name} has the type list<element: int64>; expected integers or strings"
    assert expected in refusal(log, tmp_path / "store")


def test_columns_that_are_there_twice_or_have_no_use_are_refused(tmp_path):
    write_log(tmp_path / "log", user_id=[1], item_id=[2], timestamp=[5])
    assert "has no use" in refusal(tmp_path / "log", tmp_path / "store", columns={"behavior": "kind"})
    twice = pa.table([[1], [2], [5], [5]], names=["user_id", "item_id", "timestamp", "timestamp"])
    (tmp_path / "twice").mkdir()
    pq.write_table(twice, tmp_path / "twice/a.parquet")
    assert "is there twice" in refusal(tmp_path / "twice", tmp_path / "store")


ROWS = [(f"u{number % 3}", f"i{number}", T0 + number) for number in range(6)]


def text(rows, header="user_id,item_id,timestamp"):
    return "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ({"interactions.csv": text(ROWS), "items.csv": "item_id,title\ni1,One\n"}, {}),
        ({"log.tsv": text(ROWS).replace(",", "\t")}, {}),
        ({"day=1/a.csv": text(ROWS[:2]), "day=2/a.csv": text(ROWS[2:])}, {}),
        ({"log.csv": text(ROWS, "").lstrip()}, {"names": ["user_id", "item_id", "timestamp"]}),
        (
            {"log.csv": text([(*row[:2], f"{row[2] - T0}.1.2020") for row in ROWS[1:]])},
            {"time_format": "%d.%m.%Y"},
        ),
        ({"a.inter": text(ROWS, "user_id:token,item_id:token,timestamp:float").replace(",", "\t")}, {}),
    ],
    ids=["folder", "tabs", "hive", "no header", "dates", "recbole"],
)
def test_a_store_reads_what_prepare_reads(tmp_path, files, settings):
    for name, content in files.items():
        path = tmp_path / "log" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    report = build(tmp_path / "log", tmp_path / "store", **settings)
    if "time_format" in settings:
        times = [time for events in histories(tmp_path / "store").values() for time, _ in events]
        assert sorted(times) == [(T0 + day * DAY) * SECOND for day in range(5)]
        return
    assert report.added == 6
    plain = write_log(
        tmp_path / "plain",
        "log.parquet",
        **dict(zip(("user_id", "item_id", "timestamp"), zip(*ROWS, strict=True), strict=True)),
    )
    build(plain, tmp_path / "expected")
    assert histories(tmp_path / "store") == histories(tmp_path / "expected")


def test_numbers_of_text_files_are_kept_as_numbers(tmp_path):
    rows = [(*row, number, f'"{number},5"') for number, row in enumerate(ROWS)]
    (tmp_path / "log.csv").write_text(text(rows, "user_id,item_id,timestamp,count,price"))
    build(tmp_path / "log.csv", tmp_path / "store", keep=["count", "price"])
    kept = [event[2:] for events in histories(tmp_path / "store").values() for event in events]
    assert sorted(kept) == [(number, number + 0.5) for number in range(6)]
    assert "a store keeps numbers only" in refusal(tmp_path / "log.csv", tmp_path / "other", keep=["item_id"])


def test_files_of_whole_numbers_go_on_in_a_column_of_fractions(tmp_path):
    log, store = tmp_path / "log", tmp_path / "store"
    log.mkdir()
    names = "user_id,item_id,timestamp,price\n"
    (log / "1.csv").write_text(f"{names}1,5,{T0},1.5\n")
    build(log, store, keep=["price"])
    assert build(log, store, keep=["price"]).files == 0
    (log / "2.csv").write_text(f"{names}1,6,{T0 + 1},3\n")
    (log / "3.csv").write_text(f"{names}1,7,{T0 + 2},\n")
    assert build(log, store, keep=["price"]).added == 2
    *prices, missing = [price for *_, price in histories(store)[1]]
    assert prices == [1.5, 3.0]
    assert np.isnan(missing)
    (log / "4.csv").write_text(f"{names}1,8,{T0 + 3},4\n")
    assert "its manifest has columns" in refusal(log, store, keep=["price", "timestamp"])


def test_a_kept_column_may_have_any_name_but_those_of_the_store(tmp_path):
    columns = {"user_id": [1, 2], "item_id": [5, 6], "timestamp": [T0, T0 + 1], "event": ["a", "b"]}
    log = write_log(tmp_path / "log", **columns, key=[2, 1], behaviors=[7, 8], times=[1, 2])
    build(log, tmp_path / "store", keep=["key"])
    assert histories(tmp_path / "store") == {
        1: [(T0 * SECOND, 5, 0, 2)],
        2: [((T0 + 1) * SECOND, 6, 1, 1)],
    }
    for name in ("behaviors", "times", "__key"):  # the codes of events would be other ones
        assert f"names '{name}', as a store calls a column of its own" in refusal(
            log, tmp_path / "other", keep=[name]
        )


def test_a_column_that_is_a_float_in_any_file_is_one(tmp_path):
    log = write_log(tmp_path / "log", "1.parquet", user_id=[1], item_id=[5], timestamp=[T0], price=[2])
    write_log(log, "2.parquet", user_id=[1], item_id=[6], timestamp=[T0 + 1], price=[2.5])
    build(log, tmp_path / "store", keep=["price"])
    assert [price for *_, price in histories(tmp_path / "store")[1]] == [2.0, 2.5]


def test_fractions_do_not_go_on_in_a_column_of_integers(tmp_path):
    log, store = tmp_path / "log", tmp_path / "store"
    write_log(log, "1.parquet", user_id=[1], item_id=[5], timestamp=[T0], price=[2])
    build(log, store, keep=["price"])
    write_log(log, "2.parquet", user_id=[1], item_id=[6], timestamp=[T0 + 1], price=[3.0])
    assert build(log, store, keep=["price"]).added == 1  # whole numbers, as some programs write them
    write_log(log, "3.parquet", user_id=[1], item_id=[7], timestamp=[T0 + 2], price=[2.5])
    assert "column price has a value that is no int64" in refusal(log, store, keep=["price"])
    assert [price for *_, price in histories(store)[1]] == [2, 3]


def test_a_number_that_the_store_cannot_hold_is_refused_by_its_column(tmp_path):
    price = pa.array([2**63], pa.uint64())
    log = write_log(tmp_path / "log", "1.parquet", user_id=[1], item_id=[5], timestamp=[T0], price=price)
    message = refusal(log, tmp_path / "store", keep=["price"])
    assert "1.parquet: column price has a value that is no int64" in message
    assert not (tmp_path / "store").exists()


def test_the_same_rows_in_another_folder_are_other_events(tmp_path):
    for behavior in ("view", "a%2Fb"):
        write_log(tmp_path / "log" / f"event={behavior}", user_id=[1], item_id=[2], timestamp=[T0])
    assert build(tmp_path / "log", tmp_path / "store").added == 2


def test_an_order_without_times_makes_no_store(tmp_path):
    (tmp_path / "Beauty.txt").write_text("1 5 6 7\n2 6 5 8\n")
    assert "a store needs times" in refusal(tmp_path / "Beauty.txt", tmp_path / "store")
