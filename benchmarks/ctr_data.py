"""Impressions for the benchmark of ranking models: for us as the importer writes them, for peers in numbers.

Peers hold tables of numbered rows. Somebody has to have numbered them, so they get every id as its row, in
Parquet; ours starts from the 64-bit ids of the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.synthetic_impressions import synthetic_impressions
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot.snapshot import write_table
from rayrec.platform.impression_schema import FEATURE_TABLE
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.ids import ids_of

NUM_COLUMNS, NUM_NUMBERS = 26, 13
"""As Criteo's."""
ZIPF = 1.05
_ROWS_AT_ONCE = 500_000


@dataclass(frozen=True)
class CtrData:
    """The same rows twice."""

    dataset: ImpressionDataset
    numbered: Path
    """Folder with train.parquet and test.parquet: click, N1, ..., and C1, ... as rows of tables."""
    ids_per_column: int

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.dataset.schema.ids)


def make(folder: Path, num_rows: int, ids_per_column: int) -> CtrData:
    synthetic_impressions(
        folder / "data",
        num_rows,
        num_columns=NUM_COLUMNS,
        ids_per_column=ids_per_column,
        num_numbers=NUM_NUMBERS,
        zipf=ZIPF,
    )
    dataset = ImpressionDataset.open(folder / "data", checksums=False)
    data = CtrData(dataset, folder / "numbered", ids_per_column)
    data.numbered.mkdir()
    rows_of = {column: pd.Index(ids_of_column(data, column)) for column in data.columns}
    files = {
        "train": [dataset.root / name for name in dataset.train_files],
        "test": [dataset.root / "test.parquet"],
    }
    for name, paths in files.items():
        writer: pq.ParquetWriter | None = None
        for path in paths:
            for batch in pq.ParquetFile(path).iter_batches(65_536):
                made = {column: batch[column] for column in ("click", *dataset.schema.numbers)}
                for column, index in rows_of.items():
                    made[column] = pa.array(index.get_indexer(pd.Index(batch[column].to_numpy())))
                table = pa.table(made)
                writer = writer or pq.ParquetWriter(data.numbered / f"{name}.parquet", table.schema)
                writer.write_table(table)
        assert writer is not None
        writer.close()
    return data


def ids_of_column(data: CtrData, column: str) -> np.ndarray:
    """[ids_per_column] ids in the order of their numbers."""
    space = data.dataset.schema.ids[column]
    ids: np.ndarray = ids_of(space, pa.array(np.arange(data.ids_per_column))).to_numpy()
    return ids


def all_rows(data: CtrData, table: TableConfig, folder: Path) -> list[str]:
    """Files of a snapshot in which every id has a row that was trained: so do peers' tables."""
    assert table.name == FEATURE_TABLE
    shard = EmbeddingShard([table], shard=0, num_trainers=1)
    step = 0
    for column in data.columns:
        ids = ids_of_column(data, column)
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[start : start + _ROWS_AT_ONCE]
            no_gradient = np.zeros((len(some), table.dim), dtype=np.float32)
            shard.apply(UpdateTag(0, step, 0), {table.name: (some, no_gradient)})
            step += 1
    files = write_table(folder, table, ShardMap(1), 0, step - 1, [shard.export(table.name)])
    return [str(folder / file.name) for file in files]
