"""A run that cannot learn anything says so, and what it did not train on is a share by reason."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.stores.build import build_store
from tests.helpers.data import write_source
from tests.helpers.runs import SPARSE_SASREC

EVENTS = [(user, (user + step) % 9, 100 * user + step) for user in range(12) for step in range(6)]


def dataset_of(folder, events=EVENTS, **source):
    prepare(write_source(folder / "log", events, **source), folder / "data", PrepareConfig(clean=True))
    return Dataset.open(folder / "data")


def settings(dataset, **data):
    return RunConfig.parse(
        {
            "data": {"path": str(dataset.root), **data},
            "model": SPARSE_SASREC,
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 4, "epochs": 1},
        }
    )


def test_users_with_one_training_event_each_are_refused(tmp_path):
    dataset = dataset_of(tmp_path, [event for event in EVENTS if event[2] % 100 < 3])
    message = r"no training row has a target; 100.0% of 12 rows had fewer than two known items"
    with pytest.raises(InputError, match=message):
        train(settings(dataset), tmp_path / "run", cluster=in_process)
    state = RunFolder.open(tmp_path / "run").state
    assert state["state"] != "finished"
    assert (state["best"], state["last"]) == (None, None)


def test_raw_rows_with_foreign_ids_are_refused(tmp_path):
    dataset = dataset_of(tmp_path)
    (tmp_path / "samples").mkdir()
    rows = pa.table({"user_id": [1, 2], "item_ids": [[1001, 1002, 1003], [1002, 1004]]})
    pq.write_table(rows, tmp_path / "samples" / "rows.parquet")
    config = settings(dataset, samples=str(tmp_path / "samples"))
    with pytest.raises(InputError, match=r"100.0% of 5 events were of items that the data set does not have"):
        train(config, tmp_path / "run", cluster=in_process)


@pytest.mark.parametrize(
    "table",
    [{"items": {"item_id": ["0", "x1"]}}, {"users": {"user_id": ["0", "somebody"]}}],
    ids=["items", "users"],
)
def test_a_store_with_ids_of_another_kind_is_told_of(tmp_path, table, caplog):
    """One text among the ids of a side table, and `prepare` hashes what the store keeps as integers."""
    dataset = dataset_of(tmp_path, **table)
    build_store(tmp_path / "log" / "interactions.parquet", str(tmp_path / "store"))
    (tmp_path / "samples").mkdir()
    rows = pa.table({"user_id": [1, 2], "timestamp": [105, 205]})
    pq.write_table(rows, tmp_path / "samples" / "rows.parquet")
    features = [{"op": "join_history", "store": str(tmp_path / "store")}]
    config = settings(dataset, samples=str(tmp_path / "samples"), features=features)
    if "items" in table:
        with pytest.raises(InputError, match=r"of items that the data set does not have.*hashes of texts"):
            train(config, tmp_path / "run", cluster=in_process)
    else:
        train(config, tmp_path / "run", cluster=in_process)
    assert "store: ids of this event store are" in caplog.text


def test_what_was_not_trained_on_is_a_share_by_reason(tmp_path, caplog):
    dataset = dataset_of(tmp_path)
    config = settings(dataset)
    backbone = config.model.backbone.model_copy(update={"max_length": 2})
    short = config.model_copy(update={"model": config.model.model_copy(update={"backbone": backbone})})
    whole = train(short, tmp_path / "whole", cluster=in_process)
    assert whole.dropped == {}  # older events are read in windows of their own
    training = short.training.model_copy(update={"windows": 1})
    short = short.model_copy(update={"training": training})

    with caplog.at_level(logging.INFO, logger="rayrec"):
        result = train(short, tmp_path / "run", cluster=in_process)

    # Four training events of each user, of which three are read: two inputs and the last one's target.
    assert result.dropped == {"unread_events": 0.25}
    assert result.described_drops == "25.0% of 48 events were older than the model's window (max_length)"
    assert f"not trained on so far: {result.described_drops}" in caplog.text
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["read"] == {"rows": 12, "events": 48}
    assert record["dropped"]["unread_events"] == 12
