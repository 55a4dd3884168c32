"""Compiled equations of the sparse optimizers, a row at a time, and the one loop over the rows of a step.

Every operation rounds by itself, in float32, and squares are added in the order of `compiled.sum_squares`:
so a row has the same bits on whatever CPU or device it is changed.

Axes: M rows of one step, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from rayrec.embeddings.base.compiled import (
    RowAddresses,
    float32_at,
    int32_at,
    prefetch_row,
    row_address,
    sum_decayed_squares,
    sum_squares,
)
from rayrec.embeddings.base.layout import FLOAT32, RecordLayout, load_weights, store_weights
from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array
from rayrec.platform.compiled import extend64

Rates = tuple[np.float32, np.float32, np.float32, np.float32, np.float32]
"""What an equation needs to know of its settings and the step; each kernel names its own."""

ROWWISE_ADAGRAD, ADAGRAD, SGD, ADAM, PARTIAL_ROWWISE_ADAM, FTRL = range(6)

_AHEAD = 16  # records asked for this many rows early


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
) -> int:
    """Change the rows in place by the equation `kind` and stamp them with the step.

    Args:
        ids_M, seed_hash: what the rounding of 16-bit weights is keyed by.

    Returns:
        How many rows had that stamp already: a row given twice, or a step applied twice.
    """
    if kind == ROWWISE_ADAGRAD and layout.kind == FLOAT32:
        return _apply_rowwise_adagrad(rows, layout, rows_M, grads_MD, step, rates)
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
        repeated += _stamp(words[first_stamp:], step)
    return repeated


@njit(nogil=True, cache=True)
def _apply_rowwise_adagrad(
    rows: RowAddresses,
    layout: RecordLayout,
    rows_M: Int64Array,
    grads_MD: Float32Array,
    step: int,
    rates: Rates,
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
        _rowwise_adagrad(values[: layout.dim], values[first_state:first_stamp], grads_MD[m], rates)
        # Last: whole lanes of weights are read up to here, and would wait for what was just written.
        repeated += _stamp(words[first_stamp:], step)
    return repeated


@njit(nogil=True, cache=True, forceinline=True)
def apply_row(
    kind: int, weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates
) -> None:
    """One row's update by the equation `kind`."""
    if kind == ROWWISE_ADAGRAD:
        _rowwise_adagrad(weights_D, state_S, grad_D, rates)
    elif kind == ADAGRAD:
        _adagrad(weights_D, state_S, grad_D, rates)
    elif kind == SGD:
        _sgd(weights_D, grad_D, rates)
    elif kind == ADAM:
        _adam(weights_D, state_S, grad_D, rates)
    elif kind == PARTIAL_ROWWISE_ADAM:
        _partial_rowwise_adam(weights_D, state_S, grad_D, rates)
    else:
        _ftrl(weights_D, state_S, grad_D, rates)


@njit(nogil=True, cache=True, forceinline=True)
def _stamp(stamps: Int32Array, step: int) -> bool:
    """Record the step and count the update; true if the row had this step's stamp already."""
    seen = stamps[0] == step
    stamps[0] = step
    stamps[1] += 1
    return seen


@njit(nogil=True, cache=True, inline="always")
def _address(numbers: Float32Array) -> np.uint64:
    return np.uint64(numbers.ctypes.data)


@njit(nogil=True, cache=True, forceinline=True)
def _rowwise_adagrad(
    weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates
) -> None:
    lr, eps, weight_decay = rates[0], rates[1], rates[2]
    squares = sum_decayed_squares(_address(grad_D), weight_decay, _address(weights_D), np.uint64(len(grad_D)))
    state_S[0] += squares / np.float32(len(grad_D))
    rate = lr / (math.sqrt(state_S[0]) + eps)
    for d in range(len(grad_D)):
        weights_D[d] -= rate * (grad_D[d] + weight_decay * weights_D[d])


@njit(nogil=True, cache=True, forceinline=True)
def _adagrad(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    lr, eps, weight_decay = rates[0], rates[1], rates[2]
    for d in range(len(grad_D)):
        grad = grad_D[d] + weight_decay * weights_D[d]
        total = state_S[d] + grad * grad
        state_S[d] = total
        weights_D[d] -= lr * (grad / (np.float32(math.sqrt(total)) + eps))


@njit(nogil=True, cache=True, forceinline=True)
def _sgd(weights_D: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    lr, weight_decay = rates[0], rates[1]
    for d in range(len(grad_D)):
        weights_D[d] -= lr * (grad_D[d] + weight_decay * weights_D[d])


@njit(nogil=True, cache=True, forceinline=True)
def _adam(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    """rest1, rest2: 1 - beta1, 1 - beta2; step_size: the rate with both bias corrections."""
    step_size, rest1, rest2, eps = rates[0], rates[1], rates[2], rates[3]
    dim = len(grad_D)
    first_D, second_D = state_S[:dim], state_S[dim:]
    for d in range(dim):
        grad = grad_D[d]
        first = first_D[d] + rest1 * (grad - first_D[d])
        second = second_D[d] + rest2 * (grad * grad - second_D[d])
        first_D[d] = first
        second_D[d] = second
        weights_D[d] -= step_size * (first / (np.float32(math.sqrt(second)) + eps))


@njit(nogil=True, cache=True, forceinline=True)
def _partial_rowwise_adam(
    weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates
) -> None:
    """step_size: the rate with the first moment's correction; `correction` is the second one's factor."""
    step_size, rest1, rest2, eps, correction = rates[0], rates[1], rates[2], rates[3], rates[4]
    dim = len(grad_D)
    squares = sum_squares(_address(grad_D), np.uint64(dim))
    second = state_S[dim] + rest2 * (squares / np.float32(dim) - state_S[dim])
    state_S[dim] = second
    rate = step_size / (np.float32(math.sqrt(second * correction)) + eps)
    for d in range(dim):
        first = state_S[d] + rest1 * (grad_D[d] - state_S[d])
        state_S[d] = first
        weights_D[d] -= rate * first


@njit(nogil=True, cache=True, forceinline=True)
def _ftrl(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    alpha, beta, l1, l2 = rates[0], rates[1], rates[2], rates[3]
    dim = len(grad_D)
    linear_D, squares_D = state_S[:dim], state_S[dim:]
    for d in range(dim):
        grad = grad_D[d]
        squares = squares_D[d] + grad * grad
        root = np.float32(math.sqrt(squares))
        linear = linear_D[d] + grad - (root - np.float32(math.sqrt(squares_D[d]))) / alpha * weights_D[d]
        squares_D[d] = squares
        linear_D[d] = linear
        if abs(linear) <= l1:
            weights_D[d] = np.float32(0)
        else:
            excess = linear - l1 if linear > 0 else linear + l1
            weights_D[d] = -excess / ((beta + root) / alpha + l2)
