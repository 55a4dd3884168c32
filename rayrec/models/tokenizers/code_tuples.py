"""Which items share a tuple of codes; needs numpy alone.

Axes: I items, L code levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.code_tree import IntArray, sorted_tuples


def tuple_groups(codes_IL: IntArray) -> tuple[Int64Array, Int64Array]:
    """Number the distinct tuples.

    Returns:
        [I] number of each item's tuple and [tuples] how many items have it.
    """
    order_I, starts_I = _in_order(codes_IL)
    group_I = np.empty(len(codes_IL), dtype=np.int64)
    group_I[order_I] = np.cumsum(starts_I, dtype=np.int64) - 1
    return group_I, np.diff(np.flatnonzero(starts_I), append=len(codes_IL))


def _in_order(codes_IL: IntArray) -> tuple[Int64Array, BoolArray]:
    """Positions in the order of their tuples, equal ones as they come; and where a new tuple begins."""
    widths = [int(column_I.max(initial=0)).bit_length() for column_I in codes_IL.T]
    if codes_IL.min(initial=0) < 0:
        widths = [64] * len(widths)  # no number stands for a negative code
    order_I, packed_I = sorted_tuples(codes_IL, widths)
    return order_I, _begins(codes_IL[order_I] if packed_I is None else packed_I[:, None])


def _begins(sorted_IL: IntArray) -> BoolArray:
    starts_I = np.ones(len(sorted_IL), dtype=np.bool_)
    starts_I[1:] = (sorted_IL[1:] != sorted_IL[:-1]).any(axis=1)
    return starts_I


def num_distinct(numbers_I: Int64Array) -> int:
    """How many distinct numbers there are.

    Of ten millions, `np.unique` takes 18 s; this takes one, and no time where they ascend, as item ids do.
    """
    if len(numbers_I) < 2 or bool((numbers_I[1:] > numbers_I[:-1]).all()):
        return len(numbers_I)
    sorted_I = np.sort(numbers_I)
    return 1 + int(np.count_nonzero(sorted_I[1:] != sorted_I[:-1]))


def num_distinct_tuples(codes_IL: IntArray, level_sizes: Sequence[int]) -> int:
    """How many distinct tuples there are.

    Args:
        level_sizes: one more than the largest code of each level, at least.
    """
    if math.prod(level_sizes) > np.iinfo(np.int64).max:
        return len(tuple_groups(codes_IL)[1])
    # Each tuple as one number: to find equal ones takes a fifth of sorting tuples.
    number_I = np.zeros(len(codes_IL), dtype=np.int64)
    for codes_I, size in zip(codes_IL.T, level_sizes, strict=True):
        number_I *= size
        number_I += codes_I
    return num_distinct(number_I)
