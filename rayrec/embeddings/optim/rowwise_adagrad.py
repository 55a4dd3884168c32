"""Adagrad with one accumulator per row: settings, state, and the equation on host and device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from numba import njit
from pydantic import Field

from rayrec.embeddings.base.compiled import numbers_address, sum_decayed_squares
from rayrec.embeddings.optim.row_optimizer import Rates, RowOptimizer, float32
from rayrec.platform.arrays import Float32Array
from rayrec.platform.config import Config

if TYPE_CHECKING:
    from torch import Tensor


class RowwiseAdagradConfig(Config):
    """Adagrad with one accumulator per row: the least state, the usual choice for sparse ids."""

    kind: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    lr: float = Field(default=0.05, gt=0)
    """Learning rate."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the accumulator; keeps the first division finite."""
    initial_accumulator: float = Field(default=0.0, ge=0)
    """Value of a new row's accumulator; larger values soften the first steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient of the rows a step touches (not decoupled)."""


class RowwiseAdagrad(RowOptimizer[RowwiseAdagradConfig]):
    """Adagrad whose accumulator is one number per row: the running sum of the mean squared gradient.

    g += weight_decay * w;  s += mean(g * g);  w -= lr * g / (sqrt(s) + eps)

    Source: EXACT_ROWWISE_ADAGRAD of FBGEMM (with its L2 weight decay); Gupta et al., arXiv:1412.1193.
    """

    kernel = 0

    @property
    def initial_state(self) -> float:
        return self._config.initial_accumulator

    def state_size(self, dim: int) -> int:
        return 1

    def rates(self, step: int) -> Rates:
        lr = self._config.lr * self._schedule.factor(step)
        return float32(lr, self._config.eps, self._config.weight_decay)

    @staticmethod
    def update_on_device(weights_MD: Tensor, state_MS: Tensor, grads_MD: Tensor, rates: Tensor) -> Tensor:
        from rayrec.embeddings.optim import device_kernels  # imports torch: only where a device is used

        lr, eps, weight_decay = rates[:3]
        decayed_MD = grads_MD + weight_decay * weights_MD
        state_MS[:, 0] += device_kernels.sum_squares(decayed_MD) / device_kernels.dim_of(grads_MD)
        rate_M = lr / (device_kernels.root(state_MS[:, 0]) + eps)
        return weights_MD - rate_M[:, None] * decayed_MD


@njit(nogil=True, cache=True, forceinline=True)
def update_row(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    lr, eps, weight_decay = rates[0], rates[1], rates[2]
    squares = sum_decayed_squares(
        numbers_address(grad_D), weight_decay, numbers_address(weights_D), np.uint64(len(grad_D))
    )
    state_S[0] += squares / np.float32(len(grad_D))
    rate = lr / (math.sqrt(state_S[0]) + eps)
    for d in range(len(grad_D)):
        weights_D[d] -= rate * (grad_D[d] + weight_decay * weights_D[d])
