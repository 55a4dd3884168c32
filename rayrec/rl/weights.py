"""A version of the policy's weights on its way from the learner to those who draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from torch import nn


def views_of(network: nn.Module) -> dict[str, np.ndarray]:
    """Every weight by name, without a copy where it is on the host: they change with the network."""
    return {name: parameter.detach().cpu().numpy() for name, parameter in network.named_parameters()}


class WeightsChangedError(RuntimeError):
    """Weights are not those that were sent."""


@dataclass(frozen=True)
class Weights:
    """Named arrays, and what their bytes hash to."""

    version: int
    """Optimizer steps that were taken."""
    arrays: dict[str, np.ndarray]
    checksum: str

    @classmethod
    def of(cls, version: int, arrays: dict[str, np.ndarray]) -> Weights:
        return cls(version, arrays, checksum_of(arrays))

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """
        Raises:
            WeightsChangedError: these are others.
        """
        if (found := checksum_of(arrays)) != self.checksum:
            raise WeightsChangedError(
                f"the weights of version {self.version} have the checksum {found}, sent were {self.checksum}"
            )


def checksum_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Of names, shapes and bytes, whatever their order."""
    hashed = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        hashed.update(f"{name}{array.shape}{array.dtype}".encode())
        hashed.update(array.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()
