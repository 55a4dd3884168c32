"""Adagrad with one accumulator per element: settings, state, and the equation on host and device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from numba import njit
from pydantic import Field

from rayrec.embeddings.optim.row_optimizer import Rates, RowOptimizer, float32
from rayrec.platform.arrays import Float32Array
from rayrec.platform.config import Config

if TYPE_CHECKING:
    from torch import Tensor


class AdagradConfig(Config):
    """Adagrad with an accumulator per element, as torch.optim.Adagrad."""

    kind: Literal["adagrad"] = "adagrad"
    lr: float = Field(default=0.05, gt=0)
    """Learning rate."""
    eps: float = Field(default=1e-10, gt=0)
    """Added to the root of the accumulator."""
    initial_accumulator: float = Field(default=0.0, ge=0)
    """Value of a new row's accumulators; larger values soften the first steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient of the rows a step touches (not decoupled)."""


class Adagrad(RowOptimizer[AdagradConfig]):
    """Adagrad with one accumulator per element.

    g += weight_decay * w;  s += g * g;  w -= lr * g / (sqrt(s) + eps)

    Source: torch.optim.Adagrad; Duchi et al., JMLR 2011.
    """

    kernel = 1

    @property
    def initial_state(self) -> float:
        return self._config.initial_accumulator

    def state_size(self, dim: int) -> int:
        return dim

    def rates(self, step: int) -> Rates:
        lr = self._config.lr * self._schedule.factor(step)
        return float32(lr, self._config.eps, self._config.weight_decay)

    @staticmethod
    def update_on_device(weights_MD: Tensor, state_MS: Tensor, grads_MD: Tensor, rates: Tensor) -> Tensor:
        from rayrec.embeddings.optim import device_kernels  # imports torch: only where a device is used

        lr, eps, weight_decay = rates[:3]
        decayed_MD = grads_MD + weight_decay * weights_MD
        state_MS += decayed_MD * decayed_MD
        return weights_MD - lr * (decayed_MD / (device_kernels.root(state_MS) + eps))


@njit(nogil=True, cache=True, forceinline=True)
def update_row(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    lr, eps, weight_decay = rates[0], rates[1], rates[2]
    for d in range(len(grad_D)):
        grad = grad_D[d] + weight_decay * weights_D[d]
        total = state_S[d] + grad * grad
        state_S[d] = total
        weights_D[d] -= lr * (grad / (np.float32(math.sqrt(total)) + eps))
