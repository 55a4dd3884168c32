"""`impressions.json`: what a data set of impressions contains, and the checksums that say it is whole."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field

from rayrec.platform.config import Config
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.dataset.dataset_folder import IMPRESSIONS, FileEntry, FolderManifest
from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.source import SplitName


class SchemaInfo(Config):
    """`ImpressionSchema`, as JSON has it."""

    labels: tuple[str, ...]
    numbers: tuple[str, ...]
    ids: dict[str, str]
    lists: dict[str, str]
    group: str | None

    @classmethod
    def of(cls, schema: ImpressionSchema) -> SchemaInfo:
        return cls(
            labels=schema.labels,
            numbers=schema.numbers,
            ids=dict(schema.ids),
            lists=dict(schema.lists),
            group=schema.group,
        )

    def to_schema(self) -> ImpressionSchema:
        return ImpressionSchema(self.labels, self.numbers, dict(self.ids), dict(self.lists), self.group)


class ImpressionSplit(Config):
    """How rows were divided; boundaries in UNIX seconds, for a split by time."""

    kind: Literal["files", "order", "time", "random", "data_set"]
    valid_start: float | None = None
    test_start: float | None = None
    held_out_of: str | None = None
    """Fingerprint of the data set of histories that holds out the same events."""

    def start_of(self, split: SplitName) -> float | None:
        """Where a split begins; None of the training rows, and of rows that are not divided by time."""
        return {"valid": self.valid_start, "test": self.test_start}.get(split)


class ImpressionManifest(FolderManifest):
    """Everything `ImpressionDataset.open` has to know before it reads a table."""

    KIND = IMPRESSIONS

    format: int
    name: str
    source: str
    layout: str
    columns: SchemaInfo
    split: ImpressionSplit
    seed: int
    min_count: int
    rows: dict[SplitName, int]
    known: dict[str, dict[SplitName, int]]
    """By label: rows in which it is not null."""
    positives: dict[str, dict[SplitName, int]]
    """By label: rows in which it is 1."""
    num_ids: dict[str, int]
    """By space: distinct ids in the files, that of the rare ones included, null not."""
    num_rare: dict[str, int]
    """By space: distinct ids of training rows that were seen less often than `min_count`."""
    history: HistoryRule | None = None
    """What histories are made of; None where that is not known."""
    origins: dict[str, str] = Field(default_factory=dict)
    """Of the layout `table`: column to what it is in a request, as in `ImpressionsConfig`."""
    kept: tuple[str, ...] = ()
    """Columns beside those, for operations."""
    list_separator: str = "|"
    """Between the elements of a list that is written as a text."""
    extra: dict[str, float] = Field(default_factory=dict)
    """What else is known of the data, such as the best AUC there can be."""
    files: dict[str, FileEntry]
    fingerprint: str
    """Two data sets with the same fingerprint hold the same rows in the same order."""

    def expected_fingerprint(self) -> str:
        return fingerprint_of(self.files, self.columns)


def fingerprint_of(files: dict[str, FileEntry], columns: SchemaInfo) -> str:
    """Hex sha256 over the names, row counts and checksums of all files, and what the columns mean."""
    content = [[name, entry.rows, entry.sha256] for name, entry in sorted(files.items())]
    described = [IMPRESSIONS.format, columns.model_dump(mode="json"), content]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
