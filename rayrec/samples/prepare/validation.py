"""Raw interactions become events: 64-bit ids, times in microseconds, behavior codes, or a refusal.

Every refusal names the file, the row and the value, and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
from rayrec.samples.prepare.ids import IdTable, assign_ids, ids_alike, plain_spelling
from rayrec.samples.prepare.times import described, times_of

EVENT_COLUMNS = ("user_id", "item_id", "timestamp", "behavior")
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
    log, findings = raw.interactions, Findings()
    if not len(log.table):
        raise InputError(f"{log.file}: no events in it; expected one row per interaction")
    trimmed = 0
    wrong_R = np.zeros(len(log.table), dtype=bool)
    for name in ("user_id", "item_id"):
        log, count = _trimmed(log, name)
        trimmed += count
        wrong_R |= _without_ids(log, name, findings, wrong_R)
    if raw.order_is_time:
        _refuse_settings_of_times(log, config)
    times_R, faults = times_of(log, "s" if raw.order_is_time else config.time_unit, config.time_format)
    for fault in faults:
        rows_R = fault.rows_R & ~wrong_R

        def describe(row: int, why: str = fault.why) -> str:
            return f"{log.where(row)}: {described(log, row, why)}"

        findings.add_rows("bad-times", rows_R, describe)
        wrong_R |= rows_R
    if wrong_R.all():
        findings.refuse(())
    codes = {label: _codes(log, label) for label in LABELS if label in log.table.schema.names}
    if config.behaviors is not None:
        codes_R, names = codes.get("behavior", (np.full(len(times_R), UNKNOWN), ()))
        if "behavior" in codes:  # which of these would be kept?
            refuse_nulls(log, "behavior", log.table["behavior"])
        chosen_R = np.isin(codes_R, _codes_of(config.behaviors, names, log))
    else:
        chosen_R = np.ones(len(times_R), dtype=bool)
    kept_R = np.flatnonzero(chosen_R & ~wrong_R)
    if not len(kept_R):
        raise InputError(f"{log.file}: no event is left of {len(times_R):,}; keep other behaviors")
    labels = {label: _renumbered(codes_R[kept_R], names) for label, (codes_R, names) in codes.items()}
    source = log.table.take(pa.array(kept_R)) if len(kept_R) < len(times_R) else log.table
    items, trimmed_items = _described(raw.items, "item", findings)
    users, trimmed_users = _described(raw.users, "user", findings)
    for entity, described_by in (("item", items), ("user", users)):
        for raw_table, table in ((log, source), (described_by, described_by and described_by.table)):
            if raw_table is not None and table is not None:
                _add_alike(raw_table, table, f"{entity}_id", findings)
    items = _compared(log, source, items, "item", findings)
    users = _compared(log, source, users, "user", findings)
    titles_of_log = ""
    if "title" in log.table.schema.names:
        items, titles_of_log = with_titles_of_log(log, kept_R, times_R[kept_R], items)
        log = replace(log, table=log.table.drop_columns(["title"]))
        source = source.drop_columns(["title"])
    item_ids, item_columns = _ids(source, items, "item")
    user_ids, user_columns = _ids(source, users, "user")
    columns = {
        "user_id": pa.array(user_columns[0]),
        "item_id": pa.array(item_columns[0]),
        "timestamp": pa.array(times_R[kept_R]),
        "behavior": pa.array(np.full(len(kept_R), UNKNOWN)),
        SOURCE_ROW: pa.array(kept_R),
    } | {label: pa.array(codes_E) for label, (codes_E, _) in labels.items()}
    # `PART` goes along, and ends with the sequences.
    further = [name for name in source.schema.names if name not in (*EVENT_COLUMNS, *LABELS)]
    return Events(
        table=pa.table(columns | {name: source[name] for name in further}),
        raw=replace(raw, interactions=log, items=items, users=users, titles_of_log=titles_of_log),
        users=user_ids,
        items=item_ids,
        item_rows=None if items is None else item_columns[1],
        user_rows=None if users is None else user_columns[1],
        labels={label: names for label, (_, names) in labels.items()},
        num_filtered=int((~chosen_R & ~wrong_R).sum()),
        num_trimmed=trimmed + trimmed_items + trimmed_users,
        findings=findings,
    )


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
        row = int(np.argmax(column.is_null().to_numpy()))
        raise InputError(
            f"{raw.where(row)}: {name} is missing ({column.null_count} rows have none); "
            "fill it in or leave the row out"
        )


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


def _trimmed(raw: RawTable, name: str) -> tuple[RawTable, int]:
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
        return f"{raw.where(row)}: {name} is {'missing' if none_R[row] else 'empty'}"

    lacks_R = none_R | empty_R
    new_R = lacks_R if found_R is None else lacks_R & ~found_R
    findings.add_rows("missing-ids", new_R, describe)
    return lacks_R


def _described(raw: RawTable | None, entity: str, findings: Findings) -> tuple[RawTable | None, int]:
    """The table of items or users with one row for each id that it has, and the number of blanks trimmed."""
    if raw is None:
        return None, 0
    name = f"{entity}_id"
    raw, trimmed = _trimmed(raw, name)
    lacks_R = _without_ids(raw, name, findings)
    keys_R = raw.table[name].to_pandas()
    repeated_R = keys_R.duplicated().to_numpy() & ~lacks_R

    def describe(row: int) -> str:
        return f"{raw.where(row)}: {entity} {raw.table[name][row].as_py()!r} is described a second time"

    findings.add_rows("repeated-descriptions", repeated_R, describe)
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
    """A table of items or users whose notes say how many of the log's ids it has, where it is not all.

    Ids that are written in two ways are found: none of the table is in the log, or some would meet if `00012`
    were `12`, `12.0` or an upper case the same as without.
    """
    name = f"{entity}_id"
    if described is None or not len(described.table) or not len(source):
        return described
    here = pc.unique(source[name].cast(pa.string()))
    there = described.table[name].cast(pa.string()).combine_chunks()
    alone_here = here.filter(pc.invert(pc.is_in(here, value_set=there)))
    alone_there = there.filter(pc.invert(pc.is_in(there, value_set=here)))
    if not len(alone_here) or not len(alone_there):
        return described
    shown, shown_log = Path(described.file).name, Path(log.file).name
    plain_here, plain_there = plain_spelling(alone_here), plain_spelling(alone_there)
    at_there = pc.index_in(plain_there, value_set=plain_here)
    num_alike = len(pc.unique(at_there.drop_null()))
    if num_alike:
        first = int(np.argmax(at_there.is_valid().to_numpy(zero_copy_only=False)))
        one, other = alone_there[first].as_py(), alone_here[at_there[first].as_py()].as_py()
        why = f"{num_alike:,} of its {entity} ids differ from the log's only in how they are written"
    else:
        one, other = alone_there[0].as_py(), alone_here[0].as_py()
    if len(alone_there) == len(there):
        why = f"none of its {len(there):,} {entity} ids is in the log"
    if num_alike or len(alone_there) == len(there):
        text = f"{described.file}: {why}: {one!r} there, {other!r} in {log.file}"
        findings.add("unmatched-ids", max(num_alike, 1), 0, lambda row: text)
    note = (
        f"has {len(here) - len(alone_here):,} of the log's {len(here):,} {entity} ids: {one!r} is in {shown} "
        f"alone, {other!r} in {shown_log} alone"
    )
    return replace(described, notes=(*described.notes, note))


def _add_alike(raw: RawTable, table: pa.Table, name: str, findings: Findings) -> None:
    """Find ids of one column that are the same number, and two ids."""
    found = ids_alike(pc.unique(table[name]))
    if found is None:
        return
    count, (one, other) = found
    text = f"{raw.file}: {name} has {one!r} and {other!r}, which are two ids"
    findings.add("ids-alike", count, 0, lambda row: text)


def _codes(raw: RawTable, label: Label) -> tuple[Int64Array, tuple[str, ...]]:
    """Code of each row, unknown where it says nothing, and the names of the codes, sorted: they do not depend
    on the order of rows."""
    column = raw.table[label]
    if pa.types.is_nested(column.type):
        raise InputError(
            f"{raw.file}: column {label} has the type {column.type}; expected strings or integers"
        )
    codes_R, names = pd.factorize(column.cast(pa.string()).to_pandas(), sort=True)
    if len(names) > np.iinfo(LABEL_TYPE.to_pandas_dtype()).max:
        expected = "kind of the event, such as view or buy"
        if label == "scenario":
            expected = "place where the event happened, such as home or search"
        raise InputError(
            f"{raw.file}: column {label} has {len(names)} different values; expected the {expected}"
        )
    return codes_R.astype(np.int64), tuple(names)


def _codes_of(wanted: tuple[str, ...], behaviors: tuple[str, ...], raw: RawTable) -> list[int]:
    unknown = sorted(set(wanted) - set(behaviors))
    if unknown:
        known = ", ".join(behaviors) or "none: there is no column behavior"
        raise InputError(f"{raw.file}: no event has the behavior {unknown[0]!r}; those that occur: {known}")
    if not wanted:
        raise InputError(
            "behaviors is an empty list, which keeps no event; name at least one, or leave it out"
        )
    return sorted(behaviors.index(name) for name in set(wanted))


def _renumbered(codes_E: Int64Array, names: tuple[str, ...]) -> tuple[Int64Array, tuple[str, ...]]:
    """With codes for those names only that occur."""
    is_known_E = codes_E != UNKNOWN
    kept, new_K = np.unique(codes_E[is_known_E], return_inverse=True)
    new_E = np.full(len(codes_E), UNKNOWN, dtype=np.int64)
    new_E[is_known_E] = new_K
    return new_E, tuple(names[code] for code in kept.tolist())
