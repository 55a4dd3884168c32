"""The second pass: the events of a partition of users become their sequences, by the same `SequenceBuilder`.

What is written of a partition: its sequences, its rows of the table of users, and counters of the items that
occur in it, by partition of the items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import LABELS, UNKNOWN, Label
from rayrec.samples.dataset.manifest import Entity, IdKind
from rayrec.samples.prepare.catalog import user_table
from rayrec.samples.prepare.distributed.files import Kind
from rayrec.samples.prepare.distributed.keys import Described, KeysFound, LogKeys, compare_keys
from rayrec.samples.prepare.distributed.rows import RowsJob, SpilledTable
from rayrec.samples.prepare.distributed.spill import read_partitions, write_partitions, write_rows
from rayrec.samples.prepare.partitions import partition_numbers
from rayrec.samples.prepare.sequences import WITHOUT_HISTORY, SequenceBuilder
from rayrec.samples.prepare.totals import SequenceTotals
from rayrec.samples.prepare.validation import SOURCE_ROW, event_table

_NOT_WRITTEN = (*WITHOUT_HISTORY.values(), "duplicates", "first_duplicate", "first_row", "ties")
"""Columns of sequences that only the totals need."""


@dataclass(frozen=True)
class CatalogJob:
    """What the passes over users and items share."""

    rows: RowsJob
    tables: tuple[SpilledTable, ...]
    """In the order of the log."""
    labels: Mapping[Label, tuple[str, ...]]
    """Names of the codes of the data set."""
    described: Mapping[Entity, tuple[Path, str]]
    """The rows of the tables of users and items by partition, and what the tables are called in messages."""
    num_compared: Mapping[Entity, int]
    """Rows of these tables, without what was added to them from the log."""
    are_unsigned: Mapping[Entity, bool]
    """Whether integers that are ids are unsigned."""

    @property
    def folder(self) -> Path:
        return self.rows.folder

    @property
    def num_partitions(self) -> int:
        return self.rows.num_partitions

    def sequences_file(self, partition: int) -> Path:
        """The sequences of a partition of users."""
        return self.folder / f"sequences-{partition:06}.arrow"

    def users_file(self, partition: int) -> Path:
        """A partition's rows of the table of users."""
        return self.folder / f"users-of-{partition:06}.arrow"

    def counts_file(self, partition: int) -> Path:
        """Counters of items among the events of a partition of users."""
        return self.folder / f"counts-{partition:06}.arrow"

    def spelled_file(self, entity: Entity, partition: int) -> Path:
        """Keys whose spelling is to be compared."""
        return self.folder / f"spelled-{entity}s-{partition:06}.arrow"

    def described_in(self, entity: Entity, first: int, stop: int) -> Described | None:
        """Rows of a table of users or items in some partitions; None without such a table."""
        if entity not in self.described:
            return None
        path, file = self.described[entity]
        return Described.read(path, file, first, stop)

    def log_keys(
        self, entity: Entity, first: int, stop: int, ids_K: Int64Array, rows_K: Int64Array
    ) -> LogKeys:
        """The keys of the log in some partitions.

        Args:
            ids_K, rows_K: the ids in these, and the rows in which they are first; for ids that are integers.
        """
        if self.rows.kinds[entity] == "integer":
            return LogKeys.of_integers(ids_K, rows_K, self.are_unsigned[entity])
        paths = [self.rows.keys_file(table.name, entity) for table in self.tables]
        return LogKeys.read(paths, first, stop)

    def compare(
        self, entity: Entity, keys: LogKeys, described: Described | None, partition: int
    ) -> KeysFound:
        """`compare_keys` of the partitions from one on."""
        return compare_keys(
            keys,
            described,
            self.num_compared[entity],
            entity,
            self.kind(entity),
            self.spelled_file(entity, partition),
            self.num_partitions,
        )

    def kind(self, entity: Entity) -> IdKind:
        return self.rows.kinds[entity]


@dataclass(frozen=True)
class UsersJob:
    """What the tasks of the second pass share."""

    catalog: CatalogJob
    builder: SequenceBuilder


@dataclass(frozen=True)
class UsersBuilt:
    """What is known of a partition of users that is done."""

    totals: SequenceTotals
    rows: Mapping[Kind, int]
    """Rows of the table of users, and of the files of training, history, validation and test."""
    num_counts: int
    """Rows of counters of items."""
    without_events: int
    """Users that are described, and have no events."""
    keys: KeysFound
    schema: pa.Schema | None
    """Of the sequences; None of a partition without events."""
    users_schema: pa.Schema | None = field(default=None)


def build_users(job: UsersJob, partition: int) -> UsersBuilt:
    """Build the sequences of a partition.

    Raises:
        NoRoomError: the disk is full.
    """
    catalog = job.catalog
    described = catalog.described_in("user", partition, partition + 1)
    events = _events(catalog, partition)
    nothing = np.zeros(0, dtype=np.int64)
    if events is None:
        keys = catalog.compare("user", LogKeys.of_integers(nothing, nothing, False), described, partition)
        num_described = 0 if described is None else len(described.ids_D)
        return UsersBuilt(SequenceTotals(), {}, 0, num_described, keys, None)
    user_E, item_E, row_E = (events[name].to_numpy() for name in ("user_id", "item_id", SOURCE_ROW))
    first_item_rows = _first_rows(item_E, row_E)
    first_user_rows = _first_rows(user_E, row_E)
    sequences = job.builder(events)
    del events, user_E, item_E, row_E
    totals = SequenceTotals()
    totals.add(sequences)
    num_counts = _write_counts(catalog, partition, sequences, first_item_rows)
    log_keys = catalog.log_keys("user", partition, partition + 1, *first_user_rows)
    keys = catalog.compare("user", log_keys, described, partition)
    ids = log_keys.id_table(catalog.kind("user"), described, "user")
    kept_K = np.arange(len(ids.ids_K)) < len(log_keys.ids_K)
    if described is None:
        users = user_table(ids, kept_K, None, None)
    else:
        users = user_table(ids, kept_K, described.table, described.ids_D)
    write_rows(catalog.users_file(partition), users)
    written = sequences.drop_columns(list(_NOT_WRITTEN))
    write_rows(catalog.sequences_file(partition), written)
    rows: dict[Kind, int] = {
        "users": len(users),
        "history": len(sequences),
        "train": int(np.count_nonzero(sequences["num_train"].to_numpy())),
        "valid": int(np.count_nonzero(sequences["valid_at"].to_numpy() >= 0)),
        "test": int(np.count_nonzero(sequences["test_at"].to_numpy() >= 0)),
    }
    without_events = len(ids.ids_K) - len(log_keys.ids_K)
    return UsersBuilt(totals, rows, num_counts, without_events, keys, written.schema, users.schema)


def _events(job: CatalogJob, partition: int) -> pa.Table | None:
    """The events of a partition as `Events.table` has them; None without any."""
    tables = []
    for spilled in job.tables:
        path = job.rows.events_file(spilled.name)
        for rows in read_partitions([path], partition, partition + 1):
            tables.append(_with_codes(rows, spilled, job.labels))
    if not tables:
        return None
    rows = pa.concat_tables(tables).combine_chunks()
    del tables
    labels = {label: (rows[label].to_numpy(), names) for label, names in job.labels.items()}
    users, items, times, source = (
        rows[name].to_numpy() for name in ("user_id", "item_id", "timestamp", SOURCE_ROW)
    )
    return event_table(rows.drop_columns([SOURCE_ROW]), users, items, times, source, labels)


def _with_codes(rows: pa.Table, spilled: SpilledTable, labels: Mapping[Label, tuple[str, ...]]) -> pa.Table:
    """With the data set's codes of labels instead of the table's own."""
    for label, names in spilled.labels.items():
        code_of = {name: code for code, name in enumerate(labels[label])}
        # The last is for -1.
        codes_K = np.array([*(code_of.get(name, UNKNOWN) for name in names), UNKNOWN], dtype=np.int64)
        at = rows.schema.get_field_index(label)
        rows = rows.set_column(at, label, pa.array(codes_K[rows[label].to_numpy()]))
    return rows


def _first_rows(id_E: Int64Array, row_E: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The distinct ids, and the first row of each; rows are ascending."""
    is_first = ~pd.Series(id_E).duplicated().to_numpy()
    return id_E[is_first], row_E[is_first]


def _write_counts(
    job: CatalogJob, partition: int, sequences: pa.Table, first_rows: tuple[Int64Array, Int64Array]
) -> int:
    items = sequences["item_ids"].combine_chunks()
    lengths_U = np.diff(items.offsets.to_numpy())
    item_E = items.flatten().to_numpy()
    within_E = np.arange(len(item_E)) - np.repeat(np.cumsum(lengths_U) - lengths_U, lengths_U)
    is_train_E = within_E < np.repeat(sequences["num_train"].to_numpy(), lengths_U)
    ids_K, rows_K = first_rows
    code_E = pd.Index(ids_K).get_indexer(pd.Index(item_E))
    table = pa.table(
        {
            "id": ids_K,
            "row": rows_K,
            "events": np.bincount(code_E, minlength=len(ids_K)),
            "train": np.bincount(code_E[is_train_E], minlength=len(ids_K)),
        }
    )
    write_partitions(job.counts_file(partition), table, partition_numbers(ids_K, job.num_partitions))
    return len(ids_K)


def labels_of(names: Mapping[Label, tuple[str, ...]]) -> dict[Label, tuple[str, ...]]:
    """Labels in their usual order."""
    return {label: names[label] for label in LABELS if label in names}
