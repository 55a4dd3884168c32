"""Weights of a module that were read and are never trained: no snapshot has them, only their fingerprint.

What was trained beside them is not taken beside others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

BASE = "base"
"""Name of the fingerprint among the weights of a snapshot."""

_V = TypeVar("_V")


class FrozenBase:
    """What a module's property `frozen_weights` has by name; of a module without one, nothing."""

    def __init__(self, module: nn.Module) -> None:
        weights: Mapping[str, Tensor] = getattr(module, "frozen_weights", {})
        self.names = frozenset(weights)
        self._fingerprint = (
            np.frombuffer(bytes.fromhex(fingerprint(weights)), dtype=np.uint8)
            if weights
            else np.zeros(0, dtype=np.uint8)
        )

    def beside(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Weights that are kept, with the fingerprint of the base, if there is one."""
        return {BASE: self._fingerprint.copy(), **weights} if self.names else dict(weights)

    def checked(self, saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Saved weights without the fingerprint.

        Raises:
            ValueError: it is that of another base, or there is one and should not be, or the other way round.
        """
        weights = dict(saved)
        base = weights.pop(BASE, None)
        if self.names and base is None:
            raise ValueError(
                "the weights are those of a whole network, and this one has a frozen base and adapters "
                "(model.lora)"
            )
        if base is not None and not self.names:
            raise ValueError(
                "the weights are those of adapters, and this network has none: set model.lora as it was when "
                "they were trained"
            )
        if base is not None and not np.array_equal(base, self._fingerprint):
            raise ValueError(
                "the weights were trained beside another base than model.base is now; give the one that they "
                f"were trained beside, whose fingerprint is {bytes(base).hex()}"
            )
        return weights

    def without(self, values: Mapping[str, _V]) -> dict[str, _V]:
        """Values by name of those weights that are kept."""
        return {name: value for name, value in values.items() if name not in self.names}


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Of names, shapes and bits; equal ones are the same weights, wherever they were read."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        if not weight.is_meta:
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
