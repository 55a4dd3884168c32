"""The last pass: the files of the data set, one per task, of the rows that lie in order in many files.

A file is written by one task, as its row groups follow each other in it; the task holds one of them and one
batch of what it reads. Where a row stands depends on the number of rows before it alone, so the files are
those that one process would write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from rayrec.platform.files import no_room
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset_folder import FileEntry
from rayrec.samples.dataset.manifest import EVALUATION_FILES, HISTORY_FILE, ITEMS_FILE, USERS_FILE
from rayrec.samples.prepare.distributed.spill import read_rows
from rayrec.samples.prepare.splits import SplitRows, train_file
from rayrec.samples.prepare.writer import ROWS_PER_TABLE_GROUP, RowGroupWriter, groups_per_file

Kind = Literal["train", "history", "valid", "test", "items", "users"]
FILES: dict[Kind, str] = {
    "history": HISTORY_FILE,
    "valid": EVALUATION_FILES["valid"],
    "test": EVALUATION_FILES["test"],
    "items": ITEMS_FILE,
    "users": USERS_FILE,
}


@dataclass(frozen=True)
class Stored:
    """A file with rows of the data set; such files follow each other."""

    path: Path
    rows: Mapping[Kind, int]
    """That it has for each kind of file."""


@dataclass(frozen=True)
class FilesJob:
    """What the tasks of the pass share."""

    config: PrepareConfig
    folder: Path
    """Of the data set."""
    sequences: tuple[Stored, ...]
    users: tuple[Stored, ...]
    items: tuple[Stored, ...]
    sequence_schema: pa.Schema
    users_schema: pa.Schema
    items_schema: pa.Schema


@dataclass(frozen=True)
class FileToWrite:
    """One file, and the rows of its kind that it has."""

    name: str
    kind: Kind
    first: int
    stop: int


def files_to_write(config: PrepareConfig, rows: Mapping[Kind, int]) -> list[FileToWrite]:
    """All files of the data set, the largest first.

    Args:
        rows: of each kind.
    """
    files = [FileToWrite(name, kind, 0, rows[kind]) for kind, name in FILES.items()]
    step = config.rows_per_group * groups_per_file(config.rows_per_group, config.rows_per_file)
    # Without a training row there is a file nevertheless.
    for number, first in enumerate(range(0, max(rows["train"], 1), step)):
        stop = min(first + step, rows["train"])
        files.append(FileToWrite(train_file(number), "train", first, stop))
    return files


def write_file(job: FilesJob, file: FileToWrite) -> FileEntry:
    """Write one file.

    Raises:
        NoRoomError: the disk is full.
    """
    split = SplitRows(job.sequence_schema)
    schemas: dict[Kind, pa.Schema] = {
        "train": split.train_schema,
        "history": split.history_schema,
        "valid": split.evaluation_schema,
        "test": split.evaluation_schema,
        "items": job.items_schema,
        "users": job.users_schema,
    }
    is_table = file.kind in ("items", "users")
    path = job.folder / file.name
    writer = RowGroupWriter(
        lambda number: path,
        schemas[file.kind],
        ROWS_PER_TABLE_GROUP if is_table else job.config.rows_per_group,
    )
    try:
        for rows in _rows(job, file, split):
            writer.write(rows)
        writer.close()
    except BaseException as error:
        if (full := no_room(error, job.folder.parent)) is not None:
            raise full from error
        raise
    return FileEntry.of(path, file.stop - file.first)


def _rows(job: FilesJob, file: FileToWrite, split: SplitRows) -> Iterator[pa.Table]:
    """The rows of a file, in order."""
    kind = file.kind
    stored = {"items": job.items, "users": job.users}.get(kind, job.sequences)
    before = 0
    for one in stored:
        after = before + one.rows[kind]
        if file.first < after and before < file.stop:
            at = before
            for table in read_rows(one.path):
                rows = _of_kind(table, kind, split)
                first, stop = max(file.first - at, 0), min(file.stop - at, len(rows))
                if first < stop:
                    yield rows.slice(first, stop - first)
                at += len(rows)
        before = after


def _of_kind(table: pa.Table, kind: Kind, split: SplitRows) -> pa.Table:
    if kind == "train":
        return split.training(table)
    if kind == "history":
        return split.history(table)
    if kind == "valid" or kind == "test":
        return split.targets(table, kind)
    return table
