"""What an optimizer of embedding rows is: settings, state, numbers of a step, and its equation in two forms.

Each optimizer is one module of this folder: its settings, a class derived from `RowOptimizer`, and the
equation, in host memory (`update_row`, compiled by numba) and on a device (`update_on_device`, torch). Both
forms round every operation by itself, in float32, and add squares in one order (`compiled.sum_squares`), so
that a row has the same bits wherever it is changed. To add an optimizer, write its module, give it a branch
in `row_kernels.apply_row`, and register it in `optimizers`.

Axes: M rows of one step, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import numpy as np

from rayrec.platform.config import Config
from rayrec.platform.schedule import RateSchedule

if TYPE_CHECKING:
    from torch import Tensor

ConfigT = TypeVar("ConfigT", bound=Config)

Rates = tuple[np.float32, np.float32, np.float32, np.float32, np.float32]
"""What an equation needs to know of its settings and the step; each one names its own."""


class RowOptimizer(ABC, Generic[ConfigT]):
    """One optimizer with its settings."""

    kernel: ClassVar[int]
    """Its number in `row_kernels.apply_row`, which compiled code chooses by."""

    def __init__(self, config: ConfigT, schedule: RateSchedule) -> None:
        self._config = config
        self._schedule = schedule

    @property
    def initial_state(self) -> float:
        """Every state number of a new row."""
        return 0.0

    @abstractmethod
    def state_size(self, dim: int) -> int:
        """S: 4-byte words of state beside D weights."""

    @abstractmethod
    def rates(self, step: int) -> Rates:
        """The equation's numbers at this step, from 0."""

    @staticmethod
    @abstractmethod
    def update_on_device(weights_MD: Tensor, state_MS: Tensor, grads_MD: Tensor, rates: Tensor) -> Tensor:
        """[M, D] new weights of rows on a device of torch; changes the state in place.

        Args:
            rates: [5] as a tensor of the device.
        """


def float32(a: float, b: float, c: float = 0.0, d: float = 0.0, e: float = 0.0) -> Rates:
    """`Rates` of up to five numbers."""
    return np.float32(a), np.float32(b), np.float32(c), np.float32(d), np.float32(e)
