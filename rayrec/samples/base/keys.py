"""What rows are known by, wherever they are: random draws for a row are keyed by it."""

from __future__ import annotations

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.hashing import combine64


def row_keys(file_B: Int64Array, row_B: Int64Array) -> Int64Array:
    """[B] identity of rows from the number of their file and their place in it."""
    return combine64(file_B, row_B).view(np.int64)
