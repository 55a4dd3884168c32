"""How fast this process multiplies matrices: what MFU is a share of."""

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
