"""Times of a log as microseconds since 1970, whatever they are written as."""

from __future__ import annotations

import re
from dataclasses import dataclass
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import TimeUnit, option
from rayrec.samples.importers.tables import RawTable

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_LATEST_S = 100_000_000_000
"""The year 5138. In another unit than the configured one, times of today lie beyond it."""
_DATES_AS_NUMBERS = {"%Y%m%d": 1, "%Y%m%d%H%M": 10_000, "%Y%m%d%H%M%S": 1_000_000}
"""Forms of dates without signs -> what they are multiples of, beside the day."""
_FIRST_S, _STOP_S = 631_152_000, 4_102_444_800
"""1990 and 2100, between which times of logs lie."""
_YEARS = (1900, 2100)
_EXCEL_DAYS = (32_874, 54_789)
"""1990 to 2050 in days since the end of 1899, as Excel has them."""
_NAMED_ZONE = re.compile(r"^(?P<time>.*\d)\s*\[?(?P<zone>[A-Za-z]+(?:[/_+-][A-Za-z0-9]+)*)\]?$")
"""A time with the name of its zone after it: `2024-01-31 12:00 UTC`, `... Europe/Berlin`."""


@dataclass(frozen=True)
class Wrong:
    """Rows that have no time, for one reason."""

    rows_R: np.ndarray
    """Whether each row is one of them."""
    why: str


def parse_times(raw: RawTable, unit: TimeUnit | None, time_format: str | None = None) -> Int64Array:
    """[R] microseconds since 1970 of a column of numbers, dates, or texts of either.

    Dates without an offset are in UTC; what lies below the microsecond is cut off.

    Args:
        unit: of numbers; None: seconds, unless they look like something else.
        time_format: of dates in texts, or in numbers, in the words of `strptime`; None: ISO 8601.

    Raises:
        InputError: a missing, NaN, infinite or negative time, one that is neither number nor date, or one
            beyond the year 5138; or the column as a whole cannot be times, see `times_of`.
    """
    times_R, wrong = times_of(raw, unit, time_format)
    for one in wrong:
        if one.rows_R.any():
            row = int(np.argmax(one.rows_R))
            more = int(one.rows_R.sum()) - 1
            others = f" (and {more} more rows)" if more else ""
            raise InputError(f"{raw.where(row)}: {described(raw, row, one.why)}{others}")
    return times_R


def described(raw: RawTable, row: int, why: str) -> str:
    """What a row's time is, and why it is none."""
    # Arrow's words for it: Python has none for a date beyond the year 9999.
    value = pc.cast(raw.table["timestamp"][row], pa.string()).as_py()
    return "timestamp is missing" if value is None else f"timestamp is {value}, {why}"


def times_of(
    raw: RawTable, unit: TimeUnit | None, time_format: str | None = None
) -> tuple[Int64Array, list[Wrong]]:
    """The times of a column as far as rows have one, and the rows that have none, by reason.

    Raises:
        InputError: the column has another type than numbers, dates or texts; its numbers are dates, years or
            days, or of another unit than is said, and would be read as times of 1970; its floats are too
            short for its times; or a setting has no effect on it.
    """
    column = raw.table["timestamp"]
    missing_R = column.is_null().to_numpy()
    wrong = [Wrong(missing_R, "")]
    kind = column.type
    if time_format is not None:
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_string(kind)):
            raise _without_effect(raw, "time_format", f"has the type {kind}")
        column = _formatted(column, time_format)
        wrong.append(Wrong(column.is_null().to_numpy() & ~missing_R, f"expected a date like {time_format}"))
    elif pa.types.is_string(kind):
        column, expected = _parse_text(column)
        wrong.append(Wrong(column.is_null().to_numpy() & ~missing_R, f"expected {expected}"))
    unit_is_known = False
    if unit is not None and pa.types.is_temporal(column.type):
        raise _without_effect(raw, "time_unit", "holds dates, not numbers")
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    kind = column.type
    none_R = column.is_null().to_numpy()
    if pa.types.is_timestamp(kind):
        unit, unit_is_known = kind.unit, True
        times_R = column.cast(pa.int64()).fill_null(0).to_numpy()
    elif pa.types.is_integer(kind):
        times_R = column.fill_null(0).to_numpy()
        _refuse_misread(raw, times_R[~none_R], unit)
    elif pa.types.is_floating(kind):
        _refuse_coarse(raw, column)
        times_R = column.cast(pa.float64()).fill_null(0).to_numpy()
        _refuse_misread(raw, times_R[~none_R], unit)
        infinite_R = ~np.isfinite(times_R)
        wrong.append(Wrong(infinite_R, "expected a number of seconds since 1970"))
        times_R = np.where(infinite_R, 0, times_R)
    else:
        raise InputError(
            f"{raw.file}: column timestamp has the type {kind}; expected numbers ({unit or 's'} since 1970) "
            "or dates"
        )
    unit = unit or "s"
    wrong.append(Wrong(times_R < 0, "expected a time since 1970, which is not negative"))
    late_R = times_R > _LATEST_S * _PER_SECOND[unit]
    wrong.append(
        Wrong(
            late_R,
            "which lies beyond the year 5138"
            if unit_is_known
            else f"which in {unit} lies beyond the year 5138; set time_unit (--time-unit) to ms, us or ns",
        )
    )
    times_R = np.where(late_R, 0, times_R)
    if times_R.dtype.kind == "f":
        return np.rint(times_R * (1_000_000 / _PER_SECOND[unit])).astype(np.int64), wrong
    times_R = times_R.astype(np.int64)
    return times_R // 1000 if unit == "ns" else times_R * (1_000_000 // _PER_SECOND[unit]), wrong


def _formatted(column: pa.ChunkedArray, time_format: str) -> pa.ChunkedArray:
    """Dates in the configured format; null where one is written otherwise."""
    if pa.types.is_floating(column.type):  # integers with gaps, as pandas has them
        whole = pc.equal(column, pc.floor(column))
        column = pc.if_else(whole, column, None).cast(pa.int64(), safe=False)
    texts_R = column.cast(pa.string()).to_pandas()
    try:
        dates_R = pd.to_datetime(texts_R, errors="coerce", format=time_format, utc=True)
    except ValueError as error:
        raise InputError(
            f"time_format (--time-format) is {time_format!r}, which no date can be written in ({error}); "
            "expected one such as %d/%m/%Y"
        ) from error
    return pa.chunked_array([pa.Array.from_pandas(dates_R)])


def _parse_text(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, str]:
    """Texts as integers, floats or timestamps, whichever most of them are, and what was expected."""
    trimmed = pc.utf8_trim_whitespace(column)
    for kind in (pa.int64(), pa.float64(), pa.timestamp("us")):
        try:
            return trimmed.cast(kind), ""
        except pa.ArrowInvalid:
            continue
    # Arrow wants all dates of a column alike; pandas reads offsets, fractions of any length and mixtures.
    texts_R = trimmed.to_pandas()
    numbers_R = pd.to_numeric(texts_R, errors="coerce")
    dates_R = pd.to_datetime(texts_R, errors="coerce", format="ISO8601", utc=True)
    if dates_R.isna().any():
        dates_R = dates_R.fillna(_of_named_zones(texts_R[dates_R.isna()]))
    are_dates = dates_R.notna().sum() > numbers_R.notna().sum()
    expected = (
        "a date such as 2020-01-31T12:00:00Z" if are_dates else "a number of seconds since 1970 or a date"
    )
    expected += "; a date in another form needs time_format (--time-format %d/%m/%Y)"
    values_R = dates_R if are_dates else numbers_R
    return pa.chunked_array([pa.Array.from_pandas(values_R)]), expected


def _of_named_zones(texts: pd.Series) -> pd.Series:
    """UTC times of texts that end with the name of a time zone; NaT for others."""
    found = texts.dropna().str.extract(_NAMED_ZONE)
    times = pd.Series(pd.NaT, index=texts.index, dtype="datetime64[ns, UTC]")
    for zone, rows in found.dropna().groupby("zone"):
        try:
            ZoneInfo(str(zone))
        except (ZoneInfoNotFoundError, ValueError):
            continue
        local = pd.to_datetime(rows["time"], errors="coerce", format="ISO8601")
        if not isinstance(local.dtype, np.dtype):
            continue  # an offset and a name, which might contradict
        # An hour that a clock shows twice is the earlier one; one that it skips, the next that there is.
        first = np.ones(len(local), dtype=bool)
        zoned = local.dt.tz_localize(str(zone), ambiguous=first, nonexistent="shift_forward")
        times[rows.index] = zoned.dt.tz_convert("UTC").astype(times.dtype)
    return times


def _without_effect(raw: RawTable, setting: str, why: str) -> InputError:
    return InputError(
        f"{raw.file}: {option(setting)} has no effect, since column timestamp {why}; leave it out"
    )


def _refuse_misread(raw: RawTable, values: np.ndarray, unit: TimeUnit | None) -> None:
    """Refuse numbers most of which are something else than times in the unit.

    Most, since a log may have 0 where it knows no time. Dates like 20240131 or 20240131120000 are times in no
    unit, and few other numbers in the range are dates by chance. Years, months and days of Excel might be the
    seconds of a clock that starts with the log: a unit that is given says so.
    """
    values = values[np.isfinite(values)]
    if unit is None:
        _refuse_short_dates(raw, values)
    else:
        _refuse_smaller_unit(raw, values, unit)
    for form, zeros in _DATES_AS_NUMBERS.items():
        in_range = (values >= 19_000_101 * zeros) & (values < 21_010_000 * zeros)
        if 2 * np.count_nonzero(in_range) <= len(values):
            continue
        texts = pd.Series(values[in_range].astype(np.int64).astype(str))
        dates = pd.to_datetime(texts, errors="coerce", format=form).notna()
        if 2 * dates.sum() > len(values):
            raise InputError(
                f"{raw.file}: column timestamp holds dates written as numbers, such as "
                f"{texts[dates].iloc[0]}; set time_format (--time-format {form})"
            )


def _refuse_short_dates(raw: RawTable, values: np.ndarray) -> None:
    whole_N = values == np.floor(values)
    months_N = values % 100
    for are_it_N, what, instead in (
        (whole_N & _within(values, _YEARS), "years", "set time_format (--time-format %Y)"),
        (
            whole_N & _within(values // 100, _YEARS) & (months_N >= 1) & (months_N <= 12),
            "months",
            "set time_format (--time-format %Y%m)",
        ),
        (_within(values, _EXCEL_DAYS), "days as Excel counts them", "write them as dates"),
    ):
        if 2 * np.count_nonzero(are_it_N) > len(values):
            raise InputError(
                f"{raw.file}: column timestamp holds numbers such as {values[are_it_N][0]:.15g}, which look "
                f"like {what}; {instead}, or set {option('time_unit')} if they are seconds (s) of a clock"
            )


def _refuse_smaller_unit(raw: RawTable, values: np.ndarray, unit: TimeUnit) -> None:
    """Refuse times of today in seconds, say, that are said to be milliseconds: they would be of 1970."""
    for other, per_second in _PER_SECOND.items():
        if per_second >= _PER_SECOND[unit]:
            continue
        of_today_N = _within(values / per_second, (_FIRST_S, _STOP_S))
        if 2 * np.count_nonzero(of_today_N) > len(values):
            value = values[of_today_N][0]
            date = pd.to_datetime(float(value) / per_second, unit="s")
            raise InputError(
                f"{raw.file}: column timestamp holds numbers such as {value:.15g}, which in {unit} would be "
                f"of 1970, and in {other} {date:%Y-%m-%d}; set {option('time_unit')} to {other}"
            )


def _within(values: np.ndarray, bounds: tuple[int, int]) -> np.ndarray:
    return (values >= bounds[0]) & (values < bounds[1])


def _refuse_coarse(raw: RawTable, column: pa.ChunkedArray) -> None:
    """Refuse floats that cannot tell one second from the next: their times have been rounded."""
    if pa.types.is_float64(column.type):
        return
    values = column.drop_null().to_numpy()
    values = values[np.isfinite(values)]
    if len(values) and (step := float(np.spacing(np.abs(values).max()))) > 1:
        raise InputError(
            f"{raw.file}: column timestamp is of {column.type}, which holds such times to {step:g} s only; "
            "write it as integers or float64"
        )
