"""Dropout by hashes in one pass over the elements, for CPUs.

As operations of torch, the hash alone is a dozen passes over integers, and was a fifth of a training step's
time. The bits are those of `rayrec.models.base.keyed_random` on any device.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.compiled import kernel_input, mix64


def drop(
    x_ND: Float32Array,
    keys_N: Int64Array,
    counters_W: Int64Array,
    threshold: int,
    kept: float,
    out_ND: Float32Array,
) -> None:
    """Multiply some elements by zero, and divide all by `kept`.

    Args:
        keys_N: hashes of the rows.
        counters_W: hashes of 0, 1, …: each gives the draws of four columns. W is D / 4, rounded up.
        threshold: of draws in [-32768, 32767]; smaller ones set to zero.
        out_ND: where the result goes.
    """
    _drop(
        kernel_input(x_ND, np.float32),
        kernel_input(keys_N, np.int64),
        kernel_input(counters_W, np.int64),
        threshold,
        np.float32(kept),
        out_ND,
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _drop(
    x_ND: Float32Array,
    keys_N: Int64Array,
    counters_W: Int64Array,
    threshold: int,
    kept: np.float32,
    out_ND: Float32Array,
) -> None:
    words_W = np.empty(len(counters_W), dtype=np.uint64)
    draws_D = words_W.view(np.int16)
    for n in range(len(x_ND)):
        # Two loops: compilers make vector instructions of each, and of one over words and their draws none.
        for w in range(len(words_W)):
            words_W[w] = mix64(keys_N[n] ^ counters_W[w])
        for d in range(x_ND.shape[1]):
            factor = np.float32(1.0) if draws_D[d] >= threshold else np.float32(0.0)
            out_ND[n, d] = x_ND[n, d] * factor / kept
