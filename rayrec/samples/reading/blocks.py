"""Memory of a window's columns, used again for a later window.

    lend ─► buffer ─► columns, slices, arrays, tensors over it ─► the last of them is gone ─► the next lend

Arrow's pool gives memory back to the system ten milliseconds after it was freed, sooner than the next window
is decoded, and new memory costs a page fault and 4 KiB of zeros for every page: half of what moving lists
takes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_KEPT = 8
"""Free blocks of one size: those of two windows, in which four columns have this size."""
_SMALLEST = 4096


class Blocks:
    """Lends memory; it may be asked by several threads at once."""

    def __init__(self) -> None:
        self._free: dict[int, deque[NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def lend(self, num_bytes: int) -> pa.Buffer:
        """At least so many bytes of no defined content; they come back when nothing refers to the buffer."""
        size = _size_of(num_bytes)
        free = self._free[size]
        try:
            block = free.pop()
        except IndexError:
            block = np.empty(size, dtype=np.uint8)
        lent = block.view()  # arrays over the Arrow buffer refer to this object, and to the block through it
        # Not with a lock: it may be collected in the middle of `lend`. A deque appends in one piece.
        weakref.finalize(lent, free.append, block).atexit = False
        return pa.py_buffer(lent)


def _size_of(num_bytes: int) -> int:
    """Rounded up by at most an eighth, so that windows whose lists differ a little share blocks."""
    step = max(_SMALLEST, 1 << max(num_bytes.bit_length() - 4, 0))
    return max(-(-num_bytes // step), 1) * step
