"""Preparation in tasks gives what one process gives, whatever the pieces and partitions are."""

import errno
import gzip
import pickle
from datetime import UTC, datetime
from functools import partial

import fsspec
import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies

from rayrec.platform.errors import InputError, MachineError, NoRoomError
from rayrec.platform.tasks import run_tasks_locally
from rayrec.platform.work_folder import WorkFolder
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.distributed import spill
from rayrec.samples.prepare.distributed.run import TaskSizes, prepare_distributed
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.examples import cases, examples, share_of

SIZES = (TaskSizes(7, 5, 10, counter_rows=8), TaskSizes(40, 100, 1000))
SMALL_FILES = {"rows_per_group": 3, "rows_per_file": 8}


def outcome(prepared):
    """What a preparation says, or how it refuses."""
    try:
        report = prepared()
    except InputError as error:
        return str(error)
    return report.manifest, report.uses


def same(folder, source, **settings):
    """Check that all ways have one outcome; returns it."""
    config = PrepareConfig.parse(SMALL_FILES | settings)
    expected = outcome(lambda: prepare(source, folder / "one", config.model_copy(update={"overwrite": True})))
    ways = list(zip(SIZES, (5, 1), strict=True))
    for number, (sizes, num_partitions) in enumerate(ways[: share_of(4)]):  # one in `make test`
        out = folder / f"many{number}"
        changed = config.model_copy(update={"num_partitions": num_partitions, "overwrite": True})
        found = outcome(partial(prepare_distributed, source, out, changed, sizes=sizes))
        assert found == expected
        if not isinstance(expected, str):
            Dataset.open(out)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return expected


def in_parts(folder, columns, num_parts=3, kind="parquet"):
    """A log in several files of small row groups; one has no rows."""
    folder.mkdir()
    table = pa.table(columns)
    bounds = np.linspace(0, len(table), num_parts).astype(int).tolist()
    for number, (start, stop) in enumerate(zip([0, *bounds], [*bounds, len(table)], strict=True)):
        part = table.slice(start, stop - start)
        if kind == "parquet":
            pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=4)
        else:
            pa_csv.write_csv(part, folder / f"part-{number}.csv")
    return folder


def columns_of(events, **further):
    users, items, times = (list(column) for column in zip(*events, strict=True))
    return {"user_id": users, "item_id": items, "timestamp": times} | further


@pytest.mark.slow
@pytest.mark.parametrize("ties", ["shuffle", "file"])
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_ties_duplicates_and_further_columns(tmp_path, ties, kind):
    events = random_events(12, 12)
    events += [events[3], events[40], ("u77", "i1", 1003), events[3], ("u78", "i999", 1001)]
    further = {"rating": [number % 5 for number in range(len(events))]}
    source = in_parts(tmp_path / "log", columns_of(events, **further), kind=kind)
    refused = same(tmp_path, source, ties=ties)
    assert "a second time" in refused
    assert "has only this event" in refused
    manifest, _ = same(tmp_path, source, ties=ties, clean=True)
    assert manifest.counts["duplicates"] == 3
    assert manifest.counts["short_users"] == 2


@pytest.mark.parametrize("kind", ["int64", "uint64", "int32"])
def test_integers_are_ids(tmp_path, kind):
    events = [(int(user[1:]), int(item[1:]), time) for user, item, time in random_events(12, 12)]
    columns = columns_of(events)
    if kind == "uint64":
        columns["user_id"] = [2**64 - 1 - user for user in columns["user_id"]]
    columns |= {name: pa.array(columns[name], kind) for name in ("user_id", "item_id")}
    manifest, _ = same(tmp_path, in_parts(tmp_path / "log", columns))
    assert manifest.id_kinds == {"user": "integer", "item": "integer"}
    keys = pq.read_table(tmp_path / "many0" / "users.parquet")["user_key"].to_pylist()
    assert (str(2**64 - 1) in keys) == (kind == "uint64")


def test_one_late_text_makes_texts_of_all_ids(tmp_path):
    events = [(int(user[1:]), int(item[1:]), time) for user, item, time in random_events(12, 12)]
    texts = [(str(user), str(item), time) for user, item, time in events]
    texts[-1] = ("anna", *texts[-1][1:])
    manifest, _ = same(tmp_path, in_parts(tmp_path / "log", columns_of(texts)), clean=True)
    assert manifest.id_kinds == {"user": "string", "item": "integer"}
    source = write_source(tmp_path / "described", events, items={"item_id": ["x1"], "title": ["X"]})
    manifest, _ = same(tmp_path, source, clean=True)
    assert manifest.id_kinds == {"user": "integer", "item": "string"}


def test_an_odd_id_of_a_row_that_is_left_out_decides_nothing(tmp_path):
    texts = [("1", "5", 10), ("1", "6", 11), ("1", "7", 12), ("anna", "8", -5)]
    manifest, _ = same(tmp_path, in_parts(tmp_path / "log", columns_of(texts)), allow=["bad-times"])
    assert manifest.id_kinds["user"] == "integer"


def test_ids_outside_64_bits_are_refused(tmp_path):
    events = [("-1", "5", 10), (str(2**63), "6", 11), ("3", "7", 12), ("4", str(2**65), 13)]
    assert f"item id {2**65} is outside 64 bits" in same(
        tmp_path, in_parts(tmp_path / "a", columns_of([("1", item, time) for _, item, time in events]))
    )
    assert f"user id {2**63} is outside 64 bits" in same(
        tmp_path, in_parts(tmp_path / "b", columns_of([(user, "5", time) for user, _, time in events]))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"valid_fraction": 0.3, "test_fraction": 0.3},
        {"valid_start": 1002, "test_start": 1004},
        {"valid_start": 900, "test_start": 1004},
        {"valid_start": 1002, "test_start": 2000},
        {"valid_start": 1002, "test_start": 1004, "targets": "last"},
        {"targets": "random", "seed": 3},
    ],
)
def test_a_split_by_time(tmp_path, settings):
    events = [(user, item, time + 0.25 * int(user[1:])) for user, item, time in random_events(12, 12)]
    same(tmp_path, in_parts(tmp_path / "log", columns_of(events)), split="time", **settings)


@pytest.mark.slow
def test_boundaries_lie_far_apart_or_within_a_microsecond(tmp_path):
    random = np.random.default_rng(0)
    for number, spread in enumerate([4 * 10**14, 10**11, 10**7, 20, 1]):
        times = 10**15 + random.integers(0, spread, 60)
        columns = columns_of([(number % 7, number, int(time)) for number, time in enumerate(times)])
        source = in_parts(tmp_path / f"log{number}", columns)
        same(tmp_path, source, split="time", time_unit="us", clean=True)


@pytest.mark.slow
def test_labels_are_numbered_by_the_events_that_are_kept(tmp_path):
    events = random_events(12, 12)
    names = ["view", "buy", "like", None, "zoom"]
    behaviors = [names[number % 5] for number in range(len(events))]
    scenarios = [["home", None, "search"][number // 30 % 3] for number in range(len(events))]
    source = in_parts(tmp_path / "log", columns_of(events, behavior=behaviors, scenario=scenarios))
    manifest, _ = same(tmp_path, source, clean=True)
    assert manifest.behaviors == ("buy", "like", "view", "zoom")
    assert "behavior is missing" in same(tmp_path, source, behaviors=["view"])
    behaviors = [name or "view" for name in behaviors]
    source = in_parts(tmp_path / "log2", columns_of(events, behavior=behaviors, scenario=scenarios))
    manifest, _ = same(tmp_path, source, clean=True, behaviors=["view", "zoom"])
    assert manifest.behaviors == ("view", "zoom")
    assert "no event has the behavior 'none'" in same(tmp_path, source, behaviors=["view", "none"])


def test_rows_without_ids_or_times(tmp_path):
    events = random_events(12, 12)
    columns = columns_of(events)
    columns["user_id"][17], columns["user_id"][60], columns["item_id"][30] = None, " ", ""
    columns["item_id"][31] = f"  {columns['item_id'][31]} "
    columns["timestamp"][50], columns["timestamp"][17], columns["timestamp"][70] = -4, None, 10**15
    source = in_parts(tmp_path / "log", columns)
    assert "row 18: user_id is missing (3 rows without an id)" in same(tmp_path, source)
    manifest, _ = same(tmp_path, source, clean=True)
    assert manifest.counts["trimmed_ids"] == 2
    assert manifest.counts["bad_times"] == 2
    columns = {"user_id": [None] * 9, "item_id": ["a"] * 9, "timestamp": [5] * 9}
    columns["user_id"] = pa.array(columns["user_id"], pa.string())
    same(tmp_path, in_parts(tmp_path / "nobody", columns), clean=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "times",
    [
        [str(number) for number in range(30)],
        [f"{number}.5" if number == 29 else str(number) for number in range(30)],
        [f"2024-01-{number + 1:02}" for number in range(30)],
        [f"2024-01-{number + 1:02}T10:00:00+0{number % 3}:00" for number in range(30)],
        [f"2024-01-{number + 1:02} 10:00 Europe/Berlin" if number % 3 else "2024" for number in range(30)],
        ["5" if number % 2 else f"2024-01-{number + 1:02}" for number in range(30)],
        ["5" if number % 3 else f"2024-01-{number + 1:02}" for number in range(30)],
        ["soon" if number == 20 else str(number) for number in range(30)],
        [None if number == 20 else f"2024010{number % 9 + 1}" for number in range(30)],
    ],
)
@pytest.mark.parametrize("kind", cases(["parquet", "csv"], ["csv"]))
def test_times_that_are_texts(tmp_path, times, kind):
    columns = columns_of([(number % 4, number, time) for number, time in enumerate(times)])
    source = in_parts(tmp_path / "log", columns, kind=kind)
    same(tmp_path, source)
    same(tmp_path, source, clean=True)


@pytest.mark.parametrize(
    ("times", "settings"),
    [
        (pa.array([20240101 + number for number in range(30)]), {}),
        (pa.array([2000 + number for number in range(30)]), {}),
        (pa.array([202401 + number % 12 for number in range(30)]), {}),
        (pa.array([45000.5 + number for number in range(30)]), {}),
        (pa.array([1_700_000_000 + number for number in range(30)]), {"time_unit": "ms"}),
        (pa.array([1_700_000_000.0 + number for number in range(30)], pa.float32()), {}),
        (pa.array([1_700_000_000 + number for number in range(30)], pa.int32()), {}),
        (pa.array([datetime(2024, 1, 1 + number % 9, tzinfo=UTC) for number in range(30)]), {}),
        (pa.array([20240101 + number % 9 for number in range(30)]), {"time_format": "%Y%m%d"}),
        (pa.array([True] * 30), {}),
    ],
)
def test_times_that_are_numbers(tmp_path, times, settings):
    events = [(number % 4, number, None) for number in range(30)]
    same(tmp_path, in_parts(tmp_path / "log", columns_of(events) | {"timestamp": times}), **settings)


@pytest.mark.slow
def test_files_that_are_divided_already(tmp_path):
    events = random_events(25, 20)
    source = tmp_path / "log"
    source.mkdir()
    pa_csv.write_csv(pa.table(columns_of(events[:70])), source / "train.csv")
    pa_csv.write_csv(pa.table(columns_of(events[70:90])), source / "valid.csv")
    in_parts(source / "test", columns_of([events[90], *events[90:]]), kind="csv")
    assert "a second time" in same(tmp_path, source)
    manifest, _ = same(tmp_path, source, clean=True)
    assert manifest.split.kind == "given"


@pytest.mark.slow
def test_descriptions_and_titles(tmp_path):
    events = random_events(12, 12)
    titles = [
        f"Title {number % 4} of {event[1]}" if number % 3 else " " for number, event in enumerate(events)
    ]
    items = {
        "item_id": ["i1", "i2", "i999", "i1", None, "i3"],
        "title": ["One", None, "Cold", "Again", "No", ""],
    }
    items |= {"brand": list("abcdef"), "tags": [["x", "y"], None, [], ["z"], [], ["w"]]}
    users = {"user_id": ["u3", "u5", "nobody", "u3"], "age": [30, 50, 1, 2]}
    source = write_source(tmp_path / "log", events, items=items, users=users, title=titles)
    refused = same(tmp_path, source)
    for clause in ("is described a second time", "item_id is missing", "item 'i999' has no interactions"):
        assert clause in refused
    same(tmp_path, source, clean=True)
    same(tmp_path, write_source(tmp_path / "log2", events, title=titles), clean=True, text_columns=["title"])
    same(tmp_path, write_source(tmp_path / "log3", events, users=users), clean=True, split="time")


def test_tables_without_rows_and_logs_without_titles_describe_nobody(tmp_path):
    events = random_events(8, 12)
    nobody = {"item_id": pa.array([], pa.string()), "title": pa.array([], pa.string())}
    source = write_source(tmp_path / "log", events, items=nobody, users={"user_id": pa.array([], pa.int64())})
    manifest, _ = same(tmp_path, source)
    assert manifest.counts["undescribed_items"] == manifest.counts["items"]
    untitled = pa.array([None] * len(events), pa.string())
    manifest, _ = same(tmp_path, write_source(tmp_path / "log2", events, title=untitled))
    assert manifest.counts["undescribed_items"] == manifest.counts["items"]


@pytest.mark.parametrize("key", ["item_id", "user_id"])
def test_a_table_none_of_whose_rows_has_an_id_describes_nobody(tmp_path, key):
    """In tasks it ended with an error of NumPy's where the log's ids are integers."""
    source = write_source(
        tmp_path / "s", [(user, item, 100 + item) for user in range(3) for item in range(4)]
    )
    table = pa.table({key: pa.array([None, None], pa.string()), "title": ["a", "b"]})
    pq.write_table(table, source / f"{key.removesuffix('_id')}s.parquet")
    assert not isinstance(same(tmp_path, source, clean=True), str)


@pytest.mark.slow
def test_ids_that_are_written_in_two_ways(tmp_path):
    events = [
        (f"{user[1:]}.0" if number % 9 == 0 else f"0{user[1:]}", item, time)
        for number, (user, item, time) in enumerate(random_events(12, 12))
    ]
    users = {"user_id": [f"{number}" for number in range(12)] + ["07", "A1", "a1"]}
    source = write_source(tmp_path / "log", events, users=users)
    refused = same(tmp_path, source, allow=["short-users", "cold-items"])
    assert "differ from the log's only in how they are written" in refused
    assert "which are two ids" in refused
    same(tmp_path, source, clean=True)
    items = {"item_id": [f"I{number}" for number in range(10)]}
    same(tmp_path, write_source(tmp_path / "log1", events, users=users, items=items), clean=True)
    source = write_source(tmp_path / "log2", events, items={"item_id": ["x", "y"]})
    assert "none of its 2 item ids is in the log" in same(tmp_path, source)


def test_folders_are_columns_and_types_are_those_of_all_files(tmp_path):
    events = random_events(12, 12)
    source = tmp_path / "log"
    for number, day in enumerate(["day=1", "day=2", "day=__HIVE_DEFAULT_PARTITION__"]):
        rows = events[number::3]
        (source / day).mkdir(parents=True)
        further = {
            "price": ["1,5" if number == 2 else str(at) for at in range(len(rows))],
            "size": [number] * len(rows),
        }
        further["size"] = pa.array(further["size"], ["int32", "int64", "float64"][number])
        if number == 1:
            pa_csv.write_csv(pa.table(columns_of(rows, **further)), source / day / "rows.csv")
        else:
            pq.write_table(pa.table(columns_of(rows, **further)), source / day / "rows.parquet")
    same(tmp_path, source)


def test_a_folder_of_mixed_columns_is_refused_by_file(tmp_path):
    events = random_events(12, 12)
    source = in_parts(tmp_path / "log", columns_of(events, rating=[1] * len(events)))
    pq.write_table(pa.table(columns_of(events, rating=["good"] * len(events))), source / "part-2.parquet")
    refused = same(tmp_path, source)
    assert "column rating differs in type between the files: int64 in part-3" in refused
    assert "string in part-2.parquet" in refused


def test_a_log_without_events_is_refused(tmp_path):
    assert "no events in it" in same(tmp_path, write_source(tmp_path / "log", []))


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(["parquet", "csv", "csv.gz"], ["csv.gz"]))
def test_a_source_may_be_a_url(tmp_path, kind):
    events = random_events(12, 12)
    titles = [f"Title of {event[1]}" for event in events]
    form = kind.removesuffix(".gz")
    items = {"item_id": ["i1", "i2"], "brand": ["A", "B"]}
    local = write_source(tmp_path / "local", events, items=items, kind=form)
    in_parts(local / "interactions", columns_of(events, title=titles), kind=form)
    (local / f"interactions.{form}").unlink()
    if kind == "csv.gz":
        for path in (local / "interactions").iterdir():
            path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    memory = fsspec.filesystem("memory")
    folder = f"/logs-{kind}"
    memory.put(str(local), folder, recursive=True)
    expected, uses = same(tmp_path, local)
    for url in (f"memory:/{folder}", f"file://{local}"):
        manifest, found = same(tmp_path, url)
        assert manifest.model_copy(update={"source": "", "name": ""}) == expected.model_copy(
            update={"source": "", "name": ""}
        )
        assert found == uses
    memory.rm(folder, recursive=True)
    assert "no such file or folder" in same(tmp_path, f"memory:/{folder}")


def test_a_layout_of_this_machine_is_refused_at_a_url(tmp_path):
    assert "is read from this machine alone" in same(tmp_path, f"file://{tmp_path}", layout="movielens")


VALUES = strategies.sampled_from([None, "", "a", "b", " c ", "7", "07", "7.0"])


@hypothesis.given(
    rows=strategies.lists(
        strategies.tuples(VALUES, VALUES, strategies.sampled_from([None, "3", "5", "6", "x"]), VALUES),
        min_size=1,
        max_size=25,
    ),
    split=strategies.sampled_from(["leave_one_out", "time"]),
    clean=strategies.booleans(),
    described=strategies.lists(VALUES, max_size=5),
)
@examples(40)
def test_any_log(tmp_path_factory, rows, split, clean, described):
    folder = tmp_path_factory.mktemp("log")
    (folder / "log").mkdir()
    users, items, times, behaviors = zip(*rows, strict=True)
    columns = {"user_id": users, "item_id": items, "timestamp": times, "behavior": behaviors}
    texts = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    pq.write_table(pa.table(texts), folder / "log" / "interactions.parquet", row_group_size=3)
    if described:
        pq.write_table(
            pa.table({"item_id": pa.array(described, pa.string())}), folder / "log" / "items.parquet"
        )
    same(folder, folder / "log", split=split, clean=clean)


# Interruptions


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_after(num_tasks):
    """`RunTasks` of a process that is killed when so many tasks are done."""
    left = num_tasks

    def run_tasks(task, shared, arguments):
        nonlocal left
        for index, result in run_tasks_locally(task, shared, arguments):
            if left == 0:
                raise Killed
            left -= 1
            yield index, pickle.loads(pickle.dumps(result))

    return run_tasks


def described_log(folder):
    events = random_events(12, 12)
    users = {"user_id": [f"u{number}" for number in range(30)], "age": list(range(30))}
    titles = [f"Title {number % 4} of {event[1]}" for number, event in enumerate(events)]
    source = write_source(folder, events, users=users)
    pq.write_table(
        pa.table(columns_of(events, title=titles)), source / "interactions.parquet", row_group_size=20
    )
    return source


@pytest.mark.slow
def test_a_preparation_that_is_killed_anywhere_goes_on_and_ends_the_same(tmp_path):
    source, sizes = described_log(tmp_path / "log"), SIZES[1]
    config = PrepareConfig.parse(SMALL_FILES | {"split": "time", "clean": True, "num_partitions": 3})
    expected = prepare(source, tmp_path / "one", config).manifest
    num_tasks = 0
    while True:
        out = tmp_path / f"many{num_tasks}"
        try:
            prepare_distributed(source, out, config, killed_after(num_tasks), sizes=sizes)
            break
        except Killed:
            assert not out.exists()
        with pytest.raises(InputError, match="was interrupted has got this far; go on with it"):
            prepare_distributed(source, out, config, sizes=sizes)
        done = []

        def run_tasks(task, shared, arguments, done=done):
            for found in run_tasks_locally(task, shared, arguments):
                done.append(found)
                yield found

        again = prepare_distributed(source, out, config, run_tasks, resume=True, sizes=sizes)
        assert again.manifest == expected
        assert Dataset.open(out).manifest == expected
        num_tasks += 1
        if num_tasks == 1:
            all_tasks = len(done) + 1
        assert len(done) <= all_tasks - num_tasks
    assert num_tasks > 15
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_preparation_that_is_killed_when_it_has_replaced_a_data_set_replaces_it_by_a_whole_one(
    tmp_path, monkeypatch
):
    def killed(work):
        raise Killed

    source, sizes, out = described_log(tmp_path / "log"), SIZES[1], tmp_path / "data"
    config = PrepareConfig.parse({"clean": True, "overwrite": True})
    expected = prepare_distributed(source, out, config, sizes=sizes).manifest
    with monkeypatch.context() as patched:
        patched.setattr(WorkFolder, "delete", killed)
        with pytest.raises(Killed):
            prepare_distributed(source, out, config, sizes=sizes)

    assert prepare_distributed(source, out, config, resume=True, sizes=sizes).manifest == expected

    dataset = Dataset.open(out)
    assert sum(pq.read_metadata(out / name).num_rows for name in dataset.manifest.files) == sum(
        file.rows for file in expected.files.values()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "log"]


def test_another_log_or_other_settings_are_not_gone_on_with(tmp_path):
    source, sizes = described_log(tmp_path / "log"), SIZES[1]
    config = PrepareConfig.parse({"clean": True})
    with pytest.raises(Killed):
        prepare_distributed(source, tmp_path / "data", config, killed_after(3), sizes=sizes)
    again = partial(prepare_distributed, source, tmp_path / "data", resume=True, sizes=sizes)
    with pytest.raises(InputError, match="seed is 1, but the interrupted preparation began with 0"):
        again(config.model_copy(update={"seed": 1}))
    table = pq.read_table(source / "users.parquet")
    pq.write_table(table.slice(1), source / "users.parquet")
    with pytest.raises(InputError, match=r"users.parquet: the file has changed since the interrupted"):
        again(config)


def test_what_is_finished_is_not_prepared_again(tmp_path, caplog):
    source, sizes, out = described_log(tmp_path / "log"), SIZES[1], tmp_path / "data"
    config = PrepareConfig.parse({"clean": True})
    first = prepare_distributed(source, out, config, sizes=sizes)
    again = partial(prepare_distributed, source, out, run_tasks=killed_after(0), resume=True, sizes=sizes)

    with caplog.at_level("INFO"):
        assert again(config) == first
    assert f"{out}: is finished already" in caplog.text
    with pytest.raises(InputError, match="seed is 1, but the data set was made with 0; give a new folder"):
        again(config.model_copy(update={"seed": 1}))
    with pytest.raises(Killed):
        again(config.model_copy(update={"overwrite": True}))
    table = pq.read_table(source / "users.parquet")
    pq.write_table(table.slice(1), source / "users.parquet")
    with pytest.raises(InputError, match=r"users.parquet: the file has changed since the data set was made"):
        again(config)
    prepare(source, tmp_path / "one", config)
    with pytest.raises(
        InputError, match="one: a data set is there already, and does not say what it was made of"
    ):
        prepare_distributed(source, tmp_path / "one", config, resume=True)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path):
    source = described_log(tmp_path / "log")
    table = pq.read_table(source / "interactions.parquet")

    def run_tasks(task, shared, arguments):
        for found in run_tasks_locally(task, shared, arguments):
            yield found
            pq.write_table(table.slice(1), source / "interactions.parquet", row_group_size=20)

    with pytest.raises(
        InputError, match=r"interactions.parquet: the file has changed since preparation began"
    ):
        prepare_distributed(source, tmp_path / "data", None, run_tasks, sizes=SIZES[1])
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("after", [0, 3, 9, 15])
def test_a_full_disk_ends_it_in_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, after):
    source = described_log(tmp_path / "log")
    opened, left = pa.OSFile, after

    def full(path, mode):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return opened(path, mode)

    monkeypatch.setattr(spill.pa, "OSFile", full)
    (tmp_path / "spill").mkdir()
    with pytest.raises(NoRoomError, match=r"its disk is full .*; make room there, or name another"):
        prepare_distributed(
            source, tmp_path / "data", PrepareConfig(clean=True), spill=tmp_path / "spill", sizes=SIZES[1]
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "spill"]
    assert not list((tmp_path / "spill").iterdir())


def test_a_user_with_more_events_than_a_process_takes_is_refused_by_name(tmp_path):
    events = [*random_events(25, 20), *(("robot", f"i{number}", number) for number in range(90))]
    source = in_parts(tmp_path / "log", columns_of(events))
    sizes = TaskSizes(40, 100, 30, largest_partition_rows=80)
    with pytest.raises(InputError, match=r"user 'robot' has 90 of the .* events; one process orders"):
        prepare_distributed(source, tmp_path / "data", PrepareConfig(clean=True), sizes=sizes)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_two_preparations_of_one_data_set_are_refused(tmp_path):
    source = described_log(tmp_path / "log")
    config = PrepareConfig(clean=True)

    def run_tasks(task, shared, arguments):
        with pytest.raises(MachineError, match="another process prepares this data set at the moment"):
            prepare_distributed(source, tmp_path / "data", config, resume=True, sizes=SIZES[1])
        return run_tasks_locally(task, shared, arguments)

    prepare_distributed(source, tmp_path / "data", config, run_tasks, sizes=SIZES[1])


def test_a_layout_that_is_read_by_one_process_is_refused(tmp_path):
    (tmp_path / "log.txt").write_text("1 5 6 7\n2 5 7\n")
    with pytest.raises(InputError, match="is read by one process; prepare it without Ray"):
        prepare_distributed(tmp_path / "log.txt", tmp_path / "data")


@pytest.mark.ray
def test_tasks_on_ray_write_the_same(ray_cluster, tmp_path):
    from rayrec.platform.ray_tasks import run_tasks_on_ray

    source = described_log(tmp_path / "log")
    config = PrepareConfig.parse(SMALL_FILES | {"num_partitions": 3, "clean": True})
    expected = prepare(source, tmp_path / "one", config).manifest
    found = prepare_distributed(source, tmp_path / "many", config, run_tasks_on_ray, sizes=SIZES[1])
    assert found.manifest == expected
    pq.write_table(pa.table(columns_of([("u1", [1], 5)])), source / "interactions.parquet")
    with pytest.raises(InputError, match="column item_id has the type list"):
        prepare_distributed(source, tmp_path / "more", config, run_tasks_on_ray, sizes=SIZES[1])
