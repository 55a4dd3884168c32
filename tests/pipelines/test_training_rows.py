"""The rows of a run without Ray: prepared data and raw folders, operations, filters, lengths, the cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.accepted_files import AcceptedFiles
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.features import features_of, row_source
from rayrec.pipelines.tasks.training_rows import training_rows
from rayrec.pipelines.training.arrivals import Arrivals
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import remote_folder
from rayrec.samples.base.batches import FeatureBatch, RowBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.features.row_features import RowFeatures
from rayrec.samples.reading.reader import SampleReader
from tests.helpers import user_functions
from tests.helpers.data import small_dataset, write_log, write_source

BACKBONE = {"dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 8}
REVERSED = {
    "op": "python",
    "function": "tests.helpers.user_functions:reversed_lists",
    "inputs": ["item_ids"],
    "outputs": {"item_ids": "list<int64>"},
}
NEWEST = {"op": "truncate", "inputs": ["item_ids"], "length": 3}
FILES = {"hour=00/a.parquet": 20, "hour=00/b.parquet": 9, "hour=01/a.parquet": 13}


def config(
    data: Path, training: dict[str, Any] | None = None, seed: int = 0, **data_settings: Any
) -> RunConfig:
    values = {
        "seed": seed,
        "data": {"path": str(data), **data_settings},
        "model": {"name": "sasrec", "user_embedding": True, "backbone": BACKBONE},
        "training": {"batch_size": 8} | (training or {}),
        "evaluation": {"every_steps": 10} if "follow" in data_settings else {},
    }
    return RunConfig.parse(values)


def epoch(assembly: Assembly, number: int = 0) -> list[tuple[RowBatch, list[FeatureBatch]]]:
    """Rows and features of every step of an epoch, from readers and features of their own."""
    plan, reader = assembly.plan, SampleReader(assembly.plan.spec)
    features = features_of(assembly.config, assembly.rows.columns)
    steps = range(plan.first_step(number), plan.first_step(number + 1))
    rows = [reader.read_batch(plan.batch(step)) for step in steps]
    return [(batch, features.training(step, batch)) for step, batch in zip(steps, rows, strict=True)]


def histories(batches: list[tuple[RowBatch, list[FeatureBatch]]], dataset: Dataset) -> list[list[Any]]:
    """By row in reading order: its key, its user, the ids of its inputs and then of its last target."""
    found = []
    for _, (features,) in batches:
        users_B = features.lookups["user"].ids_M[features.lookups["user"].inverse]
        for row, key in enumerate(features.row_keys_B.tolist()):
            low, high = features.offsets_B1[row : row + 2]
            ids = dataset.items.ids_I[[*features.items_N[low:high], *features.targets_N[low:high][-1:]]]
            found.append([key, int(users_B[row]), ids.tolist()])
    return found


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return small_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> Dataset:
    """A catalog of the items 0 to 49 and of users that are numbers, as `write_log` has them."""
    folder = tmp_path_factory.mktemp("ring")
    events = [(user, (user + place) % 50, 1000 + place) for user in range(50) for place in range(4)]
    from rayrec.samples.base.config import PrepareConfig
    from rayrec.samples.prepare.prepare import prepare

    prepare(write_source(folder / "source", events), folder / "data", PrepareConfig(num_partitions=2))
    return Dataset.open(folder / "data")


@pytest.fixture
def log(tmp_path) -> pd.DataFrame:
    return write_log(tmp_path / "log", FILES)


def test_operations_change_rows_and_not_their_order(dataset):
    plain = histories(epoch(assemble(config(dataset.root))), dataset)
    changed = histories(epoch(assemble(config(dataset.root, features=[REVERSED, NEWEST]))), dataset)

    assert len(plain) == 40
    assert changed == [[key, user, items[::-1][-3:] if len(items) > 1 else []] for key, user, items in plain]


def test_rows_of_a_raw_folder_are_what_its_operations_make_of_them(ring, log, tmp_path):
    raw = config(
        ring.root,
        samples=str(tmp_path / "log"),
        features=[REVERSED, {"op": "concat", "inputs": ["item_ids", "user_id"], "output": "item_ids"}],
    )
    assembly = assemble(raw)

    batches = epoch(assembly)

    expected = {}
    for number, (_, rows) in enumerate(log.groupby("file", sort=True)):
        for row in rows.itertuples():
            known = [item for item in [*row.item_ids[::-1].tolist(), row.user_id] if item < 50]
            expected[number << 40 | row.row] = [row.user_id, known[-9:]]
    found = histories(batches, ring)
    keys = [interval for batch, _ in batches for interval in batch.cursor]
    assert sum(stop - start for _, start, stop in keys) == sum(FILES.values()) == len(found)
    assert sorted([user, items] for _, user, items in found) == sorted(
        [user, items if len(items) > 1 else []] for user, items in expected.values()
    )


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_url_gives_the_rows_of_the_path(ring, log, tmp_path, scheme):
    local = tmp_path / "log"
    url = f"file://{local}"
    if scheme == "memory":
        url = f"memory://{tmp_path.name}"
        there = remote_folder(url)
        fs.copy_files(str(local), there.path, fs.LocalFileSystem(), there.filesystem)

    by_path, by_url = (epoch(assemble(config(ring.root, samples=place))) for place in (str(local), url))

    assert histories(by_url, ring) == histories(by_path, ring)
    assert [batch.cursor for batch, _ in by_url] == [batch.cursor for batch, _ in by_path]


def test_the_cursor_is_of_the_content_of_a_folder_wherever_it_lies(ring, log, tmp_path):
    write_log(tmp_path / "copy", FILES)
    write_log(tmp_path / "other", FILES, seed=1)

    fingerprints = [
        assemble(config(ring.root, samples=str(tmp_path / name))).rows.fingerprint
        for name in ("log", "copy", "other")
    ]

    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_only_rows_that_pass_the_filters_are_read(ring, log, tmp_path):
    filtered = config(
        ring.root, samples=str(tmp_path / "log"), filters=[["price", ">", 5.0], ["country", "==", "de"]]
    )

    batches = epoch(assemble(filtered))

    wanted = log[(log["price"] > 5.0) & (log["country"] == "de")]
    assert sorted(user for _, user, _ in histories(batches, ring)) == sorted(wanted["user_id"])


def test_batches_by_tokens_are_cut_by_the_lists_as_they_are_read(ring, log, tmp_path):
    by_length = config(
        ring.root, {"batch_size": 30, "batch_tokens": 20, "epochs": 4}, samples=str(tmp_path / "log")
    )
    assembly = assemble(by_length)

    steps = 0
    for number in range(4):
        batches = epoch(assembly, number)
        steps += len(batches)
        tokens = [int(batch.rows["item_ids"].flatten().__len__()) for batch, _ in batches]
        assert max(tokens) <= 20
        assert sum(batch.num_rows for batch, _ in batches) == len(log)
    assert assembly.total_steps == steps  # however many batches each epoch has
    assert assembly.epochs_at(steps) == 4.0
    ends = [assembly.plan.first_step(number) for number in range(5)]
    assert [assembly.next_validation(step) for step in range(steps)] == [
        min(end for end in ends if end > step) for step in range(steps)
    ]


def test_lengths_may_be_of_another_column_than_the_operations_make(ring, tmp_path):
    table = pa.table(
        {"user_id": [1, 2, 3], "clicks": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32()))}
    )
    (tmp_path / "clicks").mkdir()
    pq.write_table(table, tmp_path / "clicks" / "a.parquet")
    renamed = {"op": "truncate", "inputs": ["clicks"], "outputs": ["item_ids"], "length": 9}

    assembly = assemble(
        config(
            ring.root,
            {"batch_tokens": 4, "length_of": "clicks"},
            samples=str(tmp_path / "clicks"),
            features=[renamed],
        )
    )

    assert [batch.num_rows for batch, _ in epoch(assembly)] == [2, 1]


def test_null_and_empty_lists_are_rows_without_targets(ring, tmp_path):
    lists = pa.array([None, [], [1, 2, 3], [7]], pa.large_list(pa.int32()))
    (tmp_path / "log").mkdir()
    pq.write_table(
        pa.table({"user_id": pa.array([1, 2, 3, 4], pa.uint8()), "item_ids": lists}),
        tmp_path / "log" / "a.parquet",
    )

    for features in ([], [REVERSED]):
        ((rows, (made,)),) = epoch(
            assemble(config(ring.root, samples=str(tmp_path / "log"), features=features))
        )
        assert rows.num_rows == 4
        assert made.num_targets == 2
        assert made.counts == {
            "rows": 4,
            "events": 4,
            "unknown_items": 0,
            "unread_events": 0,
            "rows_without_target": 3,
        }


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"user_id": [1, None], "item_ids": [[1, 2], [3]]}, "the column 'user_id' has 1 nulls"),
        ({"user_id": [1, 2], "item_ids": [[1, None], [3]]}, "the column 'item_ids' has 1 nulls"),
    ],
)
def test_nulls_in_the_place_of_ids_are_refused(ring, tmp_path, columns, expected):
    (tmp_path / "log").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "log" / "a.parquet")

    with pytest.raises(InputError, match=rf"{expected} in the rows of step 0, which begin with row 0 of a"):
        epoch(assemble(config(ring.root, samples=str(tmp_path / "log"))))


def cached(data: Path, folder: Path, **settings: Any) -> RunConfig:
    return config(data, cache={"folder": str(folder / "cache")}, features=[REVERSED, NEWEST], **settings)


def test_what_operations_made_is_read_from_the_cache_and_is_the_same(ring, log, tmp_path):
    samples = str(tmp_path / "log")
    plain = epoch(assemble(config(ring.root, samples=samples, features=[REVERSED, NEWEST])))
    user_functions.calls.clear()

    first = epoch(assemble(cached(ring.root, tmp_path, samples=samples)))
    made = sum(user_functions.calls)
    second = epoch(assemble(cached(ring.root, tmp_path, samples=samples)))
    other_epoch = epoch(assemble(cached(ring.root, tmp_path, samples=samples)), 1)

    assert made == sum(user_functions.calls) == len(log)
    for batches in (first, second):
        assert histories(batches, ring) == histories(plain, ring)
        assert [batch.cursor for batch, _ in batches] == [batch.cursor for batch, _ in plain]
    assert sorted(histories(other_epoch, ring)) == sorted(histories(plain, ring))


@pytest.mark.parametrize("what", ["operation", "seed", "file", "filter"])
def test_what_was_made_of_something_else_is_not_used(ring, log, tmp_path, what):
    settings: dict[str, Any] = {"samples": str(tmp_path / "log")}
    epoch(assemble(cached(ring.root, tmp_path, **settings)))
    user_functions.calls.clear()
    changed = cached(ring.root, tmp_path, **settings)
    if what == "operation":
        operations = [REVERSED, NEWEST | {"length": 2}]
        changed = config(
            ring.root, **settings, features=operations, cache={"folder": str(tmp_path / "cache")}
        )
    elif what == "seed":
        changed = cached(ring.root, tmp_path, seed=1, **settings)
    elif what == "file":
        write_log(tmp_path / "log", {"hour=00/a.parquet": 20}, seed=3)
    else:
        changed = cached(ring.root, tmp_path, filters=[["price", ">=", 0.0]], **settings)

    found = epoch(assemble(changed))

    expected = 20 if what == "file" else len(log)
    assert sum(user_functions.calls) == expected
    uncached = changed.model_copy(update={"data": changed.data.model_copy(update={"cache": None})})
    assert histories(found, ring) == histories(epoch(assemble(uncached)), ring)


def test_a_damaged_entry_of_the_cache_is_made_again(ring, log, tmp_path):
    samples = str(tmp_path / "log")
    first = epoch(assemble(cached(ring.root, tmp_path, samples=samples)))
    entries = sorted((tmp_path / "cache").glob("*.arrow"))
    for entry in entries[:2]:
        content = bytearray(entry.read_bytes())
        content[len(content) // 2] ^= 1
        entry.write_bytes(content)
    user_functions.calls.clear()

    second = epoch(assemble(cached(ring.root, tmp_path, samples=samples)))

    assert len(user_functions.calls) == 2
    assert histories(second, ring) == histories(first, ring)


def test_the_cache_leaves_the_order_of_a_prepared_data_set_as_it_is(dataset, tmp_path):
    plain = epoch(assemble(config(dataset.root, window_rows=8)))
    kept = epoch(assemble(config(dataset.root, window_rows=8, cache={"folder": str(tmp_path / "cache")})))

    assert histories(kept, dataset) == histories(plain, dataset)


def test_a_cache_is_found_from_any_working_directory(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    absolute = config(dataset.root, cache={"folder": "kept"}).with_absolute_paths()

    assert absolute.data.cache is not None
    assert absolute.data.cache.folder == str(tmp_path / "kept")


FOLLOW = {"follow": {"every_s": 1.0}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"features": [NEWEST | {"inputs": ["items"]}]}, r"data.features.0 \(truncate\): .*'items'"),
        (
            {"features": [{"op": "hash", "input": "price", "buckets": 3}]},
            r"data.features.0 \(hash\): .*'price'",
        ),
        (
            {"features": [{"op": "hash", "input": "country", "output": "user_id", "buckets": 3}]},
            "there is a column 'user_id' already",
        ),
        (
            {"features": [REVERSED | {"function": "tests.helpers.user_functions:nothing"}]},
            "has no function 'nothing'",
        ),
        ({"filters": [["cost", ">", 3]]}, "no column 'cost'|column 'cost', which is not there"),
        ({"filters": [["price", ">", "much"]]}, "price > 'much' cannot be applied"),
        ({"filters": [["price", ">"]]}, "expected filters like"),
        ({"samples": "nowhere"}, "nowhere"),
        ({"samples": "kafka://nowhere"}, "the file system 'kafka' cannot be used"),
        (
            {"training": {"batch_tokens": 10, "length_of": "price"}},
            "must name a column of lists, 'price' is float",
        ),
        ({"training": {"batch_tokens": 10, "length_of": "prices"}}, "'prices' is not there"),
    ],
)
def test_mistakes_are_found_when_the_rows_are_opened(ring, log, tmp_path, settings, expected):
    given = {"samples": str(tmp_path / "log"), **settings}
    if given["samples"] == "nowhere":
        given["samples"] = str(tmp_path / "nowhere")

    for following in ({}, FOLLOW):
        with pytest.raises(InputError, match=expected):
            _ = assemble(config(ring.root, **given, **following)).features


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"item_ids": [[1]]},
            "need a column 'user_id' of integers, and there are item_ids; add an operation",
        ),
        ({"user_id": ["ann"], "item_ids": [[1]]}, "'user_id' of integers, and it is string"),
        ({"user_id": [1], "item_ids": [1]}, "'item_ids' of lists of integers, and it is int64"),
        ({"user_id": [1], "item_ids": [["a"]]}, "'item_ids' of lists of integers, and it is list<"),
    ],
)
def test_columns_that_the_model_needs_are_asked_for(ring, tmp_path, columns, expected):
    (tmp_path / "log").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "log" / "a.parquet")

    with pytest.raises(InputError, match=expected):
        _ = assemble(config(ring.root, samples=str(tmp_path / "log"))).features


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": FOLLOW}, "data.follow needs data.samples"),
        ({"data": {"samples": "log", **FOLLOW}}, "data.follow needs evaluation.every_steps"),
        (
            {
                "data": {"samples": "log", **FOLLOW},
                "evaluation": {"every_steps": 3},
                "training": {"schedule": {"decay": "cosine"}},
            },
            "a folder that grows has no end to decay towards",
        ),
        ({"training": {"batch_tokens": 0}}, "training.batch_tokens: input should be greater than 0"),
        ({"data": {"follow": {"every_s": 0}, "samples": "log"}}, "data.follow.every_s"),
        ({"data": {"on_corrupt": "ignore"}}, "data.on_corrupt: input should be 'stop' or 'skip'"),
        ({"data": {"features": [{"op": "cats"}]}}, "data.features"),
        ({"data": {"cache": {"max_bytes": "1 GiB"}}}, "data.cache.folder"),
        ({"data": {"cache": {"folder": "cache", "max_bytes": 0}}}, "data.cache.max_bytes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, expected):
    values: dict[str, Any] = {"model": {"name": "sasrec"}, **changes}
    values["data"] = {"path": "data"} | changes.get("data", {})

    with pytest.raises(InputError, match=expected):
        RunConfig.parse(values)


def test_a_function_that_fails_on_a_row_is_named(dataset):
    refusing = REVERSED | {"function": "tests.helpers.user_functions:refusing"}

    with pytest.raises(
        InputError, match=r"data.features.0 \(python\).*refusing failed on 8 rows: ZeroDivision"
    ):
        epoch(assemble(config(dataset.root, features=[refusing])))


def test_operations_that_make_nothing_the_model_reads_are_named_and_not_run(ring, log, tmp_path, caplog):
    useless = [{"op": "log", "input": "price", "output": "log_price"}, NEWEST]

    with caplog.at_level(logging.WARNING):
        settings = config(ring.root, samples=str(tmp_path / "log"), features=useless)
        rows = training_rows(settings, row_source(settings))

    assert "data.features.0 (log): the model reads nothing of what they make" in caplog.text
    assert "data.features.1" not in caplog.text
    assert rows.plan.spec.schema.names == ["user_id", "item_ids"]


def test_feature_workers_need_no_file_of_the_training_rows(ring, log, tmp_path):
    assembly = assemble(config(ring.root, samples=str(tmp_path / "log"), features=[NEWEST]))
    columns = assembly.rows.columns
    for file in (tmp_path / "log").rglob("*.parquet"):
        file.unlink()

    assert isinstance(features_of(assembly.config, columns), RowFeatures)


def test_filters_by_date_are_kept_apart_in_the_cache(ring, tmp_path):
    import datetime

    days = pa.array([datetime.date(2026, 1, day) for day in (1, 2, 3)])
    (tmp_path / "log").mkdir()
    pq.write_table(
        pa.table({"user_id": [1, 2, 3], "item_ids": [[1, 2], [3, 4], [5, 6]], "day": days}),
        tmp_path / "log" / "a.parquet",
    )
    for first, users in ((2, [2, 3]), (3, [3])):
        filters = [["day", ">=", datetime.date(2026, 1, first)]]
        given = cached(ring.root, tmp_path, samples=str(tmp_path / "log"), filters=filters)
        assert sorted(user for _, user, _ in histories(epoch(assemble(given)), ring)) == users
        (tmp_path / "config.yaml").write_text(given.to_yaml())
        again = RunConfig.load(tmp_path / "config.yaml")
        assert sorted(user for _, user, _ in histories(epoch(assemble(again)), ring)) == users


class Clock:
    """Time that passes when somebody sleeps; things happen at their times."""

    def __init__(self, *events: tuple[float, Any]) -> None:
        self.now = 0.0
        self._events = list(events)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._events and self._events[0][0] <= self.now:
            self._events.pop(0)[1]()


def arrivals(assembly: Assembly, clock: Clock, waited: list[int], arrived: list[int]) -> Arrivals:
    return Arrivals(
        assembly.rows,
        assembly.config.data,
        assembly.total_steps,
        on_wait=waited.append,
        on_arrival=lambda: arrived.append(assembly.plan.known_steps),
        sleep=clock.sleep,
        clock=clock,
    )


def test_a_folder_is_looked_at_as_often_as_set_until_nothing_comes_any_more(ring, tmp_path):
    write_log(tmp_path / "log", {"hour=00/a.parquet": 20})
    clock = Clock(
        (7.0, lambda: write_log(tmp_path / "log", {"hour=01/a.parquet": 9}, seed=1)),
        (24.0, lambda: write_log(tmp_path / "log", {"hour=00/late.parquet": 8}, seed=2)),
    )
    follow = {"every_s": 5.0, "stop_after_s": 12.0}
    assembly = assemble(config(ring.root, samples=str(tmp_path / "log"), follow=follow))
    waited, arrived = [], []
    there = arrivals(assembly, clock, waited, arrived)

    assert (there.after(0), clock.now) == (3, 0.0)
    assert (there.after(3), clock.now) == (5, 10.0)
    assert set(waited) == {3}
    assert len(waited) == 20  # twice a second
    # What came after the last look of the schedule counts as well.
    assert (there.after(5), clock.now) == (5, 22.0)
    clock.sleep(3.0)
    assert there.after(5) == 6
    assert arrived == [5, 6]


def test_waiting_ends_with_a_last_look(ring, tmp_path):
    """Where patience is shorter than the time between two looks."""
    write_log(tmp_path / "log", {"a.parquet": 8})
    clock = Clock((1.0, lambda: write_log(tmp_path / "log", {"b.parquet": 8}, seed=1)))
    follow = {"every_s": 10.0, "stop_after_s": 3.0}
    there = arrivals(assemble(config(ring.root, samples=str(tmp_path / "log"), follow=follow)), clock, [], [])

    assert (there.after(1), clock.now) == (2, 3.0)
    assert (there.after(2), clock.now) == (2, 6.0)


def test_files_accepted_after_a_snapshot_are_found_again_in_the_same_steps(ring, tmp_path):
    write_log(tmp_path / "log", {"hour=00/a.parquet": 20})
    following = config(ring.root, samples=str(tmp_path / "log"), **FOLLOW)
    assembly = assemble(following)
    accepted = AcceptedFiles(tmp_path)
    accepted.keep(assembly.plan)
    of_snapshot = assembly.rows.state()
    for number, name in enumerate(("hour=01/b.parquet", "hour=00/late.parquet")):
        write_log(tmp_path / "log", {name: 9}, seed=1 + number)
        assembly.plan.refresh()
        accepted.keep(assembly.plan)
    with open(tmp_path / "accepted.jsonl", "ab") as file:
        file.write(b'{"files": [{"na')  # the line that its writer died in
    write_log(tmp_path / "log", {"hour=02/unseen.parquet": 4}, seed=9)
    expected = [assembly.plan.batch(step) for step in range(assembly.plan.known_steps)]

    for state in (of_snapshot, None):
        accepted_before = AcceptedFiles(tmp_path).state_since(state)
        found = training_rows(following, row_source(following), accepted_before, next_step=1)
        assert [found.plan.batch(step) for step in range(found.plan.known_steps)] == expected
        assert found.plan.refresh() == 1
    rewritten = AcceptedFiles(tmp_path)
    rewritten.keep(found.plan)
    assert len(rewritten.state_since(None)["segments"]) == 4


def test_what_was_accepted_in_another_life_of_the_folder_is_not_taken_for_ours(ring, tmp_path):
    write_log(tmp_path / "log", {"a.parquet": 20})
    ours = assemble(config(ring.root, samples=str(tmp_path / "log"), **FOLLOW))
    write_log(tmp_path / "other", {"a.parquet": 20}, seed=5)
    theirs = assemble(config(ring.root, samples=str(tmp_path / "other"), **FOLLOW))
    accepted = AcceptedFiles(tmp_path)
    accepted.keep(theirs.plan)

    assert accepted.state_since(ours.rows.state()) == ours.rows.state()
    assert AcceptedFiles(tmp_path / "nothing").state_since(ours.rows.state()) == ours.rows.state()
