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
from rayrec.samples.dataset.dataset_folder import HISTORIES, FileEntry
from rayrec.samples.dataset.manifest import (
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
from rayrec.samples.prepare.totals import (
    CatalogCounts,
    LogCounts,
    SequenceTotals,
    find_cold,
    find_in_sequences,
    manifest_counts,
    shown_values,
)
from rayrec.samples.prepare.validation import Events, validate
from rayrec.samples.prepare.writer import check_target, whole_folder, write_table

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)."""


def silent(phase: str, done: int, total: int) -> None:
    """`Progress` that nobody sees."""


def prepare(
    source: str | Path,
    out: str | Path,
    config: PrepareConfig | None = None,
    run_partitions: RunPartitions = run_partitions_locally,
    progress: Progress = silent,
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
        kept = _write_splits(folder, events, split, config, run_partitions, progress)
        cold_rows = _cold_rows(events, kept)
        log = raw.interactions
        find_in_sequences(events.findings, kept.totals, log.where, lambda row: shown_values(log, row))
        find_cold(events.findings, raw.items, len(cold_rows), int(cold_rows[0]) if len(cold_rows) else -1)
        events.findings.refuse(config.allowed)
        files = kept.files
        kept_items_K = kept.events_of_item_K > 0
        if events.item_rows is not None:
            kept_items_K[events.items.positions(events.item_rows)] = True
        items = item_table(
            events.items, kept_items_K, kept.train_counts_K, raw.items, events.item_rows, textual
        )
        users = user_table(events.users, kept.seen_user_K, raw.users, events.user_rows)
        counts = manifest_counts(
            kept.totals,
            files,
            _catalog_counts(events, kept, items, users, len(cold_rows)),
            _log_counts(events),
            events.findings,
        )
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
            ties=TiesInfo(rule=config.ties, neighbors=kept.totals.ties, users=kept.totals.tied_users),
            id_kinds={"user": events.users.kind, "item": events.items.kind},
            behaviors=behaviors,
            scenarios=scenarios,
            text_columns=textual,
            counts=counts,
            files=files,
            fingerprint=fingerprint_of(files, behaviors, scenarios),
        )
        manifest.write(folder)
    return PrepareReport(out, manifest, uses_of(raw, textual))


@dataclass
class _Kept:
    """What is kept while the partitions pass by."""

    train_counts_K: Int64Array
    events_of_item_K: Int64Array
    seen_user_K: np.ndarray
    totals: SequenceTotals = field(default_factory=SequenceTotals)
    files: dict[str, FileEntry] = field(default_factory=dict)


def _write_splits(
    folder: Path,
    events: Events,
    split: SplitInfo,
    config: PrepareConfig,
    run_partitions: RunPartitions,
    progress: Progress,
) -> _Kept:
    builder = SequenceBuilder(split, config.ties, config.seed, tuple(events.labels))
    kept = _Kept(
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
        kept.totals.add(sequences)
        item_ids = sequences["item_ids"].combine_chunks().flatten().to_numpy()
        num_items = len(events.items.ids_K)
        kept.train_counts_K += np.bincount(events.items.positions(train_ids), minlength=num_items)
        kept.events_of_item_K += np.bincount(events.items.positions(item_ids), minlength=num_items)
        kept.seen_user_K[events.users.positions(sequences["user_id"].to_numpy())] = True
        done += len(item_ids) + int(sequences["duplicates"].to_numpy().sum())
        progress("sequences", done, len(events.table))
    assert writer is not None, "validation refuses a source without events"
    kept.files = writer.close()
    return kept


def _split_of(events: Events, raw: RawTables, config: PrepareConfig) -> SplitInfo:
    """The split with its boundaries; fractions are of the source's events, duplicates included."""
    rule = split_rule(raw.interactions.file, raw.order_is_time, PART in events.table.schema.names, config)
    if rule.kind != "time":
        return rule
    times_T, counts_T = np.unique(events.table["timestamp"].to_numpy(), return_counts=True)
    valid_start, test_start = time_boundaries(times_T, counts_T, config.starts, config.fractions)
    return SplitInfo(kind="time", valid_start=valid_start, test_start=test_start, targets=config.targets)


def split_rule(file: str, order_is_time: bool, is_divided: bool, config: PrepareConfig) -> SplitInfo:
    """The split, without the boundaries of one by time.

    Raises:
        InputError: a split by time of a log that has no times.
    """
    if config.split == "time" and order_is_time:
        raise InputError(
            f"{file}: the source has no times, only an order of each user's events; split "
            f"it by leaving one out ({option('split')} leave_one_out)"
        )
    return SplitInfo(kind="given" if is_divided else config.split)


def _cold_rows(events: Events, kept: _Kept) -> Int64Array:
    """Rows of the source's table of items whose item has no event."""
    if events.item_rows is None:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(kept.events_of_item_K[events.items.positions(events.item_rows)] == 0)


def _catalog_counts(
    events: Events, kept: _Kept, items: pa.Table, users: pa.Table, num_cold: int
) -> CatalogCounts:
    described_users = np.zeros(0, dtype=np.int64) if events.user_rows is None else events.user_rows
    return CatalogCounts(
        users=len(users),
        items=len(items),
        described_items=0 if events.item_rows is None else len(events.item_rows),
        cold_items=num_cold,
        users_without_events=int((~kept.seen_user_K[events.users.positions(described_users)]).sum()),
    )


def _log_counts(events: Events) -> LogCounts:
    times_E = events.table["timestamp"].to_numpy()
    return LogCounts(
        num_filtered=events.num_filtered,
        num_trimmed=events.num_trimmed,
        earliest_us=int(times_E.min()),
        latest_us=int(times_E.max()),
        num_ordered=len(events.table) if events.raw.order_is_time else 0,
    )
