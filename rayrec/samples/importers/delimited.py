"""Text files of separated values, streamed as text: how a file is written is found out before a row is read.

A double quote opens a quoted value in most such files and is an ordinary sign in others, where one that
never closes would swallow the rows after it. `DelimitedFile.detect` decides by lexing the file once, and only
where it has a double quote at all; the reader then holds the number of its rows against the lexer's.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.csv as pa_csv

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import RemotePath

_BLOCK_BYTES = 16 << 20
_DELIMITERS = (",", "\t", ";", "|")
"""What separates values; among equally frequent ones the earlier wins."""
_LARGEST_VALUE = 1 << 30
"""Bytes of a value, for Python's lexer, which stops at 128 KiB otherwise."""


@dataclass(frozen=True)
class DelimitedFile:
    """One file; every value is read as a text, so that "007" stays what it is."""

    path: Path
    columns: tuple[str, ...]
    """Names in the order of the file."""
    has_header: bool
    delimiter: str
    quoted: bool
    """Whether a double quote opens a quoted value."""
    num_rows: int | None = None
    """Rows that the lexer found; None where the file did not have to be lexed."""
    notes: tuple[str, ...] = field(default=())
    """What is unusual about how the file is written, for the report."""
    header_lines: int = 1
    """Lines up to the end of the header, if there is one: blank ones may stand before it."""

    @classmethod
    def detect(
        cls,
        path: Path,
        names: Sequence[str] | None = None,
        delimiter: str | None = None,
        quoted: bool | None = None,
    ) -> DelimitedFile:
        """Find out how a file is written.

        Args:
            names: of the columns of a file without a header.
            delimiter: None: the most frequent of the usual ones in the first line.
            quoted: None: whether it is, if every value can then be read; see the module.

        Raises:
            InputError: the file is missing, empty or not in UTF-8, names a column twice, has another number
                of columns than `names`, or a quoted value in it does not end.
        """
        delimiter = delimiter or _likely_delimiter(path)
        first, header_lines = _first_row(path, delimiter, quoted is not False)
        if names is not None and len(names) != len(first):
            raise InputError(
                f"{path} line 1: {len(first)} values separated by {delimiter!r}, but {len(names)} names "
                f"are given ({', '.join(names)}); give one name for each column"
            )
        columns = tuple(names or (name.strip() for name in first))
        if len(set(columns)) < len(columns):
            raise InputError(f"{path}: a column is there twice in {', '.join(columns)}; rename one")
        notes = []
        if delimiter != ("\t" if ".tsv" in path.suffixes else ","):
            notes.append(f"values separated by {delimiter!r}")
        num_rows = None
        if quoted is None:
            quoted, num_rows = _quoting(path, delimiter, len(columns))
            if num_rows is not None and names is None:
                num_rows -= 1
            if not quoted and num_rows is not None:
                notes.append("double quotes are ordinary signs, since some are not closed")
        return cls(path, columns, names is None, delimiter, quoted, num_rows, tuple(notes), header_lines)

    def spans(self, num_bytes: int) -> list[tuple[int, int]]:
        """The file in spans of whole lines, (first byte, byte after the last), of about so many bytes each.

        One that is packed, or in which a value may reach over the end of a line, is a single span.
        """
        size = self.path.stat().st_size
        if self.quoted or self.path.suffix == ".gz":
            return [(0, size)]
        starts = [0]
        with self.path.open("rb") as file:
            while starts[-1] + num_bytes < size:
                file.seek(starts[-1] + num_bytes)
                file.readline()
                starts.append(file.tell())
        stops = [*starts[1:], size]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def read(
        self, columns: Sequence[str] | None = None, span: tuple[int, int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read these columns, or all, as text, in batches.

        Args:
            span: one of `spans`; None: the whole file.

        Raises:
            InputError: a row has too many or too few values, or the file is not in UTF-8.
        """
        seen = 0
        source: Path | pa.NativeFile = self.path
        if isinstance(self.path, RemotePath):  # unpacked, too
            source = self.path.filesystem.open_input_stream(self.path.path)
        if span is not None and span != (0, self.path.stat().st_size):
            with self.path.open("rb") as file:
                file.seek(span[0])
                source = pa.BufferReader(file.read(span[1] - span[0]))
        is_first = span is None or span[0] == 0
        try:
            reader = pa_csv.open_csv(
                source,
                read_options=pa_csv.ReadOptions(
                    column_names=self.columns,
                    skip_rows=self.header_lines if self.has_header and is_first else 0,
                    block_size=_BLOCK_BYTES,
                ),
                parse_options=pa_csv.ParseOptions(
                    delimiter=self.delimiter,
                    quote_char='"' if self.quoted else False,
                    double_quote=self.quoted,
                    newlines_in_values=self.quoted,
                ),
                # Only an empty cell is missing: "NA" is Namibia, and "null" may be somebody's title.
                convert_options=pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(self.columns, pa.string()),
                    include_columns=None if columns is None else list(columns),
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
            with reader:
                for batch in reader:
                    seen += len(batch)
                    if len(batch):
                        yield batch
        except (OSError, EOFError, pa.ArrowException) as error:
            # What Arrow says of a header and nothing below it, without and with a line end.
            if not any(text in str(error) for text in ("Empty CSV", "Could not skip initial")):
                raise self._explained(error) from error
        if self.num_rows is not None and seen != self.num_rows:
            raise InputError(
                f"{self.path}: {seen:,} rows were read of {self.num_rows:,} that are there; its double "
                "quotes are ambiguous, write the file again with every quote in a value doubled"
            )

    def where(self, row: int) -> str:
        return f"{self.path} line {line_of(self.path, row if self.has_header else row - 1, self.quoted)}"

    def _explained(self, error: Exception) -> InputError:
        if "invalid UTF8" in str(error):
            return not_utf8(self.path)
        if "columns, got" in str(error) and (found := self._row_of_wrong_width()) is not None:
            line, width = found
            return InputError(
                f"{self.path} line {line}: {width} values, expected {len(self.columns)} separated by "
                f"{self.delimiter!r}; mend or remove the line"
            )
        return InputError(f"{self.path}: cannot be read as a table: {error}")

    def _row_of_wrong_width(self) -> tuple[int, int] | None:
        """The first line, from 1, that has another number of values than there are columns, and theirs."""
        with _opened(self.path) as file:
            rows = _reader(file, self.delimiter, self.quoted)
            for row in rows:
                if row and len(row) != len(self.columns):
                    return rows.line_num, len(row)
        return None


def first_line(path: Path, delimiter: str, quoted: bool = True) -> list[str]:
    """The values of the first line of a file.

    Raises:
        InputError: the file is missing, empty or not in UTF-8.
    """
    return _first_row(path, delimiter, quoted)[0]


def _first_row(path: Path, delimiter: str, quoted: bool) -> tuple[list[str], int]:
    """The values of the first line that is not blank, and how many lines end with it."""

    def read(file: IO[str]) -> tuple[list[str], int] | None:
        rows = _reader(file, delimiter, quoted)
        return next(((row, rows.line_num) for row in rows if row), None)

    values, num_lines = _first(path, read)
    return values, num_lines


def line_of(path: Path, row: int, quoted: bool) -> int:
    """Line, from 1, at which a row below the header begins: blank lines are no rows, and a quoted value
    may have several. It reads the file up to there, which only a message is worth."""
    at, begins, inside = -2, 0, False
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not inside and line.strip("\r\n"):
                at, begins = at + 1, number
            if at == row:
                break
            if quoted:
                inside ^= line.count('"') % 2 == 1
    return begins


def not_utf8(path: Path) -> InputError:
    return InputError(f"{path}: not in UTF-8; save it in this encoding")


def _likely_delimiter(path: Path) -> str:
    """The most frequent of the usual signs between values in the first line, or that of the suffix."""
    usual = "\t" if ".tsv" in path.suffixes else ","
    line = _first(path, lambda file: next((line for line in file if line.strip("\r\n")), None))
    line = re.sub(r'"[^"]*"', "", line)  # a name such as "price, EUR"
    counts = {delimiter: line.count(delimiter) for delimiter in _DELIMITERS}
    if usual == "\t" and counts["\t"]:
        return usual
    best = max(_DELIMITERS, key=counts.__getitem__)
    return best if counts[best] else usual


def _quoting(path: Path, delimiter: str, num_columns: int) -> tuple[bool, int | None]:
    """Whether a double quote opens a quoted value, and the number of records, the header's included.

    Read with quotes, every value has to end where the standard says (RFC 4180). If one does not, and every
    single line has all columns, quotes are ordinary signs of this file.

    Raises:
        InputError: neither reading gives every row, or both do, with other rows.
    """
    if not _has_quote(path):
        return False, None
    limit = csv.field_size_limit(_LARGEST_VALUE)
    try:
        with _opened(path) as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            num_rows = first_long = before = opened_at = 0
            fault = ""
            try:
                for row in rows:
                    num_rows += bool(row)
                    if rows.line_num > before + 1 and any("\n" in value for value in row):
                        first_long = first_long or before + 1
                    before = rows.line_num
            except csv.Error:
                opened_at, fault = before + 1, "a double quote that is not closed, or not before a delimiter"
        if not fault and not first_long:
            return True, num_rows
        lines = _lines_of_width(path, delimiter, num_columns)
        if fault and lines is not None:
            return False, lines
        if not fault and lines is None:
            return True, num_rows
        if not fault:
            raise InputError(
                f"{path} line {first_long}: a value in double quotes reaches over the end of the line, but "
                "every line by itself has all columns, so rows may be lost; write the table as Parquet, or "
                "without line ends inside values"
            )
        raise InputError(
            f"{path} line {opened_at}: {fault}; write a quote inside a value twice and put such a value in "
            "quotes"
        )
    finally:
        csv.field_size_limit(limit)


def _lines_of_width(path: Path, delimiter: str, num_columns: int) -> int | None:
    """Number of lines that are not blank, if each has the columns without any quoting."""
    lines = 0
    with _opened(path) as file:
        for line in file:
            if line.strip("\r\n"):
                lines += 1
                if line.count(delimiter) != num_columns - 1:
                    return None
    return lines


def _has_quote(path: Path) -> bool:
    try:
        with _opened_binary(path) as file:
            while block := file.read(_BLOCK_BYTES):
                if b'"' in block:
                    return True
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return False


def _first(path: Path, read: Any) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected a table with column names")
    try:
        with _opened_binary(path) as binary:
            if binary.read(2) in (b"\xff\xfe", b"\xfe\xff"):  # the byte order marks of UTF-16
                raise not_utf8(path)
        with _opened(path, errors="strict") as file:
            found = read(file)
    except (UnicodeDecodeError, OSError, EOFError, csv.Error) as error:
        if isinstance(error, UnicodeDecodeError):
            raise not_utf8(path) from error
        raise InputError(f"{path}: cannot be read as a table: {error}") from error
    if found is None:
        raise InputError(f"{path}: there is no table in it; expected a line with column names, and rows")
    return found


def _reader(file: IO[str], delimiter: str, quoted: bool) -> Any:
    return csv.reader(file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)


def _opened(path: Path, errors: str = "replace") -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path.open("rb"), "rt", encoding="utf-8-sig", errors=errors, newline="")
    return path.open(encoding="utf-8-sig", errors=errors, newline="")


def _opened_binary(path: Path) -> IO[bytes]:
    file: IO[bytes] = path.open("rb")
    return cast(IO[bytes], gzip.open(file, "rb")) if path.suffix == ".gz" else file
