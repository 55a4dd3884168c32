"""A run that learns walks round a ring: its settings, its data, and what is compared of its snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import Snapshot, read_snapshot
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import write_source

EPOCHS = 3


def settings(data: Path, **changes: Any) -> RunConfig:
    """Sampled-softmax SASRec with sparse items and users; `changes` by dotted key with `__` for dots."""
    values: dict[str, Any] = {
        "data": {"path": str(data)},
        "model": {
            "name": "sasrec",
            "item_matrix": "sparse",
            "num_negatives": 16,
            "user_embedding": True,
            "backbone": {
                "dim": 8,
                "num_layers": 1,
                "num_heads": 2,
                "feedforward_dim": 16,
                "max_length": 8,
                "dropout": 0.1,
            },
        },
        "sparse": {"num_servers": 1, "optimizer": {"kind": "adam", "lr": 0.03}},
        "pipeline": {"trainer_threads": 1, "cpus_per_trainer": 0.5},
        "training": {
            "batch_size": 8,
            "epochs": EPOCHS,
            "optimizer": {"learning_rate": 0.02},
            "schedule": {"warmup_steps": 4},
        },
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return RunConfig.parse(values)


def walks(folder: Path) -> Path:
    """A data set that can be learned: item i is followed by item i + 1 of a ring of 20.

    Of 40 users one, "long", trains on seven inputs, the others on four.
    """
    events = [
        (f"u{user}" if user else "long", f"i{(user + place) % 20}", 1000 + place)
        for user in range(40)
        for place in range(7 if user else 10)
    ]
    config = PrepareConfig(rows_per_group=4, rows_per_file=16, num_partitions=3)
    prepare(write_source(folder / "source", events), folder / "data", config)
    return folder / "data"


def last_snapshot(run: Path) -> Snapshot:
    return read_snapshot(RunFolder.open(run).chosen_snapshot("last"))


def sparse_rows(snapshot: Snapshot) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Every column of every row by (table, id), whatever shard wrote it."""
    rows = {}
    (files,) = snapshot.sparse_chain
    for path in files:
        for row in pq.read_table(path).to_pylist():
            ident = row.pop("id")
            rows[path.name.split("-")[0], ident] = tuple(map(str, row.values()))
    return rows


def assert_no_actor_survives() -> None:
    assert ray.util.list_named_actors() == []


def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("a cluster was started or joined")

    monkeypatch.setattr("rayrec.pipelines.training.placements.ray_cluster", started)
