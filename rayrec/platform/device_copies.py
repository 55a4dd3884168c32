"""Copies from host to device memory that overlap with computation.

The host waits for a copy of pageable memory, and for everything queued before it on the same stream. A batch
arrives while the optimizer's kernels of the previous batch still run, so its arrays are copied on a separate
stream:

    default stream   ... optimizer t ......│ forward t + 1 (waits for the copies)
    copy stream          arrays of t + 1  ─┘

A device that shares the host's memory needs none of this.
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
    """A context in which arrays are copied; after it, the device may compute with them.

    Not before: only at the end of the block does the computing stream wait for the copies.
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
        """Copy an array, on the host too: arrays of other processes are read-only and are freed by them."""
        copy = torch.tensor(values, device=self._device)
        if self._module is not None:
            # Or the allocator might reuse its memory for a later copy while the computing stream reads it.
            copy.record_stream(self._computing)
        return copy

    def moved(self, values: np.ndarray) -> Tensor:
        """As `copied`, for an array that has no other user: on the host it is not copied."""
        return torch.from_numpy(values) if self._module is None else self.copied(values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._module is not None:
            self._entered.__exit__(kind, error, trace)
            self._computing.wait_stream(_copy_stream(self._device))


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """One per process and device: the number of streams is limited."""
    return torch.get_device_module(device).Stream(device)
