"""What all kinds of data set share: the folder, its manifest, the files that it lists, the report."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError, looked_in

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
    out_option: str = ""
    """Before the folder that the command writes; empty: it follows the source."""


HISTORIES = DatasetKind("histories", "dataset.json", 1, "rayrec prepare")
IMPRESSIONS = DatasetKind("impressions", "impressions.json", 1, "rayrec impressions")
TEXT = DatasetKind("text", "text.json", 1, "rayrec text prepare", "--out ")
_KINDS = (HISTORIES, IMPRESSIONS, TEXT)


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


class FolderManifest(Config, ABC):
    """Base of the manifests: what a data set contains, and the checksums that say it is whole."""

    KIND: ClassVar[DatasetKind]

    if TYPE_CHECKING:  # declared by the subclasses, whose order of fields is that of the file
        name: str
        source: str
        layout: str
        files: dict[str, FileEntry]
        fingerprint: str

    @property
    def held_files(self) -> dict[str, FileEntry]:
        """Those of the files that are in the folder; a copy may lack some."""
        return self.files

    @abstractmethod
    def expected_fingerprint(self) -> str:
        """Hex sha256 over the names, row counts and checksums of all files, and what the columns mean."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a data set folder.

        Raises:
            InputError: no such folder, no manifest in it, one that is damaged or of another format, or the
                manifest of a data set of another kind.
        """
        path = folder / cls.KIND.manifest_file
        manifest = cls.parse(manifest_values(folder, cls.KIND), source=str(path))
        if manifest.expected_fingerprint() != manifest.fingerprint:
            raise InputError(f"{path}: its fingerprint does not fit its content; prepare the data set again")
        return manifest

    def write(self, folder: Path) -> None:
        """Write the manifest into a data set folder."""
        path = folder / self.KIND.manifest_file
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=2) + "\n")


M = TypeVar("M", bound=FolderManifest)


class DatasetFolder(Generic[M]):
    """A prepared data set of any kind. Tables are read when first asked for."""

    MANIFEST: ClassVar[type[FolderManifest]]

    def __init__(self, root: Path, manifest: M) -> None:
        self.root = root
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path, checksums: bool = True) -> Self:
        """Open a data set and check that it is whole.

        Args:
            checksums: read every file once to compare its sha256; without it only sizes are
                compared, which is enough where another process of the run has done it.

        Raises:
            InputError: the folder, its manifest or one of its files is missing or not as written, or it is a
                data set of another kind.
        """
        root = Path(path)
        manifest = cls.MANIFEST.read(root)
        check_files(root, manifest.held_files, checksums)
        return cls(root, cast(M, manifest))

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def train_files(self) -> tuple[str, ...]:
        """Names below `root`, sorted; a file's number is its index here."""
        return train_files(self.manifest.files)

    def read(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """One of the files.

        Args:
            columns: None for all.

        Raises:
            InputError: it cannot be read.
        """
        path = self.root / name
        try:
            return pq.read_table(path, columns=None if columns is None else list(columns))
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: not a readable Parquet file: {error}") from error

    def read_parts(
        self, name: str, columns: Sequence[str], rows: int, max_rows: int | None = None
    ) -> Iterator[pa.Table]:
        """One of the files, so many rows at a time; the last part may have fewer.

        Args:
            max_rows: no more than the first so many rows, and no more of the file than they take.

        Raises:
            InputError: it cannot be read.
        """
        path = self.root / name
        try:
            with pq.ParquetFile(path) as file:
                left = file.metadata.num_rows if max_rows is None else min(max_rows, file.metadata.num_rows)
                pending: list[pa.Table] = []
                held = 0
                for batch in file.iter_batches(min(rows, 65_536), columns=list(columns)):
                    table = pa.Table.from_batches([batch.slice(0, left)])
                    left -= len(table)
                    pending.append(table)
                    held += len(table)
                    while held >= rows or (held and not left):
                        together = pa.concat_tables(pending)
                        yield together.slice(0, rows).combine_chunks()
                        pending, held = [together.slice(rows)], max(held - rows, 0)
                    if not left:
                        return
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: not a readable Parquet file: {error}") from error


@dataclass(frozen=True)
class DatasetReport(Generic[M]):
    """A data set that has been written, for people and for programs."""

    path: Path
    manifest: M

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {"path": str(self.path), **self.manifest.model_dump(mode="json")}

    def head(self, split: str, valid_start: float | None, test_start: float | None) -> list[tuple[str, str]]:
        """(label, value) of the first rows to print.

        Args:
            split: how rows were divided, for people.
            valid_start, test_start: boundaries in UNIX seconds, for a split by time.
        """
        if valid_start is not None and test_start is not None:
            split += f", validation from {_date(valid_start)}, test from {_date(test_start)}"
        return [
            ("data set", str(self.path)),
            ("source", f"{self.manifest.source} ({self.manifest.layout})"),
            ("split", split),
        ]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def manifest_values(folder: Path, kind: DatasetKind) -> dict[str, Any]:
    """The values of a folder's manifest, of the format that this version reads.

    Raises:
        InputError: no such folder, no manifest in it, that of a data set of another kind, or one that is
            damaged or of another format.
    """
    path = folder / kind.manifest_file
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such data set{looked_in(folder)}; "
            f"`{kind.command} SOURCE {kind.out_option}{folder}` makes one"
        )
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
