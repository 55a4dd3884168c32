"""A log of records in Parquet files that appear whole.

    any thread: reserve ─► add ─► queue, bounded ─► writer's thread: FOLDER/date=YYYY-MM-DD/part-*.parquet
                  └ False: full                         ├ fails: counted, told once, tried again later
                                                        └ rows that fit no column: left out, counted

A file is made when so many rows or seconds have come, under a name that readers pass over, and renamed;
stores of objects show whole files anyway. A process that is killed loses what is queued.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rayrec.platform.remote_files import RemoteFolder, remote_folder

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024 * 1024
RETRY_S = 5.0
"""Between attempts to write where one has failed."""

Row = Mapping[str, Any]

_UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)
"""What Arrow raises for values that are none of a column's type."""


@dataclass(frozen=True)
class LogStatus:
    """For metrics."""

    queued: int
    """Rows that are in no file yet."""
    dropped: int
    """Rows so far that `offer` had no room for, that do not fit the columns, or were left at the end."""
    rows: int
    """In files."""
    files: int
    failures: int
    """Attempts to write so far that failed."""
    newest_age_s: float
    """Since the newest file, or since the log was opened."""


class ParquetLog:
    """Takes rows from any thread."""

    def __init__(
        self,
        folder: str,
        schema: pa.Schema,
        roll_s: float,
        roll_rows: int = 100_000,
        max_queued: int = 200_000,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """
        Args:
            folder: path or URL.
            roll_s: oldest that a row gets before it is in a file.
            max_queued: rows, those that are being written included.
            max_bytes: of texts in these, above which `offer` has no room; from half of it on, they are due.

        Raises:
            InputError: nobody knows the folder's scheme.
        """
        self._folder: RemoteFolder = remote_folder(folder)
        self._schema, self._clock, self._retry_s = schema, clock, retry_s
        self._roll_s, self._roll_rows, self._max_queued = roll_s, roll_rows, max_queued
        self._rows: list[Row] = []
        self._since = 0.0
        """When the oldest row came."""
        self._reserved = self._writing = self._bytes = 0
        self._max_bytes = max_bytes
        self._dropped = self._num_rows = self._files = self._failures = 0
        self._newest = clock()
        self._is_closed = self._is_failing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="parquet-log", daemon=True)
        self._thread.start()

    def reserve(self, num_rows: int) -> bool:
        """Keep room for rows that will be added, or given back by `release`; False: there is none."""
        with self._changed:
            held = len(self._rows) + self._writing + self._reserved
            if self._is_closed or held + num_rows > self._max_queued:
                return False
            self._reserved += num_rows
            return True

    def release(self, num_rows: int) -> None:
        """Give back room that was reserved."""
        with self._changed:
            self._reserved -= num_rows

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows that room was reserved for; a column that a row lacks is null."""
        with self._changed:
            self._reserved -= len(rows)
            if self._is_closed:
                self._dropped += len(rows)
                return
            if not self._rows:
                self._since = self._clock()
            self._rows.extend(rows)
            self._bytes += sum(map(_size, rows))
            self._changed.notify()

    def offer(self, row: Row) -> None:
        """Take a row if there is room, else count it as dropped."""
        with self._changed:
            has_room = self._bytes + _size(row) <= self._max_bytes
        if has_room and self.reserve(1):
            self.add([row])
        else:
            with self._changed:
                self._dropped += 1

    @property
    def status(self) -> LogStatus:
        with self._changed:
            return LogStatus(
                queued=len(self._rows) + self._writing,
                dropped=self._dropped,
                rows=self._num_rows,
                files=self._files,
                failures=self._failures,
                newest_age_s=self._clock() - self._newest,
            )

    def close(self) -> None:
        """Write what is left, and end the thread. What cannot be written is counted and told."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and not self._is_due():
                    left = self._roll_s - (self._clock() - self._since) if self._rows else None
                    self._changed.wait(left if left is None else max(left, 0.01))
                rows, self._rows = self._rows[: self._roll_rows], self._rows[self._roll_rows :]
                self._writing = len(rows)
                is_closed = self._is_closed
            if not rows:
                return
            written = self._written(rows)
            with self._changed:
                self._writing = 0
                if written is not None:
                    self._files += written > 0
                    self._num_rows += written
                    self._dropped += len(rows) - written
                    self._bytes -= sum(map(_size, rows))
                    self._newest = self._clock()
                elif is_closed:
                    self._dropped += len(rows)
                    self._bytes -= sum(map(_size, rows))
                else:
                    self._rows = rows + self._rows
                    self._changed.wait_for(lambda: self._is_closed, self._retry_s)

    def _is_due(self) -> bool:
        if not self._rows:
            return False
        if len(self._rows) >= self._roll_rows or self._bytes >= self._max_bytes // 2:
            return True
        return self._clock() - self._since >= self._roll_s

    def _written(self, rows: list[Row]) -> int | None:
        """Rows that are in a file now; None: it could not be written, and all of them wait."""
        try:
            table = self._table(rows)
            if table.num_rows:
                self._write(table)
        except Exception as error:  # a disk, a network, a token that is over: the service answers on
            with self._changed:
                self._failures += 1
            if not self._is_failing:
                shown = self._folder.url
                logger.warning("%s: cannot be written (%s); %d rows wait", shown, error, len(rows))
            self._is_failing = True
            return None
        if self._is_failing:
            logger.warning("%s: can be written again", self._folder.url)
        self._is_failing = False
        return int(table.num_rows)

    def _table(self, rows: list[Row]) -> pa.Table:
        """The rows that fit the columns: one that does not would never, and is not to hold up the others."""
        try:
            return pa.Table.from_pylist(rows, schema=self._schema)
        except _UNFIT as error:
            fit = [row for row in rows if self._fits(row)]
            logger.warning(
                "%s: %d rows do not fit its columns (%s)", self._folder.url, len(rows) - len(fit), error
            )
            return pa.Table.from_pylist(fit, schema=self._schema)

    def _fits(self, row: Row) -> bool:
        try:
            pa.Table.from_pylist([row], schema=self._schema)
        except _UNFIT:
            return False
        return True

    def _write(self, table: pa.Table) -> None:
        now = datetime.now(UTC)
        day = f"date={now:%Y-%m-%d}"
        name = f"part-{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:12]}.parquet"
        files = self._folder.filesystem
        if isinstance(files, fs.LocalFileSystem):
            # Rows name users: nobody but the owner and the group, as the umask has it, is to read them.
            os.makedirs(self._folder.path_of(day), exist_ok=True)
            _not_for_others(Path(self._folder.path_of(day)))
        else:
            files.create_dir(self._folder.path_of(day), recursive=True)
        final = self._folder.path_of(f"{day}/{name}")
        # What a rename would copy is whole as soon as it shows; elsewhere a file grows before one's eyes.
        begun = self._folder.path_of(f"{day}/.{name}") if isinstance(files, fs.LocalFileSystem) else final
        try:
            with files.open_output_stream(begun) as out:
                if begun != final:
                    _not_for_others(Path(begun))
                pq.write_table(table, out)
            if begun != final:
                files.move(begun, final)
        except BaseException:
            self._remove(begun)
            raise

    def _remove(self, path: str) -> None:
        try:
            self._folder.filesystem.delete_file(path)
        except OSError:
            logger.debug("%s was not there", path)


def _size(row: Row) -> int:
    """Bytes of its texts, near enough; the rest of a row is small."""
    size = 0
    for value in row.values():
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, list):
            size += sum(len(one) for one in value if isinstance(one, str | bytes))
    return size


def _not_for_others(path: Path) -> None:
    path.chmod(path.stat().st_mode & 0o770)
