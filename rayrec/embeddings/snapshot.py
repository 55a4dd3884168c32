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
from collections.abc import Iterable, Iterator, Sequence
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
_ROWS_PER_PART = 8192
"""Of a table that is larger than its memory, when it is read."""
_CONTENTS = ("rows", "sighted", "evicted")


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
) -> dict[str, Iterator[TableRows]]:
    """Rows of one shard out of the files of all shards that wrote them.

    A table in memory comes as one part; one that is larger comes in parts that are read when asked for.

    Args:
        files: every file of the snapshot, of all tables, in any order.
        tables: the run's tables.
        shard_map, shard: which rows to take; need not be the map the files were written with.

    Returns:
        Parts by table, for `EmbeddingShard.restore`.

    Raises:
        InputError: a file cannot be read, is of an unknown table or of one with another dim, optimizer,
            seed or initial scale; or a table has no file.
    """
    configs = {config.name: config for config in tables}
    paths: dict[tuple[str, str], list[Path]] = {}
    for path in files:
        paths.setdefault(_check_file(path, configs), []).append(path)
    for name in configs:
        if (name, "rows") not in paths:
            raise InputError(f"the snapshot has no file of table {name!r}, which the config names")
    buckets = shard_map.buckets(shard)
    return {
        name: _parts({content: paths.get((name, content), []) for content in _CONTENTS}, config, buckets)
        for name, config in configs.items()
    }


def _parts(paths: dict[str, list[Path]], config: TableConfig, buckets: range) -> Iterator[TableRows]:
    """What files of each content have of some buckets."""
    sighted, evicted = (_read_files(paths[content], buckets) for content in ("sighted", "evicted"))
    if config.disk is None:
        rows = _read_files(paths["rows"], buckets)
        assert rows is not None
        yield _rows(rows, sighted, evicted)
        return
    for path in paths["rows"]:
        for rows in _read_batches(path, buckets):
            yield _rows(rows, sighted, evicted)
            sighted = evicted = None
    if sighted is not None or evicted is not None:  # there are no rows
        rows = _read_files(paths["rows"], buckets)
        assert rows is not None
        yield _rows(rows, sighted, evicted)


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


def _read_files(paths: Sequence[Path], buckets: range) -> pa.Table | None:
    in_shard = [("bucket", ">=", buckets.start), ("bucket", "<", buckets.stop)]
    tables = [pq.read_table(path, filters=in_shard).replace_schema_metadata() for path in paths]
    return pa.concat_tables(tables).combine_chunks() if tables else None


def _read_batches(path: Path, buckets: range) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        in_shard = [
            group
            for group in range(file.num_row_groups)
            if _overlaps(file.metadata.row_group(group), buckets)
        ]
        for batch in file.iter_batches(_ROWS_PER_PART, row_groups=in_shard):
            bucket_M = batch["bucket"].to_numpy()
            wanted_M = (bucket_M >= buckets.start) & (bucket_M < buckets.stop)
            if wanted_M.any():
                yield pa.table(batch.filter(pa.array(wanted_M)))


def _overlaps(group: pq.RowGroupMetaData, buckets: range) -> bool:
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    statistics = columns["bucket"].statistics
    return statistics is None or (statistics.max >= buckets.start and statistics.min < buckets.stop)


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
