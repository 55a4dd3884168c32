"""Raw interactions become events: 64-bit ids, times in microseconds, behaviour codes, or a refusal.

Every refusal names the file, the row and the value, and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.errors import InputError
from rayrec.samples.batches import Int64Array
from rayrec.samples.config import PrepareConfig
from rayrec.samples.ids import IdTable, assign_ids
from rayrec.samples.importers.tables import RawTable, RawTables

EVENT_COLUMNS = ("user_id", "item_id", "timestamp", "behavior")
SOURCE_ROW = "__row"

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_LATEST_S = 100_000_000_000
"""The year 5138. In another unit than the configured one, times of today lie beyond it."""


@dataclass(frozen=True)
class Events:
    """Checked interactions and the ids that occur in any table of the source."""

    table: pa.Table
    """user_id, item_id, timestamp (us), behavior (code, -1 without), `SOURCE_ROW`, further columns."""
    users: IdTable
    items: IdTable
    item_rows: Int64Array | None
    """Item id of each row of the source's table of items."""
    user_rows: Int64Array | None
    behaviors: tuple[str, ...]
    """Names of the behaviour codes, sorted."""
    num_filtered: int
    """Events left out because their behaviour was not asked for."""


def validate(raw: RawTables, config: PrepareConfig) -> Events:
    """Check the source.

    Raises:
        InputError: no events, a missing id, an id or time of a wrong type, a NaN or negative time, an item
            or user described twice, a behaviour that does not occur.
    """
    log = raw.interactions
    if not len(log.table):
        raise InputError(f"{log.file}: no events in it; expected one row per interaction")
    for name in ("user_id", "item_id"):
        check_ids(log, name)
    times_R = parse_times(log, config.time_unit)
    codes_R, behaviors = _behaviors(log)
    rows_R = np.arange(len(times_R))
    if config.behaviors is not None:
        kept = _codes_of(config.behaviors, behaviors, log)
        rows_R = np.flatnonzero(np.isin(codes_R, kept))
        behaviors, codes_R = _renumber(behaviors, kept, codes_R)
    source = log.table.take(rows_R) if len(rows_R) < len(times_R) else log.table
    items, item_columns = _ids(source["item_id"], raw.items, "item")
    users, user_columns = _ids(source["user_id"], raw.users, "user")
    columns = {
        "user_id": pa.array(user_columns[0]),
        "item_id": pa.array(item_columns[0]),
        "timestamp": pa.array(times_R[rows_R]),
        "behavior": pa.array(codes_R[rows_R]),
        SOURCE_ROW: pa.array(rows_R),
    }
    further = [name for name in source.schema.names if name not in EVENT_COLUMNS]
    return Events(
        table=pa.table(columns | {name: source[name] for name in further}),
        users=users,
        items=items,
        item_rows=item_columns[1] if raw.items is not None else None,
        user_rows=user_columns[1] if raw.users is not None else None,
        behaviors=behaviors,
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
    """
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
    """
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


def _behaviors(raw: RawTable) -> tuple[Int64Array, tuple[str, ...]]:
    """Code of each row and the names of the codes, sorted: they do not depend on the order of rows."""
    if "behavior" not in raw.table.schema.names:
        return np.full(len(raw.table), -1), ()
    column = raw.table["behavior"]
    refuse_nulls(raw, "behavior", column)
    codes_R, names = pd.factorize(column.cast(pa.string()).to_pandas(), sort=True)
    if len(names) > np.iinfo(np.int16).max:
        raise InputError(
            f"{raw.file}: column behavior has {len(names)} different values; expected the kind of the event, "
            "such as view or buy"
        )
    return codes_R.astype(np.int64), tuple(names)


def _codes_of(wanted: tuple[str, ...], behaviors: tuple[str, ...], raw: RawTable) -> list[int]:
    unknown = sorted(set(wanted) - set(behaviors))
    if unknown:
        known = ", ".join(behaviors) or "none: there is no column behavior"
        raise InputError(f"{raw.file}: no event has the behaviour {unknown[0]!r}; those that occur: {known}")
    if not wanted:
        raise InputError(
            "behaviors is an empty list, which keeps no event; name at least one, or leave it out"
        )
    return sorted(behaviors.index(name) for name in set(wanted))


def _renumber(
    behaviors: tuple[str, ...], kept: list[int], codes_R: Int64Array
) -> tuple[tuple[str, ...], Int64Array]:
    new_codes = np.full(len(behaviors), -1)
    new_codes[kept] = np.arange(len(kept))
    return tuple(behaviors[code] for code in kept), new_codes[codes_R]
