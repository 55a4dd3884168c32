"""`dataset.json`: what a prepared data set contains, and the checksums that say it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import ClassVar, Literal

from rayrec.platform.config import Config
from rayrec.platform.event_labels import Label
from rayrec.samples.base.config import TargetRule
from rayrec.samples.dataset.dataset_folder import HISTORIES, FileEntry, FolderManifest

ITEMS_FILE = "items.parquet"
USERS_FILE = "users.parquet"
HISTORY_FILE = "history.parquet"

Split = Literal["valid", "test"]
EVALUATION_FILES: dict[Split, str] = {"valid": "valid.parquet", "test": "test.parquet"}

IdKind = Literal["integer", "string"]
Entity = Literal["user", "item"]


class SplitInfo(Config):
    """How events were divided; boundaries in UNIX seconds, for a split by time."""

    kind: Literal["leave_one_out", "time", "given"]
    valid_start: float | None = None
    test_start: float | None = None
    targets: TargetRule = "first"
    """Of a split by time: which of a user's events in a period is predicted."""


class TiesInfo(Config):
    """Events of one user that share their time."""

    RENAMED: ClassVar[Mapping[str, str]] = {"neighbours": "neighbors"}

    rule: Literal["shuffle", "file"]
    """`shuffle`: in an order given by the seed; `file`: as the source has them."""
    neighbors: int
    """Pairs of neighboring events of one user with the same time."""
    users: int
    """Users with at least one such pair."""


class Manifest(FolderManifest):
    """Everything `Dataset.open` has to know before it reads a table."""

    KIND = HISTORIES

    format: int
    name: str
    source: str
    layout: str
    split: SplitInfo
    seed: int
    ties: TiesInfo
    id_kinds: dict[Entity, IdKind]
    behaviors: tuple[str, ...]
    """Names of the behavior codes; empty when the source has none."""
    scenarios: tuple[str, ...] = ()
    """Names of the scenario codes; empty when the source has none."""
    text_columns: tuple[str, ...] = ()
    """Columns of the source that the items' texts are made of."""
    counts: dict[str, int]
    files: dict[str, FileEntry]
    fingerprint: str
    """Two data sets with the same fingerprint hold the same rows in the same order."""
    held: tuple[str, ...] | None = None
    """Files that are in the folder, where it is a copy of a part; None: all."""

    @property
    def held_files(self) -> dict[str, FileEntry]:
        """Those of the files that are in the folder."""
        return self.files if self.held is None else {name: self.files[name] for name in self.held}

    @property
    def labels(self) -> dict[Label, tuple[str, ...]]:
        """Names of the codes of each label of events; empty where the source has none."""
        return {"behavior": self.behaviors, "scenario": self.scenarios}

    def expected_fingerprint(self) -> str:
        return fingerprint_of(self.files, self.behaviors, self.scenarios)


def fingerprint_of(
    files: dict[str, FileEntry], behaviors: tuple[str, ...], scenarios: tuple[str, ...] = ()
) -> str:
    """Hex sha256 over the names, row counts and checksums of all files, and the names of the codes."""
    content = [[name, entry.rows, entry.sha256] for name, entry in sorted(files.items())]
    # Scenarios came later: data sets without them keep the fingerprint that they had.
    described = [HISTORIES.format, list(behaviors), content, *([list(scenarios)] if scenarios else [])]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
