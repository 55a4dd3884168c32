"""Rows of different lengths cut into shares of about equal work."""

from __future__ import annotations

import numpy as np

from rayrec.platform.arrays import Int64Array


def balanced_bounds(lengths_B: Int64Array, num_shares: int) -> list[int]:
    """Where to cut rows into contiguous shares, so that none waits long for another: [num_shares + 1] bounds.

    The sums of lengths differ from their mean by no more than one row's length. Rows of length 0 count as one
    of length 1 where there are no others.
    """
    ends_B = np.cumsum(lengths_B if lengths_B.any() else np.ones_like(lengths_B))
    total = int(ends_B[-1]) if len(ends_B) else 0
    # A row belongs to the share in which its middle lies.
    middles_B = 2 * ends_B - np.diff(ends_B, prepend=0)
    inner = np.searchsorted(middles_B, [2 * total * share / num_shares for share in range(1, num_shares)])
    return [0, *inner.tolist(), len(lengths_B)]
