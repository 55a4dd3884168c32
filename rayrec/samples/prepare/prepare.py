"""`prepare`: a source becomes a data set.

source ─ importers ─► raw tables ─ validation ─► events ─┬─ partitions by user, in parallel
                                                         │      SequenceBuilder
data set ◄─ renamed when whole ◄─ items, users, manifest ◄┴─ SplitWriter, in order of mix64(user)

Only `SequenceBuilder` runs elsewhere, where `run_partitions` says. This process reads and checks the log and
writes the data set, and has to hold the log: 120 bytes an event with integer ids, 170 with short strings,
further columns on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig, option
from rayrec.samples.dataset.dataset_folder import HISTORIES, TRAIN_FOLDER, FileEntry
from rayrec.samples.dataset.manifest import (
    EVALUATION_FILES,
    ITEMS_FILE,
    USERS_FILE,
    Manifest,
    SplitInfo,
    TiesInfo,
    fingerprint_of,
)
from rayrec.samples.importers import load_source
from rayrec.samples.importers.tables import PART, RawTables
from rayrec.samples.prepare.catalog import item_table, text_columns, user_table
from rayrec.samples.prepare.partitions import RunPartitions, run_partitions_locally
from rayrec.samples.prepare.report import PrepareReport, uses_of
from rayrec.samples.prepare.sequences import SequenceBuilder
from rayrec.samples.prepare.splits import SplitWriter
from rayrec.samples.prepare.time_split import time_boundaries
from rayrec.samples.prepare.validation import Events, validate
from rayrec.samples.prepare.writer import check_target, whole_folder, write_table

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)."""


def _silent(phase: str, done: int, total: int) -> None:
    pass


def prepare(
    source: str | Path,
    out: str | Path,
    config: PrepareConfig | None = None,
    run_partitions: RunPartitions = run_partitions_locally,
    progress: Progress = _silent,
) -> PrepareReport:
    """Write the data set `out` from `source`; `out` appears when it is whole, or not at all.

    The result depends on the source and the config alone: not on the partitions, nor on where they
    run, nor (unless `ties` is "file") on the order of the source's rows.

    Raises:
        InputError: something in the source or the config cannot be used, or `out` is taken.
    """
    config = config or PrepareConfig()
    out = Path(out)
    check_target(out, HISTORIES, config.overwrite)
    progress("reading", 0, 1)
    raw, layout = load_source(source, config)
    events = validate(raw, config)
    raw = events.raw
    progress("reading", 1, 1)
    split = _split_of(events, raw, config)
    textual = text_columns(raw.items, config.text_columns)
    with whole_folder(out) as folder:
        totals = _write_splits(folder, events, split, config, run_partitions, progress)
        _find_after_all(events, totals)
        events.findings.refuse(config.allowed)
        files = totals.files
        kept_items_K = totals.events_of_item_K > 0
        if events.item_rows is not None:
            kept_items_K[events.items.positions(events.item_rows)] = True
        items = item_table(
            events.items, kept_items_K, totals.train_counts_K, raw.items, events.item_rows, textual
        )
        users = user_table(events.users, totals.seen_user_K, raw.users, events.user_rows)
        files[ITEMS_FILE] = write_table(folder / ITEMS_FILE, items)
        files[USERS_FILE] = write_table(folder / USERS_FILE, users)
        behaviors, scenarios = events.labels.get("behavior", ()), events.labels.get("scenario", ())
        manifest = Manifest(
            format=HISTORIES.format,
            name=raw.name,
            source=str(source),
            layout=layout,
            split=split,
            seed=config.seed,
            ties=TiesInfo(rule=config.ties, neighbors=totals.ties, users=totals.tied_users),
            id_kinds={"user": events.users.kind, "item": events.items.kind},
            behaviors=behaviors,
            scenarios=scenarios,
            text_columns=textual,
            counts=_counts(events, totals, items, users),
            files=files,
            fingerprint=fingerprint_of(files, behaviors, scenarios),
        )
        manifest.write(folder)
    return PrepareReport(out, manifest, uses_of(raw, textual))


@dataclass
class _Totals:
    """What is summed up while the partitions pass by."""

    train_counts_K: Int64Array
    events_of_item_K: Int64Array
    seen_user_K: np.ndarray
    files: dict[str, FileEntry] = field(default_factory=dict)
    ties: int = 0
    tied_users: int = 0
    duplicates: int = 0
    first_duplicate: int = -1
    """Source row; -1 when there is none."""
    short_users: int = 0
    first_short: int = -1
    """Source row of the only event of a user; -1 when there is no such user."""

    def add(self, sequences: pa.Table) -> None:
        ties_U = sequences["ties"].to_numpy()
        self.ties += int(ties_U.sum())
        self.tied_users += int((ties_U > 0).sum())
        self.duplicates += int(sequences["duplicates"].to_numpy().sum())
        first_U = sequences["first_duplicate"].to_numpy()
        self.first_duplicate = _earliest(self.first_duplicate, first_U[first_U >= 0])
        short_U = np.diff(sequences["item_ids"].combine_chunks().offsets.to_numpy()) == 1
        self.short_users += int(short_U.sum())
        self.first_short = _earliest(self.first_short, sequences["first_row"].to_numpy()[short_U])


def _earliest(row: int, rows: Int64Array) -> int:
    if not len(rows):
        return row
    return int(rows.min()) if row < 0 else min(row, int(rows.min()))


def _write_splits(
    folder: Path,
    events: Events,
    split: SplitInfo,
    config: PrepareConfig,
    run_partitions: RunPartitions,
    progress: Progress,
) -> _Totals:
    builder = SequenceBuilder(split, config.ties, config.seed, tuple(events.labels))
    totals = _Totals(
        train_counts_K=np.zeros(len(events.items.ids_K), dtype=np.int64),
        events_of_item_K=np.zeros(len(events.items.ids_K), dtype=np.int64),
        seen_user_K=np.zeros(len(events.users.ids_K), dtype=bool),
    )
    writer: SplitWriter | None = None
    done = 0
    progress("sequences", done, len(events.table))
    for sequences in run_partitions(events.table, "user_id", config.num_partitions, builder):
        if writer is None:
            writer = SplitWriter(folder, sequences.schema, config.rows_per_group, config.rows_per_file)
        train_ids = writer.add(sequences)
        totals.add(sequences)
        item_ids = sequences["item_ids"].combine_chunks().flatten().to_numpy()
        num_items = len(events.items.ids_K)
        totals.train_counts_K += np.bincount(events.items.positions(train_ids), minlength=num_items)
        totals.events_of_item_K += np.bincount(events.items.positions(item_ids), minlength=num_items)
        totals.seen_user_K[events.users.positions(sequences["user_id"].to_numpy())] = True
        done += len(item_ids) + int(sequences["duplicates"].to_numpy().sum())
        progress("sequences", done, len(events.table))
    assert writer is not None, "validation refuses a source without events"
    totals.files = writer.close()
    return totals


def _split_of(events: Events, raw: RawTables, config: PrepareConfig) -> SplitInfo:
    """The split with its boundaries; fractions are of the source's events, duplicates included."""
    if config.split == "time" and raw.order_is_time:
        raise InputError(
            f"{raw.interactions.file}: the source has no times, only an order of each user's events; split "
            f"it by leaving one out ({option('split')} leave_one_out)"
        )
    if PART in events.table.schema.names:
        return SplitInfo(kind="given")
    if config.split == "leave_one_out":
        return SplitInfo(kind="leave_one_out")
    times_E = events.table["timestamp"].to_numpy()
    times_T, counts_T = np.unique(times_E, return_counts=True)
    starts = None
    if config.valid_start is not None and config.test_start is not None:
        starts = (config.valid_start, config.test_start)
    valid_start, test_start = time_boundaries(times_T, counts_T, starts, config.fractions)
    return SplitInfo(kind="time", valid_start=valid_start, test_start=test_start)


def _find_after_all(events: Events, totals: _Totals) -> None:
    """Add to the findings what only shows once the sequences of all users are there."""
    log, findings = events.raw.interactions, events.findings

    def duplicate(row: int) -> str:
        user, item, time = (log.table[name][row].as_py() for name in ("user_id", "item_id", "timestamp"))
        return f"user {user!r} has item {item!r} at {time} a second time"

    def short(row: int) -> str:
        return f"user {log.table['user_id'][row].as_py()!r} has only this event"

    findings.add("duplicates", totals.duplicates, totals.first_duplicate, log.where, duplicate)
    findings.add("short-users", totals.short_users, totals.first_short, log.where, short)
    items, cold_rows = events.raw.items, _cold_rows(events, totals)
    if items is not None and len(cold_rows):

        def cold(row: int) -> str:
            return f"item {items.table['item_id'][row].as_py()!r} has no interactions"

        findings.add("cold-items", len(cold_rows), int(cold_rows[0]), items.where, cold)


def _cold_rows(events: Events, totals: _Totals) -> Int64Array:
    """Rows of the source's table of items whose item has no event."""
    if events.item_rows is None:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(totals.events_of_item_K[events.items.positions(events.item_rows)] == 0)


def _counts(events: Events, totals: _Totals, items: pa.Table, users: pa.Table) -> dict[str, int]:
    described_items = 0 if events.item_rows is None else len(events.item_rows)
    described_users = np.zeros(0, dtype=np.int64) if events.user_rows is None else events.user_rows
    rows = {name: entry.rows for name, entry in totals.files.items()}
    times_E = events.table["timestamp"].to_numpy()
    return {
        "users": len(users),
        "items": len(items),
        "events": int(totals.events_of_item_K.sum()),
        "train_rows": sum(count for name, count in rows.items() if name.startswith(f"{TRAIN_FOLDER}/")),
        "train_events": int(totals.train_counts_K.sum()),
        **{f"{split}_rows": rows[name] for split, name in EVALUATION_FILES.items()},
        "unused_events": int(totals.events_of_item_K.sum() - totals.train_counts_K.sum())
        - sum(rows[name] for name in EVALUATION_FILES.values()),
        "duplicates": totals.duplicates,
        "short_users": totals.short_users,
        "cold_items": len(_cold_rows(events, totals)),
        "undescribed_items": len(items) - described_items,
        "users_without_events": int((~totals.seen_user_K[events.users.positions(described_users)]).sum()),
        "events_filtered": events.num_filtered,
        "trimmed_ids": events.num_trimmed,
        "missing_ids": events.findings.count("missing-ids"),
        "bad_times": events.findings.count("bad-times"),
        "repeated_descriptions": events.findings.count("repeated-descriptions"),
        "earliest": int(times_E.min()) // 1_000_000,
        "latest": int(times_E.max()) // 1_000_000,
        "ordered_without_times": len(events.table) if events.raw.order_is_time else 0,
    }
