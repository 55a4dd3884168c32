"""A small recommender, and small ranking models of the same source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.pipelines.config.run import RunConfig
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.prepare import prepare_impressions
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import Event, random_events, write_source
from tests.helpers.impressions import ctr_config
from tests.helpers.runs import MODELS, NUM_ITEMS, NUM_USERS, trained


def rated_source(folder: Path) -> Path:
    """Ratings of "u0" to "u39" and "i0" to "i29", each at a time of its own: those of even items are high."""
    drawn = random_events(NUM_USERS, NUM_ITEMS)
    events: list[Event] = [(user, item, 1000 + place) for place, (user, item, _) in enumerate(drawn)]
    items, users = [f"i{place}" for place in range(NUM_ITEMS)], [f"u{place}" for place in range(NUM_USERS)]
    return write_source(
        folder,
        events,
        items={"item_id": items, "genres": ["Crime Drama", "Comedy"] * (NUM_ITEMS // 2)},
        users={"user_id": users, "gender": ["F", "M"] * (NUM_USERS // 2)},
        rating=[5.0 if int(str(item)[1:]) % 2 == 0 else 2.0 for _, item, _ in events],
    )


def prepared_histories(source: Path, out: Path) -> Dataset:
    prepare(source, out, PrepareConfig(rows_per_group=4, rows_per_file=16, num_partitions=3))
    return Dataset.open(out)


def prepared_ratings(source: Path, out: Path, **settings: object) -> ImpressionDataset:
    values = {"layout": "movielens", "history_events": "all", "rows_per_group": 32, **settings}
    prepare_impressions(source, out, ImpressionsConfig.parse(values))
    return ImpressionDataset.open(out)


def recommender_run(dataset: Dataset, folder: Path, model: str = "sasrec") -> Path:
    config = RunConfig.parse(
        {
            "data": {"path": str(dataset.root)},
            "model": MODELS[model],
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 16, "epochs": 1},
        }
    )
    return trained(config, folder)


def ranker_run(dataset: ImpressionDataset, folder: Path, model: dict[str, Any] | None = None) -> Path:
    return trained(ctr_config(dataset, model, training={"batch_size": 4}), folder)


def prepared_clicks(folder: Path, **settings: object) -> ImpressionDataset:
    """Clicks and likes of the same users and items, of a table: even items are clicked on, and of these every
    third is liked."""
    random = np.random.default_rng(0)
    users_R, items_R = random.integers(NUM_USERS, size=400), random.integers(NUM_ITEMS, size=400)
    folder.mkdir(parents=True)
    columns = {
        "click": (items_R % 2 == 0).astype(np.int64),
        "like": (items_R % 6 == 0).astype(np.int64),
        "user": [f"u{user}" for user in users_R],
        "item": [f"i{item}" for item in items_R],
        "sex": [("F", "M")[user % 2] for user in users_R],
        "history": pa.array([[f"i{item}"] for item in random.integers(NUM_ITEMS, size=400)]),
    }
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    values: dict[str, Any] = {
        "layout": "table",
        "labels": ("click", "like"),
        "ids": {"user": "user", "item": "item", "sex": "sex"},
        "lists": {"history": "item"},
        "origins": {"user": "user", "item": "item", "sex": "user.gender", "history": "history"},
        **settings,
    }
    if "history" in values["origins"].values():
        values["history_length"] = 3
    prepare_impressions(folder / "clicks.parquet", folder / "data", ImpressionsConfig.parse(values))
    return ImpressionDataset.open(folder / "data")
