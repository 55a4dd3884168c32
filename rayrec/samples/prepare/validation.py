"""Raw interactions become events: 64-bit ids, times in microseconds, behavior codes, or a refusal.

Every refusal names the file, the row and the value, and says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import LABELS, UNKNOWN, Label
from rayrec.samples.base.config import PrepareConfig, option
from rayrec.samples.base.event_labels import LABEL_TYPE
from rayrec.samples.importers.tables import RawTable, RawTables
from rayrec.samples.prepare.catalog import with_titles_of_log
from rayrec.samples.prepare.findings import Findings
from rayrec.samples.prepare.ids import IdTable, assign_ids
from rayrec.samples.prepare.key_comparison import KeysCompared, NumbersAlike, SpellingsCompared
from rayrec.samples.prepare.times import TextForm, TimesSeen, described_time, times_of

EVENT_COLUMNS = ("user_id", "item_id", "timestamp", "behavior")
ID_COLUMNS = ("user_id", "item_id")
SOURCE_ROW = "__row"


@dataclass(frozen=True)
class Events:
    """Checked interactions and the ids that occur in any table of the source."""

    table: pa.Table
    """user_id, item_id, timestamp (us), behavior (code, -1 without), `SOURCE_ROW`, the codes of further
    labels that the source has, further columns."""
    users: IdTable
    items: IdTable
    item_rows: Int64Array | None
    """Item id of each row of the source's table of items."""
    user_rows: Int64Array | None
    labels: dict[Label, tuple[str, ...]]
    """Names of the codes, sorted, of each label that the source has."""
    num_filtered: int
    """Events left out because their behavior was not asked for."""
    num_trimmed: int
    """Ids that had blanks around them."""
    findings: Findings
    """Rows that need a decision; those of `table` and `raw` do without them."""
    raw: RawTables
    """The source: all rows of the log, as `SOURCE_ROW` counts them; one row for each item and user."""


def validate(raw: RawTables, config: PrepareConfig) -> Events:
    """Check the source, row by row and as a whole.

    Raises:
        InputError: no events, an id or time of a wrong type, labels that cannot be, a behavior that does not
            occur, or none where some are chosen by it. What single rows lack is found, not refused.
    """
    if not len(raw.interactions.table):
        raise no_events(raw.interactions.file)
    rows = check_rows(raw.interactions, config, raw.order_is_time)
    log, times_R, kept_R, findings = rows.log, rows.times_R, rows.kept_R, rows.findings
    rows.tally.refuse(log, findings, config)
    labels = {label: _renumbered(codes_R[kept_R], names) for label, (codes_R, names) in rows.codes.items()}
    source = log.table.take(pa.array(kept_R)) if len(kept_R) < len(times_R) else log.table
    items, trimmed_items = described(raw.items, "item", findings)
    users, trimmed_users = described(raw.users, "user", findings)
    for entity, described_by in (("item", items), ("user", users)):
        name = f"{entity}_id"
        add_alike(log.file, source[name], name, findings)
        if described_by is not None:
            add_alike(described_by.file, described_by.table[name], name, findings)
    items = _compared(log, source, items, "item", findings)
    users = _compared(log, source, users, "user", findings)
    titles_of_log = ""
    if "title" in log.table.schema.names:
        items, titles_of_log = with_titles_of_log(log, kept_R, times_R[kept_R], items)
        log = replace(log, table=log.table.drop_columns(["title"]))
        source = source.drop_columns(["title"])
    item_ids, item_columns = _ids(source, items, "item")
    user_ids, user_columns = _ids(source, users, "user")
    table = event_table(source, user_columns[0], item_columns[0], times_R[kept_R], kept_R, labels)
    return Events(
        table=table,
        raw=replace(raw, interactions=log, items=items, users=users, titles_of_log=titles_of_log),
        users=user_ids,
        items=item_ids,
        item_rows=None if items is None else item_columns[1],
        user_rows=None if users is None else user_columns[1],
        labels={label: names for label, (_, names) in labels.items()},
        num_filtered=rows.tally.num_filtered,
        num_trimmed=rows.tally.num_trimmed + trimmed_items + trimmed_users,
        findings=findings,
    )


def event_table(
    source: pa.Table,
    users_E: Int64Array,
    items_E: Int64Array,
    times_E: Int64Array,
    rows_E: Int64Array,
    labels: Mapping[Label, tuple[Int64Array, tuple[str, ...]]],
) -> pa.Table:
    """The columns of `Events.table`.

    Args:
        source: the rows that are kept, with all columns of the log.
        rows_E: which rows of the log they are.
    """
    columns = {
        "user_id": pa.array(users_E),
        "item_id": pa.array(items_E),
        "timestamp": pa.array(times_E),
        "behavior": pa.array(np.full(len(rows_E), UNKNOWN)),
        SOURCE_ROW: pa.array(rows_E),
    } | {label: pa.array(codes_E) for label, (codes_E, _) in labels.items()}
    # `PART` goes along, and ends with the sequences.
    further = [name for name in source.schema.names if name not in (*EVENT_COLUMNS, *LABELS)]
    return pa.table(columns | {name: source[name] for name in further})


def no_events(file: str) -> InputError:
    """The refusal of a log without rows."""
    return InputError(f"{file}: no events in it; expected one row per interaction")


@dataclass
class RowTally:
    """Counters of checked rows; those of the parts of a log merge, in the order of the parts."""

    times: TimesSeen
    num_rows: int = 0
    num_wrong: int = 0
    """Without an id or a usable time."""
    num_filtered: int = 0
    """Others, of a behavior that was not asked for."""
    num_trimmed: int = 0
    names: dict[Label, tuple[str, ...]] = field(default_factory=dict)
    """What each label that the log has is called in some row, sorted."""
    num_unlabeled: int = 0
    """Without a behavior, where rows are chosen by it."""
    first_unlabeled: int = -1
    """The first of them."""

    def merge(self, other: RowTally, first_row: int) -> None:
        """Take the next part into account.

        Args:
            first_row: where it begins.
        """
        self.times.merge(other.times)
        self.num_rows += other.num_rows
        self.num_wrong += other.num_wrong
        self.num_filtered += other.num_filtered
        self.num_trimmed += other.num_trimmed
        for label, names in other.names.items():
            self.names[label] = tuple(sorted({*self.names.get(label, ()), *names}))
        if other.num_unlabeled and not self.num_unlabeled:
            self.first_unlabeled = first_row + other.first_unlabeled
        self.num_unlabeled += other.num_unlabeled

    def refuse(self, log: RawTable, findings: Findings, config: PrepareConfig) -> None:
        """Refuse a log that has no usable rows, or cannot be read as it is said.

        Args:
            log: the whole, of which only its name and where its rows are is looked at.

        Raises:
            InputError: as `validate`.
        """
        self.times.refuse(log.file)
        if self.num_wrong == self.num_rows:
            findings.refuse_all()
        for label, names in self.names.items():
            _refuse_many_names(log, label, len(names))
        if config.behaviors is not None:
            if self.num_unlabeled:  # which of these would be kept?
                raise _no_value(log.where(self.first_unlabeled), "behavior", self.num_unlabeled)
            _refuse_unknown(config.behaviors, self.names.get("behavior", ()), log)
        if self.num_wrong + self.num_filtered == self.num_rows:
            raise InputError(f"{log.file}: no event is left of {self.num_rows:,}; keep other behaviors")


@dataclass(frozen=True)
class CheckedRows:
    """Rows of a log, each checked by itself."""

    log: RawTable
    """Without blanks around ids."""
    times_R: Int64Array
    """Microseconds since 1970."""
    kept_R: Int64Array
    """Those that are events."""
    codes: dict[Label, tuple[Int64Array, tuple[str, ...]]]
    """[R] codes and their names, of each label that the log has."""
    findings: Findings
    tally: RowTally


def check_rows(
    log: RawTable, config: PrepareConfig, order_is_time: bool = False, text_form: TextForm | None = None
) -> CheckedRows:
    """Check rows, each by itself; what only all rows together tell is in the tally.

    Args:
        log: a log or some rows of it.
        text_form: how its times are written, if they are texts; None: as those of these rows.

    Raises:
        InputError: an id, time or label has a type that it cannot have, or a setting has no effect.
    """
    findings, num_rows = Findings(), len(log.table)
    trimmed = 0
    wrong_R = np.zeros(num_rows, dtype=bool)
    for name in ID_COLUMNS:
        log, count = trimmed_ids(log, name)
        trimmed += count
        wrong_R |= _without_ids(log, name, findings, wrong_R)
    if order_is_time:
        _refuse_settings_of_times(log, config)
    times = times_of(log, "s" if order_is_time else config.time_unit, config.time_format, text_form)
    for fault in times.wrong:
        rows_R = fault.rows_R & ~wrong_R

        def describe(row: int, why: str = fault.why) -> str:
            return described_time(log, row, why)

        findings.add_rows("bad-times", rows_R, log.where, describe)
        wrong_R |= rows_R
    tally = RowTally(times.seen, num_rows, int(wrong_R.sum()), num_trimmed=trimmed)
    codes = {label: _codes(log, label) for label in LABELS if label in log.table.schema.names}
    tally.names = {label: names for label, (_, names) in codes.items()}
    chosen_R = np.ones(num_rows, dtype=bool)
    if config.behaviors is not None:
        codes_R, names = codes.get("behavior", (np.full(num_rows, UNKNOWN), ()))
        if "behavior" in codes and (unlabeled_R := codes_R == UNKNOWN).any():
            tally.num_unlabeled, tally.first_unlabeled = int(unlabeled_R.sum()), int(np.argmax(unlabeled_R))
        chosen_R = np.isin(codes_R, [code for code, name in enumerate(names) if name in config.behaviors])
        tally.num_filtered = int((~chosen_R & ~wrong_R).sum())
    kept_R = np.flatnonzero(chosen_R & ~wrong_R)
    return CheckedRows(log, times.times_R, kept_R, codes, findings, tally)


def check_ids(raw: RawTable, name: str) -> None:
    """Check that a column holds ids.

    Raises:
        InputError: the column has another type than integer or string, a null, or an empty text.
    """
    column = raw.table[name]
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{raw.file}: column {name} has the type {kind}; expected integers or strings")
    refuse_nulls(raw, name, column)
    if not pa.types.is_integer(kind):
        empty_R = pc.equal(column.cast(pa.large_string()), "").to_numpy()
        if empty_R.any():
            raise InputError(
                f"{raw.where(int(np.argmax(empty_R)))}: {name} is empty; expected an id, or no such row"
            )


def refuse_nulls(raw: RawTable, name: str, column: pa.ChunkedArray) -> None:
    """Check that a column has no nulls.

    Raises:
        InputError: naming the first row without a value.
    """
    if column.null_count:
        raise _no_value(raw.where(int(np.argmax(column.is_null().to_numpy()))), name, column.null_count)


def _no_value(where: str, name: str, count: int) -> InputError:
    return InputError(f"{where}: {name} is missing ({count} rows have none); fill it in or leave the row out")


def _refuse_settings_of_times(log: RawTable, config: PrepareConfig) -> None:
    """Raise InputError if a setting says something of times, where the source has none."""
    for name in ("time_unit", "time_format"):
        if getattr(config, name) is not None:
            raise InputError(
                f"{log.file}: {option(name)} has no effect, since the source has no times, only an order; "
                "leave it out"
            )


def _ids(log: pa.Table, described: RawTable | None, entity: str) -> tuple[IdTable, list[Int64Array]]:
    tables = [log] if described is None else [log, described.table]
    return assign_ids([table[f"{entity}_id"] for table in tables], entity)


def trimmed_ids(raw: RawTable, name: str) -> tuple[RawTable, int]:
    """A table without blanks around its ids, and how many ids had some."""
    column = raw.table[name]
    if not pa.types.is_string(column.type):
        return raw, 0
    trimmed = pc.utf8_trim_whitespace(column)
    count = pc.sum(pc.not_equal(trimmed, column)).as_py() or 0
    if not count:
        return raw, 0
    at = raw.table.schema.get_field_index(name)
    return replace(raw, table=raw.table.set_column(at, name, trimmed)), count


def _without_ids(
    raw: RawTable, name: str, findings: Findings, found_R: np.ndarray | None = None
) -> np.ndarray:
    """[R] whether a row has no id; such rows are found, unless `found_R` says that they are already."""
    column = raw.table[name]
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
        raise InputError(f"{raw.file}: column {name} has the type {kind}; expected integers or strings")
    none_R = column.is_null().to_numpy()
    empty_R = np.zeros(len(none_R), dtype=bool)
    if pa.types.is_string(kind):
        empty_R = pc.fill_null(pc.equal(column, ""), False).to_numpy()

    def describe(row: int) -> str:
        return f"{name} is {'missing' if none_R[row] else 'empty'}"

    lacks_R = none_R | empty_R
    new_R = lacks_R if found_R is None else lacks_R & ~found_R
    findings.add_rows("missing-ids", new_R, raw.where, describe)
    return lacks_R


def described(raw: RawTable | None, entity: str, findings: Findings) -> tuple[RawTable | None, int]:
    """The table of items or users with one row for each id that it has, and the number of blanks trimmed."""
    if raw is None:
        return None, 0
    name = f"{entity}_id"
    raw, trimmed = trimmed_ids(raw, name)
    lacks_R = _without_ids(raw, name, findings)
    keys_R = raw.table[name].to_pandas()
    repeated_R = keys_R.duplicated().to_numpy() & ~lacks_R

    def describe(row: int) -> str:
        return f"{entity} {raw.table[name][row].as_py()!r} is described a second time"

    findings.add_rows("repeated-descriptions", repeated_R, raw.where, describe)
    return _of_rows(raw, np.flatnonzero(~(lacks_R | repeated_R))), trimmed


def _of_rows(raw: RawTable, rows: Int64Array) -> RawTable:
    """Some rows of a table, which are traced to where they were."""
    if len(rows) == len(raw.table):
        return raw
    where = raw.where
    return replace(raw, table=raw.table.take(pa.array(rows)), where=lambda row: where(int(rows[row])))


def _compared(
    log: RawTable, source: pa.Table, described: RawTable | None, entity: str, findings: Findings
) -> RawTable | None:
    """A table of items or users whose notes say how many of the log's ids it has, where it is not all."""
    name = f"{entity}_id"
    if described is None or not len(described.table) or not len(source):
        return described
    here = pc.unique(source[name].cast(pa.string()))
    there = described.table[name].cast(pa.string()).combine_chunks()
    compared, alone_here, alone_there = KeysCompared.of(
        here, np.arange(len(here)), there, np.arange(len(there))
    )
    spellings = SpellingsCompared.of(alone_here, alone_there)
    return with_comparison(described, compared, spellings, entity, log.file, findings)


def with_comparison(
    described: RawTable,
    compared: KeysCompared,
    spellings: SpellingsCompared,
    entity: str,
    log: str,
    findings: Findings,
) -> RawTable:
    """A table of items or users whose notes say how its ids compare with the log's; ids that are written in
    two ways are found."""
    compared.find(findings, spellings, entity, described.file, log)
    note = compared.note(spellings, entity, described.file, log)
    return described if note is None else replace(described, notes=(*described.notes, note))


def add_alike(file: str, column: pa.ChunkedArray, name: str, findings: Findings) -> None:
    """Find ids of one column that are the same number, and two ids."""
    keys = pc.unique(column)
    NumbersAlike.of(keys, np.arange(len(keys))).find(findings, file, name)


def _codes(raw: RawTable, label: Label) -> tuple[Int64Array, tuple[str, ...]]:
    """Code of each row, unknown where it says nothing, and the names of the codes, sorted: they do not depend
    on the order of rows."""
    column = raw.table[label]
    if pa.types.is_nested(column.type):
        raise InputError(
            f"{raw.file}: column {label} has the type {column.type}; expected strings or integers"
        )
    codes_R, names = pd.factorize(column.cast(pa.string()).to_pandas(), sort=True)
    _refuse_many_names(raw, label, len(names))
    return codes_R.astype(np.int64), tuple(names)


def _refuse_many_names(raw: RawTable, label: Label, count: int) -> None:
    if count > np.iinfo(LABEL_TYPE.to_pandas_dtype()).max:
        expected = "kind of the event, such as view or buy"
        if label == "scenario":
            expected = "place where the event happened, such as home or search"
        raise InputError(f"{raw.file}: column {label} has {count} different values; expected the {expected}")


def _refuse_unknown(wanted: tuple[str, ...], behaviors: tuple[str, ...], raw: RawTable) -> None:
    """Refuse a choice of behaviors that does not choose anything, or something that does not occur."""
    unknown = sorted(set(wanted) - set(behaviors))
    if unknown:
        known = ", ".join(behaviors) or "none: there is no column behavior"
        raise InputError(f"{raw.file}: no event has the behavior {unknown[0]!r}; those that occur: {known}")
    if not wanted:
        raise InputError(
            "behaviors is an empty list, which keeps no event; name at least one, or leave it out"
        )


def _renumbered(codes_E: Int64Array, names: tuple[str, ...]) -> tuple[Int64Array, tuple[str, ...]]:
    """With codes for those names only that occur."""
    is_known_E = codes_E != UNKNOWN
    kept, new_K = np.unique(codes_E[is_known_E], return_inverse=True)
    new_E = np.full(len(codes_E), UNKNOWN, dtype=np.int64)
    new_E[is_known_E] = new_K
    return new_E, tuple(names[code] for code in kept.tolist())
