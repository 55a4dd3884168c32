"""MFU: model FLOPs that were trained, as a share of what the device could have multiplied meanwhile."""

from __future__ import annotations

import time

import torch

MOST_S = 0.2
"""Time for all repetitions, the first aside, which warms up."""
SIZES = (512, 1024, 2048, 4096, 8192)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best product of two square matrices; by the threads of this process.

    Sizes grow as long as there is time: an accelerator is not busy with what fills a CPU.
    """
    best, left_s = 0.0, MOST_S
    for size in SIZES:
        factor = torch.ones(size, size, dtype=dtype, device=device)
        _seconds(factor)
        seconds = min(_seconds(factor) for _ in range(3))
        best = max(best, 2 * size**3 / seconds)
        left_s -= 4 * seconds
        if left_s < 4 * 8 * seconds:  # of twice the size
            break
    return best


def _seconds(factor: torch.Tensor) -> float:
    started = time.perf_counter()
    product = factor @ factor
    product[0, 0].item()  # waits for the device, whichever it is
    return time.perf_counter() - started


class Utilization:
    """One trainer's account."""

    def __init__(self, matrix_rate: float) -> None:
        """
        Args:
            matrix_rate: FLOP/s, see `matrix_rate`.
        """
        self.matrix_rate = matrix_rate
        self.total_flops = 0.0
        self._asked_at = (0.0, 0.0)

    def measured(self, matrix_rate: float) -> None:
        """Note another measurement: the best counts, since other work on the machine can only lower it."""
        self.matrix_rate = max(self.matrix_rate, matrix_rate)

    def add(self, flops: float) -> None:
        self.total_flops += flops

    def since_last(self, running_s: float) -> float:
        """MFU since this was asked before; 0 where no time has passed.

        Args:
            running_s: seconds of training so far, with all waiting.
        """
        (flops, before_s), self._asked_at = self._asked_at, (self.total_flops, running_s)
        seconds = running_s - before_s
        return (self.total_flops - flops) / (seconds * self.matrix_rate) if seconds > 0 else 0.0
