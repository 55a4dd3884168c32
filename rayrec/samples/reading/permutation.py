"""The order of a window's rows: numpy's permutation of a seed, compiled.

What `numpy.random.default_rng(seed).permutation(num_rows)` gives, as 32-bit integers and in less than half
the time. Orders are a contract (a run resumes by them); numpy keeps to the stream of words of its bit
generators, and promises nothing of what its generators draw from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.platform.arrays import Int32Array


def permutation(seed: Sequence[int], num_rows: int) -> Int32Array:
    """[R] the numbers 0 to R - 1 in an order drawn at random; R is less than 2**31."""
    order_R = np.arange(num_rows, dtype=np.int32)
    words = np.random.PCG64(np.random.SeedSequence(seed))
    undrawn = num_rows - 1
    while undrawn > 0:
        # Four words of 32 bits for three rows are about what it takes; the rest is drawn in further rounds.
        drawn = words.random_raw(2 * undrawn // 3 + 16).astype("<u8", copy=False).view("<u4")
        undrawn = _shuffle(drawn, order_R, undrawn)
    return order_R


@njit(nogil=True, cache=True)
def _shuffle(words: NDArray[np.uint32], order_R: Int32Array, last: int) -> int:
    """Fisher and Yates: place `last` changes with one up to it, then the place before; which is next.

    A word's low bits are such a place, or more than it, and then the next word's turn. The attempt that
    fails changes the place with itself: which ones fail no processor can foresee, so there is no branch.
    """
    mask = 1
    while mask < last:
        mask = 2 * mask + 1
    for word in words:
        if last <= mask >> 1:
            mask >>= 1
        if last == 0:
            break
        drawn = np.int64(word) & mask
        fits = drawn <= last
        place, current = np.uintp(drawn if fits else last), np.uintp(last)
        order_R[current], order_R[place] = order_R[place], order_R[current]
        last -= int(fits)
    return last
