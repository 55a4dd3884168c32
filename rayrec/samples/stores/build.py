"""`rayrec data store`: a log of events becomes an event store.

Parquet files ─ ids, times, codes ─► spilled, by partition of the users ─► appended, a partition at a time
                                                                      ─► the files are remembered

Memory holds one batch of rows, then one partition. A build that was cut short is simply run again: events
that are there already change nothing, and a file counts as done when all of it is there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pyarrow.types as pt
from pydantic import Field

from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import mix64
from rayrec.samples.base.config import PrepareConfig, Role
from rayrec.samples.dataset.dataset_folder import sha256_of
from rayrec.samples.dataset.manifest import IdKind
from rayrec.samples.importers.column_types import plain
from rayrec.samples.importers.roles import roles_of
from rayrec.samples.importers.tables import RawTable, files_of, is_hidden, missing_columns
from rayrec.samples.prepare.ids import ids_of_kind, is_integer_id
from rayrec.samples.prepare.times import parse_times
from rayrec.samples.prepare.validation import check_ids, refuse_nulls
from rayrec.samples.stores import open_store
from rayrec.samples.stores.errors import NoStoreError
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS, TIMES, By, ColumnType, StoreManifest, TimeUnit
from rayrec.samples.stores.retry import RetryConfig
from rayrec.samples.stores.store import EventBatch, KeyValueEvents, StoredFile
from rayrec.samples.stores.times import refuse_other_unit

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)."""

DAY_US = 86_400_000_000
_FAR_DAYS, _FAR_PART = 366, 0.001
"""Events are far in the future if a year without any lies before them, and they are few."""
_BATCH_ROWS = 131_072
_MOST_PARTITIONS = 256
"""Each is an open file."""
_APPEND_EVENTS = 200_000
"""Of one transaction."""


class StoreBuildConfig(Config):
    """How a log is read."""

    name: str | None = None
    """Of the log, part of the store's fingerprint; None: the name of the source's folder or file."""
    columns: dict[Role, str] = Field(default_factory=dict)
    """What the columns are called, where the usual names do not tell."""
    time_unit: TimeUnit = "s"
    """Unit of numbers in the time column, counted from 1970."""
    by: By = "user"
    """Which side of the store is built: what users did, or who met an item."""
    keep: tuple[str, ...] = ()
    """Further columns of numbers that the store shall have."""
    events_per_partition: int = Field(1_000_000, ge=1)
    """Events that memory holds at once, more or less; more of them where there would be too many
    partitions."""
    retry: RetryConfig = RetryConfig()


@dataclass
class StoreReport:
    """What became of a log."""

    store: str
    fingerprint: str
    files: int = 0
    files_known: int = 0
    """Files that were left out because their events are all there."""
    events: int = 0
    """In the files that were read."""
    added: int = 0
    duplicates: int = 0
    late: int = 0
    """Added, though older than what the store had of their user."""
    out_of_order: int = 0
    """Rows with an earlier time than the row before."""
    far_future: int = 0
    """Events long after all others; they are in the store."""
    far_future_from: str | None = None
    newest_before: str | None = None
    """Date of the newest event that is not far in the future."""

    def rows(self) -> list[tuple[str, str]]:
        rows = [
            ("store", self.store),
            ("fingerprint", self.fingerprint),
            ("files", f"{self.files:,}, and {self.files_known:,} that were in it already"),
            ("events", f"{self.events:,}, of which added {self.added:,}, duplicates {self.duplicates:,}"),
            ("late", f"{self.late:,} older than what their user had"),
            ("out of order", f"{self.out_of_order:,} earlier than the row before"),
        ]
        if self.far_future:
            rows.append(
                (
                    "far in the future",
                    f"{self.far_future:,}, from {self.far_future_from}; the others end {self.newest_before}",
                )
            )
        return rows


def build_store(
    source: str | Path,
    address: str,
    config: StoreBuildConfig | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> StoreReport:
    """Add the events of a Parquet file, or of all those below a folder, to a store, which is made if need be.

    Raises:
        InputError: a file cannot be used, or the store was built from another kind of log.
        StoreUnavailableError: the store did not answer; run it again when it does.
    """
    config = config or StoreBuildConfig()
    source = Path(source)
    files = _files(source)
    roles = _common_roles(files, config)
    digests = _digests(files, progress)
    there, accepted = _what_is_there(address, config, config.by)
    beside, _ = _what_is_there(address, config, "item" if config.by == "user" else "user")
    new = {digest: file for digest, file in digests.items() if digest not in accepted}
    found = _Scan.of(list(new.values()), roles, progress)
    manifest = _manifest(source, files[0], roles, found, config)
    if there is not None:
        _check_same_kind(address, there, manifest)
        _refuse_changed_files(new, accepted, source)
        manifest = there.with_behaviors(found.behaviors)
    elif beside is not None:
        # Both sides of a log have one clock, one kind of ids, and the same codes of behaviors.
        _check_same_kind(address, beside, manifest)
        if beside.id_kinds != manifest.id_kinds:
            raise InputError(
                f"{address}: its other side has ids that are {beside.id_kinds}, those of this log are "
                f"{manifest.id_kinds}; build both sides from the same files"
            )
        manifest = beside.with_behaviors(found.behaviors).model_copy(update={"by": config.by})
    num_events = {digest: pq.ParquetFile(file).metadata.num_rows for digest, file in new.items()}
    total = sum(num_events.values())
    with tempfile.TemporaryDirectory(prefix="rayrec-store-") as folder:
        partitions = _Partitions(Path(folder), _num_partitions(total, config))
        reader = _EventReader(manifest, roles, config)
        with partitions:
            done = 0
            for file in new.values():
                for events in reader.read(file):
                    partitions.write(events)
                    done += len(events)
                    progress("reading", done, total)
        # Only now: what is wrong with a log leaves no store behind.
        store = open_store(address, config.retry, create=manifest, by=config.by)
        try:
            _agree_on_behaviors(store, manifest)
            report = StoreReport(store.name, manifest.fingerprint, len(new), len(files) - len(new), total)
            report.out_of_order = reader.out_of_order
            _tell_far_future(reader.events_of_day, report)
            for batch in partitions.batches(manifest):
                appended = store.append(batch)
                report.added += appended.added
                report.duplicates += appended.duplicates
                report.late += appended.late
                progress("storing", report.added + report.duplicates, total)
            store.add_sources(
                {digest: StoredFile(_name(file, source), num_events[digest]) for digest, file in new.items()}
            )
        finally:
            store.close()
    return report


def _num_partitions(num_events: int, config: StoreBuildConfig) -> int:
    return min(max(-(-num_events // config.events_per_partition), 1), _MOST_PARTITIONS)


def _what_is_there(
    address: str, config: StoreBuildConfig, by: By
) -> tuple[StoreManifest | None, dict[str, StoredFile]]:
    try:
        store = open_store(address, config.retry, by=by)
    except NoStoreError:
        return None, {}
    try:
        return store.manifest, store.sources()
    finally:
        store.close()


def _agree_on_behaviors(store: KeyValueEvents, manifest: StoreManifest) -> None:
    """Give the store the codes that the events were read with."""
    store.add_behaviors(manifest.behaviors)
    if store.manifest.behaviors[: len(manifest.behaviors)] != manifest.behaviors:
        raise InputError(
            f"{store.name}: another process added behaviors to it meanwhile; run this command again"
        )


@dataclass
class _Scan:
    """What has to be known of all rows before the first one is taken."""

    kinds: dict[str, IdKind] = field(default_factory=dict)
    behaviors: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, files: Sequence[Path], roles: Mapping[str, str], progress: Progress) -> _Scan:
        scan = cls({"user": "integer", "item": "integer"})
        for number, file in enumerate(files):
            progress("checking", number, len(files))
            parquet = pq.ParquetFile(file)
            of_text = {
                entity: roles[f"{entity}_id"]
                for entity, kind in scan.kinds.items()
                if kind == "integer"
                and not pt.is_integer(parquet.schema_arrow.field(roles[f"{entity}_id"]).type)
            }
            names = [*of_text.values(), *([roles["behavior"]] if "behavior" in roles else [])]
            if not names:
                continue
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=names):
                for entity, name in of_text.items():
                    if not is_integer_id(_trimmed(batch.column(name))):
                        scan.kinds[entity] = "string"
                if "behavior" in roles and not pt.is_nested(batch.column(roles["behavior"]).type):
                    values = pc.unique(batch.column(roles["behavior"]).cast(pa.string())).drop_null()
                    scan.behaviors.update(values.to_pylist())
        return scan


class _EventReader:
    """Rows of the log -> events, counting what is odd about their order."""

    def __init__(self, manifest: StoreManifest, roles: Mapping[str, str], config: StoreBuildConfig) -> None:
        self._manifest = manifest
        self._roles = roles
        self._config = config
        self._codes = pa.array(manifest.behaviors, pa.string())
        self._before: int | None = None
        self.out_of_order = 0
        self.events_of_day: dict[int, int] = {}

    def read(self, file: Path) -> Iterator[pa.RecordBatch]:
        """`key` and the columns of the store.

        Raises:
            InputError: naming file, row and value.
        """
        first_row = 0
        columns = [*self._roles.values(), *self._config.keep]
        for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=list(dict.fromkeys(columns))):
            yield self._events(file, first_row, plain(pa.Table.from_batches([batch])))
            first_row += batch.num_rows

    def _events(self, file: Path, first_row: int, rows: pa.Table) -> pa.RecordBatch:
        columns = {role: rows[name] for role, name in self._roles.items()}
        columns |= {role: _trimmed(columns[role]) for role in ("user_id", "item_id")}
        raw = RawTable(pa.table(columns), str(file), lambda row: f"{file} row {first_row + row + 1}")
        times_R = self._times(raw, first_row)
        ids = {}
        for entity in ("user", "item"):
            check_ids(raw, f"{entity}_id")
            try:
                ids[entity] = ids_of_kind(
                    raw.table[f"{entity}_id"],
                    self._manifest.id_kinds[entity],
                    entity,
                )
            except InputError as error:
                raise InputError(f"{file}: {error}") from error
        kinds = self._manifest.types
        key, other = ("user", "item") if self._config.by == "user" else ("item", "user")
        events = {"key": pa.array(ids[key]), TIMES: pa.array(times_R), ITEMS: pa.array(ids[other])}
        if BEHAVIORS in kinds:
            if pt.is_nested(raw.table["behavior"].type):
                raise InputError(
                    f"{file}: column {self._roles['behavior']} has the type {raw.table['behavior'].type}; "
                    "expected strings or integers"
                )
            refuse_nulls(raw, "behavior", raw.table["behavior"])
            codes = pc.index_in(raw.table["behavior"].cast(pa.string()), self._codes).combine_chunks()
            events[BEHAVIORS] = codes.cast(pa.from_numpy_dtype(kinds[BEHAVIORS]))
        for name in self._config.keep:
            events[name] = _numbers(rows[name], name, raw).cast(pa.from_numpy_dtype(kinds[name]))
        return pa.record_batch(events)

    def _times(self, raw: RawTable, first_row: int) -> Int64Array:
        column = raw.table["timestamp"]
        refuse_nulls(raw, "timestamp", column)
        if pt.is_integer(column.type) or pt.is_floating(column.type):
            where = f"{raw.file}: column {self._roles['timestamp']}"
            numbers_R = column.to_numpy()
            if pt.is_floating(column.type):
                numbers_R = np.clip(
                    np.nan_to_num(numbers_R), -(2.0**62), 2.0**62
                )  # parse_times names the others
            refuse_other_unit(numbers_R.astype(np.int64), self._config.time_unit, where, first_row)
        times_R = parse_times(raw, self._config.time_unit)
        if len(times_R):
            before = times_R[0] if self._before is None else self._before
            self.out_of_order += int((np.diff(times_R, prepend=before) < 0).sum())
            self._before = int(times_R[-1])
            days, counts = np.unique(times_R // DAY_US, return_counts=True)
            for day, count in zip(days.tolist(), counts.tolist(), strict=True):
                self.events_of_day[day] = self.events_of_day.get(day, 0) + count
        return times_R


class _Partitions:
    """Events by ranges of `mix64(key)`, each in a file of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        self._paths = [folder / f"part-{part:05d}.arrow" for part in range(number)]
        self._writers: dict[int, ipc.RecordBatchStreamWriter] = {}
        self._files = ExitStack()

    def __enter__(self) -> _Partitions:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def write(self, events: pa.RecordBatch) -> None:
        part_R = self._part(events.column("key").to_numpy())
        order_R = np.argsort(part_R, kind="stable")
        bounds = np.searchsorted(part_R[order_R], np.arange(len(self._paths) + 1))
        events = events.take(pa.array(order_R))
        for part, path in enumerate(self._paths):
            rows = events.slice(bounds[part], bounds[part + 1] - bounds[part])
            if rows.num_rows:
                if part not in self._writers:
                    self._writers[part] = self._files.enter_context(ipc.new_stream(str(path), events.schema))
                self._writers[part].write_batch(rows)

    def batches(self, manifest: StoreManifest) -> Iterator[EventBatch]:
        """All that was written, a few thousand users at a time, and all events of a user at once."""
        for part in sorted(self._writers):
            with pa.memory_map(str(self._paths[part])) as file:
                yield from _batches_of_users(ipc.open_stream(file).read_all(), manifest)
            self._paths[part].unlink()

    def _part(self, keys_R: Int64Array) -> Int64Array:
        high_bits_R = mix64(keys_R) >> np.uint64(32)
        return ((high_bits_R * np.uint64(len(self._paths))) >> np.uint64(32)).astype(np.int64)


def _batches_of_users(table: pa.Table, manifest: StoreManifest) -> Iterator[EventBatch]:
    order_E = np.argsort(table["key"].to_numpy(), kind="stable")
    columns = {name: table[name].to_numpy()[order_E] for name in table.column_names}
    keys_E = columns.pop("key")
    start = 0
    while start < len(keys_E):
        last_key = keys_E[min(start + _APPEND_EVENTS, len(keys_E)) - 1]
        stop = int(np.searchsorted(keys_E, last_key, side="right"))
        further = {name: columns[name][start:stop] for name in manifest.columns}
        yield EventBatch(keys_E[start:stop], columns[TIMES][start:stop], columns[ITEMS][start:stop], further)
        start = stop


def _files(source: Path) -> list[Path]:
    if source.is_file() and source.suffix == ".parquet":
        return [source]
    files = []
    if source.is_dir():
        files = sorted(
            file
            for file in source.rglob("*.parquet")
            if not any(is_hidden(part) for part in file.relative_to(source).parts)
        )
    if not files:
        if not source.exists():
            raise InputError(f"{source}: no such file or folder; give the log of events")
        raise InputError(
            f"{source}: no Parquet file in it, found {files_of(source)}; write the log as Parquet, say by "
            'python -c \'import pandas; pandas.read_csv("LOG.csv").to_parquet("LOG.parquet")\''
        )
    return files


def _trimmed(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Texts without the blanks around them: `prepare` cuts them off, too, and ids have to meet."""
    if pt.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    is_text = pt.is_string(column.type) or pt.is_large_string(column.type)
    return pc.utf8_trim_whitespace(column) if is_text else column


def _name(file: Path, source: Path) -> str:
    return file.name if file == source else file.relative_to(source).as_posix()


def _common_roles(files: Sequence[Path], config: StoreBuildConfig) -> dict[str, str]:
    """Role -> column, which all files must have."""
    prepare = PrepareConfig(columns=config.columns)
    roles: dict[str, str] = {}
    for file in files:
        try:
            names = list(pq.read_schema(file).names)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{file}: cannot be read as Parquet: {error}") from error
        if len(set(names)) < len(names):
            raise InputError(f"{file}: a column is there twice in {', '.join(names)}; rename one")
        if not roles:
            for role, name in config.columns.items():
                if name not in names or role == "title":
                    raise InputError(
                        f"{file}: columns (--column) says that {role} is called {name!r}, but a store has no "
                        f"use for it; found {', '.join(names)}"
                    )
            roles = {role: name for role, name in roles_of(names, prepare).items() if role != "title"}
            missing = [role for role in ("user_id", "item_id", "timestamp") if role not in roles]
            if missing:
                raise missing_columns(file, names, missing)
        missing = [name for name in (*roles.values(), *config.keep) if name not in names]
        if missing:
            raise missing_columns(file, names, missing)
    return roles


def _digests(files: Sequence[Path], progress: Progress) -> dict[str, Path]:
    """sha256 -> file; of files with the same content, the first."""
    digests: dict[str, Path] = {}
    for number, file in enumerate(files):
        progress("checking", number, len(files))
        digests.setdefault(sha256_of(file), file)
    return digests


def _manifest(
    source: Path, first: Path, roles: Mapping[str, str], found: _Scan, config: StoreBuildConfig
) -> StoreManifest:
    columns: dict[str, ColumnType] = {}
    if "behavior" in roles:
        columns[BEHAVIORS] = "int16"
    schema = pq.read_schema(first)
    for name in config.keep:
        columns[name] = "float64" if pt.is_floating(schema.field(name).type) else "int64"
    return StoreManifest.parse(
        {
            "name": config.name or source.resolve().stem,
            "columns": columns,
            "time_unit": "us",
            "id_kinds": found.kinds,
            "behaviors": tuple(sorted(found.behaviors)),
            "by": config.by,
        },
        source="rayrec data store",
    )


def _check_same_kind(address: str, there: StoreManifest, wanted: StoreManifest) -> None:
    """Refuse to add a log to a store of something else."""
    for name, remedy in (
        ("name", "give the name of the store's log (--name), or another store"),
        ("columns", "keep the same columns, or build another store"),
        ("time_unit", "build another store"),
    ):
        if (mine := getattr(wanted, name)) != (its := getattr(there, name)):
            raise InputError(f"{address}: its manifest has {name} {its!r}, this log {mine!r}; {remedy}")


def _refuse_changed_files(new: Mapping[str, Path], accepted: Mapping[str, StoredFile], source: Path) -> None:
    names = {file.name for file in accepted.values()}
    for file in new.values():
        if _name(file, source) in names:
            raise InputError(
                f"{file}: a file of this name is in the store, with other content; what it had then cannot "
                "be taken back. Write what is new into a new file, or build a new store"
            )


def _numbers(column: pa.ChunkedArray, name: str, raw: RawTable) -> pa.Array:
    if pt.is_floating(column.type):
        return pc.fill_null(column, float("nan")).combine_chunks()
    if not (pt.is_integer(column.type) or pt.is_boolean(column.type)):
        raise InputError(f"{raw.file}: column {name} has the type {column.type}; a store keeps numbers only")
    refuse_nulls(raw, name, column)
    return column.combine_chunks()


def _tell_far_future(events_of_day: Mapping[int, int], report: StoreReport) -> None:
    days = np.array(sorted(events_of_day), dtype=np.int64)
    counts = np.array([events_of_day[day] for day in days.tolist()], dtype=np.int64)
    gaps = np.flatnonzero(np.diff(days) > _FAR_DAYS)
    for gap in gaps.tolist():
        after = int(counts[gap + 1 :].sum())
        if after <= max(_FAR_PART * counts.sum(), 1):
            report.far_future = after
            report.far_future_from = _date(int(days[gap + 1]))
            report.newest_before = _date(int(days[gap]))
            return


def _date(day: int) -> str:
    return (
        f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"
        if day < 2_900_000
        else f"day {day} since 1970"
    )
