"""What is made of weights alone: once for all requests to a version of a model, not for each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Made = TypeVar("Made")
_Key = tuple[list[tuple[Tensor, int]], torch.dtype | None]
"""The weights with their versions, and what products are computed in under autocast."""


class MadeOfWeights(nn.Module, Generic[Made]):
    """Keeps a value until the weights that it is made of change.

    It is a module so that `made_of_weights` finds it in a network. Code that changes weights calls `forget`,
    as `TorchProgram` does: fused optimizers and copies through NumPy leave a tensor's version as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[_Key, Made] | None = None
        self._given: Made | None = None

    def forward(self, weights: Iterable[Tensor], make: Callable[[], Made]) -> Made:
        """What `make` returns; where gradients are wanted, it is made each time.

        Args:
            weights: all that it is made of, at least one. Other tensors in their place
                (`torch.func.functional_call`) and those that were written in place have another value.
        """
        if self._given is not None:
            return self._given
        if torch.is_grad_enabled():
            return make()
        made_of = [(each, each._version) for each in weights]
        kind = made_of[0][0].device.type
        key = made_of, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        kept = self._kept  # read once: threads of a replica may ask at the same time
        if kept is not None and _are_same(kept[0], key):
            return kept[1]
        made = make()
        self._kept = key, made
        return made

    def forget(self) -> None:
        """Make it again when it is asked for next."""
        self._kept = None

    @property
    def kept(self) -> Made | None:
        """The value, if there is one; a recording of kernels that read it has to hold it."""
        return None if self._kept is None else self._kept[1]

    @contextmanager
    def given(self, value: Made) -> Iterator[None]:
        """Have this value instead, of whatever weights; for one thread."""
        before, self._given = self._given, value
        try:
            yield
        finally:
            self._given = before

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MadeOfWeights[Made]:
        super()._apply(fn, recurse)
        self.forget()  # the value stays where it was
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


def made_of_weights(network: nn.Module) -> list[MadeOfWeights[Any]]:
    """All that a network keeps."""
    return [each for each in network.modules() if isinstance(each, MadeOfWeights)]


def _are_same(before: _Key, now: _Key) -> bool:
    (of_before, type_before), (of_now, type_now) = before, now
    return type_before == type_now and all(
        a is b and version == version_now
        for (a, version), (b, version_now) in zip(of_before, of_now, strict=True)
    )
