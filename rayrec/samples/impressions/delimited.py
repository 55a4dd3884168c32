"""Text files of separated values, streamed: what does not fit into memory can be read all the same."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from rayrec.platform.errors import InputError
from rayrec.samples.importers.tables import line_of, not_utf8

_BLOCK_BYTES = 16 << 20


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

    @classmethod
    def with_header(cls, path: Path, delimiter: str, quoted: bool = True) -> DelimitedFile:
        """A file whose first line names its columns.

        Raises:
            InputError: the file is missing, empty or not in UTF-8, or names a column twice.
        """
        names = tuple(first_line(path, delimiter, quoted))
        if len(set(names)) < len(names):
            raise InputError(f"{path}: a column is there twice in {', '.join(names)}; rename one")
        return cls(path, names, True, delimiter, quoted)

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read these columns as text, in batches.

        Raises:
            InputError: a row has too many or too few values, or the file is not in UTF-8.
        """
        try:
            reader = pa_csv.open_csv(
                self.path,
                read_options=pa_csv.ReadOptions(
                    column_names=self.columns, skip_rows=int(self.has_header), block_size=_BLOCK_BYTES
                ),
                parse_options=pa_csv.ParseOptions(
                    delimiter=self.delimiter,
                    quote_char='"' if self.quoted else False,
                    double_quote=self.quoted,
                    newlines_in_values=self.quoted,
                ),
                # Only an empty cell is missing: "NA" is Namibia.
                convert_options=pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(self.columns, pa.string()),
                    include_columns=list(columns),
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
            with reader:
                yield from (batch for batch in reader if len(batch))
        except (OSError, pa.ArrowException) as error:
            if "Empty CSV" in str(error):  # a header and nothing below it
                return
            raise self._explained(error) from error

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
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with _opened(path, errors="strict") as file:
            found = next((row for row in _reader(file, delimiter, quoted) if row), None)
    except (UnicodeDecodeError, OSError, EOFError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise not_utf8(path) from error
        raise InputError(f"{path}: cannot be read: {error}") from error
    if found is None:
        raise InputError(f"{path}: the file is empty; expected rows of values")
    return found


def _reader(file: IO[str], delimiter: str, quoted: bool) -> Any:
    return csv.reader(file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)


def _opened(path: Path, errors: str = "replace") -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline="")
    return path.open(encoding="utf-8-sig", errors=errors, newline="")
