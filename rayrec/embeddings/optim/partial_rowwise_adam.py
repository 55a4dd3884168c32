"""Lazy Adam with one second moment per row: settings, state, and the equation on host and device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numba import njit
from pydantic import Field

from rayrec.embeddings.base.compiled import numbers_address, sum_squares
from rayrec.embeddings.optim.row_optimizer import Rates, RowOptimizer, float32
from rayrec.platform.arrays import Float32Array
from rayrec.platform.config import Config

if TYPE_CHECKING:
    from torch import Tensor


class PartialRowwiseAdamConfig(Config):
    """Lazy Adam whose second moment is one number per row: half the state of Adam."""

    kind: Literal["partial_rowwise_adam"] = "partial_rowwise_adam"
    lr: float = Field(default=0.001, gt=0)
    """Learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its mean square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment, after bias correction."""


class PartialRowwiseAdam(RowOptimizer[PartialRowwiseAdamConfig]):
    """Lazy Adam whose second moment is one number per row, of the mean squared gradient.

    m += (1 - b1) * (g - m);  v += (1 - b2) * (mean(g * g) - v)
    w -= lr * m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps),  t = step + 1

    State of a row: m, then v.

    Source: PARTIAL_ROWWISE_ADAM of FBGEMM.
    """

    kernel = 4

    def state_size(self, dim: int) -> int:
        return dim + 1

    def rates(self, step: int) -> Rates:
        (beta1, beta2), t = self._config.betas, step + 1
        step_size = self._config.lr * self._schedule.factor(step) / (1 - beta1**t)
        return float32(step_size, 1 - beta1, 1 - beta2, self._config.eps, 1 / (1 - beta2**t))

    @staticmethod
    def update_on_device(weights_MD: Tensor, state_MS: Tensor, grads_MD: Tensor, rates: Tensor) -> Tensor:
        from rayrec.embeddings.optim import device_kernels  # imports torch: only where a device is used

        step_size, rest1, rest2, eps, correction = rates
        first_MD, second_M = state_MS[:, :-1], state_MS[:, -1]
        second_M += rest2 * (
            device_kernels.sum_squares(grads_MD) / device_kernels.dim_of(grads_MD) - second_M
        )
        rate_M = step_size / (device_kernels.root(second_M * correction) + eps)
        first_MD += rest1 * (grads_MD - first_MD)
        return weights_MD - rate_M[:, None] * first_MD


@njit(nogil=True, cache=True, forceinline=True)
def update_row(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    """step_size: the rate with the first moment's correction; `correction` is the second one's factor."""
    step_size, rest1, rest2, eps, correction = rates[0], rates[1], rates[2], rates[3], rates[4]
    dim = len(grad_D)
    squares = sum_squares(numbers_address(grad_D), np.uint64(dim))
    second = state_S[dim] + rest2 * (squares / np.float32(dim) - state_S[dim])
    state_S[dim] = second
    rate = step_size / (np.float32(math.sqrt(second * correction)) + eps)
    for d in range(dim):
        first = state_S[d] + rest1 * (grad_D[d] - state_S[d])
        state_S[d] = first
        weights_D[d] -= rate * first
