"""Behaviors and scenarios on their way from a log to the features of a batch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch, SampleBatch
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.event_labels import HISTORY_LABELS
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.dataset_folder import FileEntry
from rayrec.samples.dataset.manifest import EVALUATION_FILES, fingerprint_of
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.reader import evaluation_batches
from tests.helpers.data import small_dataset, write_source

EVENTS = [
    (f"u{user}", f"i{item}", 100 * place) for user in range(3) for place, item in enumerate([3, 1, 4, 2])
]
BEHAVIORS = ["view", "view", "like", "view", "like", "view", "buy", "like", "view", "like", "view", "view"]
SCENARIOS = [
    "home",
    "search",
    "home",
    "home",
    "item",
    "item",
    "home",
    "search",
    "home",
    "item",
    "home",
    "home",
]


def labeled(folder: Path, **settings: object) -> Dataset:
    source = write_source(folder / "source", EVENTS, behavior=BEHAVIORS, scenario=SCENARIOS)
    prepare(source, folder / "data", PrepareConfig.parse({"num_partitions": 2} | settings))
    return Dataset.open(folder / "data")


def names_of(dataset: Dataset, label: str, codes: list[int]) -> list[str]:
    return [dataset.manifest.labels[label][code] for code in codes]


def test_prepare_keeps_what_the_log_says_of_every_event(tmp_path: Path):
    dataset = labeled(tmp_path)

    assert dataset.manifest.labels == {
        "behavior": ("buy", "like", "view"),
        "scenario": ("home", "item", "search"),
    }
    rows = pa.concat_tables(pq.read_table(dataset.root / name) for name in dataset.train_files).to_pylist()
    users = dict(
        zip(dataset.users["user_id"].to_pylist(), dataset.users["user_key"].to_pylist(), strict=True)
    )
    for row in rows:
        first = 4 * int(users[row["user_id"]][1:])
        assert names_of(dataset, "behavior", row["behaviors"]) == BEHAVIORS[first : first + 2]
        assert names_of(dataset, "scenario", row["scenarios"]) == SCENARIOS[first : first + 2]
    for place, split in ((2, "valid"), (3, "test")):
        found = dataset.evaluation_rows(split, labels=("behavior", "scenario"))
        for b, user in enumerate(found.user_ids_B.tolist()):
            first = 4 * int(users[user][1:])
            target = int(found.target_labels["scenario"][b])
            assert names_of(dataset, "scenario", [target]) == [SCENARIOS[first + place]]
            held = slice(found.offsets_B1[b], found.offsets_B1[b + 1])
            history = found.labels["behavior"][held].tolist()
            assert names_of(dataset, "behavior", history) == BEHAVIORS[first : first + place]
    stored = dataset.history_labels_of("u1", "scenario").tolist()
    assert names_of(dataset, "scenario", stored) == SCENARIOS[4:8]


def test_codes_are_of_the_events_that_are_kept(tmp_path: Path):
    dataset = labeled(tmp_path, behaviors=("view",), allow=frozenset({"short-users"}))

    assert dataset.manifest.labels == {"behavior": ("view",), "scenario": ("home", "item", "search")}
    assert names_of(dataset, "scenario", dataset.history_labels_of("u2", "scenario").tolist()) == ["home"] * 3


def test_a_scenario_may_have_another_name_in_a_log_of_events(tmp_path: Path):
    users, items, times = (list(column) for column in zip(*EVENTS, strict=True))
    table = pa.table({"user": users, "item": items, "time": times, "surface": SCENARIOS})
    pq.write_table(table, tmp_path / "log.parquet")

    prepare(
        tmp_path / "log.parquet",
        tmp_path / "data",
        PrepareConfig.parse({"columns": {"scenario": "surface"}}),
    )

    assert Dataset.open(tmp_path / "data").manifest.scenarios == ("home", "item", "search")


def test_what_the_log_does_not_say_of_an_event_is_unknown(tmp_path: Path):
    source = write_source(
        tmp_path / "source",
        EVENTS,
        scenario=[None, *SCENARIOS[1:]],
        behavior=[*BEHAVIORS[:3], None, *BEHAVIORS[4:]],
    )

    prepare(source, tmp_path / "data", PrepareConfig())

    dataset = Dataset.open(tmp_path / "data")
    assert dataset.manifest.scenarios == ("home", "item", "search")
    assert dataset.history_labels_of("u0", "scenario").tolist() == [-1, 2, 0, 0]
    assert dataset.history_labels_of("u0", "behavior").tolist() == [2, 2, 1, -1]
    with pytest.raises(InputError, match=r"behavior is missing \(1 rows have none\)"):
        prepare(source, tmp_path / "views", PrepareConfig(behaviors=("view",)))


def test_data_without_labels_is_what_it_was(tmp_path: Path):
    """Files and fingerprint: runs and semantic IDs that name a data set go on to fit."""
    dataset = small_dataset(tmp_path)

    assert pq.read_schema(dataset.root / "valid.parquet").names == [
        "user_id",
        "history",
        "history_timestamps",
        "target",
        "timestamp",
    ]
    files = dataset.manifest.files
    content = [[name, entry.rows, entry.sha256] for name, entry in sorted(files.items())]
    before = hashlib.sha256(json.dumps([1, [], content]).encode()).hexdigest()
    assert dataset.fingerprint == before
    assert fingerprint_of(files, (), ("home",)) != before
    manifest = json.loads((dataset.root / "dataset.json").read_text())
    del manifest["scenarios"]
    (dataset.root / "dataset.json").write_text(json.dumps(manifest))
    assert Dataset.open(dataset.root).manifest.labels == {"behavior": (), "scenario": ()}


def test_a_missing_label_is_refused_with_what_to_do(tmp_path: Path):
    with pytest.raises(InputError, match=r"events have no scenario.*--column scenario=NAME"):
        small_dataset(tmp_path / "plain").check_label("scenario")
    dataset = labeled(tmp_path / "labeled")
    dataset.check_label("behavior")

    # As an earlier version wrote it: labels in the training rows alone.
    name = EVALUATION_FILES["valid"]
    table = pq.read_table(dataset.root / name)
    pq.write_table(table.drop_columns([HISTORY_LABELS["behavior"]]), dataset.root / name)
    files = dataset.manifest.files | {name: FileEntry.of(dataset.root / name, len(table))}
    labels = (dataset.manifest.behaviors, dataset.manifest.scenarios)
    changed = {"files": files, "fingerprint": fingerprint_of(files, *labels)}
    dataset.manifest.model_copy(update=changed).write(dataset.root)
    with pytest.raises(InputError, match=r"valid.parquet: the behavior .* is missing.*prepare it again"):
        Dataset.open(dataset.root).check_label("behavior")


def rows(item_ids: list[list[int]], **columns: list) -> RowBatch:
    users = pa.array(np.arange(len(item_ids)))
    values = {"user_id": users, "item_ids": pa.array(item_ids, pa.list_(pa.int64()))}
    return RowBatch(np.arange(len(item_ids)), pa.record_batch(values | columns))


def test_labels_go_where_their_items_go():
    """Unknown items take theirs along; inputs have those of themselves, targets those of what follows."""
    features = SequenceFeatures(np.arange(10), max_length=3, tables=(), label_sizes={"behavior": 8})
    batch = SampleBatch.of(
        0, rows([[1, 99, 2, 3], [4], [5, 6, 7, 8, 9]], behaviors=[[0, 1, 2, 3], [4], [5, 6, 7, 0, 1]])
    )

    (training,) = features(batch)
    ranking = features.ranking(batch)

    assert training.items_N.tolist() == [1, 2, 6, 7, 8]
    assert training.labels["behavior"].tolist() == [0, 2, 6, 7, 0]
    assert training.target_labels["behavior"].tolist() == [2, 3, 7, 0, 1]
    assert ranking.labels["behavior"].tolist() == [0, 2, 3, 4, 7, 0, 1]
    assert ranking.target_labels == {}


def test_shares_of_trainers_have_the_labels_of_their_rows():
    items = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    batch = SampleBatch.of(0, rows(items, scenarios=items))
    whole, *parts = (
        part
        for trainers in (1, 3)
        for part in SequenceFeatures(
            np.arange(10), max_length=3, tables=(), label_sizes={"scenario": 10}, num_trainers=trainers
        )(batch)
    )

    for name in ("labels", "target_labels"):
        together = np.concatenate([getattr(part, name)["scenario"] for part in parts])
        assert together.tolist() == getattr(whole, name)["scenario"].tolist()


def test_a_code_without_a_name_is_refused_and_an_unknown_one_is_not():
    features = SequenceFeatures(np.arange(10), max_length=3, tables=(), label_sizes={"behavior": 2})

    features(SampleBatch.of(0, rows([[1, 2]], behaviors=[[-1, 1]])))
    with pytest.raises(InputError, match="an event has the behavior 2, and the data set has names for 2"):
        features(SampleBatch.of(0, rows([[1, 2]], behaviors=[[0, 2]])))


def test_a_row_with_too_few_codes_is_refused():
    with pytest.raises(InputError, match="a row has 2 item_ids and 1 behaviors: number 1"):
        SampleBatch.of(0, rows([[1, 2]], behaviors=[[0]]))


def test_evaluation_reads_the_labels_that_are_asked_for(tmp_path: Path):
    dataset = labeled(tmp_path)

    (batch,) = evaluation_batches(dataset, "test", 10, labels=("scenario",))
    (plain,) = evaluation_batches(dataset, "test", 10)

    assert set(batch.labels) == {"scenario"}
    assert len(batch.labels["scenario"]) == len(batch.item_ids_N)
    assert plain.labels == {}
    assert batch.instructed({"behavior": 2}).instruction["behavior"].tolist() == [2, 2, 2]
