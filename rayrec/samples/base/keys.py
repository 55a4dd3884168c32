"""Keys of rows: random numbers of a row are derived from its key."""

from __future__ import annotations

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.hashing import combine64


def row_keys(file_B: Int64Array, row_B: Int64Array) -> Int64Array:
    """[B] identity of rows from the number of their file and their row number in it."""
    return combine64(file_B, row_B).view(np.int64)
