"""Atomic writes of files, and whether a folder is on a disk."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rayrec.platform.errors import InputError, NoRoomError

MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""By the type that Linux's `statfs` returns."""


_FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "has no quota left", errno.EROFS: "is read-only"}


def no_room(error: BaseException, folder: Path | None = None, then: str = "") -> NoRoomError | None:
    """The sentence for an error of a disk that is full or read-only; None for any other error.

    Args:
        folder: which the error is about, where it does not say so itself.
        then: what to do when there is room.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None:  # libraries in other languages give the system's words alone
        number = next((each for each in _FULL if f"(os error {each})" in str(error)), None)
    if number not in _FULL:
        return None
    where = folder or getattr(error, "filename", None)
    place = "a disk" if where is None else f"{where}: its disk"
    remedy = "name a folder on another one" if number == errno.EROFS else "make room there, or name another"
    return NoRoomError(f"{place} {_FULL[number]} ({error}); {remedy}{then}")


_UNUSABLE = {
    errno.EEXIST: "is there already",
    errno.ENOTDIR: "lies below a file, and not in a folder",
    errno.EISDIR: "is a folder, and not a file",
    errno.EACCES: "may not be used by this user in this way",
    errno.EPERM: "may not be changed by this user",
    errno.ENAMETOOLONG: "has too long a name",
}


def unusable_path(error: BaseException) -> InputError | None:
    """The sentence for a place that cannot be read or written as asked; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _UNUSABLE:
        return None
    # Of two names, the second one is in the way, or may not be made; the first one is a file of ours.
    where = error.filename if error.filename2 is None else error.filename2
    if where is None or (error.filename2 is not None and error.errno == errno.ENOTDIR):
        return None
    return InputError(f"{where}: {_UNUSABLE[error.errno]} ({error.strerror}); name another place")


def is_plain_name(name: object) -> bool:
    """Whether this is the name of something directly in a folder, and of nothing outside of it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def append_line(path: Path, content: bytes) -> None:
    """Add a line to a file; on disk when this returns.

    Of an append that fails nothing stays. What a power cut has left of one becomes a line of its own.
    """
    with open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                content = b"\n" + content
        try:
            left = memoryview(content + b"\n")
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


@contextmanager
def written_whole(path: Path, on_disk: bool = False) -> Iterator[Path]:
    """Another name in the folder to write a file under: it takes its own when the block ends.

    There is the old file or the new one, and after an error nothing else. Writers of one file do not meet,
    whatever thread, process or machine they are on: the last one stays.

    Args:
        on_disk: wait until the file and its name are on disk.
    """
    unfinished = path.with_name(f".{path.name}.{unfinished_suffix()}")
    try:
        yield unfinished
        if on_disk:
            sync(unfinished)
        os.replace(unfinished, path)
        if on_disk:
            sync(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def unfinished_suffix() -> str:
    """End of the name of a file that is being written, as no other writer has it."""
    return f"{secrets.token_hex(6)}.unfinished"


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is what a killed writer has left, or what one writes now."""
    return re.fullmatch(r"\..+\.[0-9a-f]{12}\.unfinished", name) is not None


def remove_unfinished(folder: Path) -> None:
    """Delete what killed writers have left below a folder; only for who knows that nobody writes there."""
    for left in filter(lambda path: is_unfinished(path.name), folder.rglob(".*.unfinished")):
        left.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace `path` by `content`; a crash leaves the old file or the new one.

    Args:
        mode: of the file, from its first byte on; less what the process's umask takes.
    """
    with (
        written_whole(path, on_disk=True) as unfinished,
        open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file,
    ):
        file.write(content)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, values: Any) -> None:
    """Replace `path` by the values as JSON, atomically."""
    write_atomically(path, (json.dumps(values, indent=2) + "\n").encode())


def without_nan(value: Any) -> Any:
    """Plain values with null for what is no finite number, which JSON cannot write."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def memory_file_system(folder: Path) -> str | None:
    """Name of the file system that keeps this folder in memory; None if it is on a disk or unknown."""
    if sys.platform != "linux":
        return None
    described = ctypes.create_string_buffer(512)  # struct statfs; its first word is the type
    if ctypes.CDLL(None).statfs(os.fsencode(folder), described) != 0:
        return None
    number = ctypes.c_long.from_buffer(described).value
    return MEMORY_FILE_SYSTEMS.get(number & 0xFFFFFFFF)


def check_on_disk(folder: Path, may_be_memory: bool = False) -> None:
    """Refuse a folder that does not exist, takes no files, or is kept in memory, with an InputError.

    Args:
        may_be_memory: take one that is.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}: there is no such folder on this machine; make it, or name another (disk.folder)"
        )
    try:
        with tempfile.TemporaryFile(prefix="rayrec-", dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{folder}: no file can be made in this folder ({error.strerror}); let this user write there, or "
            "name another (disk.folder)"
        ) from error
    if not may_be_memory and (name := memory_file_system(folder)):
        raise InputError(
            f"{folder} is in memory ({name}), so that rows written there take the memory that they should "
            "make room in: name a folder on a local disk (disk.folder)"
        )
