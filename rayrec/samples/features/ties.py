"""Ties: events of one user at one time, whose order carries no information.

A data set holds one arbitrary order of them. Reshuffling ties at every step keeps a model from memorizing it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayrec.platform.hashing import combine64
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.jagged import concatenated_ranges

_STREAM = 4
"""Orders of a step come from the hash of (seed, 4, step, row, index of the event in its row)."""


def with_shuffled_ties(batch: SampleBatch, seed: int) -> SampleBatch:
    """The same rows, each run of neighboring events of one time in an order of this step.

    Items, times and labels move together. The order depends on the seed, the step, the row and the
    indices of the events alone.
    """
    assert batch.times_N is not None, "the times were read for this"
    lengths_B = np.diff(batch.offsets_B1)
    row_N = np.repeat(np.arange(batch.num_rows), lengths_B)
    position_N = concatenated_ranges(np.zeros_like(lengths_B), lengths_B)
    begins_N = (np.diff(batch.times_N, prepend=0) != 0) | (position_N == 0)
    bits_N = combine64(seed, _STREAM, batch.step, batch.row_keys_B[row_N], position_N)
    order_N = np.lexsort((bits_N, begins_N.cumsum()))
    return replace(
        batch,
        item_ids_N=batch.item_ids_N[order_N],
        times_N=batch.times_N[order_N],
        labels={label: codes_N[order_N] for label, codes_N in batch.labels.items()},
    )
