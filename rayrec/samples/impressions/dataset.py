"""A prepared data set of impressions, opened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.dataset.dataset_folder import check_files, train_files
from rayrec.samples.dataset.manifest import EVALUATION_FILES, Split
from rayrec.samples.impressions.manifest import ImpressionManifest


class ImpressionDataset:
    """A folder written by `rayrec impressions`. Tables are read when asked for."""

    def __init__(self, root: Path, manifest: ImpressionManifest) -> None:
        self.root = root
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path, checksums: bool = True) -> ImpressionDataset:
        """Open a data set and check that it is whole.

        Args:
            checksums: read every file once to compare its sha256; without it only sizes are
                compared, which is enough where another process of the run has done it.

        Raises:
            InputError: the folder, its manifest or one of its files is missing or not as written, or it is a
                data set of histories.
        """
        root = Path(path)
        manifest = ImpressionManifest.read(root)
        check_files(root, manifest.files, checksums)
        return cls(root, manifest)

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @cached_property
    def schema(self) -> ImpressionSchema:
        """What the columns mean; the files have no others."""
        return self.manifest.columns.to_schema()

    @property
    def train_files(self) -> tuple[str, ...]:
        """Names below `root`, sorted; a file's number is its index here."""
        return train_files(self.manifest.files)

    @property
    def num_ids(self) -> dict[str, int]:
        """By space: distinct ids in all splits; null, which is one more, not counted."""
        return dict(self.manifest.num_ids)

    def split_table(self, split: Split, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of `valid` or `test`, in the order in which they were written.

        Args:
            columns: None for all.

        Raises:
            InputError: there is no such split, or its file cannot be read.
        """
        if split not in EVALUATION_FILES:
            raise InputError(f"there is no split {split!r} to evaluate; choose 'valid' or 'test'")
        path = self.root / EVALUATION_FILES[split]
        try:
            return pq.read_table(path, columns=None if columns is None else list(columns))
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: not a readable Parquet file: {error}") from error
