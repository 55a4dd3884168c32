"""The one loop over the rows of a step, compiled; it applies an optimizer's equation to a row at a time.

Axes: M rows of one step, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from rayrec.embeddings.base.compiled import (
    RowAddresses,
    float32_at,
    int32_at,
    prefetch_row,
    row_address,
)
from rayrec.embeddings.base.layout import FLOAT32, RecordLayout, load_weights, store_weights
from rayrec.embeddings.optim import (
    adagrad,
    adam,
    ftrl,
    partial_rowwise_adam,
    rowwise_adagrad,
    sgd,
)
from rayrec.embeddings.optim.row_optimizer import Rates
from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array
from rayrec.platform.compiled import extend64

_ROWWISE_ADAGRAD = rowwise_adagrad.RowwiseAdagrad.kernel
_ADAGRAD = adagrad.Adagrad.kernel
_SGD = sgd.Sgd.kernel
_ADAM = adam.Adam.kernel
_PARTIAL_ROWWISE_ADAM = partial_rowwise_adam.PartialRowwiseAdam.kernel

_AHEAD = 16  # records prefetched this many rows early


@njit(nogil=True, cache=True)
def apply_rows(
    kind: int,
    rows: RowAddresses,
    layout: RecordLayout,
    rows_M: Int64Array,
    ids_M: Int64Array,
    grads_MD: Float32Array,
    step: int,
    rates: Rates,
    seed_hash: np.uint64,
    before_M: Int32Array,
) -> int:
    """Change the rows in place by the equation `kind` and stamp them with the step.

    Args:
        ids_M, seed_hash: what the rounding of 16-bit weights is keyed by.
        before_M: is given the stamp that each row had.

    Returns:
        How many rows had that stamp already: a row given twice, or a step applied twice.
    """
    if kind == _ROWWISE_ADAGRAD and layout.kind == FLOAT32:
        return _apply_rowwise_adagrad(rows, layout, rows_M, grads_MD, step, rates, before_M)
    first_state, first_stamp = layout.weight_words, layout.weight_words + layout.state_size
    wide_D = np.empty(layout.dim, dtype=np.float32)
    repeated = 0
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M):
            prefetch_row(rows, rows_M[m + _AHEAD])
        address = row_address(rows, rows_M[m])
        values = carray(float32_at(address), rows.words)
        words = carray(int32_at(address), rows.words)
        state_S = values[first_state:first_stamp]
        if layout.kind == FLOAT32:
            apply_row(kind, values[: layout.dim], state_S, grads_MD[m], rates)
        else:
            load_weights(layout.kind, words, wide_D)
            apply_row(kind, wide_D, state_S, grads_MD[m], rates)
            step_hash = extend64(extend64(seed_hash, np.uint64(ids_M[m])), np.uint64(step))
            store_weights(layout.kind, words, wide_D, step_hash)
        before_M[m] = _stamp(words[first_stamp:], step)
        repeated += before_M[m] == step
    return repeated


@njit(nogil=True, cache=True)
def _apply_rowwise_adagrad(
    rows: RowAddresses,
    layout: RecordLayout,
    rows_M: Int64Array,
    grads_MD: Float32Array,
    step: int,
    rates: Rates,
    before_M: Int32Array,
) -> int:
    """`apply_rows` of what most tables are: a loop without choices is a fifth faster."""
    first_state, first_stamp = layout.weight_words, layout.weight_words + layout.state_size
    repeated = 0
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M):
            prefetch_row(rows, rows_M[m + _AHEAD])
        address = row_address(rows, rows_M[m])
        values = carray(float32_at(address), rows.words)
        words = carray(int32_at(address), rows.words)
        rowwise_adagrad.update_row(values[: layout.dim], values[first_state:first_stamp], grads_MD[m], rates)
        # Last: whole lanes of weights are read up to here, and would wait for what was just written.
        before_M[m] = _stamp(words[first_stamp:], step)
        repeated += before_M[m] == step
    return repeated


@njit(nogil=True, cache=True, forceinline=True)
def apply_row(
    kind: int, weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates
) -> None:
    """One row's update by the equation `kind`: `RowOptimizer.kernel` of its module."""
    if kind == _ROWWISE_ADAGRAD:
        rowwise_adagrad.update_row(weights_D, state_S, grad_D, rates)
    elif kind == _ADAGRAD:
        adagrad.update_row(weights_D, state_S, grad_D, rates)
    elif kind == _SGD:
        sgd.update_row(weights_D, state_S, grad_D, rates)
    elif kind == _ADAM:
        adam.update_row(weights_D, state_S, grad_D, rates)
    elif kind == _PARTIAL_ROWWISE_ADAM:
        partial_rowwise_adam.update_row(weights_D, state_S, grad_D, rates)
    else:
        ftrl.update_row(weights_D, state_S, grad_D, rates)


@njit(nogil=True, cache=True, forceinline=True)
def _stamp(stamps: Int32Array, step: int) -> np.int32:
    """Record the step and count the update; returns the step that the row had."""
    before = stamps[0]
    stamps[0] = step
    stamps[1] += 1
    return before
