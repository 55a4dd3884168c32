"""The third pass: counters and keys of some partitions of items become their rows of the table of items."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.samples.prepare.catalog import item_table
from rayrec.samples.prepare.distributed.keys import KeysFound
from rayrec.samples.prepare.distributed.spill import read_partitions, write_rows
from rayrec.samples.prepare.distributed.users import CatalogJob


@dataclass(frozen=True)
class ItemsJob:
    """What the tasks of the pass share."""

    catalog: CatalogJob
    partitions: tuple[int, ...]
    """Of users, those that have events."""
    textual: tuple[str, ...]
    """Columns that make up the items' texts."""

    def items_file(self, first: int) -> Path:
        """Rows of the table of items of the partitions from one on."""
        return self.catalog.folder / f"items-of-{first:06}.arrow"


@dataclass(frozen=True)
class ItemsBuilt:
    """What is known of some partitions of items that are done."""

    num_items: int
    num_cold: int
    first_cold: int
    """Row of the table of items; -1 without."""
    keys: KeysFound
    schema: pa.Schema


def build_items(job: ItemsJob, partitions: tuple[int, int]) -> ItemsBuilt:
    """Build the rows of the partitions from the first to before the second.

    Raises:
        NoRoomError: the disk is full.
    """
    catalog = job.catalog
    first, stop = partitions
    counts = _counts(job, first, stop)
    described = catalog.described_in("item", first, stop)
    ids_C = counts.index.to_numpy()
    keys = catalog.log_keys("item", first, stop, ids_C, counts["row"].to_numpy())
    found = catalog.compare("item", keys, described, first)
    ids = keys.id_table(catalog.kind("item"), described, "item")
    at_K = pd.Index(ids_C).get_indexer(pd.Index(ids.ids_K))
    events_K, train_K = (_at(counts[name].to_numpy(), at_K) for name in ("events", "train"))
    cold_rows = np.zeros(0, dtype=np.int64)
    if described is not None:
        cold_rows = described.rows_D[events_K[ids.positions(described.ids_D)] == 0]
    items = item_table(
        ids,
        np.ones(len(ids.ids_K), dtype=bool),
        train_K,
        None if described is None else described.table,
        None if described is None else described.ids_D,
        job.textual,
    )
    write_rows(job.items_file(first), items)
    first_cold = int(cold_rows.min()) if len(cold_rows) else -1
    return ItemsBuilt(len(items), len(cold_rows), first_cold, found, items.schema)


def _counts(job: ItemsJob, first: int, stop: int) -> pd.DataFrame:
    """Counters by item id."""
    paths = [job.catalog.counts_file(partition) for partition in job.partitions]
    tables = list(read_partitions(paths, first, stop))
    columns = ("id", "row", "events", "train")
    nothing = pa.table({name: pa.array([], pa.int64()) for name in columns})
    frame = pa.concat_tables([nothing, *tables]).to_pandas()
    return frame.groupby("id", sort=False).agg({"row": "min", "events": "sum", "train": "sum"})


def _at(values: Int64Array, at_K: Int64Array) -> Int64Array:
    """The values at positions, 0 at -1."""
    return np.where(at_K >= 0, np.append(values, 0)[at_K], 0)
