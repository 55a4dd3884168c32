"""A log that is read in pieces: row groups of Parquet and spans of lines of text, in the order of the source.

What all rows together decide, which types columns have and how times are written, is looked for before the
pieces are read: `PieceLook` of every piece of a text file, merged, gives the `LogForm`. A piece in that form
has the rows and types that it would have if the log were read whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import RemoteStat
from rayrec.samples.base.config import PrepareConfig, Role
from rayrec.samples.importers.column_types import ColumnTypes, joined, plain, without_nulls_type
from rayrec.samples.importers.found import FoundTables
from rayrec.samples.importers.given_splits import join_parts, with_part
from rayrec.samples.importers.roles import (
    REQUIRED,
    keep_log_apart,
    open_log,
    under_our_names,
    without_part,
)
from rayrec.samples.importers.tables import (
    PART,
    OpenTable,
    Piece,
    RawTable,
    TableFile,
    TableForm,
    typed_columns,
)
from rayrec.samples.prepare.times import TextForms

PIECE_BYTES = 64 << 20
"""Of a text file, about."""


@dataclass(frozen=True)
class LogPiece:
    """Rows of one file that are read at once."""

    section: int
    file: int
    piece: Piece
    num_rows: int | None
    """None: not known before a text file has been looked at."""


@dataclass(frozen=True)
class FileVersion:
    """What a file was when the log was opened."""

    path: Path
    bytes: int
    version: str
    """Changes when the file is rewritten."""

    @classmethod
    def of(cls, path: Path) -> FileVersion:
        found = path.stat()
        version = found.version if isinstance(found, RemoteStat) else str(found.st_mtime_ns)
        return cls(path, found.st_size, version)

    def check(self) -> None:
        """Check that the file is what it was.

        Raises:
            InputError: it has changed, or is gone.
        """
        try:
            now = FileVersion.of(self.path)
        except FileNotFoundError:
            now = None
        if now != self:
            raise InputError(
                f"{self.path}: the file has {'vanished' if now is None else 'changed'} since preparation "
                "began; prepare again when the log is complete"
            )


@dataclass(frozen=True)
class _Section:
    """A table of a log: all of it, or what is for training, validation or test."""

    table: OpenTable
    roles: Mapping[Role, str]
    part: int | None


@dataclass
class PieceLook:
    """What a piece tells of the whole log; those of all pieces merge, in any order."""

    num_rows: int = 0
    types: ColumnTypes = field(default_factory=ColumnTypes)
    times: TextForms = field(default_factory=TextForms)


@dataclass(frozen=True)
class OpenLog:
    """A log of which no row has been read; it can be pickled."""

    label: str
    """For messages."""
    sections: tuple[_Section, ...]
    pieces: tuple[LogPiece, ...]
    """In the order of the source."""
    versions: tuple[FileVersion, ...]

    @classmethod
    def open(cls, found: FoundTables, source: Path, config: PrepareConfig, piece_rows: int) -> OpenLog:
        """Open the files of a log.

        Args:
            source: where they have been found.
            piece_rows: of a piece of Parquet, about.

        Raises:
            InputError: a file cannot be read, has other columns than the first, or one is missing that a log
                needs.
        """
        parts: list[tuple[int | None, Path | Sequence[Path]]] = [(None, found.log)]  # type: ignore[list-item]
        if isinstance(found.log, Mapping):
            parts = [*found.log.items()]
        sections = tuple(_Section(*open_log(path, config), part) for part, path in parts)
        pieces = tuple(
            LogPiece(number, at, piece, num_rows)
            for number, section in enumerate(sections)
            for at, file in enumerate(section.table.files)
            for piece, num_rows in file.pieces(piece_rows, PIECE_BYTES)
        )
        versions = tuple(FileVersion.of(file.path) for section in sections for file in section.table.files)
        label = str(source) if isinstance(found.log, Mapping) else sections[0].table.label
        return cls(label, sections, pieces, versions)

    @property
    def is_divided(self) -> bool:
        return self.sections[0].part is not None

    def file(self, piece: LogPiece) -> TableFile:
        """The file that has a piece."""
        return self.sections[piece.section].table.files[piece.file]

    def check(self, piece: LogPiece) -> None:
        """Check that the piece's file is what it was when the log was opened.

        Raises:
            InputError: it is not.
        """
        path = self.file(piece).path
        next(one for one in self.versions if one.path == path).check()

    def times_are_texts(self, form: LogForm) -> bool:
        """Whether the log's times are texts, so that all of them decide how they are read."""
        return bool(pt.is_string(form.schema.field("timestamp").type))

    def look_at_footer(self, piece: LogPiece) -> PieceLook | None:
        """What is known of a piece without reading its rows; None of one of a text file."""
        file = self.file(piece)
        if piece.num_rows is None:
            return None
        look = PieceLook(piece.num_rows)
        number = min(piece.num_rows, 1)
        look.types.add(
            pa.table({name: pa.array([value] * number, pa.string()) for name, value in file.folders.items()})
        )
        return look

    def look(self, piece: LogPiece, with_times: bool, are_mixed: bool = False) -> PieceLook:
        """Look at a piece.

        Args:
            with_times: at its times, too.
            are_mixed: only count which times are numbers and which are dates.

        Raises:
            InputError: the file cannot be read, or has changed.
        """
        found, file = PieceLook(), self.file(piece)
        time = self.sections[piece.section].roles["timestamp"]
        columns = list(dict.fromkeys([*(() if are_mixed else typed_columns(file)), *([time] * with_times)]))
        for batch in file.read(columns, piece.piece):
            found.num_rows += len(batch)
            if not are_mixed:
                found.types.add(batch.select(typed_columns(file)))
            if with_times:
                texts = pa.chunked_array([batch.column(time)]).cast(pa.string())
                if are_mixed:
                    found.times.count(texts)
                else:
                    found.times.add(texts)
        self.check(piece)
        return found

    def form(self, looks: Sequence[PieceLook], config: PrepareConfig) -> LogForm:
        """What the pieces are turned into, and the number of rows of each.

        Args:
            looks: at every piece.

        Raises:
            InputError: the files have a column of two kinds.
        """
        tables, raws, names = [], {}, []
        for number, section in enumerate(self.sections):
            types = ColumnTypes()
            for piece, look in zip(self.pieces, looks, strict=True):
                if piece.section == number:
                    types.merge(look.types)
            form = section.table.form(types)
            empty = RawTable(form.schema.empty_table(), section.table.label, str, notes=form.notes)
            raw = under_our_names(empty, section.roles, REQUIRED)
            if self.is_divided:
                raw = without_part(raw)
            tables.append(form)
            raws[section.part] = raw
            names.append(tuple(raw.table.schema.names))
        if self.is_divided:
            raw = join_parts({part: one for part, one in raws.items() if part is not None}, self.label)
        before = raw.table.schema
        raw = keep_log_apart(raw, self.is_divided)
        rows = tuple(look.num_rows for look in looks)
        return LogForm(
            tuple(tables), tuple(names), before, raw.table.schema, dict(raw.names), raw.notes, rows
        )


@dataclass(frozen=True)
class LogForm:
    """The columns of a log, under our names, and how the tables in it are turned into them."""

    tables: tuple[TableForm, ...]
    names: tuple[tuple[str, ...], ...]
    """Of the columns of each table."""
    before: pa.Schema
    """Before columns gave way to those of the data set."""
    schema: pa.Schema
    sources: Mapping[str, str]
    """Our name -> the source's, of columns that were renamed."""
    notes: tuple[str, ...]
    rows: tuple[int, ...]
    """Of each piece."""

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    def first_row(self, piece: int) -> int:
        """Where a piece begins in the log."""
        return sum(self.rows[:piece])

    def read(self, log: OpenLog, piece: LogPiece) -> Iterator[pa.Table]:
        """The rows of a piece, in tables as they come.

        Raises:
            InputError: the file cannot be read.
        """
        section = log.sections[piece.section]
        file = log.file(piece)
        for batch in file.read(piece=piece.piece):
            rows = section.table.in_form(pa.Table.from_batches([batch]), self.tables[piece.section])
            rows = rows.rename_columns(list(self.names[piece.section]))
            if section.part is not None:
                rows = with_part(
                    rows.select([name for name in self.before.names if name != PART]), section.part
                )
            rows = joined([self.before.empty_table(), rows], [log.label, file.path.name], log.label)
            yield without_nulls_type(plain(rows)).rename_columns(self.schema.names)

    def where(self, log: OpenLog) -> Callable[[int], str]:
        """Where a row of the log is, for messages."""
        starts, traces = [], []
        start = 0
        for number, section in enumerate(log.sections):
            rows = [0] * len(section.table.files)
            for piece, num_rows in zip(log.pieces, self.rows, strict=True):
                if piece.section == number:
                    rows[piece.file] += num_rows
            starts.append(start)
            traces.append(section.table.where(rows))
            start += sum(rows)

        def where(row: int) -> str:
            at = bisect_right(starts, row) - 1
            return traces[at](row - starts[at])

        return where

    def row(self, log: OpenLog, row: int) -> RawTable:
        """One row of the log, read again for a message.

        Raises:
            InputError: the file cannot be read.
        """
        first = 0
        for piece, num_rows in zip(log.pieces, self.rows, strict=True):
            if row < first + num_rows:
                for rows in self.read(log, piece):
                    if row < first + len(rows):
                        return RawTable(rows.slice(row - first, 1), log.label, str)
                    first += len(rows)
            first += num_rows
        raise InputError(f"{log.label}: a file has changed since preparation began; prepare again")


def in_tables(batches: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Tables of any size as tables of about so many rows."""
    held: list[pa.Table] = []
    for rows in batches:
        held.append(rows)
        if sum(map(len, held)) >= num_rows:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)
