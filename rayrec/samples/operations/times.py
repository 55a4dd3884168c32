"""`time_features` and `time_since`: calendar features of a time, and the time passed up to another one.

A null stays null. Times before 1970 are negative, and no time is refused: a wrong clock gives wrong
features, not a failed run. Axes: R rows, N times, C changes of a zone's offset.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numba import njit
from numpy.typing import NDArray
from pydantic import Field, field_validator

from rayrec.platform.arrays import BoolArray, Float32Array, Int64Array
from rayrec.platform.compiled import kernel_input, reciprocal64, remainder64
from rayrec.platform.errors import InputError
from rayrec.samples.operations.columns import (
    both_valid,
    column_of,
    complete_lists,
    input_type,
    is_list,
    is_time,
    list_column,
    lists_of,
    numbers_of,
    value_type,
    with_values,
)
from rayrec.samples.operations.operation import OperationSettings, RowContext

Unit = Literal["s", "ms", "us", "ns"]
TimeFeature = Literal["hour", "weekday", "day_sin", "day_cos", "week_sin", "week_cos"]
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY, _WEEK = 86_400, 7 * 86_400
_MONDAY = 3 * _DAY
"""1970 began on a Thursday: seconds since the Monday before."""
_EARLIEST = np.uint64(2**63)
"""Turns an int64 into the uint64 that counts from -2**63."""
_START_OF_DAYS, _START_OF_WEEKS = -(2**63) % _DAY, (_MONDAY - 2**63) % _WEEK
_KNOWN_UNTIL = 365 * 130 * _DAY
"""Changes of a zone's offset are looked up from 1970 to here; outside, the first and last offsets hold."""


class TimeFeaturesConfig(OperationSettings):
    """Features of the local time, from integers since 1970 UTC or Arrow timestamps, also in lists.

    `hour` is 0 to 23 and `weekday` 0 (Monday) to 6, as int64. The pairs `day_sin`, `day_cos` and
    `week_sin`, `week_cos` (from Monday 0:00) map the time to a circle, as float32. A timestamp
    without a zone is UTC.
    """

    op: Literal["time_features"] = "time_features"
    input: str
    outputs: dict[TimeFeature, str] = Field(min_length=1)
    """Feature -> name of its column."""
    zone: str
    """`UTC`, an offset such as `+08:00`, or a name such as `Europe/Berlin` with its summer times (those
    of 1970 to 2099)."""
    unit: Unit | None = None
    """Of integers; None for timestamps, which have their own."""

    @field_validator("zone")
    @classmethod
    def _zone_is_known(cls, value: str) -> str:
        try:
            _zone(value)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(
                f"there is no time zone {value!r}; expected UTC, an offset such as +08:00, or a name such as "
                "Europe/Berlin"
            ) from error
        return value

    def bind(self, schema: pa.Schema) -> TimeFeatures:
        dtype = input_type(schema, self.input, is_time, _TIMES)
        names = list(self.outputs.values())
        if len(set(names)) < len(names):
            raise InputError(f"two features have one name among {', '.join(names)}; give each its own")
        return TimeFeatures(
            inputs=(self.input,),
            outputs={
                name: with_values(dtype, pa.int64() if feature in ("hour", "weekday") else pa.float32())
                for feature, name in self.outputs.items()
            },
            features=tuple(self.outputs),
            unit=_unit(self.input, dtype, self.unit),
            zone=self.zone,
        )


@dataclass(frozen=True)
class TimeFeatures:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    features: tuple[TimeFeature, ...]
    """In the order of `outputs`."""
    unit: Unit
    zone: str

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        column = columns[self.inputs[0]]
        lists = lists_of(column) if is_list(column.type) else None
        times_N, valid_N = numbers_of(column if lists is None else lists.values)
        zone = _zone(self.zone)
        local_N = _local_seconds(
            kernel_input(times_N, np.int64), _PER_SECOND[self.unit], zone.starts_C, zone.offsets_C
        )
        made = {}
        for feature, (name, dtype) in zip(self.features, self.outputs.items(), strict=True):
            values = column_of(_feature(feature, local_N), valid_N, value_type(dtype))
            made[name] = values if lists is None else list_column(values, lists.offsets_R1, lists.valid_R)
        return made


class TimeSinceConfig(OperationSettings):
    """Time from `input` to `relative_to`: whole units, rounded down, as int64.

    Lists of times are compared with one time per row, or with a parallel list of times. Null if either
    time is.
    """

    op: Literal["time_since"] = "time_since"
    input: str
    relative_to: str
    output: str
    unit: Unit | None = None
    """Of both columns, if they are integers; None for timestamps, which have their own."""
    counted_in: Literal["s", "min", "h", "day"] = "s"
    negatives: Literal["keep", "zero", "null"] = "zero"
    """Of times that lie after `relative_to`, as clocks that differ make them."""

    def bind(self, schema: pa.Schema) -> TimeSince:
        dtype = input_type(schema, self.input, is_time, _TIMES)
        other = input_type(schema, self.relative_to, is_time, _TIMES)
        unit = _unit(self.input, dtype, self.unit)
        if _unit(self.relative_to, other, self.unit) != unit:
            raise InputError(
                f"columns {self.input!r} ({dtype}) and {self.relative_to!r} ({other}) count in different "
                "units; they need the same"
            )
        if is_list(other) and not is_list(dtype):
            raise InputError(
                f"column {self.relative_to!r} holds lists and {self.input!r} does not; swap them"
            )
        seconds = {"s": 1, "min": 60, "h": 3600, "day": _DAY}[self.counted_in]
        return TimeSince(
            inputs=(self.input, self.relative_to),
            outputs={self.output: with_values(dtype, pa.int64())},
            divisor=seconds * _PER_SECOND[unit],
            negatives=self.negatives,
        )


@dataclass(frozen=True)
class TimeSince:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    divisor: int
    """Units of the columns in one of the result."""
    negatives: Literal["keep", "zero", "null"]

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        ((output, dtype),) = self.outputs.items()
        name, relative_to = self.inputs
        if not is_list(dtype):
            return {output: self._elapsed(numbers_of(columns[name]), numbers_of(columns[relative_to]))}
        if is_list(columns[relative_to].type):
            lists, others = complete_lists(columns, self.inputs)
            latest = numbers_of(others.values)
        else:
            latest_R, valid_R = numbers_of(columns[relative_to])
            (lists,) = complete_lists(columns, [name], valid_R)
            latest = np.repeat(latest_R, np.diff(lists.offsets_R1)), None
        elapsed = self._elapsed(numbers_of(lists.values), latest)
        return {output: list_column(elapsed, lists.offsets_R1, lists.valid_R)}

    def _elapsed(self, times: _Times, latest: _Times) -> pa.Array:
        (times_N, valid_N), (latest_N, latest_valid_N) = times, latest
        elapsed_N = _elapsed(kernel_input(times_N, np.int64), kernel_input(latest_N, np.int64), self.divisor)
        valid_N = both_valid(valid_N, latest_valid_N)
        if self.negatives == "zero":
            elapsed_N = np.maximum(elapsed_N, 0)
        elif self.negatives == "null":
            negative_N = elapsed_N < 0
            valid_N = both_valid(valid_N, ~negative_N) if negative_N.any() else valid_N
        return column_of(elapsed_N, valid_N, pa.int64())


_Times = tuple[Int64Array, BoolArray | None]
_TIMES = "timestamps or integers"


def _unit(name: str, dtype: pa.DataType, given: Unit | None) -> Unit:
    own = value_type(dtype)
    if pt.is_timestamp(own):
        if given is not None and given != own.unit:
            raise InputError(f"column {name!r} is {dtype}, which is not in {given!r}; leave out the unit")
        return own.unit
    if given is None:
        raise InputError(f"column {name!r} holds integers: give their unit, one of s, ms, us and ns")
    return given


class _Zone(NamedTuple):
    """From second starts_C[c] of UTC on, local time is offsets_C[c] seconds ahead of it."""

    starts_C: Int64Array
    offsets_C: Int64Array


@lru_cache(maxsize=16)
def _zone(name: str) -> _Zone:
    """The offsets of a time zone.

    Raises:
        ZoneInfoNotFoundError, ValueError, OSError: there is no such zone.
    """
    if match := re.fullmatch(r"([+-])([01]\d|2[0-3]):([0-5]\d)", name):
        seconds = 3600 * int(match[2]) + 60 * int(match[3])
        offset = -seconds if match[1] == "-" else seconds
        return _Zone(_constants([0]), _constants([offset]))
    # A zone changes its offset a few hundred times: these are searched, not the database for every time.
    zone = ZoneInfo(name)
    starts, found = [0], [_offset(zone, 0)]
    for day in range(0, _KNOWN_UNTIL, _DAY):
        if _offset(zone, day + _DAY) != found[-1]:
            before, after = day, day + _DAY
            while after - before > 1:
                middle = (before + after) // 2
                if _offset(zone, middle) == found[-1]:
                    before = middle
                else:
                    after = middle
            starts.append(after)
            found.append(_offset(zone, after))
    return _Zone(_constants(starts), _constants(found))


def _offset(zone: ZoneInfo, seconds: int) -> int:
    offset = datetime.fromtimestamp(seconds, zone).utcoffset()
    assert offset is not None, "a time with a zone has an offset"
    return round(offset.total_seconds())


def _constants(values: list[int]) -> Int64Array:
    return kernel_input(values, np.int64)


def _feature(feature: TimeFeature, local_N: Int64Array) -> NDArray[Any]:
    if feature == "hour":
        return _hours(local_N)
    if feature == "weekday":
        return _weekdays(local_N)
    if feature.startswith("day"):
        return _circle(local_N, 0, _DAY, feature == "day_sin")
    return _circle(local_N, _MONDAY, _WEEK, feature == "week_sin")


@njit(nogil=True, cache=True)
def _local_seconds(
    times_N: Int64Array, per_second: int, starts_C: Int64Array, offsets_C: Int64Array
) -> Int64Array:
    local_N = np.empty(len(times_N), dtype=np.int64)
    for n in range(len(times_N)):
        seconds = times_N[n] if per_second == 1 else times_N[n] // per_second
        low, high = 0, len(starts_C)
        while high - low > 1:
            middle = (low + high) >> 1
            if starts_C[middle] <= seconds:
                low = middle
            else:
                high = middle
        local_N[n] = seconds + offsets_C[low]
    return local_N


@njit(nogil=True, cache=True)
def _hours(local_N: Int64Array) -> Int64Array:
    hours_N = np.empty(len(local_N), dtype=np.int64)
    day, start = np.uint64(_DAY), np.uint64(_START_OF_DAYS)
    reciprocal = reciprocal64(day)
    for n in range(len(local_N)):
        hours_N[n] = _seconds_into(local_N[n], start, day, reciprocal) // np.uint32(3600)
    return hours_N


@njit(nogil=True, cache=True)
def _weekdays(local_N: Int64Array) -> Int64Array:
    weekdays_N = np.empty(len(local_N), dtype=np.int64)
    week, start = np.uint64(_WEEK), np.uint64(_START_OF_WEEKS)
    reciprocal = reciprocal64(week)
    for n in range(len(local_N)):
        weekdays_N[n] = _seconds_into(local_N[n], start, week, reciprocal) // np.uint32(_DAY)
    return weekdays_N


@njit(nogil=True, cache=True, inline="always")
def _seconds_into(local: Any, start: Any, cycle: Any, reciprocal: Any) -> Any:
    """uint32 seconds of the cycle that have passed; `start` are those that had at -2**63."""
    passed = remainder64(np.uint64(local) ^ _EARLIEST, cycle, reciprocal) + start
    return np.uint32(passed - cycle if passed >= cycle else passed)


def _circle(local_N: Int64Array, shift: int, cycle: int, sine: bool) -> Float32Array:
    """[N] sine or cosine of the part of the cycle that has passed."""
    angles = pa.array(2 * math.pi * np.mod(local_N + shift, cycle) / cycle)
    # Arrow calls the C library value by value, so a result does not depend on its neighbors.
    return (pc.sin(angles) if sine else pc.cos(angles)).cast(pa.float32()).to_numpy()


@njit(nogil=True, cache=True)
def _elapsed(times_N: Int64Array, latest_N: Int64Array, divisor: int) -> Int64Array:
    elapsed_N = np.empty(len(times_N), dtype=np.int64)
    for n in range(len(times_N)):
        time, latest = times_N[n], latest_N[n]
        difference = latest - time
        # Times at both ends of 64 bits: saturate instead of wrapping to the other sign.
        if (latest ^ time) & (latest ^ difference) < 0:
            difference = np.int64(2**63 - 1) if latest >= 0 else np.int64(-(2**63))
        elapsed_N[n] = difference if divisor == 1 else difference // divisor
    return elapsed_N
