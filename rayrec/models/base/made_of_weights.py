"""What is made of weights alone: once for all requests to a version of a model, not for each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Made = TypeVar("Made")


class MadeOfWeights(nn.Module, Generic[Made]):
    """Keeps a value while nothing trains, loads or replaces the weights that it is made of.

    A module, so that it is told when training begins (`train`) and when weights were loaded (`after_load`,
    which the program calls): neither shows in the weights, since fused optimizers and copies through NumPy
    leave their version counters alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[list[tuple[Tensor, int]], Made] | None = None

    def forward(self, weights: Iterable[Tensor], make: Callable[[], Made]) -> Made:
        """What `make` returns; with gradients, and in training, it is made each time.

        Args:
            weights: all that it is made of. Other tensors (`torch.func.functional_call`) and those that were
                written in place have another value.
        """
        # A program that is traced computes it: its weights are inputs.
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return make()
        made_of = [(each, each._version) for each in weights]
        kept = self._kept  # read once: threads of a replica may ask at the same time
        if kept is not None and _are_same(kept[0], made_of):
            return kept[1]
        # No inference tensors: whoever asks next may not be in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        self._kept = made_of, made
        return made

    def train(self, mode: bool = True) -> MadeOfWeights[Made]:
        if mode:
            self._kept = None
        super().train(mode)
        return self

    def after_load(self, name: str) -> None:
        """See `torch_program.AFTER_LOAD`."""
        self._kept = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


def _are_same(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    return len(before) == len(now) and all(
        a is b and version == of_now for (a, version), (b, of_now) in zip(before, now, strict=True)
    )
