"""Lazy Adam: settings, state, and the equation on host and device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numba import njit
from pydantic import Field, model_validator

from rayrec.embeddings.optim.row_optimizer import Rates, RowOptimizer, float32
from rayrec.platform.arrays import Float32Array
from rayrec.platform.config import Config

if TYPE_CHECKING:
    from torch import Tensor


class AdamConfig(Config):
    """Lazy Adam, as torch.optim.SparseAdam: only the rows of a step move, and only their moments decay.

    With `weight_decay` it is a lazy AdamW.
    """

    kind: Literal["adam"] = "adam"
    lr: float = Field(default=0.001, gt=0)
    """Learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment, before bias correction, as SparseAdam does."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Share of the learning rate by which the rows of a step shrink, apart from the gradient, as in AdamW.
    Other rows stay as they are: one that is read in every third step needs three times the decay of a dense
    weight."""

    @model_validator(mode="after")
    def _something_stays(self) -> AdamConfig:
        lost = self.lr * self.weight_decay
        if lost >= 1:
            raise ValueError(f"lr times weight_decay is {lost:g}, and has to be below 1 for a row to stay")
        return self


class Adam(RowOptimizer[AdamConfig]):
    """Lazy Adam: only the rows of a step move, and only their moments decay.

    w *= 1 - lr * weight_decay
    m += (1 - b1) * (g - m);  v += (1 - b2) * (g * g - v)
    w -= lr * sqrt(1 - b2**t) / (1 - b1**t) * m / (sqrt(v) + eps),  t = step + 1

    t counts the steps of the run, not those of the row: SparseAdam keeps one counter per parameter,
    which advances with every step of the optimizer. State of a row: m, then v.

    Source: torch.optim.SparseAdam; Kingma and Ba, arXiv:1412.6980; decay of weights: Loshchilov and Hutter,
    arXiv:1711.05101.
    """

    kernel = 3

    def state_size(self, dim: int) -> int:
        return 2 * dim

    def rates(self, step: int) -> Rates:
        (beta1, beta2), t = self._config.betas, step + 1
        lr = self._config.lr * self._schedule.factor(step)
        step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        kept = 1 - lr * self._config.weight_decay
        return float32(step_size, 1 - beta1, 1 - beta2, self._config.eps, kept)

    @staticmethod
    def update_on_device(weights_MD: Tensor, state_MS: Tensor, grads_MD: Tensor, rates: Tensor) -> Tensor:
        from rayrec.embeddings.optim import device_kernels  # imports torch: only where a device is used

        step_size, rest1, rest2, eps, kept = rates
        first_MD, second_MD = state_MS.chunk(2, dim=1)
        first_MD += rest1 * (grads_MD - first_MD)
        second_MD += rest2 * (grads_MD * grads_MD - second_MD)
        return kept * weights_MD - step_size * (first_MD / (device_kernels.root(second_MD) + eps))


@njit(nogil=True, cache=True, forceinline=True)
def update_row(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    """rest1, rest2: 1 - beta1, 1 - beta2; step_size: the rate with both bias corrections; kept: 1 - decay."""
    step_size, rest1, rest2, eps, kept = rates[0], rates[1], rates[2], rates[3], rates[4]
    dim = len(grad_D)
    first_D, second_D = state_S[:dim], state_S[dim:]
    for d in range(dim):
        grad = grad_D[d]
        first = first_D[d] + rest1 * (grad - first_D[d])
        second = second_D[d] + rest2 * (grad * grad - second_D[d])
        first_D[d] = first
        second_D[d] = second
        weights_D[d] = kept * weights_D[d] - step_size * (first / (np.float32(math.sqrt(second)) + eps))
