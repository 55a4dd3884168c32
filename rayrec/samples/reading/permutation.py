"""The order of a window's rows: numpy's permutation of a seed, compiled.

What `numpy.random.default_rng(seed).permutation(num_rows)` gives, as 32-bit integers and in less than half
the time. Orders are a contract (a run resumes by them); numpy keeps to the stream of words of its bit
generators, and promises nothing of what its generators make of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.platform.arrays import Int32Array


def permutation(seed: Sequence[int], num_rows: int) -> Int32Array:
    """[R] the numbers 0 to R - 1 in a random order; R is less than 2**31."""
    order_R = np.arange(num_rows, dtype=np.int32)
    words = np.random.PCG64(np.random.SeedSequence(seed))
    remaining = num_rows - 1
    while remaining > 0:
        # Four words of 32 bits for three rows are about what it takes; further rounds add what is missing.
        bits = words.random_raw(2 * remaining // 3 + 16).astype("<u8", copy=False).view("<u4")
        remaining = _shuffle(bits, order_R, remaining)
    return order_R


@njit(nogil=True, cache=True)
def _shuffle(words: NDArray[np.uint32], order_R: Int32Array, last: int) -> int:
    """Fisher and Yates: swap position `last` with one up to it, then the one before; returns the next `last`.

    A word's low bits are such a position, or too large; then the next word is tried. A failed attempt swaps
    the position with itself: a branch here would be unpredictable, and slower.
    """
    mask = 1
    while mask < last:
        mask = 2 * mask + 1
    for word in words:
        if last <= mask >> 1:
            mask >>= 1
        if last == 0:
            break
        candidate = np.int64(word) & mask
        fits = candidate <= last
        position, current = np.uintp(candidate if fits else last), np.uintp(last)
        order_R[current], order_R[position] = order_R[position], order_R[current]
        last -= int(fits)
    return last
