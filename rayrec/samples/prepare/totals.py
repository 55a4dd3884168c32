"""What is counted of a data set while it is made, and what becomes findings and the manifest's counts.

Totals of partitions merge, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.samples.dataset.dataset_folder import TRAIN_FOLDER, FileEntry
from rayrec.samples.dataset.manifest import EVALUATION_FILES
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.prepare.findings import Findings
from rayrec.samples.prepare.sequences import WITHOUT_HISTORY


@dataclass
class SequenceTotals:
    """Counters of sequences as `SequenceBuilder` makes them."""

    events: int = 0
    train_events: int = 0
    ties: int = 0
    tied_users: int = 0
    duplicates: int = 0
    first_duplicate: int = -1
    """Source row; -1 when there is none."""
    short_users: int = 0
    first_short: int = -1
    """Source row of the only event of a user; -1 when there is no such user."""
    valid_without_history: int = 0
    """Users with events that validate, and none of them with an event before it."""
    test_without_history: int = 0
    """The same of the test."""

    def add(self, sequences: pa.Table) -> None:
        """Take the sequences of some users into account."""
        ties_U = sequences["ties"].to_numpy()
        self.ties += int(ties_U.sum())
        self.tied_users += int((ties_U > 0).sum())
        self.duplicates += int(sequences["duplicates"].to_numpy().sum())
        first_U = sequences["first_duplicate"].to_numpy()
        self.first_duplicate = earliest(self.first_duplicate, first_U[first_U >= 0])
        lengths_U = np.diff(sequences["item_ids"].combine_chunks().offsets.to_numpy())
        self.events += int(lengths_U.sum())
        self.train_events += int(sequences["num_train"].to_numpy().sum())
        self.short_users += int((lengths_U == 1).sum())
        self.first_short = earliest(self.first_short, sequences["first_row"].to_numpy()[lengths_U == 1])
        self.valid_without_history += _num_true(sequences[WITHOUT_HISTORY["valid"]])
        self.test_without_history += _num_true(sequences[WITHOUT_HISTORY["test"]])

    def merge(self, other: SequenceTotals) -> None:
        """Take the users of another partition into account."""
        self.events += other.events
        self.train_events += other.train_events
        self.ties += other.ties
        self.tied_users += other.tied_users
        self.duplicates += other.duplicates
        self.short_users += other.short_users
        self.first_duplicate = earliest(self.first_duplicate, _row(other.first_duplicate))
        self.first_short = earliest(self.first_short, _row(other.first_short))
        self.valid_without_history += other.valid_without_history
        self.test_without_history += other.test_without_history


def _num_true(column: pa.ChunkedArray) -> int:
    return int(column.to_numpy().sum())


def earliest(row: int, rows: Int64Array) -> int:
    """The lowest of a row, -1 for none, and others."""
    if not len(rows):
        return row
    return int(rows.min()) if row < 0 else min(row, int(rows.min()))


def _row(row: int) -> Int64Array:
    return np.array([row] if row >= 0 else [], dtype=np.int64)


def find_in_sequences(
    findings: Findings,
    totals: SequenceTotals,
    where: Callable[[int], str],
    values: Callable[[int], Mapping[str, Any]],
) -> None:
    """Add to the findings what only shows once the sequences of all users are there.

    Args:
        where: where a row of the log is.
        values: the values that the log has in a row.
    """

    def duplicate(row: int) -> str:
        found = values(row)
        user, item, time = (found[name] for name in ("user_id", "item_id", "timestamp"))
        return f"user {user!r} has item {item!r} at {time} a second time"

    def short(row: int) -> str:
        return f"user {values(row)['user_id']!r} has only this event"

    findings.add("duplicates", totals.duplicates, totals.first_duplicate, where, duplicate)
    findings.add("short-users", totals.short_users, totals.first_short, where, short)


def shown_values(log: RawTable, row: int) -> Mapping[str, Any]:
    """The values of a row that messages about an event show."""
    found: Mapping[str, Any] = (
        log.table.select(["user_id", "item_id", "timestamp"]).slice(row, 1).to_pylist()[0]
    )
    return found


def find_cold(findings: Findings, items: RawTable | None, count: int, first_row: int) -> None:
    """Add described items without events to the findings.

    Args:
        first_row: of the table of items, the first of them.
    """
    if items is None:
        return

    def cold(row: int) -> str:
        return f"item {items.table['item_id'][row].as_py()!r} has no interactions"

    findings.add("cold-items", count, first_row, items.where, cold)


@dataclass(frozen=True)
class CatalogCounts:
    """How many items and users a data set has, and what is known of them."""

    users: int
    items: int
    described_items: int
    """Of the source's table, one of each id."""
    cold_items: int
    users_without_events: int
    """Described ones, which are left out."""


@dataclass(frozen=True)
class LogCounts:
    """What is counted of the rows of a log."""

    num_filtered: int
    num_trimmed: int
    """Ids, those of the tables of items and users too."""
    earliest_us: int
    latest_us: int
    """Of the events, in microseconds since 1970."""
    num_ordered: int
    """Events of a log that has no times, only an order."""


def manifest_counts(
    totals: SequenceTotals,
    files: Mapping[str, FileEntry],
    catalog: CatalogCounts,
    log: LogCounts,
    findings: Findings,
) -> dict[str, int]:
    """The counts of the manifest.

    Args:
        files: those of sequences, by their names.
    """
    rows = {name: entry.rows for name, entry in files.items()}
    return {
        "users": catalog.users,
        "items": catalog.items,
        "events": totals.events,
        "train_rows": sum(count for name, count in rows.items() if name.startswith(f"{TRAIN_FOLDER}/")),
        "train_events": totals.train_events,
        **{f"{split}_rows": rows[name] for split, name in EVALUATION_FILES.items()},
        "unused_events": totals.events
        - totals.train_events
        - sum(rows[name] for name in EVALUATION_FILES.values()),
        "valid_without_history": totals.valid_without_history,
        "test_without_history": totals.test_without_history,
        "duplicates": totals.duplicates,
        "short_users": totals.short_users,
        "cold_items": catalog.cold_items,
        "undescribed_items": catalog.items - catalog.described_items,
        "users_without_events": catalog.users_without_events,
        "events_filtered": log.num_filtered,
        "trimmed_ids": log.num_trimmed,
        "missing_ids": findings.count("missing-ids"),
        "bad_times": findings.count("bad-times"),
        "repeated_descriptions": findings.count("repeated-descriptions"),
        "earliest": log.earliest_us // 1_000_000,
        "latest": log.latest_us // 1_000_000,
        "ordered_without_times": log.num_ordered,
    }
