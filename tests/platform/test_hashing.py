import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.hashing import combine64, mix64


def test_mix64_gives_the_published_splitmix64_sequence():
    golden = 0x9E3779B97F4A7C15  # what the generator adds to its state between draws
    states = [0, golden, 2 * golden % 2**64]

    assert mix64(np.array(states, dtype=np.uint64)).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(st.integers(-(2**63), 2**63 - 1))
def test_negative_integers_hash_as_their_bits(value):
    assert int(mix64(value)) == int(mix64(np.int64(value))) == int(mix64(np.uint64(value % 2**64)))


def test_parts_are_broadcast_and_their_order_matters():
    pairs = combine64(np.arange(3)[:, None], np.arange(4))

    assert pairs.shape == (3, 4)
    assert len(np.unique(pairs)) == 12
    assert int(pairs[1, 2]) == int(combine64(1, 2)) != int(combine64(2, 1))


def test_only_integers_are_hashed():
    with pytest.raises(TypeError, match="float64"):
        mix64(np.array([1.5]))
