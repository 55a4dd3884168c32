"""Tiny data for tests: sources on disk, data sets made of them, and where the real data lies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from rayrec.samples.base.batches import RowBatch, SampleBatch
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.event_times import HISTORY_TIMES, TIMES
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.dataset_folder import FileEntry
from rayrec.samples.dataset.manifest import EVALUATION_FILES, HISTORY_FILE, fingerprint_of
from rayrec.samples.prepare.prepare import prepare

Event = tuple[object, object, object]
"""user, item, timestamp"""


def real_data(name: str) -> Path:
    """A folder of the public data sets; skips the test where they are not to be had."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("RAYREC_DATA", beside)) / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing; set RAYREC_DATA to the folder of the public data sets")
    return folder


def write_source(
    folder: Path,
    events: Sequence[Event],
    items: dict[str, list] | None = None,
    users: dict[str, list] | None = None,
    kind: str = "parquet",
    **further: list,
) -> Path:
    """A source in the layout `folder`; `further` are more columns of the interactions."""
    folder.mkdir(parents=True, exist_ok=True)
    user_ids, item_ids, timestamps = zip(*events, strict=True) if events else ((), (), ())
    interactions = {"user_id": list(user_ids), "item_id": list(item_ids), "timestamp": list(timestamps)}
    tables = {"interactions": interactions | further, "items": items, "users": users}
    for stem, columns in tables.items():
        if columns is not None:
            table = pa.table(columns)
            if kind == "parquet":
                pq.write_table(table, folder / f"{stem}.parquet")
            else:
                pa_csv.write_csv(table, folder / f"{stem}.csv")
    return folder


def random_events(num_users: int, num_items: int, seed: int = 0, length: int = 9) -> list[Event]:
    """Users "u0", ... with 3 to `length` different items "i0", ..., several of them at the same time."""
    random = np.random.default_rng(seed)
    events: list[Event] = []
    for user in range(num_users):
        count = int(random.integers(3, length + 1))
        items = random.choice(num_items, size=count, replace=False)
        times = 1000 + np.sort(random.integers(0, 6, size=count))
        events += [(f"u{user}", f"i{item}", int(time)) for item, time in zip(items, times, strict=True)]
    return events


def small_dataset(folder: Path, num_users: int = 40, num_items: int = 30, **settings: object) -> Dataset:
    """A prepared data set of random events, in small row groups and files."""
    source = write_source(folder / "source", random_events(num_users, num_items))
    config = PrepareConfig.parse({"rows_per_group": 4, "rows_per_file": 16, "num_partitions": 3} | settings)
    prepare(source, folder / "data", config)
    return Dataset.open(folder / "data")


def without_history_times(dataset: Dataset, *names: str) -> Dataset:
    """The data set as an earlier version would have written it; of all files, or of those named."""
    for name in names or (HISTORY_FILE, *EVALUATION_FILES.values()):
        path = dataset.root / name
        table = pq.read_table(path)
        pq.write_table(
            table.drop_columns([c for c in (TIMES, HISTORY_TIMES) if c in table.column_names]), path
        )
    manifest = dataset.manifest
    files = {name: FileEntry.of(dataset.root / name, entry.rows) for name, entry in manifest.files.items()}
    changed = {"files": files, "fingerprint": fingerprint_of(files, manifest.behaviors)}
    manifest.model_copy(update=changed).write(dataset.root)
    return Dataset.open(dataset.root)


def sample_batch(
    rows: Sequence[Sequence[int]], step: int = 0, targets: list[int] | None = None
) -> SampleBatch:
    """Rows of item ids as a batch; user ids are 100, 101, ..., row keys 0, 1, ..."""
    return SampleBatch(
        step=step,
        row_keys_B=np.arange(len(rows)),
        user_ids_B=100 + np.arange(len(rows)),
        item_ids_N=np.array([item for row in rows for item in row], dtype=np.int64),
        offsets_B1=np.cumsum([0, *map(len, rows)]),
        targets_B=None if targets is None else np.array(targets),
    )


def row_batch(rows: Sequence[Sequence[int]]) -> RowBatch:
    """The same rows as they come from a reader."""
    return RowBatch(
        np.arange(len(rows)),
        pa.record_batch(
            {
                "user_id": pa.array(100 + np.arange(len(rows))),
                "item_ids": pa.array([list(row) for row in rows], pa.list_(pa.int64())),
            }
        ),
    )


def write_log(
    folder: Path, rows_of_files: dict[str, int], rows_per_group: int = 4, seed: int = 0
) -> pd.DataFrame:
    """A folder of Parquet as services write it; returns its rows, with `file` and `row`, in file order.

    Args:
        rows_of_files: rows of each file by its name below the folder.
    """
    random = np.random.default_rng(seed)
    tables = []
    for name in sorted(rows_of_files):
        count = rows_of_files[name]
        lengths = random.integers(0, 7, size=count)
        values = {
            "user_id": random.integers(0, 1000, size=count),
            "item_ids": pa.array([random.integers(0, 50, size=n) for n in lengths], pa.list_(pa.int64())),
            "price": np.round(random.gamma(2.0, 3.0, size=count), 2).astype(np.float32),
            "country": pa.array(random.choice(["de", "fr", None], size=count), pa.string()),
        }
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(values), path, row_group_size=rows_per_group)
        tables.append(pa.table(values).to_pandas().assign(file=name, row=np.arange(count)))
    return pd.concat(tables, ignore_index=True)
