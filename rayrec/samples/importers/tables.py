"""Reading tables from files so that every value can be traced back to its file and row."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import RemotePath
from rayrec.samples.base.config import option
from rayrec.samples.base.hive import values_of_folders
from rayrec.samples.importers.column_types import DECIMAL_COMMA, ColumnTypes, joined, plain, typed
from rayrec.samples.importers.delimited import DelimitedFile, not_utf8

SUFFIXES = (".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")
_BATCH_ROWS = 131_072
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a pair, as JSON writes it."""

Piece = tuple[int, int]
"""First row group of a piece of a file, or first byte, and where the next piece begins."""

PART = "__part"
"""Column of a log that is split already: 0 is for training, 1 for validation, 2 for test."""


@dataclass(frozen=True)
class RawTable:
    """A table as the source has it, under our column names."""

    table: pa.Table
    file: str
    where: Callable[[int], str]
    """Where a row of the table is in the source, for messages: "events.csv line 7"."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Our name -> the source's, of columns that were renamed."""
    notes: tuple[str, ...] = ()
    """What was unusual about the files, for the report."""


@dataclass(frozen=True)
class RawTables:
    """A source, before anything in it is checked."""

    name: str
    interactions: RawTable
    """user_id, item_id, timestamp, perhaps behavior and scenario, and any further columns."""
    items: RawTable | None = None
    """item_id, perhaps title, and any further columns."""
    users: RawTable | None = None
    """user_id and any further columns."""
    ignored: tuple[tuple[str, str], ...] = ()
    """(file, why it was not read), for the report."""
    order_is_time: bool = False
    """Whether the source has no times: those of the table count the events of a user from 0."""
    is_divided: bool = False
    """Whether the log has the column `PART`, of ours."""
    titles_of_log: str = ""
    """What became of the titles that the log has beside its events, for the report; importers leave it."""


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without a byte order mark.

    Raises:
        InputError: it is in another encoding.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


def parse_json(text: str, **options: Any) -> Any:
    """The values of a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or has half a surrogate pair, which no table can
            hold.
    """
    try:
        values = json.loads(text, **options)
        if _SURROGATE.search(text) is not None:
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("lists or objects in each other, too deep to be read") from None
    except UnicodeEncodeError:
        raise ValueError("a text has half a surrogate pair, which is no Unicode") from None
    return values


def is_hidden(name: str) -> bool:
    """Whether a file or folder is some program's own: `._x` of macOS archives, `_SUCCESS` of Spark."""
    return name.startswith((".", "_"))


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """Entries of a folder in order of their names, hidden ones left out."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry for entry in entries if fnmatch(entry.name, pattern) and not is_hidden(entry.name))


def files_of(path: Path) -> str:
    """The first few file names of a folder, for messages."""
    if path.is_file():
        return path.name
    names = sorted(entry.name for entry in path.iterdir())
    return (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "an empty folder"


GIVEN_SPLITS = (("train", "training"), ("valid", "validation", "val", "dev"), ("test",))
"""What files for training, validation and test are called."""


def find_table(folder: Path, *stems: str, suffixes: Sequence[str] = ("", *SUFFIXES)) -> Path | None:
    """The file `stem`.parquet, .csv ... or the folder `stem` of such files; None if there is none.

    Raises:
        InputError: there are several.
    """
    candidates = [folder / f"{stem}{suffix}" for stem in stems for suffix in suffixes]
    found = [path for path in candidates if path.exists()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise InputError(f"{folder}: {names} are both there; keep the one that holds the {stems[0]}")
    return found[0] if found else None


_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Numbers of rows that `DataFrame.to_parquet` adds after some have been filtered or sorted."""


@dataclass(frozen=True)
class TableFile:
    """One file of a table, read in batches of the forms that `plain` knows; text files have texts."""

    path: Path
    text: DelimitedFile | None
    """How a text file is written; None: Parquet."""
    folders: Mapping[str, str | None]
    """Columns that the folders `key=value` around the file give it; those that it has itself are left out."""
    schema: pa.Schema
    """Of its batches."""

    @classmethod
    def open(
        cls,
        root: Path | Sequence[Path],
        path: Path,
        names: Sequence[str] | None = None,
        quoted: bool | None = None,
    ) -> TableFile:
        """Find out what is in a file.

        Args:
            root: what was asked for: a folder around the file, or the file itself.
            names: of the columns of a text file without a header.
            quoted: whether a double quote opens a quoted value in a text file; None: as the file has it.

        Raises:
            InputError: it cannot be read, or a column is there twice.
        """
        text = None
        if path.suffix == ".parquet":
            if names is not None:
                raise InputError(f"{path}: {option('names')} has no effect on Parquet; leave it out")
            with open_parquet(path) as file:
                schema = plain(file.schema_arrow.empty_table()).schema
            fields = [field for field in schema if not _PANDAS_INDEX.fullmatch(field.name)]
            schema = pa.schema(fields)
        elif path.name.endswith(SUFFIXES):
            text = DelimitedFile.detect(path, names, quoted=quoted)
            schema = pa.schema([(name, pa.string()) for name in text.columns])
        else:
            raise InputError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
        if len(set(schema.names)) < len(schema.names):
            raise InputError(f"{path}: a column is there twice in {', '.join(schema.names)}; rename one")
        # Some writers keep it inside, too.
        folders = {key: value for key, value in _hive_values(root, path).items() if key not in schema.names}
        for key in folders:
            schema = schema.append(pa.field(key, pa.string()))
        return cls(path, text, folders, schema)

    @property
    def names(self) -> list[str]:
        """The columns."""
        return self.schema.names

    @property
    def num_rows(self) -> int | None:
        """Rows of a Parquet file; None of a text file, which does not say."""
        if self.text is not None:
            return None
        with open_parquet(self.path) as file:
            return int(file.metadata.num_rows)

    def pieces(self, rows: int, num_bytes: int) -> list[tuple[Piece, int | None]]:
        """The file in pieces of about so many rows or bytes, in order, each with its rows if they are known.

        A Parquet file is divided between row groups, a text file between lines; one that is packed, or in
        which a value may reach over the end of a line, is not divided.
        """
        if self.text is not None:
            return [(span, None) for span in self.text.spans(num_bytes)]
        pieces: list[tuple[Piece, int | None]] = []
        with open_parquet(self.path) as file:
            first, held = 0, 0
            for number in range(file.metadata.num_row_groups):
                held += file.metadata.row_group(number).num_rows
                if held >= rows or number + 1 == file.metadata.num_row_groups:
                    pieces.append(((first, number + 1), held))
                    first, held = number + 1, 0
        return pieces

    def read(
        self, columns: Sequence[str] | None = None, piece: Piece | None = None
    ) -> Iterator[pa.RecordBatch]:
        """These columns, or all, in batches.

        Args:
            piece: one of `pieces`; None: the whole file.

        Raises:
            InputError: naming the line, where there is one.
        """
        columns = self.names if columns is None else list(columns)
        # A file without a column of its own has its number of rows nevertheless.
        inside = [name for name in columns if name not in self.folders] or self.names[:1]
        for batch in self._batches(inside, piece):
            values = {
                name: pa.repeat(pa.scalar(self.folders[name], pa.string()), len(batch))
                if name in self.folders
                else batch.column(name)
                for name in columns
            }
            yield pa.record_batch(values, pa.schema([self.schema.field(name) for name in columns]))

    def where(self, row: int) -> str:
        """Where a row is, for messages."""
        return f"{self.path} row {row + 1}" if self.text is None else self.text.where(row)

    def _batches(self, columns: Sequence[str], piece: Piece | None) -> Iterator[pa.RecordBatch]:
        if self.text is not None:
            yield from self.text.read(columns, piece)
            return
        with open_parquet(self.path) as file:
            groups = None if piece is None else list(range(*piece))
            try:
                for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns), row_groups=groups):
                    yield from plain(pa.Table.from_batches([batch])).to_batches()
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{self.path}: cannot be read as a table: {error}") from error


def column_names(path: Path | Sequence[Path], names: Sequence[str] | None = None) -> list[str]:
    """Names of the columns of a table that `read_table` can read.

    Args:
        names: of text files without a header.
    """
    return TableFile.open(path, table_files(path)[0], names, quoted=True).names


@dataclass(frozen=True)
class TableForm:
    """What all files of a table are turned into, found out from all of them."""

    kinds: Mapping[str, str | None]
    """How columns of texts are read (`ColumnTypes.kind_of`); those that stay texts have None."""
    texts: frozenset[str]
    """Columns of ids that are numbers in some files and texts in others, and are texts in all."""
    schema: pa.Schema
    notes: tuple[str, ...]
    """What was unusual about the files, for the report."""


@dataclass(frozen=True)
class OpenTable:
    """The files of a table: what columns they have is known, and no row has been read; it can be pickled."""

    label: str
    """For messages: the folder, or the only file."""
    files: tuple[TableFile, ...]
    as_text: frozenset[str]
    others: tuple[str, ...]
    """What else is in the folder."""

    @classmethod
    def open(
        cls,
        path: Path | Sequence[Path],
        as_text: Collection[str],
        quoted: bool | None = None,
        names: Sequence[str] | None = None,
    ) -> OpenTable:
        """The arguments are those of `read_table`.

        Raises:
            InputError: a file is not readable or its columns are not those of the first.
        """
        files = [TableFile.open(path, file, names, quoted) for file in table_files(path)]
        first = files[0]
        for file in files:
            if set(file.names) != set(first.names):
                raise InputError(
                    f"{file.path}: its columns are {', '.join(file.names)}, but those of {first.path.name} "
                    f"are {', '.join(first.names)}; all parts must have the same columns"
                )
        label = str(first.path.parent if isinstance(path, Sequence) else path)
        return cls(label, tuple(files), frozenset(as_text), tuple(_others(path)))

    @property
    def names(self) -> list[str]:
        """The columns, in the order of the first file."""
        return self.files[0].names

    def form(self, types: ColumnTypes) -> TableForm:
        """What the table's files are turned into.

        Args:
            types: of the columns of texts that `typed_columns` names, of all files.

        Raises:
            InputError: the files have a column of two kinds.
        """
        notes = dict.fromkeys(
            f"{note} in {file.path.name}"
            for file in self.files
            if file.text is not None
            for note in file.text.notes
        )
        # A column of texts in Parquet is one of texts, whatever text files have in it.
        texts = {
            field_.name
            for file in self.files
            if file.text is None
            for field_ in file.schema
            if pa.types.is_string(field_.type) and field_.name not in file.folders
        }
        kinds = {
            name: None if name in self.as_text | texts else types.kind_of(name) for name in types.fitting
        }
        if commas := [name for name, kind in kinds.items() if kind == DECIMAL_COMMA]:
            notes[f"decimal commas in {', '.join(commas)}"] = None
        if unclear := [name for name in types.unclear() if name not in self.as_text]:
            notes[f"{', '.join(unclear)} kept as text: its commas may separate decimals or thousands"] = None
        notes |= dict.fromkeys(f"{name} ignored: no table" for name in self.others)
        empty = [_typed(file.schema.empty_table().select(self.names), kinds) for file in self.files]
        ids = frozenset(
            name
            for name in self.as_text & set(self.names)
            if any(pa.types.is_string(one.schema.field(name).type) for one in empty)
            and any(pa.types.is_integer(one.schema.field(name).type) for one in empty)
        )
        empty = [_as_texts(one, ids) for one in empty]
        table = joined(empty, [file.path.name for file in self.files], self.label)
        return TableForm(kinds, ids, table.schema, tuple(notes))

    def in_form(self, rows: pa.Table, form: TableForm) -> pa.Table:
        """Rows of one file with columns as the form has them, not yet of the types that all files fit."""
        return _as_texts(_typed(rows.select(self.names), form.kinds), form.texts)

    def where(self, rows: Sequence[int]) -> Callable[[int], str]:
        """Where a row of the table is, for messages.

        Args:
            rows: of each file.
        """
        return _tracer(self.files, rows)

    def read(self) -> RawTable:
        """The whole table.

        Raises:
            InputError: a file cannot be read.
        """
        types = ColumnTypes()
        parts: list[pa.Table] = []
        for file in self.files:
            parts.append(pa.Table.from_batches(file.read(), file.schema).select(self.names))
            types.add(parts[-1].select(typed_columns(file)))
        form = self.form(types)
        for number, part in enumerate(parts):
            parts[number] = self.in_form(part, form)
        table = joined(parts, [file.path.name for file in self.files], self.label)
        return RawTable(table, self.label, self.where([len(part) for part in parts]), notes=form.notes)


def typed_columns(file: TableFile) -> list[str]:
    """Columns of a file that are texts whatever they hold: all of a text file, those of folders."""
    return file.names if file.text is not None else list(file.folders)


def read_table(
    path: Path | Sequence[Path],
    as_text: Collection[str],
    quoted: bool | None = None,
    names: Sequence[str] | None = None,
) -> RawTable:
    """A Parquet, CSV or TSV file, several, or a folder of such files in order of their names.

    A folder may have folders `key=value`, as Spark and Hive write them; each key is a column.

    Args:
        as_text: columns of text files that are not to be guessed at: "007" stays what it is.
        quoted: whether a double quote opens a quoted value in a text file; None: as the file has it.
        names: of the columns of text files without a header.

    Raises:
        InputError: a file is not readable or its columns are not those of the first.
    """
    return OpenTable.open(path, as_text, quoted, names).read()


def _typed(part: pa.Table, kinds: Mapping[str, str | None]) -> pa.Table:
    for at, column in enumerate(part.schema):
        if kinds.get(column.name) is not None and pa.types.is_string(column.type):
            part = part.set_column(at, column.name, typed(part.column(at), kinds[column.name]))
    return part


def _as_texts(part: pa.Table, names: Collection[str]) -> pa.Table:
    """With texts instead of the integers of some columns: text files have texts, Parquet has numbers."""
    for name in names:
        at = part.schema.get_field_index(name)
        if pa.types.is_integer(part.schema.field(at).type):
            part = part.set_column(at, name, part.column(at).cast(pa.string()))
    return part


def rename(raw: RawTable, names: dict[str, str], required: Iterable[str]) -> RawTable:
    """Rename columns (found -> ours) and check that the required ones are there.

    Raises:
        InputError: naming the file, the columns found and those expected.
    """
    missing = [name for name in required if name not in {names.get(n, n) for n in raw.table.schema.names}]
    if missing:
        raise missing_columns(raw.file, raw.table.schema.names, missing)
    return RawTable(
        raw.table.rename_columns([names.get(name, name) for name in raw.table.schema.names]),
        raw.file,
        raw.where,
        {**raw.names, **{ours: found for found, ours in names.items() if ours != found}},
        raw.notes,
    )


_NEEDS_TIMES = (
    ". Events need times; where only their order is known, `rayrec prepare` reads a file NAME.inter.json, "
    '{"user": ["item", ...], ...}'
)


def missing_columns(file: str | Path, found: Sequence[str], missing: Sequence[str]) -> InputError:
    plural = "s" if len(missing) > 1 else ""
    times = "" if "timestamp" not in missing else _NEEDS_TIMES
    return InputError(
        f"{file}: no column{plural} {', '.join(missing)}; found {', '.join(found)}; rename them, or say what "
        f"they are called (--column user_id=customer){times}"
    )


def table_files(path: Path | Sequence[Path]) -> list[Path]:
    """The files of a table: itself, or those of a folder and of its folders `key=value`.

    Raises:
        InputError: there is no table in the folder, or one that would not be read.
    """
    if isinstance(path, Sequence):
        return list(path)
    if not path.is_dir():
        return [path]
    files = []
    for entry in visible(path):
        if entry.is_dir() and "=" in entry.name:
            files += table_files(entry)
        elif entry.is_file() and entry.name.endswith(SUFFIXES):
            files.append(entry)
    # Rows that stay behind in a part would be missed by nobody.
    left = next((entry for entry in visible(path) if entry not in files and _seems_table(entry)), None)
    if files and left is not None:
        raise InputError(
            f"{left}: seems to be part of the table {path.name}, but only files that end in "
            f"{', '.join(SUFFIXES)} and folders key=value are read; rename it, or move it out of the folder"
        )
    if not files:
        raise InputError(f"{path}: no Parquet or CSV file in this folder; found {files_of(path)}")
    return files


def _seems_table(entry: Path) -> bool:
    """Whether an entry of a table's folder holds rows, though not as `table_files` reads them."""
    if entry.is_dir():
        return "=" not in entry.name and any(map(_seems_table, visible(entry)))
    return any(f".{one}" in entry.name.lower() for one in ("parq", "csv", "tsv"))


def _others(path: Path | Sequence[Path]) -> list[str]:
    """What is in a table's folder beside its files."""
    if isinstance(path, Sequence) or not path.is_dir():
        return []
    return [
        entry.name
        for entry in visible(path)
        if not (entry.name.endswith(SUFFIXES) or (entry.is_dir() and "=" in entry.name))
    ]


def _hive_values(root: Path | Sequence[Path], file: Path) -> dict[str, str | None]:
    """The keys and values of the folders between a table's folder and one of its files."""
    if isinstance(root, Sequence) or not root.is_dir():
        return {}
    return values_of_folders(file.relative_to(root).as_posix())


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        InputError: it is missing, empty or not one.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected a table with column names")
    try:
        if isinstance(path, RemotePath):
            return pq.ParquetFile(path.filesystem.open_input_file(path.path))
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as a table: {error}") from error


def _tracer(files: Sequence[TableFile], rows: Sequence[int]) -> Callable[[int], str]:
    starts = [sum(rows[:number]) for number in range(len(rows))]

    def where(row: int) -> str:
        number = bisect_right(starts, row) - 1
        return files[number].where(row - starts[number])

    return where
