"""Rows of one table and shard as a Parquet file that any tool can read.

Columns: id int64 | bucket int32 | step int32 | count int32 | weights, state: fixed-size lists of float.
Rows are ordered by virtual bucket, then by id as uint64, so that a shard reads only the row groups
with its buckets, whatever number of shards wrote the files. What a row means (table, dim, optimizer,
seed) is in the schema's metadata. Checksums are in the manifest of the checkpoint, not here.

Axes: M rows of one file, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.routing import ShardMap, bucket_of
from rayrec.embeddings.table import TableRows
from rayrec.platform.errors import InputError

FORMAT_VERSION = 1

_METADATA_KEY = b"rayrec.table"
_ROWS_PER_GROUP = 65_536


def write_table(path: Path, config: TableConfig, rows: TableRows) -> None:
    """Write the rows of one table and shard, as `export` ordered them; the file appears when complete."""
    described = {"format_version": FORMAT_VERSION, **_identity(config)}
    table = pa.table(
        {
            "id": rows.ids_M,
            "bucket": bucket_of(rows.ids_M),
            "step": rows.steps_M,
            "count": rows.counts_M,
            "weights": _lists(rows.weights_MD),
            "state": _lists(rows.state_MS),
        }
    ).replace_schema_metadata({_METADATA_KEY: json.dumps(described)})
    unfinished = path.with_name(path.name + ".part")
    try:
        # Weights do not repeat; a dictionary of them would only take time.
        pq.write_table(
            table, unfinished, row_group_size=_ROWS_PER_GROUP, use_dictionary=False, compression="zstd"
        )
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_tables(
    files: Iterable[Path], tables: Sequence[TableConfig], shard_map: ShardMap, shard: int
) -> dict[str, TableRows]:
    """Rows of one shard out of the files of all shards that wrote them.

    Args:
        files: every file of the snapshot, of all tables, in any order.
        tables: the run's tables.
        shard_map, shard: which rows to take; need not be the map the files were written with.

    Returns:
        Rows by table, for `EmbeddingShard.restore`.

    Raises:
        InputError: a file cannot be read, is of an unknown table or of one with another dim, optimizer,
            seed or initial scale; or a table has no file.
    """
    configs = {config.name: config for config in tables}
    parts: dict[str, list[TableRows]] = {name: [] for name in configs}
    for path in files:
        name = _check_file(path, configs)
        parts[name].append(_read_rows(path, shard_map.buckets(shard)))
    for name, found in parts.items():
        if not found:
            raise InputError(f"the snapshot has no file of table {name!r}, which the config names")
    return {name: _concatenate(found) for name, found in parts.items()}


def _identity(config: TableConfig) -> dict[str, Any]:
    # Of the optimizer only its kind: that decides what the state means. Its rates may change.
    return {
        "table": config.name,
        "dim": config.dim,
        "optimizer": config.optimizer.kind,
        "seed": config.seed,
        "init_scale": config.init_scale,
    }


def _lists(values_MW: NDArray[np.float32]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(values_MW.reshape(-1)), values_MW.shape[1])


def _check_file(path: Path, configs: dict[str, TableConfig]) -> str:
    """Name of the table whose rows the file holds."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: cannot be read as a snapshot of embedding rows: {error}") from error
    if _METADATA_KEY not in metadata:
        raise InputError(f"{path}: a Parquet file, but not a snapshot of embedding rows")
    described = json.loads(metadata[_METADATA_KEY])
    if described["format_version"] != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {described['format_version']}; this version reads {FORMAT_VERSION}"
        )
    name = described["table"]
    if name not in configs:
        raise InputError(
            f"{path}: holds rows of table {name!r}; the config has tables {', '.join(map(repr, configs))}"
        )
    for key, expected in _identity(configs[name]).items():
        if described[key] != expected:
            raise InputError(
                f"{path}: table {name!r} was saved with {key} {described[key]!r}, "
                f"the config says {expected!r}; use the config of the run that saved it"
            )
    return str(name)


def _read_rows(path: Path, buckets: range) -> TableRows:
    in_shard = [("bucket", ">=", buckets.start), ("bucket", "<", buckets.stop)]
    table = pq.read_table(path, filters=in_shard).combine_chunks()
    return TableRows(
        ids_M=table["id"].to_numpy(),
        weights_MD=_matrix(table["weights"]),
        state_MS=_matrix(table["state"]),
        steps_M=table["step"].to_numpy(),
        counts_M=table["count"].to_numpy(),
    )


def _matrix(column: pa.ChunkedArray) -> NDArray[np.float32]:
    width = column.type.list_size
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type=pa.float32())
    return flat.to_numpy().reshape(-1, width)


def _concatenate(parts: list[TableRows]) -> TableRows:
    return TableRows(
        ids_M=np.concatenate([part.ids_M for part in parts]),
        weights_MD=np.concatenate([part.weights_MD for part in parts]),
        state_MS=np.concatenate([part.state_MS for part in parts]),
        steps_M=np.concatenate([part.steps_M for part in parts]),
        counts_M=np.concatenate([part.counts_M for part in parts]),
    )
