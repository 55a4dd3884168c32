"""A prepared data set to measure on where none is given: of Amazon Beauty's size, semantic IDs included."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.models.tokenizers.fit import fit_registry
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.platform.console import log
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare

NUM_USERS, NUM_ITEMS, MEAN_LENGTH = 22_363, 12_101, 8.88
"""Of Amazon Beauty (5-core), which it resembles."""


@contextmanager
def beauty_sized(given: Path | None) -> Iterator[Path]:
    """The prepared data set that was given, or a synthetic one that lasts as long as the block."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        log.print("making a data set of Beauty's size; RAYREC_BENCH_DATA names one to use instead")
        yield _synthetic(Path(folder))


def _synthetic(folder: Path) -> Path:
    """Users with 5 events or more, items by a Zipf law; semantic IDs of random vectors."""
    random = np.random.default_rng(0)
    lengths_U = 4 + random.geometric(1 / (MEAN_LENGTH - 4), size=NUM_USERS)
    users_N = np.repeat(np.arange(NUM_USERS), lengths_U)
    popularity_I = 1.0 / np.arange(10, NUM_ITEMS + 10)
    items_N = random.choice(NUM_ITEMS, size=len(users_N), p=popularity_I / popularity_I.sum())
    # Nobody has an item twice: the first of each (user, item) stays.
    _, first_M = np.unique(users_N * NUM_ITEMS + items_N, return_index=True)
    first_M.sort()
    columns = {"user_id": users_N[first_M], "item_id": items_N[first_M], "timestamp": first_M}
    (folder / "source").mkdir()
    pq.write_table(pa.table(columns), folder / "source" / "interactions.parquet")
    data = folder / "data"
    prepare(folder / "source", data, PrepareConfig(allow=frozenset({"short-users", "cold-items"})))
    dataset = Dataset.open(data)
    vectors_ID = random.normal(size=(len(dataset.items), 16)).astype(np.float32)
    registry, _ = fit_registry(vectors_ID, dataset.items.ids_I, dataset.fingerprint, num_iterations=5)
    registry.save(data / SEMANTIC_IDS_FOLDER)
    return data
