"""Whole runs on rows of every kind: cached, followed, damaged, joined from a store that goes down."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshot_requests import request_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.intervals import Interval
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.stores import EventBatch, StoreManifest, StoreUnavailableError, open_store
from tests.helpers.data import write_source
from tests.helpers.redis_server import RedisServer
from tests.helpers.training_runs import (
    assert_no_actor_survives,
    last_snapshot,
    no_cluster,
    settings,
    sparse_rows,
)

NUM_ITEMS, NUM_USERS = 20, 40
EPOCHS = 3
REVERSED = {
    "op": "python",
    "function": "tests.helpers.user_functions:reversed_lists",
    "inputs": ["item_ids"],
    "outputs": {"item_ids": "list<int64>"},
}
NEWEST = {"op": "truncate", "inputs": ["item_ids"], "length": 5}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Item i is followed by item i + 1 of a ring; users and items are numbers."""
    folder = tmp_path_factory.mktemp("data")
    events = [
        (user, (user + place) % NUM_ITEMS, 1000 + place) for user in range(NUM_USERS) for place in range(6)
    ]
    config = PrepareConfig(rows_per_group=4, rows_per_file=16, num_partitions=3)
    prepare(write_source(folder / "source", events), folder / "data", config)
    return folder / "data"


def write_rows(path: Path, first: int, count: int = 16) -> Path:
    """A file of walks along the ring, of 3 to 7 items, in row groups of 4; it appears whole."""
    users = list(range(first, first + count))
    lists = [[(user + place) % NUM_ITEMS for place in range(3 + user % 5)] for user in users]
    table = pa.table({"user_id": users, "item_ids": pa.array(lists, pa.list_(pa.int64()))})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path.with_name(f"_{path.name}"), row_group_size=4)
    path.with_name(f"_{path.name}").rename(path)
    return path


def at_steps(actions: dict[int, Callable[[], Any]]) -> Callable[[int, int, float], None]:
    def on_step(done: int, total: int, loss: float) -> None:
        if done in actions:
            actions[done]()

    return on_step


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_same_bits(run: Path, expected_run: Path) -> None:
    found, expected = last_snapshot(run), last_snapshot(expected_run)
    assert found.committed_step == expected.committed_step
    for part in ("weights", "optimizer_state"):
        arrays, expected_arrays = getattr(found, part), getattr(expected, part)
        assert arrays.keys() == expected_arrays.keys()
        for name in arrays:
            assert arrays[name].tobytes() == expected_arrays[name].tobytes(), name
    assert sparse_rows(found) == sparse_rows(expected)


def assert_every_row_once(run: Path, rows_of_files: dict[str, int], epochs: int) -> None:
    cursor = last_snapshot(run).cursor
    assert cursor.epochs == list(range(epochs))
    for epoch in cursor.epochs:
        assert cursor.intervals(epoch) == [
            Interval(file, 0, rows) for file, rows in sorted(rows_of_files.items())
        ]


@pytest.mark.slow
def test_readers_workers_and_the_cache_leave_no_trace_in_the_numbers(data, tmp_path):
    """With operations and batches by length; and whether rows are decoded or come from the cache."""
    common = {
        "data__features": [REVERSED, NEWEST],
        "training__batch_tokens": 30,
        "training__batch_size": 12,
        "pipeline__num_trainers": 2,
        "data__window_rows": 12,
    }
    cache = {"folder": str(tmp_path / "cache")}
    many = {"pipeline__num_readers": 2, "pipeline__num_feature_workers": 2, "data__cache": cache}

    alone = train(settings(data, **common), tmp_path / "alone", cluster=in_process)
    together = train(settings(data, **common, **many), tmp_path / "together", cluster=in_process)

    assert_no_actor_survives()
    assert together.final_loss == alone.final_loss
    assert_same_bits(tmp_path / "together", tmp_path / "alone")
    files = {
        str(path.relative_to(data)): pq.read_metadata(path).num_rows
        for path in (data / "train").glob("*.parquet")
    }
    assert_every_row_once(tmp_path / "together", files, EPOCHS)
    assert together.epochs == EPOCHS
    records = [
        json.loads(line) for line in (tmp_path / "together" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["epoch"] for record in records] == [1.0, 2.0, 3.0]
    assert list((tmp_path / "cache").glob("*.arrow"))


def followed(data: Path, samples: Path, **changes: Any) -> RunConfig:
    given = {
        "data__samples": str(samples),
        "data__follow": {"every_s": 0.1, "stop_after_s": 1.5},
        "evaluation__every_steps": 4,
    }
    return settings(data, **(given | changes))


FOLLOWED_ROWS = {
    "hour=00/a.parquet": 16,
    "hour=01/a.parquet": 16,
    "hour=00/late.parquet": 16,
    "hour=01/b.parquet": 12,
}


def arriving(samples: Path) -> dict[int, Callable[[], Any]]:
    """The first file, and by numbers of steps, what comes when: three more segments, of two steps each."""
    write_rows(samples / "hour=00" / "a.parquet", 0)
    return {
        2: lambda: write_rows(samples / "hour=01" / "a.parquet", 100),
        4: lambda: write_rows(samples / "hour=00" / "late.parquet", 200),
        6: lambda: write_rows(samples / "hour=01" / "b.parquet", 300, 12),
    }


@pytest.fixture(scope="module")
def undisturbed_following(data, tmp_path_factory) -> tuple[Path, list[Path]]:
    """A run that waits for what comes, and the snapshots that it was asked for while it was idle."""
    folder = tmp_path_factory.mktemp("following")
    actions = arriving(folder / "log")
    add_second = actions[2]
    asked: list[Path] = []

    def ask_twice_then_add() -> None:
        for _ in range(2):
            asked.append(request_snapshot(folder / "run", timeout_s=60))
        add_second()

    asking = threading.Thread(target=ask_twice_then_add)
    actions[2] = asking.start
    result = train(
        followed(data, folder / "log", data__follow={"every_s": 0.1, "stop_after_s": 5.0}),
        folder / "run",
        on_step=at_steps(actions),
        cluster=in_process,
    )
    asking.join()
    assert_no_actor_survives()
    assert result.steps == 8
    return folder / "run", asked


def test_a_growing_folder_is_followed_and_every_row_trained_on_once(undisturbed_following):
    run, _ = undisturbed_following
    cursor = last_snapshot(run).cursor

    assert cursor.epochs == [0, 1, 2, 3]  # one for each listing that brought something
    assert [cursor.intervals(epoch) for epoch in cursor.epochs] == [
        [Interval(file, 0, rows)] for file, rows in FOLLOWED_ROWS.items()
    ]
    assert RunFolder.open(run).state["state"] == "finished"


def test_an_idle_run_answers_who_asks_for_a_snapshot(undisturbed_following):
    """At once: nothing comes before the answer has."""
    run, asked = undisturbed_following

    assert asked == [run / "snapshots" / "step-000000002"] * 2


@pytest.mark.slow
def test_a_followed_run_that_was_interrupted_ends_with_the_bits_of_one_that_was_not(
    undisturbed_following, data, tmp_path
):
    """Its last snapshot does not know of the files that came after it; when it goes on, all are there."""
    actions = arriving(tmp_path / "log")
    run = tmp_path / "run"

    with pytest.raises(KeyboardInterrupt):
        train(
            followed(data, tmp_path / "log"),
            run,
            on_step=at_steps(actions | {7: interrupt}),
            cluster=in_process,
        )
    assert last_snapshot(run).committed_step == 3
    result = train(
        followed(data, tmp_path / "log", pipeline__num_readers=2), run, resume=True, cluster=in_process
    )

    assert result.steps == 8
    assert_same_bits(run, undisturbed_following[0])
    assert last_snapshot(run).cursor.to_table() == last_snapshot(undisturbed_following[0]).cursor.to_table()


def test_a_file_that_does_not_fit_stops_a_followed_run_behind_the_last_step(data, tmp_path):
    write_rows(tmp_path / "log" / "a.parquet", 0)
    run = tmp_path / "run"

    def add_other_columns() -> None:
        pq.write_table(pa.table({"user_id": [1.5], "item_ids": [[1]]}), tmp_path / "log" / "b.parquet")

    with pytest.raises(InputError, match=r"b.parquet: column 'user_id' is double, in a.parquet it is int64"):
        train(
            followed(data, tmp_path / "log"),
            run,
            on_step=at_steps({2: add_other_columns}),
            cluster=in_process,
        )

    assert_no_actor_survives()
    assert last_snapshot(run).committed_step == 1


def damage_group(path: Path, group: int) -> bytes:
    """Make a row group undecodable without a trace in size or time; returns what the file was."""
    whole, times = path.read_bytes(), path.stat()
    column = pq.read_metadata(path).row_group(group).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    damaged = bytearray(whole)
    damaged[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(bytes(damaged))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return whole


def raw_log(folder: Path) -> Path:
    for number in range(3):
        write_rows(folder / f"part-{number}.parquet", 100 * number, 12)
    return folder


def raw(data: Path, samples: Path, **changes: Any) -> RunConfig:
    return settings(data, **({"data__samples": str(samples), "data__window_rows": 8} | changes))


RAW_ROWS = {f"part-{number}.parquet": 12 for number in range(3)}
RAW_STEPS = 5
"""In an epoch: 36 rows in batches of 8."""


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = train(raw(data, raw_log(folder / "log")), folder / "run", cluster=in_process)
    assert result.steps == EPOCHS * RAW_STEPS
    assert_every_row_once(folder / "run", RAW_ROWS, EPOCHS)
    return folder / "run"


# Files that vanish or change are told apart in tests/samples/test_sources.py.
@pytest.mark.slow
def test_a_file_that_goes_bad_stops_the_run_with_nothing_lost(undisturbed, data, tmp_path):
    log, run = raw_log(tmp_path / "log"), tmp_path / "run"
    part = log / "part-1.parquet"
    kept = part.read_bytes()

    with pytest.raises(InputError, match=r"part-1.parquet: row group 1 \(rows 4 to 7\) cannot be decoded"):
        train(
            raw(data, log),
            run,
            on_step=at_steps({RAW_STEPS + 1: lambda: damage_group(part, 1)}),
            cluster=in_process,
        )

    assert_no_actor_survives()
    stopped = last_snapshot(run)
    assert stopped.committed_step >= RAW_STEPS
    read = sum(stopped.cursor.num_rows(epoch) for epoch in stopped.cursor.epochs)
    in_epoch = stopped.state.read_position
    assert read == in_epoch.epoch * 36 + in_epoch.rows

    part.write_bytes(kept)
    train(raw(data, log, pipeline__num_readers=2), run, resume=True, cluster=in_process)

    assert_same_bits(run, undisturbed)
    assert_every_row_once(run, RAW_ROWS, EPOCHS)


@pytest.mark.slow
def test_rows_that_cannot_be_decoded_are_left_out_and_counted_if_that_is_allowed(data, tmp_path, caplog):
    log, run = raw_log(tmp_path / "log"), tmp_path / "run"
    damage_group(log / "part-1.parquet", 1)

    with caplog.at_level(logging.WARNING):
        train(raw(data, log, data__on_corrupt="skip", training__batch_size=2), run, cluster=in_process)

    assert_no_actor_survives()
    cursor = last_snapshot(run).cursor
    for epoch in range(EPOCHS):
        assert cursor.intervals(epoch, unreadable=True) == [Interval("part-1.parquet", 4, 8)]
        assert cursor.num_rows(epoch) == 32
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["dropped"]["unreadable_rows"] == 4 * EPOCHS
    assert "part-1.parquet: rows" in caplog.text


def test_a_cursor_of_other_rows_is_refused_before_anything_starts(undisturbed, data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    log = raw_log(tmp_path / "log")
    write_rows(log / "part-1.parquet", 500, 12)
    no_cluster(monkeypatch)

    with pytest.raises(InputError, match=r"step-000000015: belongs to another data set \(fingerprint"):
        train(raw(data, log), run, resume=True, cluster=in_process)


def keyed(data: Path, samples: Path, store: str) -> RunConfig:
    retry = {"attempts": 2, "first_wait_s": 0.01, "timeout_s": 2.0}
    joined = {"op": "join_history", "store": store, "last": 6, "retry": retry}
    return settings(data, data__samples=str(samples), data__features=[joined])


def fill_store(address: str) -> None:
    store = open_store(address, create=StoreManifest(name="clicks", time_unit="s"))
    users_E, places_E = np.divmod(np.arange(NUM_USERS * 8), 8)
    store.append(EventBatch(users_E, 1000 + places_E, (users_E + places_E) % NUM_ITEMS, {}))
    store.close()


@pytest.mark.slow
def test_a_store_that_goes_down_stops_the_run_behind_a_step_and_nothing_is_lost(data, tmp_path):
    """The undisturbed run is from a store on disk."""
    log, run = tmp_path / "log", tmp_path / "run"
    log.mkdir()
    users = list(range(NUM_USERS))
    times = [1003 + user % 6 for user in users]
    pq.write_table(pa.table({"user_id": users, "timestamp": times}), log / "a.parquet", row_group_size=8)
    fill_store(str(tmp_path / "store"))
    train(keyed(data, log, str(tmp_path / "store")), tmp_path / "undisturbed", cluster=in_process)
    assert_every_row_once(tmp_path / "undisturbed", {"a.parquet": NUM_USERS}, EPOCHS)

    server = RedisServer(tmp_path)
    try:
        fill_store(server.url)
        config = keyed(data, log, server.url)
        with pytest.raises(StoreUnavailableError, match=rf"{server.url}.*: no answer in 2 attempts"):
            train(config, run, on_step=at_steps({6: server.stop}), cluster=in_process)
        assert_no_actor_survives()
        stopped = last_snapshot(run)
        assert 5 <= stopped.committed_step < EPOCHS * 5 - 1
        assert RunFolder.open(run).state["error"].startswith(f"StoreUnavailableError: {server.url}")
        with pytest.raises(StoreUnavailableError):
            train(config, run, resume=True, cluster=in_process)

        server.start()
        fill_store(server.url)
        train(config, run, resume=True, cluster=in_process)
    finally:
        server.stop()

    assert_same_bits(run, tmp_path / "undisturbed")
    assert_every_row_once(run, {"a.parquet": NUM_USERS}, EPOCHS)
