"""Distinct ids come in the order in which they first appear, whatever they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.deduplication import deduplicate


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)))
def test_distinct_ids_keep_their_order_and_the_inverse_restores_all(values: list[int]):
    ids = np.array(values, dtype=np.int64)

    distinct_M, inverse = deduplicate(ids)

    assert distinct_M.tolist() == list(dict.fromkeys(values))
    assert distinct_M[inverse].tolist() == values


@pytest.mark.parametrize("stride", [1, 2**16, 2**32, 2**48])
def test_ids_that_differ_in_few_bits_are_told_apart(stride: int):
    ids = np.arange(30_000, dtype=np.int64) * stride

    distinct_M, inverse = deduplicate(np.concatenate((ids, ids)))

    assert len(distinct_M) == len(np.unique(ids))
    assert (distinct_M[inverse] == np.concatenate((ids, ids))).all()


def test_the_inverse_has_the_shape_of_the_ids_and_read_only_ids_will_do():
    ids_NL = np.array([[7, 3], [3, 7], [9, 7]])
    ids_NL.flags.writeable = False

    distinct_M, inverse_NL = deduplicate(ids_NL)

    assert distinct_M.tolist() == [7, 3, 9]
    assert inverse_NL.tolist() == [[0, 1], [1, 0], [2, 0]]
