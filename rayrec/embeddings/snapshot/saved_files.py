"""Files of a snapshot, with the checksum by which they are known again.

The checksum is XXH3 with 128 bits: it finds what a disk or a copy does to a file, at the rate of memory,
where a cryptographic one would take as long as writing the file does. It is no seal against forgery.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rayrec.platform.files import sync

_READ_BYTES = 2**20
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class SavedFile:
    """A file that is whole and on disk."""

    name: str
    bytes: int
    checksum: str
    """As `checksum_file` computes it."""
    since: int | None = None
    """It has only what steps after this one have changed; None for everything."""


class WrittenFile:
    """A file that appears under its name when it is whole; what is written to it is checksummed on the way.

    As much of Python's files as Arrow's writers need. It goes to the disk in large blocks and past the
    system's cache where the file system allows it: a cache would push out what training needs, and to write
    it back takes as much processor time as filling it. (`snapshots.copy_to` reads the files once more.)
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # No two writers have one name: what a writer that was given up goes on to write is never taken for
        # the file of the next one, and is gone with the folder that it was told to write to.
        self._unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        self._block = mmap.mmap(-1, _BLOCK_BYTES)  # aligned, as O_DIRECT wants it
        self._descriptor, self._is_direct = _open_past_cache(self._unfinished)
        self._num_waiting = 0
        self._num_written = 0
        """Of what waits: after an error, a part of it may be in the file."""
        self._hash = xxhash.xxh3_128()
        self._num_bytes = 0
        self.closed = False

    def write(self, content: bytes) -> int:
        self._hash.update(content)
        view = memoryview(content).cast("B")
        while len(view):
            if self._num_waiting == _BLOCK_BYTES:
                self._write_waiting()
            part = view[: _BLOCK_BYTES - self._num_waiting]
            self._block[self._num_waiting : self._num_waiting + len(part)] = part
            self._num_waiting += len(part)
            view = view[len(part) :]
        self._num_bytes += len(content)
        return len(content)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        """What waits is written by `finish`."""

    def close(self) -> None:
        """Of Arrow's writer; the file is not over."""

    def finish(self, since: int | None) -> SavedFile:
        """Wait until the file is on disk, and give it its name.

        Raises:
            OSError: the disk fails; or the folder was deleted meanwhile, since another attempt has begun.
        """
        self._write_waiting()
        os.fsync(self._descriptor)
        self._close()
        if not self._unfinished.exists():
            raise OSError(
                errno.ESTALE,
                "the folder belongs to another attempt to write the snapshot; this one was given up",
                str(self._path),
            )
        os.replace(self._unfinished, self._path)
        sync(self._path.parent)
        return SavedFile(self._path.name, self._num_bytes, self._hash.hexdigest(), since)

    def remove_unfinished(self) -> None:
        self._close()
        self._unfinished.unlink(missing_ok=True)

    def _write_waiting(self) -> None:
        with memoryview(self._block) as block:
            while self._num_written < self._num_waiting:
                if self._num_waiting % mmap.PAGESIZE or self._num_written % mmap.PAGESIZE:
                    self._use_cache()  # the end of the file, or what a short write has left
                with block[self._num_written : self._num_waiting] as rest:
                    self._num_written += self._write_some(rest)
        self._num_waiting = self._num_written = 0

    def _write_some(self, content: memoryview) -> int:
        try:
            return os.write(self._descriptor, content)
        except OSError as error:
            if error.errno == errno.EINVAL and self._is_direct:  # some file systems say so only now
                self._use_cache()
                return 0
            raise OSError(error.errno, error.strerror, str(self._unfinished)) from error

    def _use_cache(self) -> None:
        if self._is_direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._is_direct = False

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._block.close()
            os.close(self._descriptor)


def checksum_file(path: Path) -> str:
    """The checksum of a file, as `SavedFile` has it."""
    hashed = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while content := file.read(_READ_BYTES):
            hashed.update(content)
    return hashed.hexdigest()


def _open_past_cache(path: Path) -> tuple[int, bool]:
    """(descriptor of the file, whether it is open with O_DIRECT)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # a file system without
            return os.open(path, flags | os.O_DIRECT, 0o666), True
    return os.open(path, flags, 0o666), False
