"""Events of one user at one time: their order says nothing, so it can be drawn anew whenever they are read.

A data set holds one order of them, drawn when it was prepared. A model that sees the same order in every
epoch learns it by heart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayrec.platform.hashing import combine64
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.jagged import concatenated_ranges

_STREAM = 4
"""Orders of a step come from the hash of (seed, 4, step, row, place of the event in its row)."""


def with_redrawn_ties(batch: SampleBatch, seed: int) -> SampleBatch:
    """The same rows, each run of neighboring events of one time in an order of this step.

    Items, times and labels move together. The order depends on the seed, the step, the row and the places of
    the events alone.
    """
    assert batch.times_N is not None, "whoever wants this asks for the times"
    lengths_B = np.diff(batch.offsets_B1)
    row_N = np.repeat(np.arange(batch.num_rows), lengths_B)
    place_N = concatenated_ranges(np.zeros_like(lengths_B), lengths_B)
    begins_N = (np.diff(batch.times_N, prepend=0) != 0) | (place_N == 0)
    bits_N = combine64(seed, _STREAM, batch.step, batch.row_keys_B[row_N], place_N)
    order_N = np.lexsort((bits_N, begins_N.cumsum()))
    return replace(
        batch,
        item_ids_N=batch.item_ids_N[order_N],
        times_N=batch.times_N[order_N],
        labels={label: codes_N[order_N] for label, codes_N in batch.labels.items()},
    )
