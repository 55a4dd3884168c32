import math
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from tests.helpers.feature_operations import column, computed

INT64 = pa.int64()
EXTREMES = [-(2**63), 2**63 - 1]
# Monday, 2 March 2026, 06:30:00 UTC
MONDAY = int(datetime(2026, 3, 2, 6, 30, tzinfo=UTC).timestamp())


def features(times, zone, dtype=INT64, unit="s", names=("hour", "weekday")):
    made = computed(
        {"t": pa.array(times, dtype)},
        {
            "op": "time_features",
            "input": "t",
            "zone": zone,
            "outputs": {name: name for name in names},
            **({"unit": unit} if unit else {}),
        },
    )
    return [made.column(name).to_pylist() for name in names]


def test_hours_and_weekdays_are_those_of_the_zone():
    assert features([MONDAY, None], "UTC") == [[6, None], [0, None]]
    assert features([MONDAY], "+08:00") == [[14], [0]]
    assert features([MONDAY], "-07:30") == [[23], [6]]
    assert features([MONDAY], "Asia/Shanghai") == [[14], [0]]


@given(st.integers(-(2**63), 2**63 - 1))
@example(0)
@example(-1)
@example(86_399)
@example(86_400)
@example(-(2**63))
@example(2**63 - 1)
def test_days_and_weeks_go_on_in_both_directions(seconds):
    hour, weekday = seconds // 3600 % 24, (seconds // 86_400 + 3) % 7  # 1970 began on a Thursday

    assert features([seconds], "UTC") == [[hour], [weekday]]


@given(st.lists(st.integers(0, 4_000_000_000), min_size=1))
@example([1774745999, 1774746000, 1792889999, 1792890000])  # both changes of 2026
@pytest.mark.parametrize(
    "zone", ["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Asia/Kathmandu"]
)
def test_summer_times_are_those_of_the_time_zone_database(zone, times):
    local = [datetime.fromtimestamp(time, ZoneInfo(zone)) for time in times]

    assert features(times, zone) == [[t.hour for t in local], [t.weekday() for t in local]]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_units_say_what_integers_count(unit):
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    late = MONDAY * scale + scale - 1

    assert features([MONDAY * scale, late], "UTC", unit=unit) == [[6, 6], [0, 0]]
    stamps = pa.array([MONDAY * scale]).view(pa.timestamp(unit, "Europe/Berlin"))
    assert features(stamps, "UTC", stamps.type, unit=None) == [[6], [0]]


def test_times_on_a_circle_meet_at_midnight_and_at_monday():
    names = ("day_sin", "day_cos", "week_sin", "week_cos")
    midnight = MONDAY - 6 * 3600 - 1800

    found = features([midnight, midnight + 6 * 3600], "UTC", names=names)
    sixteenth = 2 * math.pi / 28
    expected = [[0, 1], [1, 0], [0, math.sin(sixteenth)], [1, math.cos(sixteenth)]]
    assert np.allclose(found, expected, atol=1e-6)


def test_lists_of_times_keep_their_nulls():
    times = pa.list_(pa.int64())

    assert features([[MONDAY, None], None, []], "UTC", times)[0] == [[6, None], None, []]


def test_no_time_is_refused():
    for unit in ("s", "ms", "us", "ns"):
        hours, weekdays = features([*EXTREMES, -1], "Europe/Berlin", unit=unit)
        assert all(0 <= hour < 24 for hour in hours)
        assert all(0 <= day < 7 for day in weekdays)


@pytest.mark.parametrize(
    ("dtype", "unit", "zone", "message"),
    [
        (pa.int64(), None, "UTC", "holds integers: give their unit"),
        (pa.timestamp("ms"), "s", "UTC", "which is not in 's'; leave out the unit"),
        (pa.int64(), "s", "Europe/Atlantis", "there is no time zone 'Europe/Atlantis'"),
        (pa.int64(), "s", "+25:00", r"there is no time zone '\+25:00'"),
        (pa.float64(), "s", "UTC", "is double, expected timestamps or integers"),
    ],
)
def test_times_that_cannot_be_read_are_refused(dtype, unit, zone, message):
    with pytest.raises(InputError, match=message):
        features([], zone, dtype, unit)


def age(columns, **settings):
    operation = {"op": "age", "input": "t", "relative_to": "now", "output": "age", **settings}
    return computed(columns, operation).column("age").to_pylist()


def test_ages_are_whole_units_before_another_time():
    columns = {"t": pa.array([0, 50, None, 0]), "now": pa.array([119, 170, 5, None])}

    assert age(columns, unit="s") == [119, 120, None, None]
    assert age(columns, unit="s", counted_in="min") == [1, 2, None, None]
    assert age({"t": pa.array([0]), "now": pa.array([86_399_999])}, unit="ms", counted_in="day") == [0]


@pytest.mark.parametrize(("negatives", "expected"), [("keep", -1), ("zero", 0), ("null", None)])
def test_times_after_the_other_one_are_as_declared(negatives, expected):
    columns = {"t": pa.array([5, 0]), "now": pa.array([4, 4])}

    assert age(columns, unit="s", negatives=negatives) == [expected, 4]


def test_every_event_has_an_age():
    times = pa.array([[1, 2, None], None, [], [1]], pa.list_(pa.int64()))

    one_time = {"t": times, "now": pa.array([4, 4, 4, None])}
    assert age(one_time, unit="s") == [[3, 2, None], None, [], None]
    parallel = {"t": times, "now": pa.array([[4, None, 4], [4], [], None], pa.list_(pa.int64()))}
    assert age(parallel, unit="s") == [[3, None, None], None, [], None]


def test_the_longest_ages_keep_their_sign():
    columns = {"t": pa.array(EXTREMES), "now": pa.array(EXTREMES[::-1])}

    assert age(columns, unit="s", negatives="keep") == [2**63 - 1, -(2**63)]


def test_ages_need_one_unit():
    columns = {"t": pa.array([0], pa.timestamp("s")), "now": pa.array([0], pa.timestamp("ms"))}

    with pytest.raises(InputError, match="count in different units"):
        age(columns)
    with pytest.raises(InputError, match="'now' holds lists and 't' does not; swap them"):
        age({"t": pa.array([1]), "now": pa.array([[1]])}, unit="s")


def test_a_time_column_can_be_replaced():
    assert column([1, 2], pa.int64(), op="time_features", unit="s", zone="UTC", outputs={"hour": "x"}) == [
        0,
        0,
    ]
