"""Reading tables from files so that every value can be traced back to its file and row."""

from __future__ import annotations

import gzip
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError

_T = TypeVar("_T")

SUFFIXES = (".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")


@dataclass(frozen=True)
class RawTable:
    """A table as the source has it, under our column names."""

    table: pa.Table
    file: str
    where: Callable[[int], str]
    """Where a row of the table is in the source, for messages: "events.csv line 7"."""


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


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without a byte order mark.

    Raises:
        InputError: it is in another encoding.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


def not_utf8(path: Path) -> InputError:
    return InputError(f"{path}: not in UTF-8; save it in this encoding")


def line_of(path: Path, row: int, quoted: bool) -> int:
    """Line, from 1, at which a row below the header begins: blank lines are no rows, and a quoted value
    may have several. It reads the file up to there, which only a message is worth."""
    opened = gzip.open if path.suffix == ".gz" else open
    at, begins, inside = -2, 0, False
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not inside and line.strip("\n"):
                at, begins = at + 1, number
            if at == row:
                break
            if quoted:
                inside ^= line.count('"') % 2 == 1
    return begins


def files_of(path: Path) -> str:
    """The first few file names of a folder, for messages."""
    if path.is_file():
        return path.name
    names = sorted(entry.name for entry in path.iterdir())
    return (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "an empty folder"


def find_table(folder: Path, stem: str) -> Path | None:
    """The file `stem`.parquet, .csv ... or the folder `stem` of such files; None if there is none."""
    candidates = [folder / stem, *(folder / (stem + suffix) for suffix in SUFFIXES)]
    found = [path for path in candidates if path.exists()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise InputError(f"{folder}: {names} are both there; keep the one that holds the {stem}")
    return found[0] if found else None


def column_names(path: Path) -> list[str]:
    """Names of the columns of a table that `read_table` can read."""
    first = _parts(path)[0]
    if first.suffix == ".parquet":
        return _guarded(first, lambda: list(pq.read_schema(first).names))
    return _guarded(first, lambda: list(_open_text(first, {}).schema.names))


def read_table(path: Path, as_text: Collection[str], quoted: bool = True) -> RawTable:
    """A Parquet, CSV or TSV file, or a folder of such files in order of their names.

    Args:
        as_text: columns of a text file that are not to be guessed at: "007" stays what it is.
        quoted: whether a double quote opens a quoted value in a text file.

    Raises:
        InputError: a file is not readable or its columns are not those of the first.
    """
    files = _parts(path)
    tables = [_read_file(file, as_text, quoted) for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.schema.names != tables[0].schema.names:
            raise InputError(
                f"{file}: its columns are {', '.join(table.schema.names)}, but those of {files[0].name} are "
                f"{', '.join(tables[0].schema.names)}; all parts must have the same columns"
            )
    names = tables[0].schema.names
    if len(set(names)) < len(names):
        raise InputError(f"{path}: a column is there twice in {', '.join(names)}; rename one")
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise InputError(f"{path}: a column differs in type between the files ({error})") from error
    return RawTable(table, str(path), _tracer(files, [len(part) for part in tables], quoted))


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
    )


def missing_columns(file: str | Path, found: Sequence[str], missing: Sequence[str]) -> InputError:
    plural = "s" if len(missing) > 1 else ""
    return InputError(
        f"{file}: no column{plural} {', '.join(missing)}; found {', '.join(found)}; rename them, "
        "or say what they are called with columns in the layout events "
        "(--layout events --column user_id=customer)"
    )


def _parts(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    if not files:
        raise InputError(f"{path}: no Parquet or CSV file in this folder; found {files_of(path)}")
    return files


def _read_file(path: Path, as_text: Collection[str], quoted: bool) -> pa.Table:
    if path.suffix == ".parquet":
        return _guarded(path, lambda: pq.ParquetFile(path).read())
    types = {name: pa.string() for name in as_text}

    def read_table() -> pa.Table:
        try:
            return _open_text(path, types, quoted).read_all()
        except pa.ArrowInvalid as error:
            if "conversion error" not in str(error):
                raise
            # A type guessed from the first rows did not hold: such a column is text.
            names = _open_text(path, types, quoted).schema.names
            return _open_text(path, dict.fromkeys(names, pa.string()), quoted).read_all()

    table = _guarded(path, read_table)
    if any(pa.types.is_binary(kind) for kind in table.schema.types):  # what Arrow makes of other encodings
        raise not_utf8(path)
    return table


def _open_text(path: Path, types: dict[str, pa.DataType], quoted: bool = True) -> pa_csv.CSVStreamingReader:
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    return pa_csv.open_csv(
        path,
        read_options=pa_csv.ReadOptions(block_size=8 << 20),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if quoted else False,
            double_quote=quoted,
            newlines_in_values=quoted,
        ),
        # Only an empty cell is missing: "NA" is Namibia, and "null" may be somebody's title.
        convert_options=pa_csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )


def _guarded(path: Path, read: Callable[[], _T]) -> _T:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected a table with column names")
    with path.open("rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):  # the byte order marks of UTF-16
            raise not_utf8(path)
    try:
        return read()
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        if "invalid UTF8" in str(error):
            raise not_utf8(path) from error
        if "Empty CSV" in str(error):
            raise InputError(
                f"{path}: there is no table in it; expected a line with column names, and rows"
            ) from error
        raise InputError(f"{path}: cannot be read as a table: {error}") from error


def _tracer(files: Sequence[Path], rows: Sequence[int], quoted: bool) -> Callable[[int], str]:
    starts = [sum(rows[:number]) for number in range(len(rows))]

    def where(row: int) -> str:
        number = bisect_right(starts, row) - 1
        file, index = files[number], row - starts[number]
        if file.suffix == ".parquet":
            return f"{file} row {index + 1}"
        return f"{file} line {line_of(file, index, quoted)}"

    return where
