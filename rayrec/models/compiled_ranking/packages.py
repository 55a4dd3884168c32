"""Compiled programs on disk.

    FOLDER/KEY.pt2    the package
    FOLDER/KEY.json   its checksum and what it is; written last, so that a package with it is whole

A package is native code: a user who may write to the folder runs code in the process that loads it, as
with the run's own sources.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rayrec.platform.files import write_json

Run = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Weights and inputs to items and scores."""


class PackageError(RuntimeError):
    """A package that must not be used; the message says why."""


class PackageFolders:
    """Where packages are looked for, and where new ones go."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """
        Args:
            folders: in the order in which they are looked at; new packages go to the first that can be
                written to.
        """
        self.folders = list(folders)
        self._refused: set[Path] = set()

    def find(self, key: str) -> Path | None:
        """A package that claims to be whole, and was not refused before."""
        for folder in self.folders:
            package = folder / f"{key}.pt2"
            if package not in self._refused and _is_file(package) and _is_file(_manifest_of(package)):
                return package
        return None

    def refuse(self, package: Path) -> None:
        """Take it for missing from now on; it is written again, where that is possible."""
        self._refused.add(package)

    def place_for(self, key: str) -> Path:
        """Where a package of this key is to be written.

        Raises:
            PackageError: no folder can be written to.
        """
        for folder in self.folders:
            package = folder / f"{key}.pt2"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                is_free = os.access(folder, os.W_OK)
            except OSError:
                continue
            if is_free:
                self._refused.discard(package)
                return package
        raise PackageError(f"no folder for packages can be written to: {', '.join(map(str, self.folders))}")


def publish(unfinished: Path, package: Path, facts: Mapping[str, Any]) -> None:
    """Make a finished file of the same folder a package.

    Args:
        facts: for people who look at the folder.
    """
    _manifest_of(package).unlink(missing_ok=True)  # which was of another file, if there was one
    checksum = _checksum(unfinished)
    with open(unfinished, "rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, package)
    write_json(_manifest_of(package), {"sha256": checksum, **facts})


def load(package: Path) -> Run:
    """The program of a package: nothing is traced or compiled.

    Raises:
        PackageError: the file is not as it was written, or torch cannot load it.
    """
    try:
        expected = json.loads(_manifest_of(package).read_text())["sha256"]
        found = _checksum(package)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackageError(f"{package}: no whole package ({error!r})") from error
    if found != expected:
        raise PackageError(f"{package}: not as it was written (its checksum differs)")
    from torch._inductor import aoti_load_package  # which takes a second to import

    try:
        # The default goes by the number of runners; one is enough, since one thread computes.
        program: Run = aoti_load_package(str(package), run_single_threaded=False)
    except Exception as error:  # torch has no class of its own for it
        raise PackageError(f"{package}: {' '.join(str(error).split())[:300]}") from error
    return program


def _is_file(path: Path) -> bool:
    """A disk that is gone, or a folder that may not be read, has none."""
    try:
        return path.is_file()
    except OSError:
        return False


def _manifest_of(package: Path) -> Path:
    return package.with_suffix(".json")


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
