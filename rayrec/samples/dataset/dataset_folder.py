"""Folders of data sets, of whichever kind: the manifest that says which, and the files that it lists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError

TRAIN_FOLDER = "train"


@dataclass(frozen=True)
class DatasetKind:
    """What a folder holds, by the name of its manifest."""

    rows: str
    """What its rows are, for messages."""
    manifest_file: str
    format: int
    command: str
    """Writes such a folder."""


HISTORIES = DatasetKind("histories", "dataset.json", 1, "rayrec prepare")
IMPRESSIONS = DatasetKind("impressions", "impressions.json", 1, "rayrec impressions")
_KINDS = (HISTORIES, IMPRESSIONS)


class FileEntry(Config):
    """One file of the data set."""

    rows: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, rows: int) -> FileEntry:
        return cls(rows=rows, bytes=path.stat().st_size, sha256=sha256_of(path))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kind_of(folder: Path) -> DatasetKind | None:
    """Which kind of data set is there; None without a manifest."""
    return next((kind for kind in _KINDS if (folder / kind.manifest_file).is_file()), None)


def read_manifest(folder: Path, kind: DatasetKind) -> dict[str, Any]:
    """The values of a folder's manifest, of the format that this version reads.

    Raises:
        InputError: no such folder, no manifest in it, that of a data set of another kind, or one that is
            damaged or of another format.
    """
    path = folder / kind.manifest_file
    if not folder.is_dir():
        raise InputError(f"{folder}: no such data set; `{kind.command} SOURCE {folder}` makes one")
    if not path.is_file():
        if (other := kind_of(folder)) is not None:
            raise InputError(
                f"{folder}: a data set of {other.rows}, expected one of {kind.rows}; "
                f"give a folder that `{kind.command}` has written"
            )
        raise InputError(
            f"{folder}: not a data set, {kind.manifest_file} is missing; "
            f"give a folder that `{kind.command}` has written"
        )
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); prepare the data set again") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != kind.format:
        raise InputError(
            f"{path}: data set format {found!r}, this version reads {kind.format}; prepare the data set again"
        )
    return values


def write_manifest(folder: Path, kind: DatasetKind, manifest: Config) -> None:
    (folder / kind.manifest_file).write_text(json.dumps(manifest.model_dump(mode="json"), indent=2) + "\n")


def check_files(root: Path, files: Mapping[str, FileEntry], checksums: bool) -> None:
    """Check that files are as they were written.

    Args:
        checksums: read every file once to compare its sha256; without it only sizes are compared.

    Raises:
        InputError: a file is missing or not as it was written.
    """
    for name, entry in files.items():
        file = root / name
        if not file.is_file():
            raise InputError(f"{file}: missing from the data set; prepare it again")
        size = file.stat().st_size
        if size != entry.bytes:
            raise InputError(
                f"{file}: {size} bytes, {entry.bytes} were written; the file is truncated or changed, "
                "prepare the data set again"
            )
        if checksums and sha256_of(file) != entry.sha256:
            raise InputError(
                f"{file}: its checksum is not the one that was written: the file has changed; "
                "prepare the data set again"
            )


def train_files(files: Mapping[str, FileEntry]) -> tuple[str, ...]:
    """Names of the files of training rows below the folder, sorted; a file's number is its index here."""
    return tuple(sorted(name for name in files if name.startswith(f"{TRAIN_FOLDER}/")))
