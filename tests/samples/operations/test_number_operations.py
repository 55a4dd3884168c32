import math

import numpy as np
import pyarrow as pa
import pytest

from rayrec.platform.errors import InputError
from tests.helpers.feature_operations import column

FLOATS = pa.list_(pa.float32())


def test_a_value_is_in_the_bucket_of_the_boundaries_it_reaches():
    found = column(
        [-1.0, 0.0, 0.5, 1.0, 9.0, None, math.nan], pa.float64(), op="bucketize", boundaries=[0, 1]
    )

    assert found == [0, 1, 1, 2, 2, None, None]


@pytest.mark.parametrize("num_boundaries", [5, 100])
def test_buckets_of_few_and_of_many_boundaries_are_alike(num_boundaries):
    boundaries = [n / 4 for n in range(num_boundaries)]
    values = [n / 8 for n in range(-3, 250)]

    found = column(values, pa.float64(), op="bucketize", boundaries=boundaries)
    assert found == np.searchsorted(boundaries, values, side="right").tolist()


def test_integers_are_compared_as_integers():
    large = 2**53

    assert column([large, large + 1, None], pa.int64(), op="bucketize", boundaries=[large + 1]) == [
        0,
        1,
        None,
    ]
    assert column([2, 3], pa.int32(), op="bucketize", boundaries=[2.5]) == [0, 1]
    with pytest.raises(InputError, match="64-bit integers, which the boundary 1000000000000000000000 is not"):
        column([1], pa.int64(), op="bucketize", boundaries=[10**21])


def test_lists_are_bucketized_event_by_event():
    assert column([[1, 5], None, [None], []], FLOATS, op="bucketize", boundaries=[2]) == [
        [0, 1],
        None,
        [None],
        [],
    ]


def test_boundaries_must_ascend():
    with pytest.raises(InputError, match="boundaries must ascend, but 2 stands before 2"):
        column([1.0], pa.float64(), op="bucketize", boundaries=[1, 2, 2])


@pytest.mark.parametrize("dtype", [pa.float32(), pa.float64(), pa.int64()])
def test_clip_moves_values_to_the_limits_and_keeps_their_type(dtype):
    values = pa.array([-3, 0, 7, None], dtype)

    assert column(values, dtype, op="clip", low=-1, high=5) == [-1, 0, 5, None]
    assert column(values, dtype, op="clip", high=5) == [-3, 0, 5, None]
    assert column(values, dtype, op="clip", low=-1) == [-1, 0, 7, None]


def test_clip_takes_lists_and_drops_nan():
    assert column([[9, math.nan], None, []], FLOATS, op="clip", low=0, high=1) == [[1, None], None, []]


def test_limits_of_integers_are_integers():
    with pytest.raises(InputError, match=r"'x' holds integers, so its limits must be integers, got 0\.5"):
        column([1], pa.int64(), op="clip", low=0.5)
    with pytest.raises(InputError, match="clip from low 2 to high 1 leaves no number"):
        column([1], pa.int64(), op="clip", low=2, high=1)
    with pytest.raises(InputError, match="needs low, high or both"):
        column([1], pa.int64(), op="clip")


@pytest.mark.parametrize(("negatives", "below"), [("signed", -math.log(4)), ("zero", 0.0), ("null", None)])
def test_log_of_negative_numbers_is_as_declared(negatives, below):
    found = column([3, -3, 0, None], pa.int64(), op="log", negatives=negatives)

    assert found == [pytest.approx(math.log(4)), None if below is None else pytest.approx(below), 0, None]


def test_log_adds_the_shift_first():
    found = column([-1.0, 0.0, math.nan], pa.float64(), op="log", shift=1, negatives="null")

    assert found == [0, pytest.approx(math.log(2)), None]


def test_log_is_that_of_one_more_at_every_size():
    values = [10.0**exponent for exponent in range(-7, 300, 7)]

    found = column(values, pa.float64(), op="log")
    assert np.allclose(found, np.log1p(values), rtol=1e-7, atol=0)
    assert column([-value for value in values], pa.float64(), op="log") == [-value for value in found]
    assert column([1e-300, math.inf], pa.float64(), op="log") == [0, math.inf]


@pytest.mark.parametrize("dtype", [pa.float32(), pa.float64()])
def test_log_has_the_same_bits_wherever_the_value_stands(dtype):
    values = pa.array(np.random.default_rng(0).exponential(30, 100), dtype)  # more than fill some vectors
    together = column(values, dtype, op="log")

    for start in range(0, 100, 7):
        assert column(values.slice(start, 13), dtype, op="log") == together[start : start + 13]


def test_log_takes_lists():
    assert column([[0, None], None, []], FLOATS, op="log") == [[0, None], None, []]


def test_ids_beyond_63_bits_are_no_numbers():
    values = pa.array(np.array([2**64 - 1], dtype=np.uint64))

    with pytest.raises(InputError, match="column 'x' is uint64, expected numbers"):
        column(values, values.type, op="log")
