"""Raw interactions become events: 64-bit ids, times in microseconds, behavior codes, or a refusal.

Every refusal names the file, the row and the value, and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import LABELS, UNKNOWN, Label
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.event_labels import LABEL_TYPE
from rayrec.samples.importers.tables import RawTable, RawTables
from rayrec.samples.prepare.ids import IdTable, assign_ids

EVENT_COLUMNS = ("user_id", "item_id", "timestamp", "behavior")
SOURCE_ROW = "__row"

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_LATEST_S = 100_000_000_000
"""The year 5138. In another unit than the configured one, times of today lie beyond it."""


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


def validate(raw: RawTables, config: PrepareConfig) -> Events:
    """Check the source.

    Raises:
        InputError: no events, a missing id, an id or time of a wrong type, a NaN or negative time, an item
            or user described twice, a behavior that does not occur, or none where some are chosen by it.
    """
    log = raw.interactions
    if not len(log.table):
        raise InputError(f"{log.file}: no events in it; expected one row per interaction")
    for name in ("user_id", "item_id"):
        check_ids(log, name)
    times_R = parse_times(log, config.time_unit)
    codes = {label: _codes(log, label) for label in LABELS if label in log.table.schema.names}
    rows_R = np.arange(len(times_R))
    if config.behaviors is not None:
        codes_R, names = codes.get("behavior", (np.full(len(times_R), UNKNOWN), ()))
        if "behavior" in codes:  # which of these would be kept?
            refuse_nulls(log, "behavior", log.table["behavior"])
        rows_R = np.flatnonzero(np.isin(codes_R, _codes_of(config.behaviors, names, log)))
    labels = {label: _renumbered(codes_R[rows_R], names) for label, (codes_R, names) in codes.items()}
    source = log.table.take(rows_R) if len(rows_R) < len(times_R) else log.table
    items, item_columns = _ids(source["item_id"], raw.items, "item")
    users, user_columns = _ids(source["user_id"], raw.users, "user")
    columns = {
        "user_id": pa.array(user_columns[0]),
        "item_id": pa.array(item_columns[0]),
        "timestamp": pa.array(times_R[rows_R]),
        "behavior": pa.array(np.full(len(rows_R), UNKNOWN)),
        SOURCE_ROW: pa.array(rows_R),
    } | {label: pa.array(codes_E) for label, (codes_E, _) in labels.items()}
    further = [name for name in source.schema.names if name not in (*EVENT_COLUMNS, *LABELS)]
    return Events(
        table=pa.table(columns | {name: source[name] for name in further}),
        users=users,
        items=items,
        item_rows=item_columns[1] if raw.items is not None else None,
        user_rows=user_columns[1] if raw.users is not None else None,
        labels={label: names for label, (_, names) in labels.items()},
        num_filtered=len(times_R) - len(rows_R),
    )


def parse_times(raw: RawTable, unit: str) -> Int64Array:
    """[R] microseconds since 1970 of the column `timestamp`: numbers in `unit`, or dates.

    Dates without an offset are in UTC; what lies below the microsecond is cut off.

    Raises:
        InputError: a missing, NaN, infinite or negative time, one that is neither number nor date, or one
            beyond the year 5138.
    """
    column = _plain(raw.table["timestamp"])
    refuse_nulls(raw, "timestamp", column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = _parse_text(raw, column)
    kind, unit_is_given = column.type, False
    if pa.types.is_date(kind):
        column = column.cast(pa.timestamp("ms"))
        kind = column.type
    if pa.types.is_timestamp(kind):
        times_R = column.cast(pa.int64()).to_numpy()
        unit, unit_is_given = kind.unit, True
    elif pa.types.is_integer(kind):
        times_R = column.to_numpy()
    elif pa.types.is_floating(kind):
        times_R = column.cast(pa.float64()).to_numpy()
        _refuse_times(raw, ~np.isfinite(times_R), "expected a number of seconds since 1970")
    else:
        raise InputError(
            f"{raw.file}: column timestamp has the type {kind}; expected numbers ({unit} since 1970) or dates"
        )
    _refuse_times(raw, times_R < 0, "expected a time since 1970, which is not negative")
    _refuse_times(
        raw,
        times_R > _LATEST_S * _PER_SECOND[unit],
        "which lies beyond the year 5138"
        if unit_is_given
        else f"which in {unit} lies beyond the year 5138; set time_unit (--time-unit) to ms, us or ns",
    )
    if times_R.dtype.kind == "f":
        return np.rint(times_R * (1_000_000 / _PER_SECOND[unit])).astype(np.int64)
    times_R = times_R.astype(np.int64)
    return times_R // 1000 if unit == "ns" else times_R * (1_000_000 // _PER_SECOND[unit])


def _parse_text(raw: RawTable, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts as integers, floats or timestamps: whichever most of them are."""
    for kind in (pa.int64(), pa.float64(), pa.timestamp("us")):
        try:
            return column.cast(kind)
        except pa.ArrowInvalid:
            continue
    # Arrow wants all dates of a column alike; pandas reads offsets, fractions of any length and mixtures.
    texts_R = column.to_pandas()
    numbers_R = pd.to_numeric(texts_R, errors="coerce")
    dates_R = pd.to_datetime(texts_R, errors="coerce", format="ISO8601", utc=True)
    are_dates = dates_R.notna().sum() > numbers_R.notna().sum()
    values_R = dates_R if are_dates else numbers_R
    expected = (
        "a date such as 2020-01-31T12:00:00Z" if are_dates else "a number of seconds since 1970 or a date"
    )
    _refuse_times(raw, values_R.isna().to_numpy(), f"expected {expected}")
    return pa.chunked_array([pa.Array.from_pandas(values_R)])


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


def _refuse_times(raw: RawTable, wrong_R: np.ndarray, expected: str) -> None:
    if wrong_R.any():
        row = int(np.argmax(wrong_R))
        more = int(wrong_R.sum()) - 1
        others = f" (and {more} more rows)" if more else ""
        # Arrow's words for it: Python has none for a date beyond the year 9999.
        value = pc.cast(_plain(raw.table["timestamp"])[row], pa.string()).as_py()
        raise InputError(f"{raw.where(row)}: timestamp is {value}, {expected}{others}")


def _ids(
    column: pa.ChunkedArray, described: RawTable | None, entity: str
) -> tuple[IdTable, list[Int64Array]]:
    if described is None:
        return assign_ids([column], entity)
    name = f"{entity}_id"
    check_ids(described, name)
    table, ids = assign_ids([_plain(column), _plain(described.table[name])], entity)
    repeated_R = pd.Series(ids[1]).duplicated().to_numpy()
    if repeated_R.any():
        row = int(np.argmax(repeated_R))
        key = described.table[name][row].as_py()
        raise InputError(
            f"{described.where(row)}: {entity} {key!r} is described a second time "
            f"({repeated_R.sum()} such rows); keep one row for each {entity}"
        )
    return table, ids


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _codes(raw: RawTable, label: Label) -> tuple[Int64Array, tuple[str, ...]]:
    """Code of each row, unknown where it says nothing, and the names of the codes, sorted: they do not depend
    on the order of rows."""
    column = raw.table[label]
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
