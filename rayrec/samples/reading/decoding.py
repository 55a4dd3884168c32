"""Row groups, decoded: what is asked of them, and what may be wrong with them.

A file is told by its size and the time or tag of its last writing, which every row group of a plan carries:
rows of a file that has changed since are nobody's.

Axes: G rows of one row group that the filters let pass.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import RemoteFolder
from rayrec.samples.base.hive import values_of_folders
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.reading.filters import Filters, filter_columns, filter_expression
from rayrec.samples.reading.sources import OnCorrupt, SourceFile, file_infos, is_of_folder

KEPT_FOOTERS = 256
"""Parsed footers that a reader holds; a few ten kilobytes each."""
_ROW = "__row"
"""Column with the row numbers of filtered rows; no column of a user's has this name."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of a certain version of a file."""

    file: int
    """Number of the file in its data set."""
    name: str
    group: int
    """Number within the file."""
    first_row: int
    """As numbered in the file."""
    total_rows: int
    num_rows: int
    """Those that the filters let pass."""
    size: int
    """Of the file, in bytes."""
    version: str


@dataclass(frozen=True)
class Preparation:
    """What is done with the rows of a row group, and where the result is kept."""

    program: FeatureProgram
    seed: int
    """Of the run, for the program's random numbers."""
    folder: str
    max_bytes: int


@dataclass(frozen=True)
class ReadSpec:
    """What readers have to know of a data set: where it is, and what is wanted of its rows."""

    folder: RemoteFolder
    schema: pa.Schema
    """Columns that are read, with their plain types."""
    all_columns: pa.Schema
    """Those that there are; filters may ask for any."""
    filters: Filters = ()
    on_corrupt: OnCorrupt = "stop"
    preparation: Preparation | None = None
    """What readers do with the rows of each row group, and keep; None: rows stay as they are."""


class CorruptGroupError(Exception):
    """A row group cannot be decoded."""


@dataclass(frozen=True)
class DecodedGroup:
    """The rows of a row group that are read, in file order."""

    group: RowGroup
    columns: list[pa.Array]
    """[G] each, in the order of `ReadSpec.schema`, of its types."""
    row_G: Int64Array
    """Their row numbers in the file."""


class GroupDecoder:
    """RowGroup -> DecodedGroup; may be called by several threads at once."""

    def __init__(self, spec: ReadSpec) -> None:
        self._spec = spec
        self._footers: OrderedDict[tuple[str, str], pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()
        self._remote = not isinstance(spec.folder.filesystem, fs.LocalFileSystem)
        self._filter = None
        self._columns = list(spec.schema.names)
        if spec.filters:
            self._filter = filter_expression(spec.filters, spec.all_columns, spec.folder.url)
            further = [name for name in filter_columns(spec.filters) if name not in self._columns]
            self._columns += further

    def check_unchanged(self, groups: Iterable[RowGroup | SourceFile]) -> None:
        """Check that files are as they were when they were planned.

        Raises:
            InputError: a file has vanished, or been written again since it was planned.
        """
        folder = self._spec.folder
        files = {group.name: group for group in groups}
        for (name, planned), info in zip(files.items(), file_infos(folder, list(files)), strict=True):
            if info.size != planned.size or folder.version_of(info) != planned.version:
                raise InputError(
                    f"{folder.shown(name)}: the file has changed since the run was planned "
                    f"({planned.size:,} bytes then, {info.size:,} now); put back what was there, "
                    "or start the run again"
                )

    def decode(self, group: RowGroup) -> DecodedGroup:
        """Read and filter a row group.

        Raises:
            CorruptGroupError: its pages cannot be decoded, or hold another number of rows than planned.
            InputError: the file has vanished or changed.
        """
        table, row_G = self._read(group, self._columns)
        if len(row_G) != group.num_rows:
            raise CorruptGroupError(f"{len(row_G):,} rows, planned were {group.num_rows:,}")
        columns = [_one_array(table[field.name], field.type) for field in self._spec.schema]
        return DecodedGroup(group, columns, row_G)

    def matching_rows(self, group: RowGroup, column: str | None = None) -> tuple[Int64Array, Int64Array]:
        """For planning: numbers of the rows that pass the filters, and lengths of their lists in `column`.

        Without a column, lengths are empty. Reads nothing but that column and those of the filters.

        Raises:
            CorruptGroupError, InputError: as for `decode`.
        """
        names = [*filter_columns(self._spec.filters), *([column] if column else [])]
        table, row_G = self._read(group, list(dict.fromkeys(names)))
        if column is None:
            return row_G, np.empty(0, dtype=np.int64)
        lengths = _one_array(table[column], self._spec.all_columns.field(column).type).value_lengths()
        return row_G, lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)

    def _read(self, group: RowGroup, columns: list[str]) -> tuple[pa.Table, Int64Array]:
        folders = values_of_folders(group.name)
        keys = [name for name in columns if is_of_folder(self._spec.all_columns.field(name))]
        columns = [name for name in columns if name not in keys]
        try:
            path = self._spec.folder.path_of(group.name)
            with self._spec.folder.filesystem.open_input_file(path) as source:
                file = self._parquet(group, source)
                table = file.read_row_group(group.group, columns=columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            self.check_unchanged([group])
            raise CorruptGroupError(str(error)) from error
        if columns and table.num_rows != group.total_rows:
            self.check_unchanged([group])
            raise CorruptGroupError(f"{table.num_rows:,} rows, the footer says {group.total_rows:,}")
        for key in keys:
            values = pa.repeat(pa.scalar(folders[key], pa.string()), group.total_rows)
            table = table.append_column(key, values) if table.num_columns else pa.table({key: values})
        row_G = np.arange(group.first_row, group.first_row + group.total_rows)
        if self._filter is not None:
            table = table.append_column(_ROW, pa.array(row_G)).filter(self._filter)
            row_G = table[_ROW].to_numpy()
        return table, row_G

    def _parquet(self, group: RowGroup, source: pa.NativeFile) -> pq.ParquetFile:
        key = (group.name, group.version)
        with self._lock:
            footer = self._footers.get(key)
        # Many small requests are what remote stores are slow at: columns are fetched together.
        file = pq.ParquetFile(source, metadata=footer, pre_buffer=self._remote)
        with self._lock:
            self._footers[key] = file.metadata
            self._footers.move_to_end(key)
            while len(self._footers) > KEPT_FOOTERS:
                self._footers.popitem(last=False)
        return file


def _one_array(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunks, or too large for one
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    return array if array.type == kind else array.cast(kind)
