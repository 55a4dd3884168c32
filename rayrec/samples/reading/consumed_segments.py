"""Segments of a growing folder that a run has read to their end, in files that snapshots share.

    loop: take(plan, cursor, number) ─► table of what was consumed since
    writer: add(table) ─► save(folder of a snapshot): full files are linked, the last one is written

A run that follows a folder never forgets a file: what it accepted must not be accepted again, and which rows
it trained on can be looked up. But nothing of a consumed segment changes any more. So a snapshot costs what
is new, however many files there have been: full files of consumed segments are written once, and compared.

A file has one row per accepted file, with the rows that were consumed of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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


class ConsumedSegments:
    """What snapshots of one attempt say of consumed segments. Not thread-safe."""

    def __init__(self, full_rows: int = FULL_ROWS) -> None:
        self._full_rows = full_rows
        self._full: list[bytes] = []
        self._open = SCHEMA.empty_table()
        self._saved_in: Path | None = None
        """A folder that has the first `_num_saved` full files."""
        self._num_saved = 0

    def add(self, consumed: pa.Table) -> None:
        """Segments that were consumed after those that are here."""
        table = pa.concat_tables([self._open, consumed])
        while table.num_rows >= self._full_rows:
            self._full.append(_content(table.slice(0, self._full_rows)))
            table = table.slice(self._full_rows)
        self._open = table.combine_chunks()

    def save(self, folder: Path) -> list[str]:
        """Let a snapshot have all of them; returns the names of the files, which are not on disk yet."""
        names = []
        for number, content in enumerate([*self._full, *([_content(self._open)] if self._open else [])]):
            names.append(f"{PREFIX}{number:05d}.parquet")
            path = folder / names[-1]
            if self._saved_in is not None and number < min(self._num_saved, len(self._full)):
                with contextlib.suppress(OSError):  # it was deleted, or the file system has no links
                    os.link(self._saved_in / names[-1], path)
                    if path.read_bytes() == content:
                        continue
                    path.unlink()  # damaged meanwhile: its snapshot is lost, and this one is not to be
            path.write_bytes(content)
        return names

    def saved(self, folder: Path) -> None:
        """The snapshot is whole: the next one links its full files."""
        self._saved_in, self._num_saved = folder, len(self._full)


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


def _content(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


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
