"""FTRL-Proximal: settings, state, and the equation on host and device."""

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


class FtrlConfig(Config):
    """FTRL-Proximal: rates per element, and weights of exactly zero where the evidence is thin."""

    kind: Literal["ftrl"] = "ftrl"
    alpha: float = Field(default=0.05, gt=0)
    """Learning rate; it falls by itself with the gradients seen, so the run's schedule leaves it alone."""
    beta: float = Field(default=1.0, gt=0)
    """Added to the root of the accumulator; keeps the first rates finite."""
    l1: float = Field(default=0.0, ge=0)
    """Weights whose evidence is below this are zero."""
    l2: float = Field(default=0.0, ge=0)
    """Pull towards zero."""


class Ftrl(RowOptimizer[FtrlConfig]):
    """FTRL-Proximal.

    z += g - (sqrt(n + g * g) - sqrt(n)) / alpha * w;  n += g * g
    w = 0 if |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / alpha + l2)

    State of a row: z, then n. A row's first value counts as w in its first update.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, Algorithm 1.
    """

    kernel = 5

    def state_size(self, dim: int) -> int:
        return 2 * dim

    def rates(self, step: int) -> Rates:
        return float32(self._config.alpha, self._config.beta, self._config.l1, self._config.l2)

    @staticmethod
    def update_on_device(weights_MD: Tensor, state_MS: Tensor, grads_MD: Tensor, rates: Tensor) -> Tensor:
        from rayrec.embeddings.optim import device_kernels  # imports torch: only where a device is used

        alpha, beta, l1, l2 = rates[:4]
        linear_MD, squares_MD = state_MS.chunk(2, dim=1)
        root_before_MD = device_kernels.root(squares_MD)
        squares_MD += grads_MD * grads_MD
        root_MD = device_kernels.root(squares_MD)
        linear_MD += grads_MD
        linear_MD -= (root_MD - root_before_MD) / alpha * weights_MD
        excess_MD = (linear_MD - l1).where(linear_MD > 0, linear_MD + l1)
        moved_MD = -excess_MD / ((beta + root_MD) / alpha + l2)
        return moved_MD.masked_fill(linear_MD.abs() <= l1, 0.0)


@njit(nogil=True, cache=True, forceinline=True)
def update_row(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
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
