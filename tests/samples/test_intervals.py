"""Where a batch's rows were read."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.samples.base.intervals import Interval, Intervals

FILES = ("b", "a", "c")


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 30))), st.integers(1, 4))
def test_rows_in_any_order_and_any_parts_are_the_fewest_intervals(rows, num_parts):
    """Held to a set of rows; a name may be given twice."""
    names = (*FILES, *FILES)
    drawn = sorted(rows, key=lambda row: (row[1] * 7 % 5, row))
    parts = []
    for part in range(num_parts):
        mine = drawn[part::num_parts]
        file_B = np.array([file + 3 * (row % 2) for file, row in mine], dtype=np.int64)
        parts.append(Intervals.of_rows(names, file_B, np.array([row for _, row in mine], dtype=np.int64)))

    found = Intervals.joined(parts)

    named = {(FILES[file], row) for file, row in rows}
    assert {(one.file, row) for one in found for row in range(one.start, one.stop)} == named
    assert found.num_rows == len(rows)
    assert list(found) == sorted(found)
    assert not any((file, stop) == after[:2] for (file, _, stop), after in pairwise(found))
    assert found == Intervals.of(list(found)) == pickle.loads(pickle.dumps(found))
    by_file = [
        Interval(file, *pair) for file, low, high in found.by_file() for pair in zip(low, high, strict=True)
    ]
    assert by_file == list(found)


def test_they_are_a_sequence_of_intervals():
    found = Intervals.of([Interval("b", 4, 6), Interval("a", 1, 2), Interval("b", 6, 7)])

    assert found == [Interval("a", 1, 2), Interval("b", 4, 7)]
    assert (len(found), found[1], found[-1]) == (2, Interval("b", 4, 7), Interval("b", 4, 7))
    assert found[:1] == [Interval("a", 1, 2)]
    assert found != [Interval("a", 1, 2)]
    assert not Intervals()


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (3, 2), (-1, 2)])
def test_an_interval_without_rows_is_an_error(start, stop):
    with pytest.raises(ValueError, match=f"^b: rows {start} to {stop} are no interval"):
        Intervals.of([Interval("a", 0, 1), Interval("b", start, stop)])
