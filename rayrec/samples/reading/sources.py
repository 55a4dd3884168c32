"""A folder of Parquet files, opened: which files, which row groups, which columns.

    listing ─► footers, in parallel ─► one schema for all of them

Nothing is decoded. Names are below the folder; those with a part that starts with `_` or `.` (of writers
that are not done, of logs) are nobody's rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import RemoteFolder, remote_folder
from rayrec.samples.base.hive import values_of_folders

OnCorrupt = Literal["stop", "skip"]
"""What to do about a file or row group that cannot be decoded: stop, or leave it out and count it."""

FOOTER_THREADS = 16
_TAIL_BYTES = 65_536
"""Read in one request; longer footers take another one."""
_MAGIC = b"PAR1"


class UnreadableFooterError(Exception):
    """The end of a file is not that of a Parquet file: it is damaged, or not written to its end yet."""


@dataclass(frozen=True)
class SourceFile:
    """One file, as its footer describes it."""

    name: str
    """Below the folder."""
    size: int
    """In bytes."""
    version: str
    """Time or tag of its last writing, as the file system tells it."""
    footer: str
    """Hex sha256 of its footer: the same wherever the file is copied to."""
    group_rows: tuple[int, ...]
    """Rows of each row group."""

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)


@dataclass(frozen=True)
class ParquetSource:
    """Files that have one schema; a file's number is its index in `files`."""

    folder: RemoteFolder
    files: tuple[SourceFile, ...]
    schema: pa.Schema
    """Columns and their plain types (see `plain_type`)."""
    unreadable: tuple[str, ...] = ()
    """Names of files that are left out, since their footers cannot be read."""

    @classmethod
    def open(cls, url: str | Path, on_corrupt: OnCorrupt = "stop") -> ParquetSource:
        """All Parquet files below a folder, by name.

        Raises:
            InputError: the folder is missing or holds no Parquet, a footer cannot be read, or the files
                differ in a column.
        """
        folder = remote_folder(url)
        listed = list_files(folder)
        if not listed:
            raise InputError(
                f"{url}: no Parquet files; files have to end in .parquet, and no part of their names "
                "may start with '_' or '.'"
            )
        return cls.of_files(folder, listed, on_corrupt)

    @classmethod
    def of_names(cls, url: str | Path, names: Sequence[str]) -> ParquetSource:
        """Certain files of a folder.

        Raises:
            InputError: as for `open`, or one of them is missing.
        """
        folder = remote_folder(url)
        return cls.of_files(folder, dict(zip(names, file_infos(folder, names), strict=True)))

    @classmethod
    def of_files(
        cls, folder: RemoteFolder, infos: dict[str, fs.FileInfo], on_corrupt: OnCorrupt = "stop"
    ) -> ParquetSource:
        """A source of these files, whose footers are read.

        Raises:
            InputError: a footer cannot be read (and `on_corrupt` is `stop`), or the files differ in a column.
        """
        footers = read_footers(folder, infos)
        unreadable = [name for name, footer in footers.items() if isinstance(footer, UnreadableFooterError)]
        if unreadable and on_corrupt == "stop":
            raise InputError(
                f"{folder.shown(unreadable[0])}: not a readable Parquet file, it may be truncated "
                f"({footers[unreadable[0]]}); write it again, or allow it to be skipped (on_corrupt)"
            )
        read = [footer for footer in footers.values() if not isinstance(footer, UnreadableFooterError)]
        if not read:
            raise InputError(f"{folder.url}: none of its {len(infos)} Parquet files is readable")
        first_file, _ = read[0]
        # Files in folders `key=value` beside others that are in none: nobody can ask for the key.
        shared = set.intersection(*(set(found.names) for _, found in read))
        schema, *others = (
            pa.schema([field for field in found if field.name in shared or not is_of_folder(field)])
            for _, found in read
        )
        outside = {
            f"{_OUTSIDE}{name}": next(file.name for file, without in read if name not in without.names)
            for name in {field.name for _, found in read for field in found if is_of_folder(field)} - shared
        }
        schema = schema.with_metadata(outside or None)
        for (file, _), found in zip(read[1:], others, strict=True):
            check_same_columns(folder, file.name, found, first_file.name, schema)
        return cls(folder, tuple(file for file, _ in read), schema, tuple(unreadable))

    @property
    def fingerprint(self) -> str:
        """Hex sha256 of names and content, as far as footers tell it."""
        content = [(file.name, file.size, file.footer) for file in self.files]
        return hashlib.sha256(repr(content).encode()).hexdigest()


_OF_FOLDER = {b"rayrec": b"folder"}
_OUTSIDE = "rayrec.outside."
"""Before a key of folders that only some files have: in the schema's metadata, the name of one without."""


def is_of_folder(field: pa.Field) -> bool:
    """Whether a column is in no file: the folders `key=value` around the files give it."""
    return (field.metadata or {}).items() >= _OF_FOLDER.items()


def found_columns(schema: pa.Schema, wanted: str) -> str:
    """What an error says where a column is not there: the others, and a file that lacks the key."""
    found = f"found {', '.join(schema.names)}"
    file = (schema.metadata or {}).get(f"{_OUTSIDE}{wanted}".encode())
    return found if file is None else f"{found}; {file.decode()} is in no folder '{wanted}=...', others are"


def columns_of_files(schema: pa.Schema) -> list[str]:
    """Names of the columns that are in the files; those of folders are read where they are asked for."""
    return [field.name for field in schema if not is_of_folder(field)]


def columns_of(schema: pa.Schema, names: Iterable[str], source: str) -> pa.Schema:
    """Some columns, in the order given.

    Raises:
        InputError: there is no such column, or two of one name.
    """
    names = list(names)
    for name in names:
        if name not in schema.names:
            raise InputError(f"{source}: no column {name!r}; {found_columns(schema, name)}")
        if schema.names.count(name) > 1:
            raise _there_twice(source, name, schema)
    return pa.schema([schema.field(name) for name in names])


def _there_twice(where: str, name: str, schema: pa.Schema) -> InputError:
    names = ", ".join(schema.names)
    return InputError(f"{where}: column {name!r} is there twice in {names}; rename one")


def list_files(folder: RemoteFolder) -> dict[str, fs.FileInfo]:
    """The Parquet files below a folder, by name, sorted.

    Raises:
        InputError: there is no such folder, or it cannot be listed.
    """
    try:
        infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=True))
    except OSError as error:
        raise InputError(f"{folder.url}: the folder cannot be listed ({error})") from error
    start = len(folder.path.rstrip("/")) + 1
    found = {info.path[start:]: info for info in infos if info.type == fs.FileType.File}
    return {
        name: found[name]
        for name in sorted(found)
        if name.endswith(".parquet") and not any(part.startswith(("_", ".")) for part in name.split("/"))
    }


def file_infos(folder: RemoteFolder, names: Sequence[str]) -> list[fs.FileInfo]:
    """Sizes and modification times of files.

    Raises:
        InputError: one of the files is missing.
    """
    infos = folder.filesystem.get_file_info([folder.path_of(name) for name in names])
    for name, info in zip(names, infos, strict=True):
        if info.type != fs.FileType.File:
            raise InputError(
                f"{folder.shown(name)}: the file is missing; has it been removed since the run was planned?"
            )
    return list(infos)


def read_footers(
    folder: RemoteFolder, infos: dict[str, fs.FileInfo]
) -> dict[str, tuple[SourceFile, pa.Schema] | UnreadableFooterError]:
    """By name, in the order given: the file and its columns, or why its footer cannot be read.

    Raises:
        InputError: the file system fails.
    """

    def read(name: str) -> tuple[SourceFile, pa.Schema] | UnreadableFooterError:
        try:
            return _read_footer(folder, name, infos[name])
        except UnreadableFooterError as error:
            return error

    with ThreadPoolExecutor(FOOTER_THREADS) as threads:
        return dict(zip(infos, threads.map(read, infos), strict=True))


def _read_footer(folder: RemoteFolder, name: str, info: fs.FileInfo) -> tuple[SourceFile, pa.Schema]:
    size = info.size
    try:
        with folder.filesystem.open_input_file(info.path) as file:
            tail = file.read_at(min(size, _TAIL_BYTES), max(size - _TAIL_BYTES, 0))
            length = int.from_bytes(tail[-8:-4], "little") + 8
            if len(tail) < length <= size:
                tail = file.read_at(length, size - length)
    except OSError as error:
        raise InputError(f"{folder.shown(name)}: the file cannot be read ({error})") from error
    if tail[-4:] != _MAGIC or not 12 <= length <= size:
        raise UnreadableFooterError(f"its last bytes are not those of a Parquet file of {size:,} bytes")
    footer = tail[-length:]
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise UnreadableFooterError(str(error)) from error
    groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    version = folder.version_of(info)
    file_ = SourceFile(name, size, version, hashlib.sha256(footer).hexdigest(), groups)
    fields = [pa.field(field.name, plain_type(field.type)) for field in schema]
    # Some writers keep a folder's key in the file, too.
    keys = [key for key in values_of_folders(name) if key not in schema.names]
    return file_, pa.schema([*fields, *(pa.field(key, pa.string(), metadata=_OF_FOLDER) for key in keys)])


def plain_type(found: pa.DataType) -> pa.DataType:
    """A type without what depends on the writer: names and nullability of elements, dictionaries."""
    if pa.types.is_dictionary(found):
        return plain_type(found.value_type)
    if pa.types.is_list(found):
        return pa.list_(plain_type(found.value_type))
    if pa.types.is_large_list(found):
        return pa.large_list(plain_type(found.value_type))
    if pa.types.is_struct(found):
        return pa.struct([(field.name, plain_type(field.type)) for field in found.fields])
    return found


def check_same_columns(
    folder: RemoteFolder, name: str, found: pa.Schema, first_name: str, first: pa.Schema
) -> None:
    """Check that a file has the columns of the first one, also those that nobody reads or could read.

    Raises:
        InputError: names the file, the column and both types. The order of columns may differ.
    """
    here, rule = folder.shown(name), "all files of a data set must have one schema"
    for column in dict.fromkeys(first.names):
        expected, given = _types_of(first, column), _types_of(found, column)
        if not given:
            raise InputError(
                f"{here}: no column {column!r}, which {first_name} has ({expected[0]}); "
                f"found {', '.join(found.names)}; {rule}"
            )
        if len(given) != len(expected):
            where, schema = (here, found) if len(given) > len(expected) else (folder.shown(first_name), first)
            raise _there_twice(where, column, schema)
        for here_is, there_is in zip(given, expected, strict=True):
            if here_is != there_is:
                raise InputError(
                    f"{here}: column {column!r} is {here_is}, in {first_name} it is {there_is}; {rule}"
                )
    for field in found:
        if field.name not in first.names:
            raise InputError(f"{here}: column {field.name!r} ({field.type}) is not in {first_name}; {rule}")


def _types_of(schema: pa.Schema, column: str) -> list[pa.DataType]:
    """Of all columns of a name."""
    return [schema.field(number).type for number in schema.get_all_field_indices(column)]
