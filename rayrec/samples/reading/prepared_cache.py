"""Decoded and prepared row groups on local disk, found by what they were made of.

The key of an entry is a hash of all that its rows depend on: there is nothing to be invalidated, and an
entry that is no longer asked for is removed first. Any number of processes of one machine share a
folder:

    <key>.arrow   an Arrow IPC file and a checksum; appears whole or not at all, by renaming
    .<...>.tmp    one that is being written
    ledger        bytes that all of these take; its lock is held while they are counted or removed

Nothing that can happen to the disk stops a run: what cannot be read or kept is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrec.platform.errors import InputError

FORMAT = 1
"""Of the files; part of every key."""
_CHECKSUM_BYTES = 4
_ABANDONED_S = 3600.0
"""Age at which a file that is being written is one whose writer is no more."""
_ROOM = 16
"""One part in so many of the cache is made free at a time, so that few entries need a look at the folder."""


def cache_key(*parts: Any) -> str:
    """Hex sha256 of parts that JSON can write: the identity of a file, its row group, the columns, ...

    A part may be nested, and its type counts: 1 is not "1".
    """
    described = json.dumps([FORMAT, *parts], sort_keys=True, allow_nan=False)
    return hashlib.sha256(described.encode()).hexdigest()


@dataclass
class CacheCounts:
    """What has happened to the cache in this process."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Entries that were not as written; they count as misses too."""
    not_kept: int = 0
    """Batches that the disk did not take: it is full, or they are larger than the whole cache."""
    removed: int = 0
    """Entries that made room for others."""


class PreparedCache:
    """Key -> record batch, on at most so many bytes of disk; least recently used entries go first.

    Counts are of this process alone. An object is for one thread, the folder for any number.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        """
        Args:
            folder: on a local disk; made if it is not there, and for nothing else.

        Raises:
            InputError: there cannot be such a folder.
        """
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.counts = CacheCounts()
        self.last_error: str | None = None
        """Why a batch was last not kept."""
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._ledger() as ledger:
                ledger.taken = None  # whatever it says: a process may have ended before it wrote
                self._make_room(ledger, 0)
        except OSError as error:
            raise InputError(
                f"{self._folder}: cannot hold the cache of prepared rows ({error}); name a folder on a local "
                "disk that can be written to"
            ) from error

    def get(self, key: str) -> pa.RecordBatch | None:
        """The batch of this key over memory-mapped, read-only buffers; None if there is none.

        A file that is not as it was written is removed.
        """
        path = self._path(key)
        try:
            with pa.memory_map(str(path)) as file:
                batch = _deserialized(key, file.read_buffer())
        except FileNotFoundError:
            self.counts.misses += 1
            return None
        except (OSError, pa.ArrowException):
            self._remove_damaged(path)
            return None
        self.counts.hits += 1
        now = time.time_ns()
        with suppress(OSError):  # removed meanwhile, which the mapping outlives
            os.utime(path, ns=(now, now))
        return batch

    def put(self, key: str, batch: pa.RecordBatch) -> bool:
        """Keep a batch, replacing any under its key; returns whether the disk took it."""
        content = _serialized(batch)
        size = len(content) + _CHECKSUM_BYTES
        if size > self._max_bytes:
            return self._not_kept(f"a batch of {size} bytes does not fit into {self._max_bytes}")
        path = self._path(key)
        temporary = self._folder / f".{key}.{uuid.uuid4().hex}.tmp"
        try:
            with self._ledger() as ledger:
                self._make_room(ledger, size)
                # As large as it will be from the start, so that others who look count all of it.
                temporary.touch()
                os.truncate(temporary, size)
            with open(temporary, "r+b") as file:
                file.write(content)
                file.write(_checksum(key, content))
            with self._ledger() as ledger:
                replaced = _bytes_of(path)
                os.replace(temporary, path)
                ledger.add(-replaced)
        except OSError as error:
            with suppress(OSError), self._ledger() as ledger:
                ledger.add(-_bytes_of(temporary))
                temporary.unlink(missing_ok=True)
            return self._not_kept(str(error))
        return True

    def get_or_make(self, key: str, make: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
        """The batch of this key; made, and kept if the disk takes it, where there is none."""
        batch = self.get(key)
        if batch is None:
            batch = make()
            self.put(key, batch)
        return batch

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.arrow"

    def _remove_damaged(self, path: Path) -> None:
        self.counts.misses += 1
        self.counts.damaged += 1
        with suppress(OSError), self._ledger() as ledger:  # where it stays, it is damaged still
            ledger.add(-_bytes_of(path))
            path.unlink(missing_ok=True)

    def _not_kept(self, reason: str) -> bool:
        self.counts.not_kept += 1
        self.last_error = reason
        return False

    def _make_room(self, ledger: _Ledger, size: int) -> None:
        """Have so many bytes in the ledger, after removing what there is no room for beside them."""
        if ledger.taken is not None and ledger.taken + size <= self._max_bytes:
            ledger.add(size)
            return
        entries = sorted(self._entries())
        taken = sum(entry_bytes for _, entry_bytes, _ in entries)
        most = self._max_bytes - size
        if taken > most:
            most = min(most, self._max_bytes - self._max_bytes // _ROOM)
        for modified, entry_bytes, path in entries:
            abandoned = path.suffix == ".tmp" and modified < time.time() - _ABANDONED_S
            if abandoned or (path.suffix == ".arrow" and taken > most):
                path.unlink(missing_ok=True)
                taken -= entry_bytes
                self.counts.removed += path.suffix == ".arrow"
        ledger.taken = taken + size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """(last used, bytes, path) of every entry, and of those being written."""
        with os.scandir(self._folder) as found:
            for entry in found:
                if entry.name.endswith((".arrow", ".tmp")):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue
                    yield status.st_mtime, status.st_size, Path(entry.path)

    @contextmanager
    def _ledger(self) -> Iterator[_Ledger]:
        """Under the lock of all processes, and of the threads of this one."""
        descriptor = os.open(self._folder / "ledger", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            ledger = _Ledger.read(descriptor)
            yield ledger
            ledger.write(descriptor)
        finally:
            os.close(descriptor)


@dataclass
class _Ledger:
    taken: int | None
    """Bytes of all files; None if unknown."""

    @classmethod
    def read(cls, descriptor: int) -> _Ledger:
        digits = os.pread(descriptor, 32, 0)
        return cls(int(digits) if digits.isdigit() else None)

    def write(self, descriptor: int) -> None:
        """Always as many bytes, so that a full disk has room for them."""
        os.pwrite(descriptor, b"%032d" % (self.taken or 0), 0)

    def add(self, num_bytes: int) -> None:
        self.taken = max(0, (self.taken or 0) + num_bytes)


def _serialized(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _deserialized(key: str, content: pa.Buffer) -> pa.RecordBatch:
    """The batch that a cache entry holds.

    Raises:
        OSError, pa.ArrowException: it is not what was written for this key.
    """
    size = len(content) - _CHECKSUM_BYTES
    if size < 0 or _checksum(key, content[:size]) != content[size:].to_pybytes():
        raise OSError("not as it was written")
    return pa.ipc.open_file(pa.BufferReader(content[:size])).get_batch(0)


def _checksum(key: str, content: pa.Buffer) -> bytes:
    """CRC-32 of key and content: the file of another key is of no use here. It guards against
    accidents, not against people, and takes a quarter of the time of a sha256."""
    return zlib.crc32(content, zlib.crc32(key.encode())).to_bytes(_CHECKSUM_BYTES, "little")


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
