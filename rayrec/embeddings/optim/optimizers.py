"""Sparse optimizers: how one row's record changes with its gradient.

Only the rows of a step move. Here stand the equations, their sources and what depends on the step; the
arithmetic is compiled, in `row_kernels`.

Axes: M rows of one step, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from rayrec.embeddings.base.config import (
    AdagradConfig,
    AdamConfig,
    FtrlConfig,
    OptimizerConfig,
    PartialRowwiseAdamConfig,
    RowwiseAdagradConfig,
    SgdConfig,
)
from rayrec.embeddings.optim import row_kernels
from rayrec.embeddings.optim.row_kernels import Rates
from rayrec.platform.schedule import RateSchedule


class RowOptimizer(ABC):
    """What the compiled loop has to know of an optimizer."""

    kernel: int
    """The equation, by its number in `row_kernels`."""
    initial_state = 0.0
    """Every state number of a new row."""

    @abstractmethod
    def state_size(self, dim: int) -> int:
        """S: 4-byte words of state beside D weights."""

    @abstractmethod
    def rates(self, step: int) -> Rates:
        """The kernel's numbers at this step, from 0."""


class RowwiseAdagrad(RowOptimizer):
    """Adagrad whose accumulator is one number per row: the running sum of the mean squared gradient.

    g += weight_decay * w;  s += mean(g * g);  w -= lr * g / (sqrt(s) + eps)

    Source: EXACT_ROWWISE_ADAGRAD of FBGEMM (with its L2 weight decay); Gupta et al., arXiv:1412.1193.
    """

    kernel = row_kernels.ROWWISE_ADAGRAD

    def __init__(self, config: RowwiseAdagradConfig, schedule: RateSchedule) -> None:
        self._config = config
        self._schedule = schedule
        self.initial_state = config.initial_accumulator

    def state_size(self, dim: int) -> int:
        return 1

    def rates(self, step: int) -> Rates:
        lr = self._config.lr * self._schedule.factor(step)
        return _float32(lr, self._config.eps, self._config.weight_decay)


class Adagrad(RowOptimizer):
    """Adagrad with one accumulator per element.

    g += weight_decay * w;  s += g * g;  w -= lr * g / (sqrt(s) + eps)

    Source: torch.optim.Adagrad; Duchi et al., JMLR 2011.
    """

    kernel = row_kernels.ADAGRAD

    def __init__(self, config: AdagradConfig, schedule: RateSchedule) -> None:
        self._config = config
        self._schedule = schedule
        self.initial_state = config.initial_accumulator

    def state_size(self, dim: int) -> int:
        return dim

    def rates(self, step: int) -> Rates:
        lr = self._config.lr * self._schedule.factor(step)
        return _float32(lr, self._config.eps, self._config.weight_decay)


class Sgd(RowOptimizer):
    """w -= lr * (g + weight_decay * w)

    Source: torch.optim.SGD without momentum.
    """

    kernel = row_kernels.SGD

    def __init__(self, config: SgdConfig, schedule: RateSchedule) -> None:
        self._config = config
        self._schedule = schedule

    def state_size(self, dim: int) -> int:
        return 0

    def rates(self, step: int) -> Rates:
        return _float32(self._config.lr * self._schedule.factor(step), self._config.weight_decay)


class Adam(RowOptimizer):
    """Lazy Adam: only the rows of a step move, and only their moments decay.

    m += (1 - b1) * (g - m);  v += (1 - b2) * (g * g - v)
    w -= lr * sqrt(1 - b2**t) / (1 - b1**t) * m / (sqrt(v) + eps),  t = step + 1

    t counts the steps of the run, not those of the row: SparseAdam keeps one counter per parameter,
    which advances with every step of the optimizer. State of a row: m, then v.

    Source: torch.optim.SparseAdam; Kingma and Ba, arXiv:1412.6980.
    """

    kernel = row_kernels.ADAM

    def __init__(self, config: AdamConfig, schedule: RateSchedule) -> None:
        self._config = config
        self._schedule = schedule

    def state_size(self, dim: int) -> int:
        return 2 * dim

    def rates(self, step: int) -> Rates:
        (beta1, beta2), t = self._config.betas, step + 1
        lr = self._config.lr * self._schedule.factor(step)
        step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        return _float32(step_size, 1 - beta1, 1 - beta2, self._config.eps)


class PartialRowwiseAdam(RowOptimizer):
    """Lazy Adam whose second moment is one number per row, of the mean squared gradient.

    m += (1 - b1) * (g - m);  v += (1 - b2) * (mean(g * g) - v)
    w -= lr * m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps),  t = step + 1

    State of a row: m, then v.

    Source: PARTIAL_ROWWISE_ADAM of FBGEMM.
    """

    kernel = row_kernels.PARTIAL_ROWWISE_ADAM

    def __init__(self, config: PartialRowwiseAdamConfig, schedule: RateSchedule) -> None:
        self._config = config
        self._schedule = schedule

    def state_size(self, dim: int) -> int:
        return dim + 1

    def rates(self, step: int) -> Rates:
        (beta1, beta2), t = self._config.betas, step + 1
        step_size = self._config.lr * self._schedule.factor(step) / (1 - beta1**t)
        return _float32(step_size, 1 - beta1, 1 - beta2, self._config.eps, 1 / (1 - beta2**t))


class Ftrl(RowOptimizer):
    """FTRL-Proximal.

    z += g - (sqrt(n + g * g) - sqrt(n)) / alpha * w;  n += g * g
    w = 0 if |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / alpha + l2)

    State of a row: z, then n. A row's first value counts as w in its first update.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, Algorithm 1.
    """

    kernel = row_kernels.FTRL

    def __init__(self, config: FtrlConfig, schedule: RateSchedule) -> None:
        self._rates = _float32(config.alpha, config.beta, config.l1, config.l2)

    def state_size(self, dim: int) -> int:
        return 2 * dim

    def rates(self, step: int) -> Rates:
        return self._rates


def make_optimizer(config: OptimizerConfig, schedule: RateSchedule) -> RowOptimizer:
    match config:
        case RowwiseAdagradConfig():
            return RowwiseAdagrad(config, schedule)
        case AdagradConfig():
            return Adagrad(config, schedule)
        case SgdConfig():
            return Sgd(config, schedule)
        case AdamConfig():
            return Adam(config, schedule)
        case PartialRowwiseAdamConfig():
            return PartialRowwiseAdam(config, schedule)
        case FtrlConfig():
            return Ftrl(config, schedule)


def _float32(a: float, b: float, c: float = 0.0, d: float = 0.0, e: float = 0.0) -> Rates:
    return np.float32(a), np.float32(b), np.float32(c), np.float32(d), np.float32(e)
