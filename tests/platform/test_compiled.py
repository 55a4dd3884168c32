import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numba import njit

from rayrec.platform.compiled import reciprocal64, remainder64

UINT64 = st.integers(0, 2**64 - 1)


@njit
def remainder(value, divisor):
    return remainder64(value, divisor, reciprocal64(divisor))


@given(UINT64, st.integers(1, 2**64 - 1), UINT64)
@example(2**64 - 1, 1, 0)
@example(2**64 - 1, 2**64 - 1, 0)
@example(2**64 - 1, 2**63, 1)
@example(2**64 - 1, 86_400, 2**64 // 86_400)
def test_remainders_are_those_of_a_division(value, divisor, multiple):
    # Near multiples a quotient that is one off shows.
    nearby = multiple % (2**64 // divisor) * divisor
    for dividend in {value, nearby, max(nearby - 1, 0), min(nearby + 1, 2**64 - 1)}:
        assert int(remainder(np.uint64(dividend), np.uint64(divisor))) == dividend % divisor
