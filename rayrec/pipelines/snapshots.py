"""One cut through a run at a step boundary, written so that half of one is never taken for a whole.

A snapshot is assembled in a hidden folder, its manifest with every file's checksum last, and then renamed
into place; each of these is on disk before the next, since the snapshot before will be deleted. Reading
verifies the checksums.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from rayrec.platform.errors import InputError
from rayrec.platform.files import checksum, sync, write_json
from rayrec.samples.read_plan import ReadPosition

FORMAT_VERSION = 1
WEIGHTS, OPTIMIZER = "dense.safetensors", "optimizer.safetensors"

SaveSparse = Callable[[str], Sequence[str]]
"""Writes every table's rows below the folder it is given; returns the file names."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot whose checksums have been verified."""

    path: Path
    committed_step: int
    """Last step whose update is in it; the run goes on with the next one."""
    dataset_fingerprint: str
    semantic_ids_version: str | None
    sparse_files: tuple[Path, ...]
    read_position: ReadPosition | None = None
    """Where the training read goes on; None in snapshots from before it was written down."""
    incarnation: int = 0
    """Of the servers that wrote it; those that go on from it have a higher one."""

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return safetensors.numpy.load_file(self.path / WEIGHTS)

    @property
    def optimizer_state(self) -> dict[str, np.ndarray]:
        return safetensors.numpy.load_file(self.path / OPTIMIZER)


def write_snapshot(
    path: Path,
    *,
    committed_step: int,
    incarnation: int,
    dataset_fingerprint: str,
    semantic_ids_version: str | None,
    read_position: ReadPosition,
    weights: dict[str, np.ndarray],
    optimizer_state: dict[str, np.ndarray],
    save_sparse: SaveSparse,
) -> None:
    """Write all of a run's state at a step boundary to `path`."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        safetensors.numpy.save_file(weights, unfinished / WEIGHTS)
        safetensors.numpy.save_file(optimizer_state, unfinished / OPTIMIZER)
        sparse_files = list(save_sparse(str(unfinished.resolve())))
        files = [WEIGHTS, OPTIMIZER, *sparse_files]
        manifest = {
            "format_version": FORMAT_VERSION,
            "committed_step": committed_step,
            "incarnation": incarnation,
            "dataset_fingerprint": dataset_fingerprint,
            "semantic_ids_version": semantic_ids_version,
            "read_position": asdict(read_position),
            "sparse_files": sparse_files,
            "sha256": {name: checksum(unfinished / name) for name in files},
        }
        for name in files:
            sync(unfinished / name)
        write_json(unfinished / "manifest.json", manifest)
        if path.exists():  # a resumed run that was killed between this snapshot and the next
            shutil.rmtree(path)
        unfinished.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_snapshot(path: Path) -> Snapshot:
    """Open a snapshot and verify it.

    Raises:
        InputError: a file is missing or was changed; names it.
    """
    manifest_path = path / "manifest.json"
    if not manifest_path.is_file():
        raise InputError(f"{manifest_path}: missing; {path} is not a complete snapshot")
    try:
        manifest: dict[str, Any] = json.loads(manifest_path.read_bytes())
        format_version = manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{manifest_path}: not the manifest of a snapshot; the file was changed") from error
    if format_version != FORMAT_VERSION:
        raise InputError(
            f"{manifest_path}: format version {format_version}, this version reads {FORMAT_VERSION}"
        )
    for name, expected in manifest["sha256"].items():
        if not (path / name).is_file():
            raise InputError(f"{path / name}: missing from the snapshot")
        if checksum(path / name) != expected:
            raise InputError(f"{path / name}: its checksum differs from the manifest's: the file was changed")
    position = manifest.get("read_position")
    return Snapshot(
        path=path,
        committed_step=manifest["committed_step"],
        dataset_fingerprint=manifest["dataset_fingerprint"],
        semantic_ids_version=manifest["semantic_ids_version"],
        sparse_files=tuple(path / name for name in manifest["sparse_files"]),
        read_position=None if position is None else ReadPosition(**position),
        incarnation=manifest.get("incarnation", 0),
    )
