"""Files of a snapshot, with the checksum by which they are known again.

The checksum is XXH3 with 128 bits: it finds what a disk or a copy does to a file, at the rate of memory,
where a cryptographic one would take as long as writing the file does. It is no seal against forgery.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rayrec.platform.files import sync

_READ_BYTES = 2**20


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

    As much of Python's files as Arrow's writers need.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(path.name + ".part")
        self._file = open(self._unfinished, "wb", buffering=0)  # noqa: SIM115 (closed by `finish`)
        self._hash = xxhash.xxh3_128()
        self._num_bytes = 0
        self.closed = False

    def write(self, content: bytes) -> int:
        self._hash.update(content)
        view = memoryview(content)
        while len(view):
            view = view[self._file.write(view) :]
        self._num_bytes += len(content)
        return len(content)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """Of Arrow's writer; the file is not over."""

    def finish(self, since: int | None) -> SavedFile:
        """Wait until the file is on disk, and give it its name."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._unfinished, self._path)
        sync(self._path.parent)
        self.closed = True
        return SavedFile(self._path.name, self._num_bytes, self._hash.hexdigest(), since)

    def remove_unfinished(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def checksum_file(path: Path) -> str:
    """The checksum of a file, as `SavedFile` has it."""
    hashed = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while content := file.read(_READ_BYTES):
            hashed.update(content)
    return hashed.hexdigest()
