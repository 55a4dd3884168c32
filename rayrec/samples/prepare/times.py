"""Times of a log as microseconds since 1970, whatever they are written as."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
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


_SHORT_DATES = {
    "years": "set time_format (--time-format %Y)",
    "months": "set time_format (--time-format %Y%m)",
    "days as Excel counts them": "write them as dates",
}
"""What small numbers may be, and what to do about it."""
_FLOATS = {"halffloat": np.float16, "float": np.float32}

TextForm = Literal["integers", "floats", "timestamps", "mostly numbers", "mostly dates"]
"""How the texts of a column of times are written."""


@dataclass(frozen=True)
class Wrong:
    """Rows that have no time, for one reason."""

    rows_R: np.ndarray
    """Whether each row is one of them."""
    why: str


@dataclass(frozen=True)
class Times:
    """The times of some rows of a log."""

    times_R: Int64Array
    """Microseconds since 1970; where a row has none, any."""
    wrong: list[Wrong]
    seen: TimesSeen


def parse_times(raw: RawTable, unit: TimeUnit | None, time_format: str | None = None) -> Int64Array:
    """[R] microseconds since 1970 of a column of numbers, dates, or texts of either.

    Dates without an offset are in UTC; what lies below the microsecond is cut off. A float stands for the
    microsecond that it is the float of, if there is one.

    Args:
        unit: of numbers; None: seconds, unless they look like something else.
        time_format: of dates in texts, or in numbers, in the words of `strptime`; None: ISO 8601.

    Raises:
        InputError: a missing, NaN, infinite or negative time, one that is neither number nor date, or one
            beyond the year 5138; or the column as a whole cannot be times, see `times_of`.
    """
    times = times_of(raw, unit, time_format)
    times.seen.refuse(raw.file)
    for one in times.wrong:
        if one.rows_R.any():
            row = int(np.argmax(one.rows_R))
            more = int(one.rows_R.sum()) - 1
            others = f" (and {more} more rows)" if more else ""
            raise InputError(f"{raw.where(row)}: {described_time(raw, row, one.why)}{others}")
    return times.times_R


def described_time(raw: RawTable, row: int, why: str) -> str:
    """What a row's time is, and why it is none."""
    # Arrow's words for it: Python has none for a date beyond the year 9999.
    value = pc.cast(raw.table["timestamp"][row], pa.string()).as_py()
    return "timestamp is missing" if value is None else f"timestamp is {value}, {why}"


def times_of(
    raw: RawTable,
    unit: TimeUnit | None,
    time_format: str | None = None,
    text_form: TextForm | None = None,
) -> Times:
    """The times of rows as far as they have one, the rows that have none, and what tells of the column.

    Args:
        raw: a log or some rows of it.
        text_form: how texts are written, where `raw` is not the whole log (`TextForms`); None: as the texts
            here are.

    Raises:
        InputError: the column has another type than numbers, dates or texts, or a setting has no effect on
            it. Whether its numbers are what they are said to be, `Times.seen` knows.
    """
    column, seen = raw.table["timestamp"], TimesSeen(unit)
    missing_R = column.is_null().to_numpy()
    wrong = [Wrong(missing_R, "")]
    kind = column.type
    if time_format is not None:
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_string(kind)):
            raise _without_effect(raw, "time_format", f"has the type {kind}")
        column = _formatted(column, time_format)
        wrong.append(Wrong(column.is_null().to_numpy() & ~missing_R, f"expected a date like {time_format}"))
    elif pa.types.is_string(kind):
        column, expected = parse_texts(column, text_form)
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
        seen.add_numbers(times_R[~none_R])
    elif pa.types.is_floating(kind):
        seen.add_floats(column)
        float_type = column.type.to_pandas_dtype()
        times_R = column.cast(pa.float64()).fill_null(0).to_numpy()
        seen.add_numbers(times_R[~none_R])
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
    # Microseconds of a unit, or units of a microsecond.
    factor, divisor = max(1_000_000 // _PER_SECOND[unit], 1), max(_PER_SECOND[unit] // 1_000_000, 1)
    if times_R.dtype.kind == "f":
        times_R = _cut(times_R, factor, divisor, float_type)
    else:
        times_R = times_R.astype(np.int64) * factor // divisor
    return Times(times_R, wrong, seen)


def micros_of_seconds(seconds_R: np.ndarray) -> Int64Array:
    """[R] microseconds since 1970 of UNIX seconds in float64, by the rule of `parse_times`."""
    return _cut(seconds_R, 1_000_000, 1, np.float64)


def _cut(times_R: np.ndarray, factor: int, divisor: int, float_type: type[np.floating]) -> Int64Array:
    """[R] whole microseconds of times in float64, each of which has `factor / divisor`; one of the two is 1.

    Args:
        float_type: in which the times were given.
    """
    whole_R = np.floor(times_R * factor / divisor)

    def of_whole(micros_R: np.ndarray) -> np.ndarray:
        """The floats that stand for microseconds."""
        given: np.ndarray = (micros_R * divisor / factor).astype(float_type).astype(np.float64)
        return given

    # 0.000003 s times a million is a little less than 3; other products are rounded up to a whole number.
    whole_R += (of_whole(whole_R) < times_R) & (of_whole(whole_R + 1) <= times_R)
    whole_R -= of_whole(whole_R) > times_R
    return whole_R.astype(np.int64)


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


_FORMS: dict[TextForm, pa.DataType] = {
    "integers": pa.int64(),
    "floats": pa.float64(),
    "timestamps": pa.timestamp("us"),
}
"""Forms that Arrow reads, where all texts are in one; in the order in which they are taken."""


@dataclass
class TextForms:
    """Which forms fit every text of a column that was seen so far; those of parts merge."""

    fitting: set[TextForm] = field(default_factory=lambda: set(_FORMS))
    num_numbers: int = 0
    """Of a column that no form fits; counted by `count`."""
    num_dates: int = 0

    def add(self, texts: pa.ChunkedArray) -> None:
        """Take texts into account."""
        trimmed = pc.utf8_trim_whitespace(texts)
        self.fitting = {form for form in self.fitting if _as_form(trimmed, form) is not None}

    def count(self, texts: pa.ChunkedArray) -> None:
        """Count numbers and dates among texts, which takes far longer than `add`."""
        numbers_R, dates_R = _numbers_and_dates(pc.utf8_trim_whitespace(texts))
        self.num_numbers += int(numbers_R.notna().sum())
        self.num_dates += int(dates_R.notna().sum())

    def merge(self, other: TextForms) -> None:
        """Take what another one saw into account."""
        self.fitting &= other.fitting
        self.num_numbers += other.num_numbers
        self.num_dates += other.num_dates

    @property
    def form(self) -> TextForm | None:
        """The form that fits all; None where `count` has to decide."""
        return next((form for form in _FORMS if form in self.fitting), None)

    @property
    def mixed_form(self) -> TextForm:
        """The form of most texts, where none fits all."""
        return "mostly dates" if self.num_dates > self.num_numbers else "mostly numbers"


def parse_texts(texts: pa.ChunkedArray, form: TextForm | None = None) -> tuple[pa.ChunkedArray, str]:
    """Texts as integers, floats or timestamps, and what was expected of them.

    Args:
        form: None: the one that fits all texts, else that of most of them.
    """
    trimmed = pc.utf8_trim_whitespace(texts)
    for name in _FORMS:
        if form in (None, name) and (values := _as_form(trimmed, name)) is not None:
            return values, ""
    # Arrow wants all dates of a column alike; pandas reads offsets, fractions of any length and mixtures.
    numbers_R, dates_R = _numbers_and_dates(trimmed)
    are_dates = form == "mostly dates"
    if form is None:
        are_dates = dates_R.notna().sum() > numbers_R.notna().sum()
    expected = (
        "a date such as 2020-01-31T12:00:00Z" if are_dates else "a number of seconds since 1970 or a date"
    )
    expected += "; a date in another form needs time_format (--time-format %d/%m/%Y)"
    values_R = dates_R if are_dates else numbers_R
    return pa.chunked_array([pa.Array.from_pandas(values_R)]), expected


def _as_form(trimmed: pa.ChunkedArray, form: TextForm) -> pa.ChunkedArray | None:
    try:
        return trimmed.cast(_FORMS[form])
    except pa.ArrowInvalid:
        return None


def _numbers_and_dates(trimmed: pa.ChunkedArray) -> tuple[pd.Series, pd.Series]:
    texts_R = trimmed.to_pandas()
    numbers_R = pd.to_numeric(texts_R, errors="coerce").astype(np.float64)
    dates_R = pd.to_datetime(texts_R, errors="coerce", format="ISO8601", utc=True)
    if dates_R.isna().any():
        dates_R = dates_R.fillna(_of_named_zones(texts_R[dates_R.isna()]))
    return numbers_R, dates_R


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


@dataclass(frozen=True)
class _Likeness:
    """Numbers that look like something else than times in their unit."""

    count: int
    example: float


@dataclass
class TimesSeen:
    """What tells whether the numbers of a column are times in their unit; that of parts merges, in order.

    What most of them are counts, since a log may have 0 where it knows no time. Dates like 20240131 or
    20240131120000 are times in no unit, and few other numbers in the range are dates by chance. Years, months
    and days of Excel might be the seconds of a clock that starts with the log: a unit that is given says so.
    """

    unit: TimeUnit | None
    total: int = 0
    """Finite numbers."""
    alike: dict[str, _Likeness] = field(default_factory=dict)
    """By what numbers look like: a form of dates, a kind of short dates or a smaller unit."""
    largest: dict[str, float] = field(default_factory=dict)
    """Of floats that are shorter than 64 bits, by their type: the largest, without its sign."""

    def add_numbers(self, values: np.ndarray) -> None:
        """Take numbers into account."""
        if values.dtype.kind == "f":
            values = values[np.isfinite(values)]
        self.total += len(values)
        if self.unit is None:
            self._add_short_dates(values)
        else:
            for other, per_second in _PER_SECOND.items():
                if per_second < _PER_SECOND[self.unit]:
                    # Times of today in seconds, say, that are said to be milliseconds, would be of 1970.
                    self._add(other, values, _within(values / per_second, (_FIRST_S, _STOP_S)))
        for form, zeros in _DATES_AS_NUMBERS.items():
            in_range = values[_within(values, (19_000_101 * zeros, 21_010_000 * zeros))].astype(np.int64)
            if len(in_range):
                dates = pd.to_datetime(pd.Series(in_range.astype(str)), errors="coerce", format=form)
                self._add(form, in_range, dates.notna().to_numpy())

    def add_floats(self, column: pa.ChunkedArray) -> None:
        """Take floats into account: short ones cannot tell one second from the next."""
        if pa.types.is_float64(column.type):
            return
        values = np.abs(column.drop_null().to_numpy())
        values = values[np.isfinite(values)]
        if len(values):
            kind = str(column.type)
            self.largest[kind] = max(self.largest.get(kind, 0.0), float(values.max()))

    def merge(self, other: TimesSeen) -> None:
        """Take what was seen of the next part of the column into account."""
        self.total += other.total
        for name, one in other.alike.items():
            before = self.alike.get(name, _Likeness(0, one.example))
            self.alike[name] = _Likeness(before.count + one.count, before.example)
        for kind, value in other.largest.items():
            self.largest[kind] = max(self.largest.get(kind, 0.0), value)

    def refuse(self, file: str) -> None:
        """Refuse a column most of whose numbers are something else than times in the unit.

        Raises:
            InputError: naming one of them, and the setting that reads them.
        """
        for kind, value in self.largest.items():
            step = float(np.spacing(np.dtype(_FLOATS[kind]).type(value)))
            if step > 1:
                raise InputError(
                    f"{file}: column timestamp is of {kind}, which holds such times to {step:g} s only; "
                    "write it as integers or float64"
                )
        for what, instead in _SHORT_DATES.items():
            if (value_of_most := self._of_most(what)) is not None:
                raise InputError(
                    f"{file}: column timestamp holds numbers such as {value_of_most:.15g}, which look "
                    f"like {what}; {instead}, or set {option('time_unit')} if they are seconds (s) of a clock"
                )
        for other, per_second in _PER_SECOND.items():
            if (value_of_most := self._of_most(other)) is not None:
                date = pd.to_datetime(float(value_of_most) / per_second, unit="s")
                raise InputError(
                    f"{file}: column timestamp holds numbers such as {value_of_most:.15g}, which in "
                    f"{self.unit} would be of 1970, and in {other} {date:%Y-%m-%d}; set "
                    f"{option('time_unit')} to {other}"
                )
        for form in _DATES_AS_NUMBERS:
            if (value_of_most := self._of_most(form)) is not None:
                raise InputError(
                    f"{file}: column timestamp holds dates written as numbers, such as "
                    f"{int(value_of_most)}; set time_format (--time-format {form})"
                )

    def _of_most(self, name: str) -> float | None:
        one = self.alike.get(name)
        return one.example if one is not None and 2 * one.count > self.total else None

    def _add(self, name: str, values: np.ndarray, are_it: np.ndarray) -> None:
        if count := int(np.count_nonzero(are_it)):
            before = self.alike.get(name, _Likeness(0, values[are_it][0].item()))
            self.alike[name] = _Likeness(before.count + count, before.example)

    def _add_short_dates(self, values: np.ndarray) -> None:
        if values.dtype.kind == "f":
            whole_N = values == np.floor(values)
            self._add("years", values, whole_N & _within(values, _YEARS))
        else:
            whole_N = np.ones(1, dtype=bool)
            self._add("years", values, _within(values, _YEARS))
        are_months = _within(values, (100 * _YEARS[0], 100 * _YEARS[1]))
        if are_months.any():
            months_N = values % 100
            self._add("months", values, whole_N & are_months & (months_N >= 1) & (months_N <= 12))
        self._add("days as Excel counts them", values, _within(values, _EXCEL_DAYS))


def _within(values: np.ndarray, bounds: tuple[int, int]) -> np.ndarray:
    return (values >= bounds[0]) & (values < bounds[1])
