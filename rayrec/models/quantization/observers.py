"""What the inputs of linear layers are like, seen while a network computes.

Axes: K inputs of a layer, S rows that are kept as a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ROWS_PER_CALL = 64
"""That are kept of one call at most, spread over it: a layer that is asked about every event of a history,
and one that is asked about beams, are both seen in many batches."""
MOST_ROWS = 1024
"""That are kept of a layer."""


class InputObserver:
    """Watches one layer."""

    def __init__(self, width: int) -> None:
        self.num_rows = 0
        self.largest_K = torch.zeros(width)
        """Of the absolute values of each input."""
        self.sum_K = torch.zeros(width, dtype=torch.float64)
        """Of absolute values."""
        self._kept: list[Tensor] = []

    def see(self, x: Tensor) -> None:
        rows_NK = x.detach().reshape(-1, x.shape[-1]).float().cpu()
        if not len(rows_NK):
            return
        absolute_NK = rows_NK.abs()
        self.num_rows += len(rows_NK)
        self.largest_K = torch.maximum(self.largest_K, absolute_NK.amax(0))
        self.sum_K += absolute_NK.sum(0, dtype=torch.float64)
        self._kept.append(_spread(rows_NK, ROWS_PER_CALL).clone())

    @property
    def mean_K(self) -> Tensor:
        """Of absolute values."""
        return (self.sum_K / max(self.num_rows, 1)).float()

    @property
    def sample_SK(self) -> Tensor:
        return _spread(torch.cat(self._kept), MOST_ROWS)

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.largest_K).all())


@contextmanager
def observed(model: nn.Module) -> Iterator[dict[str, InputObserver]]:
    """Watch every linear layer of a network inside the block.

    Yields:
        Observers by the name of the layer; of layers that were asked, when the block ends.
    """
    found: dict[str, InputObserver] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if type(module) is not nn.Linear:
                continue

            def see(layer: nn.Module, inputs: Any, name: str = name) -> None:
                (x,) = inputs
                if name not in found:
                    found[name] = InputObserver(x.shape[-1])
                found[name].see(x)

            hooks.callback(module.register_forward_pre_hook(see).remove)
        yield found


def _spread(rows_NK: Tensor, most: int) -> Tensor:
    """At most so many of the rows, equally far from each other."""
    if len(rows_NK) <= most:
        return rows_NK
    return rows_NK[torch.linspace(0, len(rows_NK) - 1, most).long()]
