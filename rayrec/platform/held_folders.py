"""Temporary folders that go with what made them; those of processes that were killed go when the next one
starts.

    PREFIX-abcd/lock    locked (flock) as long as its process lives, which the kernel sees to
                ...     files of the owner
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TextIO

_LOCK = "lock"


class HeldFolder:
    """A folder of its own, until it is closed or nobody refers to it."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Make one, and delete those of the same name whose processes are gone.

        Args:
            parent: None: the folder of temporary files.

        Raises:
            OSError: there can be none.
        """
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _sweep(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = (self.path / f"{_LOCK}.new").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Others look at folders with a lock: it has its name when it is held.
        (self.path / f"{_LOCK}.new").rename(self.path / _LOCK)
        self.close = weakref.finalize(self, _delete, self.path, lock)


def _delete(path: Path, lock: TextIO) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _sweep(prefix: str, parent: Path) -> None:
    for path in parent.glob(f"{prefix}*"):
        # Another user's, one that is held or that another process deletes now.
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            with (path / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
