"""One cut through a run at a step boundary, written so that half of one is never taken for a whole.

A snapshot is assembled in a hidden folder, its manifest with every file's checksum last, and then renamed
into place; each of these is on disk before the next, since the snapshot before will be deleted. Reading
verifies the checksums.

A full snapshot has every embedding row. An increment has the rows that have changed since the snapshot that
it builds on, and is nothing without it; everything else in it is whole. Nothing in a snapshot is code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy

from rayrec.embeddings.snapshot.saved_files import SavedFile, checksum_file
from rayrec.platform.errors import InputError
from rayrec.platform.files import is_plain_name, sync, write_json
from rayrec.samples.reading.consumed_segments import PREFIX, ConsumedSegments, commit, read_segments
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.read_plan import ReadPosition

FORMAT_VERSION = 3
VERIFYING_THREADS = 8
_READ_VERSIONS = (2, 3)
"""Those of version 2 have all files of a growing folder in their manifest."""
MANIFEST = "manifest.json"
WEIGHTS, OPTIMIZER, CURSOR = "dense.safetensors", "optimizer.safetensors", "cursor.parquet"

SaveSparse = Callable[[str], Sequence[SavedFile]]
"""Writes every table's rows below the folder it is given, each file on disk when it returns."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands after a step, rows and weights aside."""

    committed_step: int
    """Last step whose update is in it; the run goes on with the next one."""
    incarnation: int
    """Of the servers; those that go on from here have a higher one."""
    dataset_fingerprint: str
    semantic_ids_version: str | None
    read_position: ReadPosition
    """Where the training read goes on."""
    progress: dict[str, Any] = field(default_factory=dict)
    """What the training loop has to know of itself to go on."""
    followed: dict[str, Any] | None = None
    """Files of a growing folder that were accepted so far, without the segments that are consumed."""
    labels: dict[str, list[str]] | None = None
    """Names of the codes that the model reads of events, by label; None where it reads none."""
    content_items: str | None = None
    """Which items the features of `model.content` were counted in, as `packed` writes them; None: all that
    there were, or the model reads none."""


class SnapshotName(NamedTuple):
    """Which snapshot of a run it is."""

    name: str
    fingerprint: str
    """Hash of what is in it: another one of the same step is told apart."""


@dataclass(frozen=True)
class SnapshotRows:
    """Rows of one snapshot: all, or those that have changed since the one that it builds on."""

    files: tuple[Path, ...]
    step: int
    fingerprint: str
    """Hash of what is in the snapshot, whatever it says of its run."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot, with those that it builds on."""

    path: Path
    state: RunState
    chain: tuple[SnapshotRows, ...]
    """Of a full snapshot, then of the increments on it; the last ones are this snapshot's."""

    @property
    def sparse_chain(self) -> tuple[tuple[Path, ...], ...]:
        return tuple(rows.files for rows in self.chain)

    @property
    def committed_step(self) -> int:
        return self.state.committed_step

    @property
    def name(self) -> SnapshotName:
        return SnapshotName(self.path.name, self.chain[-1].fingerprint)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return safetensors.numpy.load_file(self.path / WEIGHTS)

    @property
    def optimizer_state(self) -> dict[str, np.ndarray]:
        return safetensors.numpy.load_file(self.path / OPTIMIZER)

    @property
    def cursor(self) -> Cursor:
        """Rows consumed so far."""
        return _cursor_in(self.path, _consumed_files(_manifest(self.path)))

    @property
    def followed(self) -> dict[str, Any] | None:
        """Files of a growing folder that were accepted so far, those of consumed segments among them."""
        return _followed_in(self.path, _manifest(self.path))


def write_snapshot(
    path: Path,
    state: RunState,
    *,
    weights: dict[str, np.ndarray],
    optimizer_state: dict[str, np.ndarray],
    cursor: pa.Table,
    save_sparse: SaveSparse,
    base: str | None = None,
    consumed: ConsumedSegments | None = None,
) -> None:
    """Write all of a run's state at a step boundary to `path`.

    Args:
        base: name of the snapshot beside it that `save_sparse` writes the changes since.
        consumed: segments before those of `state.followed`, whose rows `cursor` does not have.
    """
    # A server of an attempt that was given up may still write, to the folder that it was told: not to ours.
    for left in path.parent.glob(f".{path.name}.*unfinished"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        for name, arrays in ((WEIGHTS, weights), (OPTIMIZER, optimizer_state)):
            _save_arrays(arrays, unfinished / name)
        pq.write_table(cursor, unfinished / CURSOR)
        # Not read again: most of the consumed files are those of the snapshot before.
        checksums = {} if consumed is None else consumed.save(unfinished)
        for name in checksums:
            sync(unfinished / name)
        for name in (WEIGHTS, OPTIMIZER, CURSOR):
            sync(unfinished / name)
            checksums[name] = checksum_file(unfinished / name)
        sparse_files = list(save_sparse(str(unfinished.resolve())))
        manifest = {
            "format_version": FORMAT_VERSION,
            **asdict(state),
            "base": base,
            "sparse_files": [file.name for file in sparse_files],
            "checksums": checksums | {file.name: file.checksum for file in sparse_files},
        }
        write_json(unfinished / MANIFEST, manifest | {"checksum": checksum_of(manifest)})
        replaced = path.with_name(f".{path.name}.replaced")
        if path.exists():  # of the same step, or of a resumed run that was killed before the next one
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        unfinished.rename(path)
        sync(path.parent)
        if consumed is not None:
            consumed.saved(path)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _save_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    try:
        safetensors.numpy.save_file(arrays, path)
    except safetensors.SafetensorError as error:  # has the system's words, and neither number nor file
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def restate_snapshot(path: Path, state: RunState) -> None:
    """Let a whole snapshot say something else of its run; weights and rows are those of its step anyway."""
    before = _manifest(path)
    manifest = before | asdict(state) | {"format_version": FORMAT_VERSION}
    if state.followed is not None and (kept := before["followed"].get("first_segment", 0)) == 0:
        # Of version 2: the consumed segments stay where they are.
        first = state.followed["first_segment"]
        segments = [*before["followed"]["segments"][:first], *state.followed["segments"]]
        manifest["followed"] = {**state.followed, "first_segment": kept, "segments": segments}
    write_json(path / MANIFEST, manifest | {"checksum": checksum_of(manifest)})


def read_snapshot(path: Path, checksums: bool = True) -> Snapshot:
    """Open a snapshot and verify it, with all that it builds on.

    Args:
        checksums: of every file; without, for who has just written it, only the manifests are verified.

    Raises:
        InputError: a file is missing or was changed; names it.
    """
    only = None if checksums else ()
    own = _verified_manifest(path, only)
    chain = [(path, own)]
    while (base := chain[0][1]["base"]) is not None:
        if base in [folder.name for folder, _ in chain]:
            raise InputError(f"{path.parent / base / MANIFEST}: builds on itself; the snapshot is damaged")
        chain.insert(0, (path.parent / base, _verified_manifest(path.parent / base, only)))
    return Snapshot(
        path,
        _state_in(own),
        tuple(
            SnapshotRows(
                tuple(folder / name for name in manifest["sparse_files"]),
                manifest["committed_step"],
                checksum_of(manifest["checksums"]),
            )
            for folder, manifest in chain
        ),
    )


def snapshot_name(path: Path) -> SnapshotName:
    """Which snapshot this is, by its manifest alone.

    Raises:
        InputError: the manifest is missing or was changed.
    """
    return SnapshotName(path.name, checksum_of(_manifest(path)["checksums"]))


def read_consumed(path: Path) -> tuple[RunState, Cursor]:
    """Where a run stood at a snapshot and the rows it had consumed; nothing else of it is looked at.

    Raises:
        InputError: the manifest or the cursor is missing or was changed.
    """
    consumed = _consumed_files(_manifest(path))
    manifest = _verified_manifest(path, only=(CURSOR, *consumed))
    state = replace(_state_in(manifest), followed=_followed_in(path, manifest))
    return state, _cursor_in(path, consumed)


def base_of(path: Path) -> str | None:
    """Name of the snapshot that this one builds on."""
    base: str | None = _manifest(path)["base"]
    return base


def _state_in(manifest: dict[str, Any]) -> RunState:
    values = {key: manifest[key] for key in RunState.__dataclass_fields__ if key in manifest}
    return RunState(read_position=ReadPosition(**values.pop("read_position")), **values)


def _consumed_files(manifest: dict[str, Any]) -> list[str]:
    return sorted(name for name in manifest["checksums"] if name.startswith(PREFIX))


def _cursor_in(path: Path, consumed: Sequence[str]) -> Cursor:
    cursor = Cursor.from_table(pq.read_table(path / CURSOR), str(path / CURSOR))
    commit([path / name for name in consumed], cursor)
    return cursor


def _followed_in(path: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    followed: dict[str, Any] | None = manifest["followed"]
    if followed is None or not (first := followed.get("first_segment", 0)):
        return followed
    consumed = read_segments([path / name for name in _consumed_files(manifest)])
    if len(consumed) != first:
        raise InputError(
            f"{path / MANIFEST}: {first:,} segments of the folder are consumed, but {len(consumed):,} are in "
            "the snapshot's files; the snapshot is damaged"
        )
    return {**followed, "first_segment": 0, "segments": [*consumed, *followed["segments"]]}


def _verified_manifest(path: Path, only: Collection[str] | None = None) -> dict[str, Any]:
    """Read a snapshot's manifest and compare its files with their checksums.

    Args:
        only: files to verify; None is all.
    """
    manifest = _manifest(path)

    def verify(name: str) -> None:
        if not (path / name).is_file():
            raise InputError(f"{path / name}: missing from the snapshot")
        if checksum_file(path / name) != manifest["checksums"][name]:
            raise InputError(f"{path / name}: its checksum differs from the manifest's: the file was changed")

    # Reading and hashing give the interpreter's lock away; of several errors, the first file's is raised.
    with ThreadPoolExecutor(VERIFYING_THREADS) as pool:
        list(pool.map(verify, (name for name in manifest["checksums"] if only is None or name in only)))
    for name in (WEIGHTS, OPTIMIZER, CURSOR, *manifest["sparse_files"]):
        if name not in manifest["checksums"]:
            raise InputError(f"{path / MANIFEST}: has no checksum of {name}; the file was changed")
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        raise InputError(f"{manifest_path}: missing; {path} is not a complete snapshot")
    try:
        manifest: dict[str, Any] = json.loads(manifest_path.read_bytes())
        format_version = manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{manifest_path}: not the manifest of a snapshot; the file was changed") from error
    if format_version not in _READ_VERSIONS:
        raise InputError(
            f"{manifest_path}: format version {format_version}, this version reads {_READ_VERSIONS[0]} to "
            f"{_READ_VERSIONS[-1]}"
        )
    if manifest.pop("checksum", None) != checksum_of(manifest):
        raise InputError(f"{manifest_path}: its own checksum differs: the file was changed")
    _check_names(manifest_path, manifest)
    return manifest


def _check_names(path: Path, manifest: dict[str, Any]) -> None:
    """Refuse a manifest of files outside of the snapshot."""
    base, checksums, sparse_files = (manifest.get(key) for key in ("base", "checksums", "sparse_files"))
    if not isinstance(checksums, dict) or not isinstance(sparse_files, list):
        raise InputError(f"{path}: does not say which files the snapshot has; the file was changed")
    for name in [*checksums, *sparse_files, *([] if base is None else [base])]:
        if not is_plain_name(name):
            raise InputError(
                f"{path}: names {name!r}, which is not directly in the folder; do not use a snapshot that "
                "somebody else has changed"
            )


def checksum_of(manifest: dict[str, Any]) -> str:
    """Of a manifest without its own, or of a part of one."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
