"""Copies from the host's memory to a device, beside what the device computes.

A copy of pageable memory is waited for by the host, with everything that was asked of the same stream before
it. A batch arrives while the optimizer's kernels of the batch before still run, so its arrays go over on a
stream of their own:

    default stream   ... optimizer t ......│ forward t + 1 (waits for the copies)
    copy stream          arrays of t + 1  ─┘

On a device that shares the host's memory there is one order of everything, and none of this.
"""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrec.platform.devices import device_of


class OverlappedCopies:
    """A context in which arrays are copied; behind it the device may compute with them.

    Tensors must not be computed with before: the stream that computes does not know of them yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if device_of(device).has_own_memory else None

    def __enter__(self) -> OverlappedCopies:
        if self._module is not None:
            self._computing = self._module.current_stream(self._device)
            self._entered = self._module.stream(_copy_stream(self._device))
            self._entered.__enter__()
        return self

    def copied(self, values: np.ndarray) -> Tensor:
        """A copy, also where the device is the host: arrays of other processes are read-only, and go away."""
        copy = torch.tensor(values, device=self._device)
        if self._module is not None:
            # Its memory is not given to a later copy before the stream that reads it has done so.
            copy.record_stream(self._computing)
        return copy

    def moved(self, values: np.ndarray) -> Tensor:
        """As `copied`, of an array that was made here for this alone: on the host it stays where it is."""
        return torch.from_numpy(values) if self._module is None else self.copied(values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._module is not None:
            self._entered.__exit__(kind, error, trace)
            self._computing.wait_stream(_copy_stream(self._device))


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """One for the process: streams are few."""
    return torch.get_device_module(device).Stream(device)
