"""Rows of different lengths divided into contiguous parts of about equal work."""

from __future__ import annotations

import numpy as np

from rayrec.platform.arrays import Int64Array


def balanced_bounds(lengths_B: Int64Array, num_shares: int) -> list[int]:
    """Divide rows into contiguous parts with similar sums of lengths: [num_shares + 1] bounds.

    The sums differ from their mean by no more than one row's length. Where all rows have length 0, each
    counts as one of length 1.
    """
    ends_B = np.cumsum(lengths_B if lengths_B.any() else np.ones_like(lengths_B))
    total = int(ends_B[-1]) if len(ends_B) else 0
    # A row belongs to the part that its middle is in.
    middles_B = 2 * ends_B - np.diff(ends_B, prepend=0)
    inner = np.searchsorted(middles_B, [2 * total * share / num_shares for share in range(1, num_shares)])
    return [0, *inner.tolist(), len(lengths_B)]
