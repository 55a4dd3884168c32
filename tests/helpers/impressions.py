"""Small data sets of impressions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.pipelines.config.run import RunConfig
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.prepare import prepare_impressions

NUM_ROWS, NUM_USERS, NUM_ITEMS = 600, 12, 20


def impression_dataset(
    folder: Path, num_rows: int = NUM_ROWS, group: str | None = "user"
) -> ImpressionDataset:
    """Even items are clicked on, one in twenty times the other way, and of these every third is liked."""
    random = np.random.default_rng(0)
    users_R, items_R = random.integers(NUM_USERS, size=num_rows), random.integers(NUM_ITEMS, size=num_rows)
    clicks_R = (items_R % 2 == 0) ^ (random.random(num_rows) < 0.05)
    histories = [random.integers(NUM_ITEMS, size=random.integers(4)).tolist() for _ in range(num_rows)]
    likes = [item % 3 == 0 if click else None for item, click in zip(items_R, clicks_R, strict=True)]
    columns = {
        "click": clicks_R.astype(np.int64),
        "like": pa.array([None if like is None else int(like) for like in likes], pa.int64()),
        "price": pa.array([None if place % 7 == 0 else place / num_rows for place in range(num_rows)]),
        "user": users_R,
        "item": pa.array([None if place % 11 == 0 else item for place, item in enumerate(items_R.tolist())]),
        "history": pa.array(histories, pa.list_(pa.int64())),
    }
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "source.parquet")
    config = ImpressionsConfig(
        layout="table",
        labels=("click", "like"),
        numbers=("price",),
        ids={"user": "user", "item": "item"},
        lists={"history": "item"},
        group=group,
        rows_per_group=32,
        rows_per_file=128,
    )
    prepare_impressions(folder / "source.parquet", folder / "data", config)
    return ImpressionDataset.open(folder / "data")


DLRM: dict[str, Any] = {"name": "dlrm", "dim": 4, "hidden_dims": [8], "bottom_dims": [4]}


def ctr_config(dataset: ImpressionDataset, model: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    """A run that trains a small model in a second.

    Args:
        model: more settings of a DLRM, or those of a model that it names.
    """
    model = model or {}
    values: dict[str, Any] = {
        "data": {"path": str(dataset.root)},
        "model": model if "name" in model else DLRM | model,
        "pipeline": {"trainer_threads": 1},
        "sparse": {"optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}, "init_scale": 0.3},
        "training": {
            "batch_size": 32,
            "epochs": 1,
            "schedule": {"warmup_steps": 0},
            "optimizer": {"learning_rate": 0.01},
        },
    }
    for name, further in settings.items():
        values[name] = values.get(name, {}) | further if isinstance(further, dict) else further
    return RunConfig.parse(values)
