"""`rayrec data store`: a log of events becomes an event store.

Files of the log ─ ids, times, codes ─► spilled, by partition of the users ─► appended, a partition at a time
                                                                      ─► the files are remembered

Memory holds one batch of rows, then one partition. A build that was cut short is simply run again: events
that are there already change nothing, and a file counts as done when all of it is there.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
import pyarrow.types as pt
from pydantic import Field, model_validator

from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.hashing import mix64
from rayrec.samples.base.config import PrepareConfig, Role, TimeUnit, option
from rayrec.samples.dataset.dataset_folder import sha256_of
from rayrec.samples.dataset.manifest import IdKind
from rayrec.samples.importers import load_source
from rayrec.samples.importers.column_types import FLOATS, ColumnTypes, typed
from rayrec.samples.importers.roles import log_roles
from rayrec.samples.importers.tables import (
    SUFFIXES,
    RawTable,
    TableFile,
    find_table,
    is_hidden,
    missing_columns,
)
from rayrec.samples.prepare.ids import ids_of_kind, is_integer_id
from rayrec.samples.prepare.times import parse_times
from rayrec.samples.prepare.validation import check_ids, refuse_nulls
from rayrec.samples.stores import open_store
from rayrec.samples.stores.batches import EventBatch
from rayrec.samples.stores.errors import NoStoreError
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS, TIMES, By, ColumnType, StoreManifest
from rayrec.samples.stores.retry import RetryConfig
from rayrec.samples.stores.store import KeyValueEvents, StoredFile
from rayrec.samples.stores.times import refuse_other_unit

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)."""

DAY_US = 86_400_000_000
_FAR_DAYS, _FAR_PART = 366, 0.001
"""Events are far in the future if a year without any lies before them, and they are few."""
_BATCH_ROWS = 131_072
_MOST_PARTITIONS = 256
"""Each is an open file."""
_KEY = "__key"
"""Column of whose an event is, on its way into the store; no column of a log's has this name."""
_APPEND_EVENTS = 200_000
"""Of one transaction."""


class StoreBuildConfig(Config):
    """How a log is read."""

    name: str | None = None
    """Of the log, part of the store's fingerprint; None: the name of the source's folder or file."""
    columns: dict[Role, str] = Field(default_factory=dict)
    """What the columns are called, where the usual names do not tell."""
    names: tuple[str, ...] | None = None
    """Names of the columns of text files that have no line of names."""
    time_format: str | None = None
    """How dates are written that are not in ISO 8601, in the words of `strptime`: `%d/%m/%Y`."""
    time_unit: TimeUnit | None = None
    """Unit of numbers in the time column, counted from 1970; None: seconds."""
    by: By = "user"
    """Which side of the store is built: what users did, or who met an item."""
    keep: tuple[str, ...] = ()
    """Further columns of numbers that the store shall have."""
    events_per_partition: int = Field(1_000_000, ge=1)
    """Events that memory holds at once, more or less; more of them where there would be too many
    partitions."""
    retry: RetryConfig = RetryConfig()

    @model_validator(mode="after")
    def _kept_columns_are_not_the_stores_own(self) -> Self:
        own = next((name for name in self.keep if name in (TIMES, ITEMS, BEHAVIORS, _KEY)), None)
        if own is not None:
            raise ValueError(
                f"{option('keep')} names {own!r}, as a store calls a column of its own; rename the log's"
            )
        return self


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
    other_side: By = "item"
    other_side_lacks: int = 0
    """Of these files, those that the other side of the store has not; 0 of a store with one side."""

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
        if self.other_side_lacks:
            lacks = f"lacks {self.other_side_lacks:,} of these files: run this again"
            rows.append((f"side by {self.other_side}", f"{lacks} with --by {self.other_side}"))
        return rows


def build_store(
    source: str | Path,
    address: str,
    config: StoreBuildConfig | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> StoreReport:
    """Add the events of a log to a store, which is made if need be.

    Args:
        source: any source of `rayrec prepare` that has times, or a folder of files of a log, which may be in
            folders below it.

    Raises:
        InputError: a file cannot be used, or the store was built from another kind of log.
        StoreUnavailableError: the store did not answer; run it again when it does.
    """
    config = config or StoreBuildConfig()
    source = Path(source)
    files, roles = _log_of(source, config)
    digests = _digests(files, {*roles.values(), *config.keep}, progress)
    there, accepted = _what_is_there(address, config, config.by)
    other: By = "item" if config.by == "user" else "user"
    beside, of_other = _what_is_there(address, config, other)
    new = {digest: file for digest, file in digests.items() if digest not in accepted}
    found = _Scan.of(new, roles, config.keep, progress)
    manifest = _manifest(source, list(new.values()), roles, found, config)
    if there is not None:
        _check_same_kind(address, there, manifest)
        _refuse_changed_files(new, accepted, source)
        if beside is not None:
            _check_same_codes(address, there, beside)
        longer = there if beside is None or len(there.behaviors) >= len(beside.behaviors) else beside
        manifest = longer.with_behaviors(found.behaviors).model_copy(update={"by": config.by})
    elif beside is not None:
        # Both sides of a log have one clock, one kind of ids, and the same codes of behaviors.
        _check_same_kind(address, beside, manifest)
        if beside.id_kinds != manifest.id_kinds:
            raise InputError(
                f"{address}: its other side has ids that are {beside.id_kinds}, those of this log are "
                f"{manifest.id_kinds}; build both sides from the same files"
            )
        manifest = beside.with_behaviors(found.behaviors).model_copy(update={"by": config.by})
    total = sum(found.num_events.values())
    with tempfile.TemporaryDirectory(prefix="rayrec-store-") as folder:
        partitions = _Partitions(Path(folder), _num_partitions(total, config))
        reader = _EventReader(manifest, roles, found.types, config)
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
            if beside is not None:
                report.other_side, report.other_side_lacks = other, len(digests.keys() - of_other.keys())
            _tell_far_future(reader.events_of_day, report)
            for batch in partitions.batches(manifest):
                appended = store.append(batch)
                report.added += appended.added
                report.duplicates += appended.duplicates
                report.late += appended.late
                progress("storing", report.added + report.duplicates, total)
            store.add_sources(
                {
                    digest: StoredFile(_name(file.path, source), found.num_events[digest])
                    for digest, file in new.items()
                }
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
    store.take_behaviors(manifest.behaviors)
    if store.manifest.behaviors[: len(manifest.behaviors)] != manifest.behaviors:
        raise MachineError(
            f"{store.name}: another process added behaviors to it meanwhile; run this command again"
        )


class _LogFile(Protocol):
    """What is read of a log at once; `TableFile` is one."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def folders(self) -> Mapping[str, str | None]: ...

    def read(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]: ...

    def where(self, row: int) -> str: ...


@dataclass(frozen=True)
class _LoadedLog:
    """The log of a layout that is no table, such as MovieLens', under our names."""

    raw: RawTable
    folders: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return Path(self.raw.file)

    @property
    def names(self) -> list[str]:
        return self.raw.table.schema.names

    @property
    def schema(self) -> pa.Schema:
        return self.raw.table.schema

    def read(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        yield from self.raw.table.select(columns or self.names).combine_chunks().to_batches(_BATCH_ROWS)

    def where(self, row: int) -> str:
        return self.raw.where(row)


@dataclass
class _Scan:
    """What has to be known of all rows before the first one is taken."""

    kinds: dict[str, IdKind] = field(default_factory=dict)
    behaviors: set[str] = field(default_factory=set)
    num_events: dict[str, int] = field(default_factory=dict)
    """By digest of the file."""
    types: ColumnTypes = field(default_factory=ColumnTypes)
    """Of columns to keep that are texts in their files."""

    @classmethod
    def of(
        cls,
        files: Mapping[str, _LogFile],
        roles: Mapping[str, str],
        keep: Sequence[str],
        progress: Progress,
    ) -> _Scan:
        scan = cls({"user": "integer", "item": "integer"})
        for number, (digest, file) in enumerate(files.items()):
            progress("checking", number, len(files))
            of_text = {
                entity: roles[f"{entity}_id"]
                for entity, kind in scan.kinds.items()
                if kind == "integer" and not _has_no_texts(file.schema.field(roles[f"{entity}_id"]).type)
            }
            texts = [name for name in keep if pt.is_string(file.schema.field(name).type)]
            names = [*of_text.values(), *([roles["behavior"]] if "behavior" in roles else []), *texts]
            scan.num_events[digest] = 0
            for batch in file.read(list(dict.fromkeys(names)) or [roles["user_id"]]):
                scan.num_events[digest] += len(batch)
                for entity, name in of_text.items():
                    if not is_integer_id(_trimmed(batch.column(name))):
                        scan.kinds[entity] = "string"
                if "behavior" in roles and not pt.is_nested(batch.column(roles["behavior"]).type):
                    values = pc.unique(batch.column(roles["behavior"]).cast(pa.string())).drop_null()
                    scan.behaviors.update(values.to_pylist())
                scan.types.add(batch.select(texts))
        return scan


class _EventReader:
    """Rows of the log -> events, counting what is odd about their order."""

    def __init__(
        self,
        manifest: StoreManifest,
        roles: Mapping[str, str],
        types: ColumnTypes,
        config: StoreBuildConfig,
    ) -> None:
        self._manifest = manifest
        self._types = types
        self._roles = roles
        self._config = config
        self._codes = pa.array(manifest.behaviors, pa.string())
        self._before: int | None = None
        self.out_of_order = 0
        self.events_of_day: dict[int, int] = {}

    def read(self, file: _LogFile) -> Iterator[pa.RecordBatch]:
        """The key and the columns of the store.

        Raises:
            InputError: naming file, row and value.
        """
        first_row = 0
        columns = [*self._roles.values(), *self._config.keep]
        for batch in file.read(list(dict.fromkeys(columns))):
            yield self._events(file, first_row, pa.Table.from_batches([batch]))
            first_row += batch.num_rows

    def _events(self, file: _LogFile, first_row: int, rows: pa.Table) -> pa.RecordBatch:
        columns = {role: rows[name] for role, name in self._roles.items()}
        columns |= {role: _trimmed(columns[role]) for role in ("user_id", "item_id")}
        raw = RawTable(pa.table(columns), str(file.path), lambda row: file.where(first_row + row))
        times_R = self._times(raw, first_row)
        ids = {}
        for entity in ("user", "item"):
            check_ids(raw, f"{entity}_id")
            ids[entity] = ids_of_kind(
                raw.table[f"{entity}_id"], self._manifest.id_kinds[entity], entity, raw.where
            )
        kinds = self._manifest.types
        key, other = ("user", "item") if self._config.by == "user" else ("item", "user")
        events = {_KEY: pa.array(ids[key]), TIMES: pa.array(times_R), ITEMS: pa.array(ids[other])}
        if BEHAVIORS in kinds:
            if pt.is_nested(raw.table["behavior"].type):
                raise InputError(
                    f"{raw.file}: column {self._roles['behavior']} has the type "
                    f"{raw.table['behavior'].type}; expected strings or integers"
                )
            refuse_nulls(raw, "behavior", raw.table["behavior"])
            codes = pc.index_in(raw.table["behavior"].cast(pa.string()), self._codes).combine_chunks()
            events[BEHAVIORS] = codes.cast(pa.from_numpy_dtype(kinds[BEHAVIORS]))
        for name in self._config.keep:
            events[name] = self._kept(rows[name], name, pa.from_numpy_dtype(kinds[name]), raw)
        return pa.record_batch(events)

    def _kept(self, values: pa.ChunkedArray, name: str, kind: pa.DataType, raw: RawTable) -> pa.Array:
        """A further column, as the store has it."""
        is_empty = pt.is_null(values.type) or (pt.is_string(values.type) and name in self._types.empty)
        if pt.is_string(values.type) and not is_empty:
            values = typed(values, self._types.kind_of(name))
        try:
            # Before nulls are looked for: in a column of fractions they are NaN, of whole numbers as well.
            if is_empty or (pt.is_integer(values.type) and pt.is_floating(kind)):
                values = values.cast(kind)
            return _numbers(values, name, raw).cast(kind)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"{raw.file}: column {name} has a value that is no {kind}, as which the store keeps it "
                f"({error}); leave the column out, or write smaller numbers"
            ) from error

    def _times(self, raw: RawTable, first_row: int) -> Int64Array:
        column = raw.table["timestamp"]
        refuse_nulls(raw, "timestamp", column)
        if self._config.time_format is None and not pt.is_temporal(column.type):
            where = f"{raw.file}: column {self._roles['timestamp']}"
            numbers_R = pd.to_numeric(column.to_pandas(), errors="coerce").to_numpy()
            if numbers_R.dtype.kind == "f":  # parse_times names what is none
                numbers_R = np.clip(np.nan_to_num(numbers_R), -(2.0**62), 2.0**62).astype(np.int64)
            refuse_other_unit(numbers_R, self._config.time_unit or "s", where, first_row)
        times_R = parse_times(raw, self._config.time_unit, self._config.time_format)
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
        part_R = self._part(events.column(_KEY).to_numpy())
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
    order_E = np.argsort(table[_KEY].to_numpy(), kind="stable")
    columns = {name: table[name].to_numpy()[order_E] for name in table.column_names}
    keys_E = columns.pop(_KEY)
    start = 0
    while start < len(keys_E):
        last_key = keys_E[min(start + _APPEND_EVENTS, len(keys_E)) - 1]
        stop = int(np.searchsorted(keys_E, last_key, side="right"))
        further = {name: columns[name][start:stop] for name in manifest.columns}
        yield EventBatch(keys_E[start:stop], columns[TIMES][start:stop], columns[ITEMS][start:stop], further)
        start = stop


def _log_of(source: Path, config: StoreBuildConfig) -> tuple[list[_LogFile], dict[str, str]]:
    """The files of a log, and role -> column, which all of them have."""
    prepare = PrepareConfig(columns=config.columns, names=config.names)
    if not source.exists():
        raise InputError(f"{source}: no such file or folder; give the log of events")
    log = source if source.is_file() else find_table(source, "interactions") or source
    paths = (
        sorted(
            path
            for path in log.rglob("*")
            if path.name.endswith(SUFFIXES) and not any(map(is_hidden, path.relative_to(log).parts))
        )
        if log.is_dir()
        else [log]
    )
    if not any(path.name.endswith(SUFFIXES) for path in paths):
        raw, _ = load_source(source, prepare)
        if raw.order_is_time:
            raise InputError(f"{source}: has an order of events, but no times; a store needs times")
        loaded: list[_LogFile] = [_LoadedLog(raw.interactions)]
        return loaded, _roles_in(loaded, PrepareConfig(), config)
    files: list[_LogFile] = [TableFile.open(log, path, config.names) for path in paths]
    return files, _roles_in(files, prepare, config)


def _has_no_texts(kind: pa.DataType) -> bool:
    """Whether a column of ids has integers; or lists, say, which are refused where they are read."""
    return bool(pt.is_integer(kind) or pt.is_nested(kind))


def _trimmed(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Texts without the blanks around them: `prepare` cuts them off, too, and ids have to meet."""
    if pt.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    is_text = pt.is_string(column.type) or pt.is_large_string(column.type)
    return pc.utf8_trim_whitespace(column) if is_text else column


def _name(file: Path, source: Path) -> str:
    return file.name if file == source else file.relative_to(source).as_posix()


def _roles_in(files: Sequence[_LogFile], prepare: PrepareConfig, config: StoreBuildConfig) -> dict[str, str]:
    """Role -> column, which all files must have."""
    first = files[0]
    for role, name in prepare.columns.items():
        if name not in first.names or role == "title":
            raise InputError(
                f"{first.path}: {option('columns', '--column')} says that {role} is called {name!r}, but a "
                f"store has no use for it; found {', '.join(first.names)}"
            )
    found = log_roles(first.names, prepare, str(first.path))
    roles: dict[str, str] = {role: name for role, name in found.items() if role != "title"}
    for file in files:
        missing = [name for name in (*roles.values(), *config.keep) if name not in file.names]
        if missing:
            raise missing_columns(file.path, file.names, missing)
    return roles


def _digests(files: Sequence[_LogFile], used: Collection[str], progress: Progress) -> dict[str, _LogFile]:
    """sha256 -> file; of files with the same content, the first."""
    digests: dict[str, _LogFile] = {}
    for number, file in enumerate(files):
        progress("checking", number, len(files))
        digest = sha256_of(file.path)
        if of_folders := {key: value for key, value in file.folders.items() if key in used}:
            # The same rows in another folder are other events.
            digest = hashlib.sha256(json.dumps([digest, of_folders], sort_keys=True).encode()).hexdigest()
        digests.setdefault(digest, file)
    return digests


def _manifest(
    source: Path,
    new: Sequence[_LogFile],
    roles: Mapping[str, str],
    found: _Scan,
    config: StoreBuildConfig,
) -> StoreManifest:
    columns: dict[str, ColumnType] = {}
    if "behavior" in roles:
        columns[BEHAVIORS] = "int16"
    for name in config.keep:
        is_float = any(pt.is_floating(file.schema.field(name).type) for file in new)
        is_float |= name in found.types.fitting and found.types.kind_of(name) in FLOATS
        columns[name] = "float64" if is_float else "int64"
    return StoreManifest.parse(
        {
            "name": config.name or source.resolve().name.split(".")[0],
            "columns": columns,
            "time_unit": "us",
            "id_kinds": found.kinds,
            "behaviors": tuple(sorted(found.behaviors)),
            "by": config.by,
        },
        source="rayrec data store",
    )


def _check_same_codes(address: str, there: StoreManifest, beside: StoreManifest) -> None:
    number = min(len(there.behaviors), len(beside.behaviors))
    if there.behaviors[:number] != beside.behaviors[:number]:
        raise InputError(
            f"{address}: its two sides have other codes of behaviors ({', '.join(there.behaviors)}; "
            f"{', '.join(beside.behaviors)}); build both again from the same files"
        )


def _check_same_kind(address: str, there: StoreManifest, wanted: StoreManifest) -> None:
    """Refuse to add a log to a store of something else."""
    # Files with whole numbers alone, or none, do not say that a column of the store is another one, nor do
    # whole numbers that are written as fractions. Values that it cannot keep are refused where they are.
    alike = {
        name: there.columns[name] if {kind, there.columns.get(name)} == {"int64", "float64"} else kind
        for name, kind in wanted.columns.items()
    }
    wanted = wanted.model_copy(update={"columns": alike})
    for name, remedy in (
        ("name", "give the name of the store's log (--name), or another store"),
        ("columns", "keep the same columns, or build another store"),
        ("time_unit", "build another store"),
    ):
        if (mine := getattr(wanted, name)) != (its := getattr(there, name)):
            raise InputError(f"{address}: its manifest has {name} {its!r}, this log {mine!r}; {remedy}")


def _refuse_changed_files(
    new: Mapping[str, _LogFile], accepted: Mapping[str, StoredFile], source: Path
) -> None:
    names = {file.name for file in accepted.values()}
    for file in new.values():
        if _name(file.path, source) in names:
            raise InputError(
                f"{file.path}: a file of this name is in the store, with other content; what it had then "
                "cannot be taken back. Write what is new into a new file, or build a new store"
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
