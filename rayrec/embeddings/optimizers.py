"""Sparse optimizers: how one row's record changes with its gradient.

A record is weights D | optimizer state S | last step | count, in 4-byte words. Each optimizer has one
row kernel, which is its equation, and one loop over the rows of a step.

Axes: M rows of one step, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from rayrec.embeddings.compiled import RowAddresses, float32_at, int32_at, prefetch_row, row_address
from rayrec.embeddings.config import AdamConfig, OptimizerConfig, RowwiseAdagradConfig
from rayrec.platform.schedule import RateSchedule

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

_AHEAD = 4  # records asked for this many rows early


class RowOptimizer(Protocol):
    """Applies gradients to row records."""

    initial_state: float
    """Every state number of a new row."""

    def state_size(self, dim: int) -> int:
        """S: 4-byte words of state beside D weights."""
        ...

    def apply(self, rows: RowAddresses, rows_M: Int64Array, grads_MD: Float32Array, step: int) -> int:
        """Change the rows in place and stamp them with the step.

        Returns:
            How many rows had that stamp already: a row given twice, or a step applied twice.
        """
        ...


class RowwiseAdagrad:
    """Adagrad whose accumulator is one number per row: the running sum of the mean squared gradient.

    g += weight_decay * w;  s += mean(g * g);  w -= lr * g / (sqrt(s) + eps)

    Source: EXACT_ROWWISE_ADAGRAD of FBGEMM (with its L2 weight decay); Gupta et al., arXiv:1412.1193.
    """

    def __init__(self, config: RowwiseAdagradConfig, schedule: RateSchedule) -> None:
        self._schedule = schedule
        self.initial_state = config.initial_accumulator
        self._lr = config.lr
        self._eps = np.float32(config.eps)
        self._weight_decay = np.float32(config.weight_decay)

    def state_size(self, dim: int) -> int:
        return 1

    def apply(self, rows: RowAddresses, rows_M: Int64Array, grads_MD: Float32Array, step: int) -> int:
        lr = np.float32(self._lr * self._schedule.factor(step))
        return _apply_rowwise_adagrad(rows, rows_M, grads_MD, step, lr, self._eps, self._weight_decay)


class Adam:
    """Lazy Adam: only the rows of a step move, and only their moments decay.

    m += (1 - b1) * (g - m);  v += (1 - b2) * (g * g - v)
    w -= lr * sqrt(1 - b2**t) / (1 - b1**t) * m / (sqrt(v) + eps),  t = step + 1

    t counts the steps of the run, not those of the row: SparseAdam keeps one counter per parameter,
    which advances with every step of the optimizer. State of a row: m, then v.

    Source: torch.optim.SparseAdam; Kingma and Ba, arXiv:1412.6980.
    """

    initial_state = 0.0

    def __init__(self, config: AdamConfig, schedule: RateSchedule) -> None:
        self._config = config
        self._schedule = schedule

    def state_size(self, dim: int) -> int:
        return 2 * dim

    def apply(self, rows: RowAddresses, rows_M: Int64Array, grads_MD: Float32Array, step: int) -> int:
        (beta1, beta2), t = self._config.betas, step + 1
        lr = self._config.lr * self._schedule.factor(step)
        step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        return _apply_adam(
            rows,
            rows_M,
            grads_MD,
            step,
            np.float32(step_size),
            np.float32(1 - beta1),
            np.float32(1 - beta2),
            np.float32(self._config.eps),
        )


def make_optimizer(config: OptimizerConfig, schedule: RateSchedule) -> RowOptimizer:
    if isinstance(config, AdamConfig):
        return Adam(config, schedule)
    return RowwiseAdagrad(config, schedule)


# Without `reassoc` a sum keeps the order of its terms, one addition at a time. With it the compiler
# sums in vector lanes: the same bits on the same kind of CPU, which is what a run promises.
@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _rowwise_adagrad_row(
    weights_D: Float32Array,
    state_S: Float32Array,
    grad_D: Float32Array,
    lr: np.float32,
    eps: np.float32,
    weight_decay: np.float32,
) -> None:
    squares = np.float32(0)
    for d in range(len(grad_D)):
        grad = grad_D[d] + weight_decay * weights_D[d]
        squares += grad * grad
    state_S[0] += squares / np.float32(len(grad_D))
    rate = lr / (math.sqrt(state_S[0]) + eps)
    for d in range(len(grad_D)):
        weights_D[d] -= rate * (grad_D[d] + weight_decay * weights_D[d])


@njit(nogil=True, cache=True)
def _adam_row(
    weights_D: Float32Array,
    state_S: Float32Array,
    grad_D: Float32Array,
    step_size: np.float32,
    rest1: np.float32,
    rest2: np.float32,
    eps: np.float32,
) -> None:
    """rest1, rest2: 1 - beta1, 1 - beta2; step_size: the rate with both bias corrections."""
    dim = len(grad_D)
    first_D, second_D = state_S[:dim], state_S[dim:]
    for d in range(dim):
        grad = grad_D[d]
        first = first_D[d] + rest1 * (grad - first_D[d])
        second = second_D[d] + rest2 * (grad * grad - second_D[d])
        first_D[d] = first
        second_D[d] = second
        weights_D[d] -= step_size * (first / (np.float32(math.sqrt(second)) + eps))


@njit(nogil=True, cache=True)
def _stamp(stamps: NDArray[np.int32], step: int) -> bool:
    """Record the step and count the update; true if the row had this step's stamp already."""
    seen = stamps[0] == step
    stamps[0] = step
    stamps[1] += 1
    return seen


@njit(nogil=True, cache=True)
def _apply_rowwise_adagrad(
    rows: RowAddresses,
    rows_M: Int64Array,
    grads_MD: Float32Array,
    step: int,
    lr: np.float32,
    eps: np.float32,
    weight_decay: np.float32,
) -> int:
    dim = grads_MD.shape[1]
    repeated = 0
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M):
            prefetch_row(rows, rows_M[m + _AHEAD])
        address = row_address(rows, rows_M[m])
        values = carray(float32_at(address), rows.words)
        stamps = carray(int32_at(address), rows.words)
        repeated += _stamp(stamps[dim + 1 :], step)
        _rowwise_adagrad_row(values[:dim], values[dim:], grads_MD[m], lr, eps, weight_decay)
    return repeated


@njit(nogil=True, cache=True)
def _apply_adam(
    rows: RowAddresses,
    rows_M: Int64Array,
    grads_MD: Float32Array,
    step: int,
    step_size: np.float32,
    rest1: np.float32,
    rest2: np.float32,
    eps: np.float32,
) -> int:
    dim = grads_MD.shape[1]
    repeated = 0
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M):
            prefetch_row(rows, rows_M[m + _AHEAD])
        address = row_address(rows, rows_M[m])
        values = carray(float32_at(address), rows.words)
        stamps = carray(int32_at(address), rows.words)
        repeated += _stamp(stamps[3 * dim :], step)
        _adam_row(values[:dim], values[dim : 3 * dim], grads_MD[m], step_size, rest1, rest2, eps)
    return repeated
