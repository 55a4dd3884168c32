"""Writing a data set so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.platform.files import no_room
from rayrec.samples.dataset.dataset_folder import DatasetKind, FileEntry, kind_of

_UNFINISHED = "unfinished-"
_LOCK = "lock"
"""In an unfinished folder, beside what is written: held by the process that writes it."""
_TRIES = 100
"""To have a folder of one's own: only another process that begins at the same moment takes one away."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system that has no locks."""


def holds_data_set(out: Path, kind: DatasetKind) -> bool:
    """Whether a folder is there with a data set of this kind."""
    return out.is_dir() and kind_of(out) == kind


def check_target(out: Path, kind: DatasetKind, overwrite: bool) -> None:
    """Refuse a folder that holds something else.

    Raises:
        InputError: `out` is a file, a folder of something else, or a data set of another kind or one that is
            not to be replaced.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"{out}: a file of this name is there; give a new folder for the data set")
    if not any(out.iterdir()):
        return
    found = kind_of(out)
    if found is None:
        raise InputError(f"{out}: the folder is not empty and holds no data set; give a new folder")
    if found != kind:
        # Not even with overwrite: another kind of data means that the name is wrong.
        raise InputError(f"{out}: a data set of {found.rows} is there; give a new folder")
    if not overwrite:
        raise InputError(
            f"{out}: a data set is there already; give a new folder, or set overwrite (--overwrite)"
        )


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; it replaces `out` when the block ends without an error.

    After an error it is gone, and `out` is as it was. What a killed process has left is deleted by the next
    that writes `out` and sees its locks: until the machine starts again, a process there.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{out.name}.{_UNFINISHED}{_sharers_of_locks(out.parent)}-"
        _remove_abandoned(out.parent, prefix)
        begun, lock = _begin(out.parent, prefix)
    except OSError as error:
        if (full := no_room(error, out.parent)) is not None:
            raise full from error
        raise
    try:
        with lock:
            draft = begun / out.name
            draft.mkdir()
            yield draft
            put_in_place(draft, out)
    except BaseException as error:
        shutil.rmtree(begun, ignore_errors=True)
        if (full := no_room(error, out.parent)) is not None:
            raise full from error
        raise
    shutil.rmtree(begun, ignore_errors=True)


def _sharers_of_locks(folder: Path) -> str:
    """The same for processes that see each other's locks in a folder, whatever its file system.

    Some network file systems keep locks on the machine that takes them. So a machine counts until it starts
    again, not by its name, which containers share; and on it, each mount.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = secrets.token_hex()  # nobody is known to see them
    return hashlib.blake2b(f"{machine} {folder.stat().st_dev}".encode(), digest_size=6).hexdigest()


def _begin(parent: Path, prefix: str) -> tuple[Path, IO[str]]:
    """A new folder, and its lock, which this process holds.

    Raises:
        InputError: the file system gives no lock.
    """
    for _ in range(_TRIES):
        begun = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, begun, ignore_errors=True)
            lock = stack.enter_context((begun / _LOCK).open("w"))
            if _is_locked(lock):
                stack.pop_all()
                return begun, lock
            # Another process locked it before, and deletes what it takes for abandoned.
    raise InputError(
        f"{parent}: in {_TRIES} tries no new file there could be locked; give a folder on another disk"
    )


def _is_locked(lock: IO[str]) -> bool:
    """Lock a file; whether it is locked now, and still there."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        # Then nobody deletes the folder but this process.
    # By its name alone, which no other folder has: some file systems number a file that is open differently.
    try:
        os.stat(lock.name)
    except FileNotFoundError:
        return False
    return True


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete what processes that have ended before their folder was whole have left."""
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), (left / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the process had for as long as it lived
            shutil.rmtree(left, ignore_errors=True)


def put_in_place(draft: Path, out: Path) -> None:
    """Rename a folder that is whole; what was at its place is gone then."""
    draft.chmod(0o777 & ~_umask())
    if out.exists():
        # A folder cannot be renamed over a full one: move the old one aside, then delete it.
        replaced = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.replaced-"))
        out.rename(replaced / out.name)
        try:
            draft.rename(out)
        except BaseException:
            (replaced / out.name).rename(out)
            replaced.rmdir()
            raise
        shutil.rmtree(replaced)
    else:
        draft.rename(out)


class RowGroupWriter:
    """Tables of any size -> Parquet files of full row groups; where the tables are cut does not show."""

    def __init__(
        self,
        path_of: Callable[[int], Path],
        schema: pa.Schema,
        rows_per_group: int,
        rows_per_file: int | None = None,
    ) -> None:
        """
        Args:
            path_of: number of a file, from 0, -> its path.
            rows_per_file: most rows of a file, cut down to full row groups; None for a single file.
        """
        self._path_of = path_of
        self._schema = schema
        self._rows_per_group = rows_per_group
        self._groups_per_file = (
            None if rows_per_file is None else groups_per_file(rows_per_group, rows_per_file)
        )
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._groups_in_file = 0
        self._rows: dict[Path, int] = {}
        self._file: pq.ParquetWriter | None = self._open()

    def write(self, table: pa.Table) -> None:
        self._pending.append(table.cast(self._schema))
        self._pending_rows += len(table)
        if self._pending_rows >= self._rows_per_group:
            rows = pa.concat_tables(self._pending)
            full = len(rows) - len(rows) % self._rows_per_group
            for start in range(0, full, self._rows_per_group):
                self._write_group(rows.slice(start, self._rows_per_group))
            self._pending, self._pending_rows = [rows.slice(full)], len(rows) - full

    def close(self) -> dict[Path, int]:
        """Write what is left; the rows of every file."""
        if self._pending_rows:
            self._write_group(pa.concat_tables(self._pending))
        if self._file is not None:
            self._file.close()
        return self._rows

    def _open(self) -> pq.ParquetWriter:
        path = self._path_of(len(self._rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows[path] = 0
        self._groups_in_file = 0
        return pq.ParquetWriter(path, self._schema, compression="zstd")

    def _write_group(self, rows: pa.Table) -> None:
        if self._file is None:
            self._file = self._open()
        # One chunk: the pages of a group depend on its rows, not on how they arrived.
        self._file.write_table(rows.combine_chunks(), row_group_size=self._rows_per_group)
        self._rows[next(reversed(self._rows))] += len(rows)
        self._groups_in_file += 1
        if self._groups_in_file == self._groups_per_file:
            self._file.close()
            self._file = None


def groups_per_file(rows_per_group: int, rows_per_file: int) -> int:
    """Full row groups of a file that has at most so many rows, one at least."""
    return max(rows_per_file // rows_per_group, 1)


ROWS_PER_TABLE_GROUP = 1 << 20
"""Of the tables of items and users."""


def write_table(path: Path, table: pa.Table) -> FileEntry:
    """Write a table of items or users."""
    pq.write_table(table.combine_chunks(), path, row_group_size=ROWS_PER_TABLE_GROUP, compression="zstd")
    return FileEntry.of(path, len(table))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
