"""Stochastic gradient descent: settings, state, and the equation on host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from numba import njit
from pydantic import Field

from rayrec.embeddings.optim.row_optimizer import Rates, RowOptimizer, float32
from rayrec.platform.arrays import Float32Array
from rayrec.platform.config import Config

if TYPE_CHECKING:
    from torch import Tensor


class SgdConfig(Config):
    """Plain gradient descent on the rows of a step: no state."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(default=0.1, gt=0)
    """Learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient of the rows a step touches (not decoupled)."""


class Sgd(RowOptimizer[SgdConfig]):
    """w -= lr * (g + weight_decay * w)

    Source: torch.optim.SGD without momentum.
    """

    kernel = 2

    def state_size(self, dim: int) -> int:
        return 0

    def rates(self, step: int) -> Rates:
        return float32(self._config.lr * self._schedule.factor(step), self._config.weight_decay)

    @staticmethod
    def update_on_device(weights_MD: Tensor, state_MS: Tensor, grads_MD: Tensor, rates: Tensor) -> Tensor:
        lr, weight_decay = rates[:2]
        return weights_MD - lr * (grads_MD + weight_decay * weights_MD)


@njit(nogil=True, cache=True, forceinline=True)
def update_row(weights_D: Float32Array, state_S: Float32Array, grad_D: Float32Array, rates: Rates) -> None:
    lr, weight_decay = rates[0], rates[1]
    for d in range(len(grad_D)):
        weights_D[d] -= lr * (grad_D[d] + weight_decay * weights_D[d])
