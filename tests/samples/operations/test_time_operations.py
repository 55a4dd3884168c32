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


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40))
def test_circles_are_those_of_the_math_module_to_the_bit(times):
    names = ("day_sin", "day_cos", "week_sin", "week_cos")
    angles = [2 * math.pi * (t % 86_400) / 86_400 for t in times]
    weekly = [2 * math.pi * ((t + 3 * 86_400) % 604_800) / 604_800 for t in times]
    expected = [[f(x) for x in part] for part in (angles, weekly) for f in (math.sin, math.cos)]

    found = features(times, "UTC", names=names)
    assert np.array_equal(np.float32(found), np.float32(expected))


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


def time_since(columns, **settings):
    operation = {"op": "time_since", "input": "t", "relative_to": "now", "output": "since", **settings}
    return computed(columns, operation).column("since").to_pylist()


def test_time_since_counts_whole_units():
    columns = {"t": pa.array([0, 50, None, 0]), "now": pa.array([119, 170, 5, None])}

    assert time_since(columns, unit="s") == [119, 120, None, None]
    assert time_since(columns, unit="s", counted_in="min") == [1, 2, None, None]
    assert time_since({"t": pa.array([0]), "now": pa.array([86_399_999])}, unit="ms", counted_in="day") == [0]


@pytest.mark.parametrize(("negatives", "expected"), [("keep", -1), ("zero", 0), ("null", None)])
def test_times_after_the_other_one_are_as_declared(negatives, expected):
    columns = {"t": pa.array([5, 0]), "now": pa.array([4, 4])}

    assert time_since(columns, unit="s", negatives=negatives) == [expected, 4]


def test_every_event_of_a_list_is_compared():
    times = pa.array([[1, 2, None], None, [], [1]], pa.list_(pa.int64()))

    one_time = {"t": times, "now": pa.array([4, 4, 4, None])}
    assert time_since(one_time, unit="s") == [[3, 2, None], None, [], None]
    parallel = {"t": times, "now": pa.array([[4, None, 4], [4], [], None], pa.list_(pa.int64()))}
    assert time_since(parallel, unit="s") == [[3, None, None], None, [], None]


def test_the_longest_differences_keep_their_sign():
    columns = {"t": pa.array(EXTREMES), "now": pa.array(EXTREMES[::-1])}

    assert time_since(columns, unit="s", negatives="keep") == [2**63 - 1, -(2**63)]


def test_time_since_needs_one_unit():
    columns = {"t": pa.array([0], pa.timestamp("s")), "now": pa.array([0], pa.timestamp("ms"))}

    with pytest.raises(InputError, match="count in different units"):
        time_since(columns)
    with pytest.raises(InputError, match="'now' holds lists and 't' does not; swap them"):
        time_since({"t": pa.array([1]), "now": pa.array([[1]])}, unit="s")


def test_a_time_column_can_be_replaced():
    assert column([1, 2], pa.int64(), op="time_features", unit="s", zone="UTC", outputs={"hour": "x"}) == [
        0,
        0,
    ]
