"""A data set of text: `text.json`, Parquet files of training rows, `valid.parquet`, `test.parquet`.

It is laid out as a data set of impressions is, so that what reads that reads this: `ReadPlan` shuffles and
divides the row groups of the training files, a cursor counts their rows, `data.cache` keeps what operations
make of them. A row is a record, not its tokens: tokens depend on a base model, and are made by operations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Literal

import pyarrow as pa

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset_folder import (
    TEXT,
    DatasetFolder,
    DatasetReport,
    FileEntry,
    FolderManifest,
)
from rayrec.samples.dataset.manifest import EVALUATION_FILES
from rayrec.samples.dataset.manifest import Split as HeldOut
from rayrec.samples.text.cleaning import SPLITS, CleaningConfig, Split
from rayrec.samples.text.records import Kind, Record

SplitRule = Literal["files", "column", "random"]
_SHOWN = {"files": "one file each", "column": "by a column", "random": "random, by content"}
_NAMES = {"train": "training", "valid": "validation", "test": "test"}


class TextSplit(Config):
    """How records were divided."""

    kind: SplitRule
    valid_fraction: float | None = None
    test_fraction: float | None = None
    seed: int | None = None


class TextManifest(FolderManifest):
    """Everything `TextDataset.open` has to know before it reads a table."""

    KIND = TEXT

    format: int
    name: str
    source: str
    layout: str = "records"
    split: TextSplit
    cleaning: CleaningConfig
    rows: dict[Split, int]
    kinds: dict[Kind, int]
    """Records of each kind, of all splits."""
    rows_read: int
    """Rows of the inputs."""
    bad: dict[str, int]
    """By what was wrong with them: rows that were left out."""
    removed: dict[str, int]
    """By rule: records that cleaning left out."""
    contaminated: dict[Split, int]
    """Records that share an n-gram with the other side; those that were left out for it, too."""
    conflicting: int
    """Records whose question is that of another record with another answer; they are kept."""
    ignored: tuple[str, ...] = ()
    """Columns of the inputs that no record has."""
    files: dict[str, FileEntry]
    fingerprint: str
    """Two data sets with the same fingerprint hold the same rows in the same order."""

    def expected_fingerprint(self) -> str:
        return fingerprint_of(self.files)


def fingerprint_of(files: dict[str, FileEntry]) -> str:
    """Hex sha256 over the names, row counts and checksums of all files."""
    content = [[name, entry.rows, entry.sha256] for name, entry in sorted(files.items())]
    return hashlib.sha256(json.dumps([TEXT.format, content]).encode()).hexdigest()


class TextDataset(DatasetFolder[TextManifest]):
    """A folder written by `rayrec text prepare`. Tables are read when asked for."""

    MANIFEST = TextManifest

    def split_table(self, split: HeldOut, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of `valid` or `test`, in the order in which they were written.

        Raises:
            InputError: there is no such split, or its file cannot be read.
        """
        if split not in EVALUATION_FILES:
            raise InputError(f"there is no split {split!r} to evaluate; choose 'valid' or 'test'")
        return self.read(EVALUATION_FILES[split], columns)

    def records(self, split: Split) -> Iterator[Record]:
        """The records of a split, in the order in which they were written."""
        names = self.train_files if split == "train" else (EVALUATION_FILES[split],)
        for name in names:
            yield from map(Record.of_row, self.read(name).to_pylist())


class TextReport(DatasetReport[TextManifest]):
    """What `rayrec text prepare` wrote."""

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) in the order to print; what did not happen is left out."""
        manifest = self.manifest
        shared = [f"{_NAMES[split]} {count:,}" for split, count in manifest.contaminated.items() if count]
        return [
            *self.head(_SHOWN[manifest.split.kind], None, None),
            ("rows read", f"{manifest.rows_read:,}"),
            *((f"{reason}, left out", f"{count:,}") for reason, count in manifest.bad.items()),
            *((f"{rule}, left out", f"{count:,}") for rule, count in manifest.removed.items()),
            *((f"{_NAMES[split]} rows", f"{manifest.rows[split]:,}") for split in SPLITS),
            ("kinds", ", ".join(f"{kind} {count:,}" for kind, count in manifest.kinds.items())),
            (
                f"sharing {manifest.cleaning.contamination_words} words with the other side",
                ", ".join(shared) or "none",
            ),
            *(
                [("one question, several answers", f"{manifest.conflicting:,}")]
                if manifest.conflicting
                else []
            ),
            *([("columns not read", ", ".join(manifest.ignored))] if manifest.ignored else []),
            ("fingerprint", manifest.fingerprint[:16]),
        ]
