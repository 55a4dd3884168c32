"""Atomic writes of files, and whether a folder is on a disk."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from rayrec.platform.errors import InputError

MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""By the type that Linux's `statfs` returns."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`; a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def memory_file_system(folder: Path) -> str | None:
    """Name of the file system that keeps this folder in memory; None if it is on a disk or unknown."""
    if sys.platform != "linux":
        return None
    described = ctypes.create_string_buffer(512)  # struct statfs; its first word is the type
    if ctypes.CDLL(None).statfs(os.fsencode(folder), described) != 0:
        return None
    number = ctypes.c_long.from_buffer(described).value
    return MEMORY_FILE_SYSTEMS.get(number & 0xFFFFFFFF)


def check_on_disk(folder: Path) -> None:
    """Refuse a folder that does not exist or that is kept in memory, with an InputError."""
    if not folder.is_dir():
        raise InputError(
            f"{folder}: there is no such folder on this machine; make it, or name another (disk.folder)"
        )
    if name := memory_file_system(folder):
        raise InputError(
            f"{folder} is in memory ({name}), so that rows written there take the memory that they should "
            "make room in: name a folder on a local disk (disk.folder)"
        )
