"""The first pass: rows of the log are checked, get their ids, and are spilled by partition of their user.

A task reads one piece. What it spills of the rows are the columns of `Events.table` with codes of labels that
are its own; keys of ids that are texts are spilled beside them, once for each table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import LABELS, UNKNOWN, Label
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.event_labels import LABEL_TYPE
from rayrec.samples.dataset.manifest import Entity, IdKind
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.prepare.catalog import latest_titles
from rayrec.samples.prepare.distributed.log_pieces import LogForm, OpenLog, in_tables
from rayrec.samples.prepare.distributed.spill import write_partitions, write_rows
from rayrec.samples.prepare.findings import FoundRows
from rayrec.samples.prepare.ids import (
    distinct_keys,
    hash_strings,
    ids_of_kind,
    integer_range,
    is_integer_id,
    is_outside,
)
from rayrec.samples.prepare.partitions import partition_numbers
from rayrec.samples.prepare.times import TextForm, TimesSeen
from rayrec.samples.prepare.validation import EVENT_COLUMNS, SOURCE_ROW, RowTally, check_rows

ENTITIES: tuple[Entity, ...] = ("user", "item")
DAY_US = 86_400_000_000


@dataclass(frozen=True)
class RowsJob:
    """What the tasks of the pass share."""

    config: PrepareConfig
    log: OpenLog
    form: LogForm
    text_form: TextForm | None
    kinds: Mapping[Entity, IdKind]
    num_partitions: int
    table_rows: int
    """Rows that are checked and spilled at once."""
    count_days: bool
    """Whether the split needs to know how many events each day has."""
    folder: Path

    @property
    def code(self) -> str:
        """Part of the names of files, as ids of other kinds give other files."""
        return "".join(self.kinds[entity][0] for entity in ENTITIES)

    def events_file(self, table: str) -> Path:
        """The events of a table of rows, by its name."""
        return self.folder / f"events-{table}.arrow"

    def keys_file(self, table: str, entity: Entity) -> Path:
        """The distinct keys of a table of rows, with their ids and first rows."""
        return self.folder / f"{entity}s-{table}.arrow"

    def titles_file(self, table: str) -> Path:
        """The latest title of each item in a table of rows."""
        return self.folder / f"titles-{table}.arrow"


@dataclass(frozen=True)
class SpilledTable:
    """Rows that were checked and spilled at once."""

    name: str
    labels: Mapping[Label, tuple[str, ...]]
    """Names of the codes of each label."""


@dataclass
class SpilledRows:
    """What is known of spilled rows; of pieces, it is merged in their order."""

    tally: RowTally
    findings: list[FoundRows] = field(default_factory=list)
    tables: list[SpilledTable] = field(default_factory=list)
    rows_P: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Events of each partition."""
    earliest_us: int | None = None
    latest_us: int | None = None
    days: dict[int, int] = field(default_factory=dict)
    """Events of each day since 1970, where they are counted."""
    names: dict[Label, tuple[str, ...]] = field(default_factory=dict)
    """Of each label of the events, sorted."""
    ranges: dict[Entity, tuple[int, int]] = field(default_factory=dict)
    """The lowest and the highest id, where ids are integers."""
    not_integers: set[Entity] = field(default_factory=set)
    """Whose ids were said to be integers, and are not; then nothing is spilled."""

    def merge(self, other: SpilledRows, first_row: int = 0) -> None:
        """Take what comes next into account.

        Args:
            first_row: where it begins in what its tally counts.
        """
        self.tally.merge(other.tally, first_row)
        self.findings += other.findings
        self.tables += other.tables
        if len(self.rows_P) and len(other.rows_P):
            self.rows_P = self.rows_P + other.rows_P
        elif len(other.rows_P):
            self.rows_P = other.rows_P
        times = [one for one in (self.earliest_us, other.earliest_us) if one is not None]
        self.earliest_us = min(times, default=None)
        times = [one for one in (self.latest_us, other.latest_us) if one is not None]
        self.latest_us = max(times, default=None)
        for day, count in other.days.items():
            self.days[day] = self.days.get(day, 0) + count
        for label, names in other.names.items():
            self.names[label] = tuple(sorted({*self.names.get(label, ()), *names}))
        for entity, (lowest, highest) in other.ranges.items():
            before = self.ranges.get(entity, (lowest, highest))
            self.ranges[entity] = min(before[0], lowest), max(before[1], highest)
        self.not_integers |= other.not_integers


def spill_piece(job: RowsJob, number: int) -> SpilledRows:
    """Check and spill the rows of a piece.

    Raises:
        InputError: a column has a type that it cannot have, or the file cannot be read or has changed.
        NoRoomError: the disk for what is spilled is full.
    """
    piece = job.log.pieces[number]
    job.log.check(piece)
    found = SpilledRows(RowTally(TimesSeen(job.config.time_unit)))
    first_row = job.form.first_row(number)
    done = 0
    for at, table in enumerate(in_tables(job.form.read(job.log, piece), job.table_rows)):
        found.merge(_spill_table(job, table, f"{job.code}-{number:06}-{at:03}", first_row + done), done)
        done += len(table)
        if found.not_integers:
            break
    job.log.check(piece)
    return found


def _spill_table(job: RowsJob, table: pa.Table, name: str, first_row: int) -> SpilledRows:
    rows = check_rows(RawTable(table, job.log.label, str), job.config, text_form=job.text_form)
    found = SpilledRows(rows.tally, rows.findings.of_part(first_row))
    kept_E = rows.kept_R
    if not len(kept_E):
        return found
    source = rows.log.table.take(pa.array(kept_E)) if len(kept_E) < len(table) else rows.log.table
    for entity in ENTITIES:
        if job.kinds[entity] == "integer":
            column = source[f"{entity}_id"]
            if not pa.types.is_integer(column.type) and not is_integer_id(column):
                found.not_integers.add(entity)
            else:
                found.ranges[entity] = integer_range(column)
    if found.not_integers or any(is_outside(*one) for one in found.ranges.values()):
        return found  # either once more with other kinds, or refused
    times_E = rows.times_R[kept_E]
    found.earliest_us, found.latest_us = int(times_E.min()), int(times_E.max())
    if job.count_days:
        days, counts = np.unique(times_E // DAY_US, return_counts=True)
        found.days = dict(zip(days.tolist(), counts.tolist(), strict=True))
    ids: dict[Entity, Int64Array] = {}
    for entity in ENTITIES:
        if job.kinds[entity] == "integer":
            ids[entity] = ids_of_kind(source[f"{entity}_id"], "integer", entity)
        else:
            keys, codes_E, first_K = distinct_keys(source[f"{entity}_id"])
            ids_K = hash_strings(keys)
            ids[entity] = ids_K[codes_E]
            rows_K = first_row + kept_E[first_K]
            of_keys = pa.table({"id": ids_K, "key": keys, "row": rows_K})
            write_partitions(
                job.keys_file(name, entity), of_keys, partition_numbers(ids_K, job.num_partitions)
            )
    if "title" in source.schema.names:
        titles = latest_titles(rows.log, kept_E, times_E, first_row)
        write_rows(job.titles_file(name), pa.Table.from_pandas(titles, preserve_index=False))
        source = source.drop_columns(["title"])
    columns = {
        "user_id": pa.array(ids["user"]),
        "item_id": pa.array(ids["item"]),
        "timestamp": pa.array(times_E),
        SOURCE_ROW: pa.array(first_row + kept_E),
    }
    for label, (codes_R, names) in rows.codes.items():
        codes_E = codes_R[kept_E]
        found.names[label] = tuple(names[code] for code in np.unique(codes_E[codes_E != UNKNOWN]).tolist())
        columns[label] = pa.array(codes_E).cast(LABEL_TYPE)
    further = [one for one in source.schema.names if one not in (*EVENT_COLUMNS, *LABELS)]
    partition_E = partition_numbers(ids["user"], job.num_partitions)
    events = pa.table(columns | {one: source[one] for one in further})
    write_partitions(job.events_file(name), events, partition_E)
    found.tables.append(SpilledTable(name, {label: names for label, (_, names) in rows.codes.items()}))
    found.rows_P = np.bincount(partition_E, minlength=job.num_partitions)
    return found
