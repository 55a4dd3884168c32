"""What one table and shard holds, as Parquet files that any tool can read.

    rows      id int64 | bucket int32 | step int32 | count int32 | weights, state: float32 numbers as bytes
    sighted   id | bucket | step | count       ids that wait for admission; no file if there are none
    evicted   id | bucket | step               tombstones; no file if there are none
    removed   id | bucket                      ids whose rows were given up; no file if there are none

Rows are ordered by virtual bucket, then by id as uint64, so that a shard reads only the row groups
with its buckets, whatever number of shards wrote the files. What a row means (table, dim, optimizer,
seed) is in the schema's metadata, and of which step and buckets the file is. Weights are little-endian
float32, whatever the table keeps: its 16-bit numbers are among them. They are one run of bytes per row
(`numpy.frombuffer` reads it), since lists cost three times as long to write.

Files of an increment have rows that were changed after the step `since` of an earlier snapshot, and ids
whose rows were given up since then; of sighted and evicted ids, those of later steps, and in the metadata up
to which step they are `forgotten`. (In version 3 they were whole.) A chain is a snapshot with all rows
and increments of it, each since the step of the one before: what it holds is what a snapshot with all rows
of the last one's step would hold. A shard may have written all rows in an increment: then nothing that
came before counts for its buckets.

Rows for readers alone may be written narrower (`row_codec`): weights are then bytes of 16-bit or 8-bit
numbers, with a column `scale` beside 8-bit ones, and the metadata say so. Readers get float32 rows again.

Checksums are computed while writing and are in the manifest of the snapshot, not here.

Axes: M rows of one file, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rayrec.embeddings.base.layout import NEVER
from rayrec.embeddings.base.routing import NUM_BUCKETS, ShardMap, bucket_of
from rayrec.embeddings.base.row_codec import NarrowRows, Wire, decode, encode_rows
from rayrec.embeddings.base.threads import give_way
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.optim.optimizers import make_optimizer
from rayrec.embeddings.snapshot.saved_files import SavedFile, WrittenFile
from rayrec.embeddings.storage.index import MISSING, IdMap
from rayrec.embeddings.table.admission import Sighted
from rayrec.embeddings.table.event_clock import NO_TIME, ClockState
from rayrec.embeddings.table.eviction import Evicted
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import Forgotten, TableRows
from rayrec.platform.arrays import BoolArray, Float32Array, Int64Array
from rayrec.platform.errors import InputError

FORMAT_VERSION = 4
_NARROW_VERSION = 5
"""Of files with narrow rows, which readers of version 4 would take for others."""
_READ_VERSIONS = (3, 4, 5)

_METADATA_KEY = b"rayrec.table"
_ROWS_PER_GROUP = 65_536
PARTS_WAITING = 8
"""Parts of a megabyte that may wait for the disk."""
_ROWS_PER_PART = 8192
"""When it is read."""


def write_table(
    folder: Path,
    config: TableConfig,
    shard_map: ShardMap,
    shard: int,
    step: int,
    parts: Iterable[TableRows],
    wire: Wire = "float32",
) -> list[SavedFile]:
    """Write what one table and shard holds, on a thread of low priority beside the caller's.

    The caller's thread reads the parts, a few ahead of what is written: steps have to copy what they change
    as long as it is not read.

    Args:
        shard_map, shard: whose rows these are.
        step: after which the table holds them.
        parts: as `EmbeddingShard.export_snapshot` gives them, or one that `export` gave.
        wire: what weights are rounded to, of rows that are only read; training does not go on from others
            than float32.

    Returns:
        The files; each appears under its name when it is complete and on disk.
    """
    contents = _Contents(folder, f"{config.name}-{shard:05d}", _identity(config), wire)
    buckets = shard_map.among(config.servers).buckets(shard)
    contents.described |= {"step": step, "since": None, "buckets": [buckets.start, buckets.stop]}
    try:
        with ThreadPoolExecutor(1, "snapshot", give_way) as writer:
            _write_parts(contents, parts, writer)
            return writer.submit(contents.finish).result()
    finally:
        contents.remove_unfinished()


def _write_parts(contents: _Contents, parts: Iterable[TableRows], writer: Executor) -> None:
    waiting: deque[Future[None]] = deque()
    try:
        for rows in parts:
            waiting.append(writer.submit(_write_part, contents, rows))
            while waiting and (waiting[0].done() or len(waiting) == PARTS_WAITING):
                waiting.popleft().result()
        for written in waiting:
            written.result()
    except BaseException:
        for written in waiting:
            # What is not begun is not written any more. A disk that is full is why, whatever else there is.
            if not written.cancel() and (error := written.exception()) is not None:
                raise error from None
        raise


def _write_part(contents: _Contents, rows: TableRows) -> None:
    contents.described["since"] = rows.since
    if rows.since is not None:  # the first part says it for all that follow
        contents.described.setdefault("forgotten", [NEVER, NEVER])
    if rows.forgotten != Forgotten():
        contents.described["forgotten"] = [rows.forgotten.sighted_step, rows.forgotten.evicted_step]
    if rows.clock != ClockState():
        contents.described["clock"] = [rows.clock.now, rows.clock.times]
    columns = {
        "id": rows.ids_M,
        "bucket": bucket_of(rows.ids_M),
        "step": rows.steps_M,
        "count": rows.counts_M,
        **_weight_columns(rows.weights_MD, contents.wire),
    }
    if rows.state_MS.shape[1]:
        columns["state"] = _as_bytes(rows.state_MS.astype("<f4", copy=False))
    contents.write("rows", columns)
    if len(rows.sighted):
        ids = rows.sighted.ids_K
        columns = {"id": ids, "bucket": bucket_of(ids), "step": rows.sighted.steps_K}
        contents.write("sighted", columns | {"count": rows.sighted.counts_K})
    if len(rows.evicted):
        ids = rows.evicted.ids_V
        contents.write("evicted", {"id": ids, "bucket": bucket_of(ids), "step": rows.evicted.steps_V})
    if len(rows.removed_X):
        contents.write("removed", {"id": rows.removed_X, "bucket": bucket_of(rows.removed_X)})


def _weight_columns(weights_MD: Float32Array, wire: Wire) -> dict[str, Any]:
    if wire == "float32":
        return {"weights": _as_bytes(weights_MD.astype("<f4", copy=False))}
    narrow = encode_rows(wire, weights_MD)
    columns: dict[str, Any] = {"weights": _as_bytes(narrow.values_MD)}
    return columns if narrow.scales_M is None else columns | {"scale": narrow.scales_M}


class _Contents:
    """The files of one table and shard while they are written, one per kind of content."""

    def __init__(self, folder: Path, stem: str, described: dict[str, Any], wire: Wire) -> None:
        self._folder = folder
        self._stem = stem
        self.wire = wire
        self.described = described
        """What the metadata say of every file."""
        self._files: dict[str, _Content] = {}

    def write(self, content: str, columns: dict[str, Any]) -> None:
        if content not in self._files:
            version: dict[str, Any] = {"format_version": FORMAT_VERSION}
            if self.wire != "float32":
                version = {"format_version": _NARROW_VERSION, "wire": self.wire}
            described = {**version, "content": content, **self.described}
            suffix = "" if content == "rows" else f".{content}"
            self._files[content] = _Content(
                self._folder / f"{self._stem}{suffix}.parquet", columns, described
            )
        self._files[content].write(columns)

    def finish(self) -> list[SavedFile]:
        """Let the files appear under their names, which are returned."""
        return [content.finish(self.described["since"]) for content in self._files.values()]

    def remove_unfinished(self) -> None:
        for content in self._files.values():
            content.remove_unfinished()


class _Content:
    """One file while it is written, a group of rows at a time."""

    def __init__(self, path: Path, columns: dict[str, Any], described: dict[str, Any]) -> None:
        self._schema = pa.table(columns).schema.with_metadata({_METADATA_KEY: json.dumps(described)})
        self._file = WrittenFile(path)
        # Weights do not repeat: a dictionary of them would take time for nothing, and compression (lz4 or
        # zstd) saves a twentieth of them for three times the time. What repeats is a fifth of narrow rows.
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._file, mode="w"),
            self._schema,
            use_dictionary=["bucket", "step", "count"] if "wire" in described else False,
            compression="none",
            write_statistics=["id", "bucket", "step", "count"],
        )
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0

    def write(self, columns: dict[str, Any]) -> None:
        batch = pa.record_batch(columns, schema=self._schema)
        self._waiting.append(batch)
        self._num_waiting += len(batch)
        if self._num_waiting >= _ROWS_PER_GROUP:
            self._write_groups()

    def finish(self, since: int | None) -> SavedFile:
        if self._num_waiting:
            self._write_groups()
        self._writer.close()
        return self._file.finish(since)

    def remove_unfinished(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, which has been raised already
            self._writer.close()
        self._file.remove_unfinished()

    def _write_groups(self) -> None:
        table = pa.Table.from_batches(self._waiting)
        self._waiting, self._num_waiting = [], 0
        self._writer.write_table(table, row_group_size=_ROWS_PER_GROUP)


Chain = Sequence[Path] | Sequence[Sequence[Path]]
"""Every file of a snapshot, of all tables, in any order; or of several: all rows first, then increments."""


def load_tables(
    chain: Chain,
    tables: Sequence[TableConfig],
    shard_map: ShardMap,
    shard: int,
    *,
    weights_only: bool = False,
    only: Mapping[str, Int64Array] | None = None,
) -> dict[str, Iterator[TableRows]]:
    """Rows of one shard out of the files of all shards that wrote them.

    Args:
        chain: the files.
        tables: the run's tables.
        shard_map, shard: which rows to take; need not be the map the files were written with.
        weights_only: for another run to begin with: rows as if no step had changed them yet, with the state
            that its optimizer begins with. Only dims have to agree then.
        only: by table, distinct ids whose rows are wanted, for `EmbeddingShard.roll_back`; what is not a
            row comes whole all the same.

    Returns:
        Parts by table of which the shard has any, which are read when asked for, for
        `EmbeddingShard.restore`.

    Raises:
        InputError: a file cannot be read, is of an unknown table or of one with another dim, optimizer,
            seed or initial scale; or files of a table are missing, or are of another chain. Also while parts
            are read.
    """
    configs = {config.name: config for config in tables}
    snapshots = [[_described(path, configs, weights_only) for path in paths] for paths in _snapshots(chain)]
    buckets = {name: shard_map.among(config.servers).buckets(shard) for name, config in configs.items()}
    loaded = {
        name: _TableChain(config, snapshots).parts(
            buckets[name], None if only is None else _set_of(only[name])
        )
        for name, config in configs.items()
        if buckets[name]
    }
    if weights_only:
        return {name: _untrained(parts, configs[name]) for name, parts in loaded.items()}
    return loaded


def load_changes(
    paths: Sequence[Path], tables: Sequence[TableConfig], since: int
) -> dict[str, Iterator[TableRows]] | None:
    """What the files of one increment say of all buckets; None if some of them have all rows instead.

    Args:
        paths: every file of the increment.
        since: the step that it has the changes since.

    Raises:
        InputError: as `load_tables`; or the increment is one since another step.
    """
    configs = {config.name: config for config in tables}
    files = [_described(path, configs, weights_only=False) for path in paths]
    if any(file.since is None for file in files):
        return None
    everything = ShardMap(1).buckets(0)
    return {
        name: (replace(part, since=since) for part in _TableChain(config, [files], since).parts(everything))
        for name, config in configs.items()
    }


def _untrained(parts: Iterable[TableRows], config: TableConfig) -> Iterator[TableRows]:
    """The same weights, with nothing else that training has left."""
    optimizer = make_optimizer(config.optimizer, config.schedule)
    state_size = optimizer.state_size(config.dim)
    for part in parts:
        num_rows = len(part.ids_M)
        yield replace(
            part,
            state_MS=np.full((num_rows, state_size), optimizer.initial_state, dtype=np.float32),
            steps_M=np.full(num_rows, NEVER, dtype=np.int32),
            counts_M=np.zeros(num_rows, dtype=np.int32),
            sighted=Sighted.nothing(),
            evicted=Evicted.nothing(),
            # Of the other run's steps: this one, which begins with step 0, would forget its own at once.
            forgotten=Forgotten(),
            clock=ClockState(),
        )


def _snapshots(chain: Chain) -> list[list[Path]]:
    paths: list[Path] = []
    snapshots: list[list[Path]] = []
    for entry in chain:
        if isinstance(entry, Path):
            paths.append(entry)
        else:
            snapshots.append(list(entry))
    return snapshots or [paths]


@dataclass(frozen=True)
class _TableFile:
    """A file, by what it says of itself."""

    path: Path
    table: str
    content: str
    step: int
    since: int | None
    buckets: range
    forgotten: Forgotten | None
    """None where sighted and evicted ids are whole, though rows may be those of an increment."""
    clock: ClockState
    wire: Wire

    def has_any_of(self, wanted_B: BoolArray) -> bool:
        """Whether it may have rows of some buckets; what has none of a server's is not opened for it."""
        return bool(wanted_B[self.buckets.start : self.buckets.stop].any())


class _TableChain:
    """One table's files of snapshots that follow each other.

    Raises:
        InputError: they do not, or files are missing.
    """

    def __init__(
        self,
        config: TableConfig,
        snapshots: Sequence[Sequence[_TableFile]],
        since: int | None = None,
    ) -> None:
        """Describe a chain of snapshot files of one table.

        Args:
            since: step of the snapshot before the first one; None if that has all rows.
        """
        self._config = config
        self._nothing = _no_rows(config)
        self._snapshots = [[file for file in files if file.table == config.name] for files in snapshots]
        last_step = since
        for files in self._snapshots:
            self._check_whole(files)
            for file in files:
                if file.step != files[0].step:
                    raise InputError(
                        f"{file.path}: of step {file.step}, but {files[0].path} is of step {files[0].step}; "
                        "they are not of one snapshot"
                    )
                if file.since is not None and file.since != last_step:
                    before = "nothing" if last_step is None else f"a snapshot of step {last_step}"
                    raise InputError(
                        f"{file.path}: has only what has changed since step {file.since}, and follows "
                        f"{before}; load the snapshots that it builds upon, all rows first"
                    )
            last_step = files[0].step

    def parts(self, buckets: range, only: IdMap | None = None) -> Iterator[TableRows]:
        """What the chain has of some buckets; of rows, those of some ids alone."""
        wanted_B = np.zeros(NUM_BUCKETS, dtype=np.bool_)
        wanted_B[buckets.start : buckets.stop] = True
        for number, files in enumerate(self._snapshots):
            later = list(itertools.chain.from_iterable(self._snapshots[number + 1 :]))
            counting_B = _without(wanted_B, [file for file in later if file.since is None])
            # Of ids without rows, too, unless all of them came later.
            waiting_B = _without(wanted_B, [file for file in later if file.forgotten is None])
            for file in files:
                if file.content == "rows" and file.forgotten is not None and file.has_any_of(waiting_B):
                    yield replace(self._nothing, since=file.since, forgotten=file.forgotten)
            for file in files if only is not None and self._has_waiting else ():
                if file.content in ("removed", "rows") and file.since is not None:
                    for ids_X in _ids(file.path, counting_B):
                        yield replace(self._nothing, since=file.since, unread_X=ids_X)
            for file in files:
                if file.content == "removed" and file.has_any_of(counting_B):
                    for columns in _batches(file.path, counting_B, only):
                        nothing = replace(self._nothing, since=file.since)
                        yield replace(nothing, removed_X=columns["id"].to_numpy())
            for file in files:
                if file.content == "rows" and file.has_any_of(counting_B):
                    for columns in _batches(file.path, counting_B, only):
                        yield replace(_rows(columns, file), since=file.since)
            if files is self._snapshots[-1]:
                for file in files:
                    if file.clock != ClockState():  # alike in all of them
                        yield replace(self._nothing, since=file.since, clock=file.clock)
                        break
            sighted, evicted = (self._read_all(files, name, waiting_B) for name in ("sighted", "evicted"))
            yield replace(self._nothing, sighted=_sighted(sighted), evicted=_evicted(evicted))

    @property
    def _has_waiting(self) -> bool:
        """Whether there may be ids that wait for admission, or were evicted."""
        return self._config.admission.min_sightings > 1 or self._config.eviction is not None

    def _check_whole(self, files: Sequence[_TableFile]) -> None:
        covered_B = np.zeros(NUM_BUCKETS, dtype=np.bool_)
        for file in files:
            if file.content == "rows":
                covered_B[file.buckets.start : file.buckets.stop] = True
        if not covered_B.any():
            raise InputError(
                f"the snapshot has no file of table {self._config.name!r}, which the config names"
            )
        if not covered_B.all():
            raise InputError(
                f"the snapshot lacks a file of table {self._config.name!r}: none has rows of virtual bucket "
                f"{np.flatnonzero(~covered_B)[0]}, as one beside {files[0].path} should"
            )

    def _read_all(
        self, files: Sequence[_TableFile], content: str, wanted_B: BoolArray
    ) -> list[pa.RecordBatch]:
        return [
            columns
            for file in files
            if file.content == content and file.has_any_of(wanted_B)
            for columns in _batches(file.path, wanted_B)
        ]


def _without(wanted_B: BoolArray, files: Iterable[_TableFile]) -> BoolArray:
    """Buckets that none of these files covers."""
    left_B = wanted_B.copy()
    for file in files:
        if file.content == "rows":
            left_B[file.buckets.start : file.buckets.stop] = False
    return left_B


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


def _as_bytes(values_MW: NDArray[Any]) -> pa.FixedSizeBinaryArray:
    values_MW = np.ascontiguousarray(values_MW)
    kind = pa.binary(values_MW.itemsize * values_MW.shape[1])
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(values_MW), [None, pa.py_buffer(values_MW)])


def _described(path: Path, configs: dict[str, TableConfig], weights_only: bool) -> _TableFile:
    """A file of one of these tables."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: cannot be read as a snapshot of embedding rows: {error}") from error
    if _METADATA_KEY not in metadata:
        raise InputError(f"{path}: a Parquet file, but not a snapshot of embedding rows")
    described = json.loads(metadata[_METADATA_KEY])
    if described["format_version"] not in _READ_VERSIONS:
        raise InputError(
            f"{path}: format version {described['format_version']}; this version reads "
            f"{_READ_VERSIONS[0]} to {_READ_VERSIONS[-1]}"
        )
    name = described["table"]
    if name not in configs:
        raise InputError(
            f"{path}: holds rows of table {name!r}; the config has tables {', '.join(map(repr, configs))}"
        )
    for key, expected in _identity(configs[name]).items():
        if described[key] != expected and (not weights_only or key == "dim"):
            raise InputError(
                f"{path}: table {name!r} was saved with {key} {described[key]!r}, "
                f"the config says {expected!r}; use the config of the run that saved it"
            )
    return _TableFile(
        path,
        name,
        described["content"],
        described["step"],
        described["since"],
        range(*described["buckets"]),
        _forgotten(described),
        _clock(described),
        described.get("wire", "float32"),
    )


def _set_of(ids_K: Int64Array) -> IdMap:
    found = IdMap(len(ids_K))
    found.assign(ids_K, np.zeros(len(ids_K), dtype=np.int64))
    return found


def _clock(described: dict[str, Any]) -> ClockState:
    now, times = described.get("clock", (NO_TIME, ()))
    return ClockState(now, tuple((step, time) for step, time in times))


def _forgotten(described: dict[str, Any]) -> Forgotten | None:
    if described["since"] is None or "forgotten" not in described:
        return None
    sighted_step, evicted_step = described["forgotten"]
    return Forgotten(sighted_step, evicted_step, range(*described["buckets"]))


def _batches(path: Path, wanted_B: BoolArray, only: IdMap | None = None) -> Iterator[pa.RecordBatch]:
    """What a file has of some buckets, or of some ids in them, in parts of bounded size."""
    try:
        with pq.ParquetFile(path) as file:
            groups = [
                group
                for group in range(file.num_row_groups)
                if _overlaps(file.metadata.row_group(group), wanted_B)
            ]
            if only is not None:
                # Ids are a fiftieth of a row: a group without any that is wanted is not read.
                groups = [group for group in groups if _has_any(file, group, only)]
            for batch in file.iter_batches(_ROWS_PER_PART, row_groups=groups):
                is_wanted_M = wanted_B[batch["bucket"].to_numpy()]
                if only is not None:
                    is_wanted_M &= only.find(batch["id"].to_numpy()) != MISSING
                if is_wanted_M.all():
                    yield batch
                elif is_wanted_M.any():
                    yield batch.filter(pa.array(is_wanted_M))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: cannot be read as a snapshot of embedding rows: {error}") from error


def _ids(path: Path, wanted_B: BoolArray) -> Iterator[Int64Array]:
    """The ids of a file in some buckets."""
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_PER_PART, columns=["bucket", "id"]):
                yield batch["id"].to_numpy()[wanted_B[batch["bucket"].to_numpy()]]
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: cannot be read as a snapshot of embedding rows: {error}") from error


def _has_any(file: pq.ParquetFile, group: int, ids: IdMap) -> bool:
    found = ids.find(file.read_row_group(group, columns=["id"])["id"].to_numpy())
    return bool((found != MISSING).any())


def _overlaps(group: pq.RowGroupMetaData, wanted_B: BoolArray) -> bool:
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    statistics = columns["bucket"].statistics
    return statistics is None or bool(wanted_B[statistics.min : statistics.max + 1].any())


def _no_rows(config: TableConfig) -> TableRows:
    return EmbeddingTable(config.model_copy(update={"disk": None})).export()


def _rows(columns: pa.RecordBatch, file: _TableFile) -> TableRows:
    state_MS = np.empty((len(columns), 0), dtype=np.float32)
    if "state" in columns.schema.names:
        state_MS = _matrix(columns["state"], "<f4")
    return TableRows(
        ids_M=columns["id"].to_numpy(),
        weights_MD=_weights(columns, file),
        state_MS=state_MS,
        steps_M=columns["step"].to_numpy(),
        counts_M=columns["count"].to_numpy(),
    )


def _sighted(batches: Sequence[pa.RecordBatch]) -> Sighted:
    return Sighted.joined(
        [Sighted(*(batch[name].to_numpy() for name in ("id", "count", "step"))) for batch in batches]
    )


def _evicted(batches: Sequence[pa.RecordBatch]) -> Evicted:
    return Evicted.joined(
        [Evicted(*(batch[name].to_numpy() for name in ("id", "step"))) for batch in batches]
    )


def _weights(columns: pa.RecordBatch, file: _TableFile) -> Float32Array:
    if file.wire == "float32":
        return _matrix(columns["weights"], "<f4")
    if file.wire == "bfloat16":
        return decode(NarrowRows(_matrix(columns["weights"], "<u2")))
    scales_M = columns["scale"].to_numpy()
    if not (np.isfinite(scales_M) & (scales_M > 0)).all():
        raise InputError(
            f"{file.path}: scales of 8-bit rows of table {file.table!r} are not finite and positive; publish "
            "the version again"
        )
    return decode(NarrowRows(_matrix(columns["weights"], "<i1"), scales_M))


def _matrix(column: pa.FixedSizeBinaryArray, dtype: str) -> NDArray[Any]:
    """[M, W] numbers of rows that are runs of bytes."""
    width, itemsize = column.type.byte_width, np.dtype(dtype).itemsize
    first = column.offset * width // itemsize
    count = len(column) * width // itemsize
    numbers = np.frombuffer(column.buffers()[1], dtype=dtype)[first : first + count]
    return numbers.reshape(len(column), width // itemsize)
