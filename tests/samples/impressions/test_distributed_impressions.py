"""Preparation of impressions in tasks gives what one process gives, however the rows lie in files."""

import errno
import gzip
import json
import logging
import pickle

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError, NoRoomError
from rayrec.platform.tasks import run_tasks_locally
from rayrec.samples.impressions import distributed
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.distributed import prepare_impressions_distributed
from rayrec.samples.impressions.prepare import prepare_impressions

NUM_ROWS = 90


def settings(**changes):
    given = {
        "layout": "table",
        "labels": ("click", "like"),
        "numbers": ("price",),
        "ids": {"item": "item", "shop": "shop"},
        "lists": {"history": "item"},
        "group": "user",
        "kept": {"time": "when", "item": "item_key"},
        "time": "time",
        "rows_per_group": 8,
        "rows_per_file": 16,
    }
    return ImpressionsConfig.parse(given | changes)


def table() -> pa.Table:
    random = np.random.default_rng(0)
    return pa.table(
        {
            "click": random.integers(0, 2, NUM_ROWS),
            "like": pa.array([None if n % 3 else n % 2 for n in range(NUM_ROWS)], pa.int64()),
            "price": pa.array([None if n % 7 == 0 else n / 4 for n in range(NUM_ROWS)]),
            "item": [f"i{n * n % 23}" for n in range(NUM_ROWS)],
            "shop": [f"{'0' if n == 60 else ''}{n % 11}" for n in range(NUM_ROWS)],
            "history": ["|".join([f"i{n % 9}", f"i{n % 5}"][: n % 3]) for n in range(NUM_ROWS)],
            "user": [n % 4 for n in range(NUM_ROWS)],
            "time": [1000 + (n * 7) % NUM_ROWS for n in range(NUM_ROWS)],
        }
    )


def in_files(folder, sizes=(30, 0, 45, 15), kind="parquet", rows=None):
    folder.mkdir()
    rows, start = table() if rows is None else rows, 0
    for number, size in enumerate(sizes):
        part = rows.slice(start, size)
        start += size
        if kind == "parquet":
            pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=7)
        else:
            pa_csv.write_csv(part, folder / f"part-{number}.csv")
    return folder


def shuffled_tasks(task, shared, arguments):
    """In another order, and what is shared pickled, as between processes."""
    for index in np.random.default_rng(1).permutation(len(arguments)).tolist():
        yield index, pickle.loads(pickle.dumps(task(shared, arguments[index])))


def same(folder, source, **changes):
    """Check that both ways have one outcome; returns it."""
    config = settings(**changes)

    def outcome(prepare, out, **more):
        try:
            return prepare(source, folder / out, config, **more).manifest
        except InputError as error:
            return str(error)

    expected = outcome(prepare_impressions, "one")
    found = outcome(prepare_impressions_distributed, "many", run_tasks=shuffled_tasks)
    assert found == expected
    if not isinstance(expected, str):
        ImpressionDataset.open(folder / "many")
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return expected


@pytest.mark.parametrize("split", ["order", "time", "random"])
@pytest.mark.parametrize("min_count", [1, 4])
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_files_side_by_side_give_the_same_data_set(tmp_path, split, min_count, kind):
    manifest = same(tmp_path, in_files(tmp_path / "log", kind=kind), split=split, min_count=min_count)

    assert sum(manifest.rows.values()) == NUM_ROWS
    assert (sum(manifest.num_rare.values()) > 0) == (min_count > 1)


def test_one_file_and_files_of_each_split(tmp_path):
    source = in_files(tmp_path / "log")
    (tmp_path / "a").mkdir()
    same(tmp_path / "a", source / "part-2.parquet")
    given = tmp_path / "given"
    given.mkdir()
    for split, number in (("train", 0), ("valid", 2), ("test", 3)):
        (given / split).mkdir()
        (source / f"part-{number}.parquet").rename(given / split / "a.parquet")
    (tmp_path / "b").mkdir()
    assert same(tmp_path / "b", given).rows == {"train": 30, "valid": 45, "test": 15}


def test_a_folder_at_a_url(tmp_path):
    source = in_files(tmp_path / "log")
    remote = fsspec.filesystem("memory")
    remote.put(str(source), "/impressions-of-many-files", recursive=True)

    manifests = [
        prepare("memory://impressions-of-many-files", tmp_path / name, settings()).manifest
        for name, prepare in (
            ("one", prepare_impressions),
            ("many", prepare_impressions_distributed),
        )
    ]

    assert manifests[0] == manifests[1]
    assert (
        manifests[0].fingerprint
        == prepare_impressions(source, tmp_path / "here", settings()).manifest.fingerprint
    )


def test_criteo_files_are_prepared_side_by_side(tmp_path):
    lines = ["\t".join([str(n % 2), *["3"] * 13, *[f"{n % 5:x}"] * 26]) for n in range(40)]
    with gzip.open(tmp_path / "train.txt.gz", "wt") as file:
        file.write("\n".join(lines))
    config = ImpressionsConfig(layout="criteo", rows_per_group=8, rows_per_file=16)

    reports = [
        prepare(tmp_path / "train.txt.gz", tmp_path / name, config)
        for name, prepare in (("one", prepare_impressions), ("many", prepare_impressions_distributed))
    ]

    assert reports[0].manifest == reports[1].manifest


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [("click", 2, "click"), ("time", None, "timestamp"), ("price", None, None)],
)
def test_errors_are_those_of_one_process_and_leave_nothing(tmp_path, column, value, what):
    rows = table()
    values = rows[column].to_pylist()
    values[70] = value
    rows = rows.set_column(rows.column_names.index(column), column, pa.array(values, rows[column].type))

    outcome = same(tmp_path, in_files(tmp_path / "log", rows=rows))

    assert (what is None) == (not isinstance(outcome, str))


def test_each_file_decodes_the_batches_that_it_has_rows_of(tmp_path, monkeypatch):
    monkeypatch.setattr("rayrec.samples.importers.tables._BATCH_ROWS", 4)
    source, decoded = in_files(tmp_path / "log"), []
    read_rows = distributed.read_rows

    def counted(path, batches=None):
        for table in read_rows(path, batches):
            decoded.append(len(table))
            yield table

    monkeypatch.setattr(distributed, "read_rows", counted)
    manifest = prepare_impressions_distributed(source, tmp_path / "many", settings(rows_per_file=8)).manifest

    longest = max(decoded)
    assert len(manifest.files) >= 9
    # A batch that two files divide is decoded for both.
    assert sum(decoded) <= NUM_ROWS + longest * len(manifest.files)


def test_nothing_to_train_on_is_refused(tmp_path):
    source = in_files(tmp_path / "log")
    changes = {"split": "time", "valid_start": 10.0, "test_start": 20.0}

    assert "to train on" in same(tmp_path, source, **changes)


def test_rows_that_a_layout_puts_together_are_of_one_process(tmp_path):
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n")
    for name in ("u.item", "u.user"):
        (tmp_path / name).write_text("")
    config = ImpressionsConfig(layout="movielens")
    with pytest.raises(InputError):
        prepare_impressions_distributed(tmp_path, tmp_path / "out", config)


@pytest.mark.slow
def test_a_killed_preparation_goes_on_where_it_was(tmp_path):
    source = in_files(tmp_path / "log")
    expected = prepare_impressions(source, tmp_path / "one", settings(min_count=3)).manifest
    num_done = 0

    class Killed(BaseException):
        pass

    def stops_after(count):
        def run_tasks(task, shared, arguments):
            nonlocal num_done
            for found in run_tasks_locally(task, shared, arguments):
                if num_done == count:
                    raise Killed
                num_done += 1
                yield found

        return run_tasks

    total = 4 + 4 + 4 + len(expected.files)
    for count in range(total):
        num_done = 0
        with pytest.raises(Killed):
            prepare_impressions_distributed(
                source, tmp_path / "many", settings(min_count=3), stops_after(count)
            )
        with pytest.raises(InputError, match="--resume"):
            prepare_impressions_distributed(source, tmp_path / "many", settings(min_count=3))
        num_done = 0
        found = prepare_impressions_distributed(
            source, tmp_path / "many", settings(min_count=3, overwrite=True), stops_after(total), resume=True
        )
        assert num_done == total - count, "what was done is not done again"
        assert found.manifest == expected
        (tmp_path / "many").rename(tmp_path / f"done-{count}")


def test_what_is_finished_is_not_prepared_again(tmp_path):
    source, out = in_files(tmp_path / "log"), tmp_path / "data"
    first = prepare_impressions_distributed(source, out, settings())

    assert prepare_impressions_distributed(source, out, settings(), resume=True) == first
    with pytest.raises(
        InputError, match=r"min_count is .*, but the data set was made with .*; give a new folder"
    ):
        prepare_impressions_distributed(source, out, settings(min_count=3), resume=True)


def test_a_file_that_changes_between_two_passes_is_refused(tmp_path):
    source = in_files(tmp_path / "log")

    def changes_a_file(task, shared, arguments):
        if task is distributed._spill:
            pq.write_table(table().slice(0, 29), source / "part-0.parquet")
        yield from run_tasks_locally(task, shared, arguments)

    with pytest.raises(InputError, match=r"part-0\.parquet"):
        prepare_impressions_distributed(source, tmp_path / "many", settings(), changes_a_file)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_disk_that_fills_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    source = in_files(tmp_path / "log")

    def full(*args, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(distributed.pa.ipc, "new_file", full)
    with pytest.raises(NoRoomError):
        prepare_impressions_distributed(source, tmp_path / "many", settings())
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_ids_written_in_two_ways_are_told_whatever_file_they_are_in(tmp_path, caplog):
    source = in_files(tmp_path / "log")
    texts = []
    for name, prepare in (("one", prepare_impressions), ("many", prepare_impressions_distributed)):
        with caplog.at_level(logging.WARNING):
            prepare(source, tmp_path / name, settings())
        texts.append([record.getMessage() for record in caplog.records])
        caplog.clear()

    assert texts[0] == texts[1]
    assert any("'05' and '5'" in text for text in texts[0])
    assert json.loads((tmp_path / "many" / "impressions.json").read_text())["num_ids"]["shop"] == 12


@pytest.mark.ray
def test_tasks_on_ray_write_the_same_data_set(ray_cluster, tmp_path):
    from rayrec.platform.ray_tasks import run_tasks_on_ray

    source = in_files(tmp_path / "log", kind="csv")
    expected = prepare_impressions(source, tmp_path / "one", settings(min_count=3)).manifest
    found = prepare_impressions_distributed(
        source, tmp_path / "many", settings(min_count=3), run_tasks_on_ray
    )
    assert found.manifest == expected


def test_two_attempts_at_one_file_of_the_source_do_not_meet(tmp_path):
    schema = pa.schema([("item", pa.int64())])
    rows = pa.table({"item": [1, 2, 3]}, schema=schema)
    with distributed._SplitFiles(tmp_path, 0, schema) as first:
        first.write("train", rows)
        with distributed._SplitFiles(tmp_path, 0, schema) as second:  # the same process id on another host
            second.write("train", rows.slice(1))
        first.write("train", rows)

    def failing() -> None:
        with distributed._SplitFiles(tmp_path, 0, schema) as third:
            third.write("train", rows)
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        failing()

    assert [path.name for path in tmp_path.iterdir()] == ["rows-000000-train.arrow"]
    assert pa.ipc.open_file(tmp_path / "rows-000000-train.arrow").read_all().num_rows == 6
