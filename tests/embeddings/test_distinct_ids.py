import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.distinct_ids import add_rows, first_repeated, positions_among, sum_by_id

IDS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1])


@given(st.lists(IDS, max_size=50))
def test_the_first_id_that_comes_again_is_found(values):
    expected = next((value for m, value in enumerate(values) if value in values[:m]), None)
    assert first_repeated(np.array(values, dtype=np.int64)) == expected


def test_one_repeated_id_is_found_among_many():
    ids_M = np.random.default_rng(0).permutation(40_000) * 7919
    assert first_repeated(ids_M) is None
    ids_M[39_999] = ids_M[3]
    assert first_repeated(ids_M) == ids_M[3]


@given(st.lists(IDS, max_size=50), st.lists(IDS, max_size=50, unique=True))
def test_ids_are_found_among_others(values, others):
    expected = [others.index(value) if value in others else -1 for value in values]
    found_M = positions_among(np.array(values, dtype=np.int64), np.array(others, dtype=np.int64))
    assert found_M.tolist() == expected


@pytest.mark.parametrize("dim", [1, 5, 16, 35])
@given(st.lists(st.lists(IDS, max_size=20, unique=True), min_size=1, max_size=4), st.integers(0, 1000))
def test_sums_are_those_of_a_dictionary_that_begins_at_zero(dim, ids_by_part, seed):
    """Bit for bit: also a lone -0 becomes 0."""
    random = np.random.default_rng(seed)
    parts = []
    for values in ids_by_part:
        grads_MD = random.normal(size=(len(values), dim)).astype(np.float32)
        grads_MD[random.random(grads_MD.shape) < 0.3] = -0.0
        parts.append((np.array(values, dtype=np.int64), grads_MD))
    expected: dict[int, np.ndarray] = {}
    for ids_M, grads_MD in parts:
        for i, grad_D in zip(ids_M.tolist(), grads_MD, strict=True):
            expected[i] = expected.get(i, np.zeros(dim, np.float32)) + grad_D

    ids_R, sums_RD = sum_by_id(parts)

    assert ids_R.tolist() == list(expected)
    assert [row_D.tobytes() for row_D in sums_RD] == [row_D.tobytes() for row_D in expected.values()]


@pytest.mark.parametrize("dim", [3, 40])
def test_rows_are_added_one_after_the_other(dim):
    sum_RD = np.ones((3, dim), np.float32)
    add_rows(sum_RD, np.array([2, 0, 2]), np.full((3, dim), [[1], [2], [4]], np.float32))
    assert sum_RD[:, -1].tolist() == [3, 1, 6]
    assert (sum_RD == sum_RD[:, :1]).all()
