"""What one table and shard holds, as Parquet files that any tool can read.

    rows      id int64 | bucket int32 | step int32 | count int32 | weights, state: fixed-size lists of float
    sighted   id | bucket | step | count       ids that wait for admission; no file if there are none
    evicted   id | bucket | step               tombstones; no file if there are none

Rows are ordered by virtual bucket, then by id as uint64, so that a shard reads only the row groups
with its buckets, whatever number of shards wrote the files. What a row means (table, dim, optimizer,
seed) is in the schema's metadata. Weights are float, whatever the table keeps: its 16-bit numbers are
among them. Checksums are in the manifest of the checkpoint, not here.

Axes: M rows of one file, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rayrec.embeddings.admission import Sighted
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.eviction import Evicted
from rayrec.embeddings.routing import ShardMap, bucket_of
from rayrec.embeddings.table import TableRows
from rayrec.platform.errors import InputError

FORMAT_VERSION = 2

_METADATA_KEY = b"rayrec.table"
_ROWS_PER_GROUP = 65_536


def write_table(folder: Path, config: TableConfig, shard: int, parts: Iterable[TableRows]) -> list[str]:
    """Write what one table and shard holds.

    Args:
        parts: as `export_parts` gives them, or one that `export` gave.

    Returns:
        Names of the files; each appears when it is complete.
    """
    contents = _Contents(folder, f"{config.name}-{shard:05d}", _identity(config))
    try:
        for rows in parts:
            _write_part(contents, rows)
        return contents.finish()
    finally:
        contents.remove_unfinished()


def _write_part(contents: _Contents, rows: TableRows) -> None:
    contents.write(
        "rows",
        {
            "id": rows.ids_M,
            "bucket": bucket_of(rows.ids_M),
            "step": rows.steps_M,
            "count": rows.counts_M,
            "weights": _lists(rows.weights_MD),
            "state": _lists(rows.state_MS),
        },
    )
    if len(rows.sighted):
        ids = rows.sighted.ids_K
        columns = {"id": ids, "bucket": bucket_of(ids), "step": rows.sighted.steps_K}
        contents.write("sighted", columns | {"count": rows.sighted.counts_K})
    if len(rows.evicted):
        ids = rows.evicted.ids_V
        contents.write("evicted", {"id": ids, "bucket": bucket_of(ids), "step": rows.evicted.steps_V})


class _Contents:
    """The files of one table and shard while they are written, one per kind of content."""

    def __init__(self, folder: Path, stem: str, identity: dict[str, Any]) -> None:
        self._folder = folder
        self._stem = stem
        self._identity = identity
        self._writers: dict[str, pq.ParquetWriter] = {}

    def write(self, content: str, columns: dict[str, Any]) -> None:
        described = {"format_version": FORMAT_VERSION, "content": content, **self._identity}
        table = pa.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(described)})
        if content not in self._writers:
            # Weights do not repeat; a dictionary of them would only take time.
            self._writers[content] = pq.ParquetWriter(
                self._unfinished(content), table.schema, use_dictionary=False, compression="zstd"
            )
        self._writers[content].write_table(table, row_group_size=_ROWS_PER_GROUP)

    def finish(self) -> list[str]:
        """Let the files appear under their names, which are returned."""
        for writer in self._writers.values():
            writer.close()
        for content in self._writers:
            os.replace(self._unfinished(content), self._folder / self._name(content))
        return [self._name(content) for content in self._writers]

    def remove_unfinished(self) -> None:
        for content, writer in self._writers.items():
            with contextlib.suppress(OSError):  # of a full disk, which has been raised already
                writer.close()
            self._unfinished(content).unlink(missing_ok=True)

    def _name(self, content: str) -> str:
        suffix = "" if content == "rows" else f".{content}"
        return f"{self._stem}{suffix}.parquet"

    def _unfinished(self, content: str) -> Path:
        return self._folder / (self._name(content) + ".part")


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
    parts: dict[tuple[str, str], list[pa.Table]] = {}
    for path in files:
        name_and_content = _check_file(path, configs)
        parts.setdefault(name_and_content, []).append(_read_part(path, shard_map.buckets(shard)))
    for name in configs:
        if (name, "rows") not in parts:
            raise InputError(f"the snapshot has no file of table {name!r}, which the config names")
    joined = {key: pa.concat_tables(found).combine_chunks() for key, found in parts.items()}
    return {
        name: _rows(joined[name, "rows"], joined.get((name, "sighted")), joined.get((name, "evicted")))
        for name in configs
    }


def _identity(config: TableConfig) -> dict[str, Any]:
    # Of the optimizer only its kind: that decides what the state means. Its rates may change.
    return {
        "table": config.name,
        "dim": config.dim,
        "weight_dtype": config.weight_dtype,
        "optimizer": config.optimizer.kind,
        "seed": config.seed,
        "init_scale": config.init_scale,
    }


def _lists(values_MW: NDArray[np.float32]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(values_MW.reshape(-1)), values_MW.shape[1])


def _check_file(path: Path, configs: dict[str, TableConfig]) -> tuple[str, str]:
    """Name of the table the file belongs to, and what of it the file holds."""
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
    return str(name), str(described["content"])


def _read_part(path: Path, buckets: range) -> pa.Table:
    in_shard = [("bucket", ">=", buckets.start), ("bucket", "<", buckets.stop)]
    return pq.read_table(path, filters=in_shard).replace_schema_metadata()


def _rows(rows: pa.Table, sighted: pa.Table | None, evicted: pa.Table | None) -> TableRows:
    return TableRows(
        ids_M=rows["id"].to_numpy(),
        weights_MD=_matrix(rows["weights"]),
        state_MS=_matrix(rows["state"]),
        steps_M=rows["step"].to_numpy(),
        counts_M=rows["count"].to_numpy(),
        sighted=Sighted.nothing()
        if sighted is None
        else Sighted(sighted["id"].to_numpy(), sighted["count"].to_numpy(), sighted["step"].to_numpy()),
        evicted=Evicted.nothing()
        if evicted is None
        else Evicted(evicted["id"].to_numpy(), evicted["step"].to_numpy()),
    )


def _matrix(column: pa.ChunkedArray) -> NDArray[np.float32]:
    width = column.type.list_size
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type=pa.float32())
    return flat.to_numpy().reshape(-1, width)
