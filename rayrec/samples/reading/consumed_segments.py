"""Segments of a growing folder that a run has read to their end, in files that snapshots share.

    loop: take(plan, cursor, number) ─► table of what was consumed since
    writer: add(table) ─► save(folder of a snapshot): full files are linked, the last one is written

A run that follows a folder never forgets a file: what it accepted must not be accepted again, and which rows
it trained on can be looked up. But nothing of a consumed segment changes any more. So a snapshot costs what
is new, however many files there have been: full files of consumed segments are written once. They are hashed
once, too, as they are in memory: what becomes of a file later never gets a checksum of its own.

A file has one row per accepted file, with the rows that were consumed of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from rayrec.platform.errors import InputError
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.followed_plan import FollowedPlan

PREFIX = "consumed-"
FULL_ROWS = 8192
"""Accepted files that one file of ours describes at most; fewer, and the last one is written again."""
_ROWS = pa.list_(pa.int64())
SCHEMA = pa.schema(
    [
        pa.field("segment", pa.int64()),
        pa.field("num_rows", pa.int64()),
        pa.field("num_steps", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("size", pa.int64()),
        pa.field("version", pa.string()),
        pa.field("footer", pa.string()),
        pa.field("group_rows", _ROWS),
        pa.field("starts", _ROWS),
        pa.field("stops", _ROWS),
        pa.field("unreadable_starts", _ROWS),
        pa.field("unreadable_stops", _ROWS),
    ]
)


def take(plan: FollowedPlan, cursor: Cursor, first: int, stop: int) -> pa.Table:
    """Segments that were read to their end, as `SCHEMA` says; the cursor lets go of their rows."""
    consumed = cursor.take(stop)
    rows: list[dict[str, Any]] = []
    for segment, described in enumerate(plan.segments_to_json(first, stop), start=first):
        for file in described["files"]:
            read, unreadable = (
                consumed.get((segment, file["name"], kind), ([], [])) for kind in (False, True)
            )
            rows.append(
                {
                    "segment": segment,
                    "num_rows": described["num_rows"],
                    "num_steps": described["num_steps"],
                    **file,
                    "starts": read[0],
                    "stops": read[1],
                    "unreadable_starts": unreadable[0],
                    "unreadable_stops": unreadable[1],
                }
            )
    return pa.Table.from_pylist(rows, SCHEMA)


class _Content(NamedTuple):
    """Of a file."""

    content: bytes
    checksum: str
    """As `checksum_file` of snapshots computes it."""


class ConsumedSegments:
    """What snapshots of one attempt say of consumed segments. Not thread-safe."""

    def __init__(self, full_rows: int = FULL_ROWS) -> None:
        self._full_rows = full_rows
        self._full: list[_Content] = []
        self._open = SCHEMA.empty_table()
        self._saved_in: Path | None = None
        """A folder that has the full files of `_saved`."""
        self._saved: list[tuple[int, int]] = []
        self._written: list[tuple[int, int]] = []
        """Of each full file, what changes with it, see `_stamp`."""

    def add(self, consumed: pa.Table) -> None:
        """Segments that were consumed after those that are here."""
        table = pa.concat_tables([self._open, consumed])
        while table.num_rows >= self._full_rows:
            self._full.append(_content(table.slice(0, self._full_rows)))
            table = table.slice(self._full_rows)
        self._open = table.combine_chunks()

    def save(self, folder: Path) -> dict[str, str]:
        """Let a snapshot have all of them; returns checksums by file, which are not on disk yet."""
        checksums = {}
        self._written = []
        contents = [*self._full, *([_content(self._open)] if self._open else [])]
        for number, (content, checksum) in enumerate(contents):
            name = f"{PREFIX}{number:05d}.parquet"
            checksums[name] = checksum
            if not self._linked(number, name, folder):
                (folder / name).write_bytes(content)
            self._written.append(_stamp(folder / name))
        return checksums

    def _linked(self, number: int, name: str, folder: Path) -> bool:
        """Whether the file of the snapshot before could be had: not where it is gone, was changed since it
        was written, or the file system has no links."""
        if self._saved_in is None or number >= len(self._saved):
            return False
        with contextlib.suppress(OSError):
            if _stamp(self._saved_in / name) == self._saved[number]:
                os.link(self._saved_in / name, folder / name)
                return True
        return False

    def saved(self, folder: Path) -> None:
        """The snapshot is whole: the next one links its full files."""
        self._saved_in, self._saved = folder, self._written[: len(self._full)]


def read_segments(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The segments as `FollowedPlan.segments_to_json` has them.

    Raises:
        InputError: a file is none of these.
    """
    segments: list[dict[str, Any]] = []
    last = None
    for row in _rows(paths):
        if row["segment"] != last:
            last = row["segment"]
            segments.append({"files": [], "num_rows": row["num_rows"], "num_steps": row["num_steps"]})
        file = {key: row[key] for key in ("name", "size", "version", "footer", "group_rows")}
        segments[-1]["files"].append(file)
    return segments


def commit(paths: Sequence[Path], cursor: Cursor) -> None:
    """Let a cursor have the rows that were taken from it.

    Raises:
        InputError: a file is none of these, or rows are in the cursor already.
    """
    for row in _rows(paths):
        for kind, prefix in ((False, ""), (True, "unreadable_")):
            if not (starts := row[f"{prefix}starts"]):
                continue
            try:
                cursor.put_back(row["segment"], row["name"], kind, starts, row[f"{prefix}stops"])
            except ValueError as error:
                raise InputError(f"{paths[0].parent}: the cursor is damaged: {error}") from error


def _content(table: pa.Table) -> _Content:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    return _Content(content, xxhash.xxh3_128_hexdigest(content))


def _stamp(path: Path) -> tuple[int, int]:
    """(size, time of the last change) of a file; links do not change them. What a disk does to it does not
    either: then reading finds that the checksum differs."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        table = pq.read_table(path)
        if not table.schema.equals(SCHEMA):
            raise InputError(
                f"{path}: not consumed segments of a folder; found columns {', '.join(table.column_names)}"
            )
        # By columns: row by row, a folder of 100,000 files would take half a minute to open.
        columns = [_values(column.combine_chunks()) for column in table.columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(SCHEMA.names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_list(column.type):
        return list(column.to_pylist())
    flat, offsets = column.values.to_pylist(), column.offsets.to_pylist()
    return [flat[low:high] for low, high in pairwise(offsets)]
