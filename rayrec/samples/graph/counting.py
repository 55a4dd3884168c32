"""Sums of scores by item in a hash table of a kernel, and the best of them.

Axes: C slots of the table, K results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.compiled import mix64

FREE = np.iinfo(np.int64).min
"""Marks a slot without a key; no id is this."""


def table(most_keys: int) -> tuple[Int64Array, Float64Array, Int64Array]:
    """(keys, sums, used) of an empty table with room for so many keys."""
    size = 1 << max(10, (2 * most_keys).bit_length())
    return np.full(size, FREE), np.zeros(size), np.zeros(size + 1, np.int64)


@njit(nogil=True, cache=True)
def add(keys_C: Any, sums_C: Any, used: Any, key: int, amount: float) -> Any:
    """Add to the sum of a key; `used` lists the slots in use, behind their number.

    A table that is three quarters full takes no further keys: what comes late in a large neighborhood is
    weak, and the sums of all others stay exact.

    Returns:
        The key's slot, -1 without one.
    """
    mask = np.uint64(len(keys_C) - 1)
    slot = np.int64(mix64(np.uint64(key)) & mask)
    while keys_C[slot] != key:
        if keys_C[slot] == FREE:
            if 4 * used[0] >= 3 * len(keys_C):
                return -1
            keys_C[slot] = key
            used[0] += 1
            used[used[0]] = slot
            break
        slot = (slot + 1) & np.int64(mask)
    sums_C[slot] += amount
    return slot


@njit(nogil=True, cache=True)
def clear(keys_C: Any, sums_C: Any, used: Any) -> None:
    for n in range(1, used[0] + 1):
        keys_C[used[n]] = FREE
        sums_C[used[n]] = 0.0
    used[0] = 0


@njit(nogil=True, cache=True)
def best(keys_C: Any, sums_C: Any, used: Any, left_out: Any, ids_K: Any, scores_K: Any) -> None:
    """Write the keys with the largest positive sums, best first; of equal ones the one with the smaller hash.

    Args:
        left_out: keys that are not wanted, sorted.
    """
    count = 0
    for n in range(1, used[0] + 1):
        key, score = keys_C[used[n]], sums_C[used[n]]
        if score <= 0.0 or (count == len(ids_K) and score < scores_K[-1]):
            continue
        place = np.searchsorted(left_out, key)
        if place < len(left_out) and left_out[place] == key:
            continue
        at = min(count, len(ids_K) - 1)
        if count == len(ids_K) and not _is_better(key, score, ids_K[at], scores_K[at]):
            continue
        while at > 0 and _is_better(key, score, ids_K[at - 1], scores_K[at - 1]):
            ids_K[at], scores_K[at] = ids_K[at - 1], scores_K[at - 1]
            at -= 1
        ids_K[at], scores_K[at] = key, score
        count = min(count + 1, len(ids_K))


@njit(nogil=True, cache=True)
def _is_better(key: int, score: float, other_key: int, other_score: float) -> bool:
    if score != other_score:
        return bool(score > other_score)
    return bool(mix64(np.uint64(key)) < mix64(np.uint64(other_key)))
