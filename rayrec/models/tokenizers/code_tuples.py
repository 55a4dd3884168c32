"""Which items share a tuple of codes; needs numpy alone.

Axes: I items, L code levels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.arrays import Int64Array

IntArray = NDArray[np.integer]


def tuple_groups(codes_IL: IntArray) -> tuple[Int64Array, Int64Array]:
    """Number the distinct tuples.

    Returns:
        [I] number of each item's tuple and [tuples] how many items have it.
    """
    order_I = np.lexsort(codes_IL.T[::-1])
    sorted_IL = codes_IL[order_I]
    starts_I = np.ones(len(codes_IL), dtype=bool)
    starts_I[1:] = (sorted_IL[1:] != sorted_IL[:-1]).any(axis=1)
    group_I = np.empty(len(codes_IL), dtype=np.int64)
    group_I[order_I] = np.cumsum(starts_I) - 1
    return group_I, np.bincount(group_I)
