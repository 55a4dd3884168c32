"""Random numbers that depend on *what* they are for, not on when they are drawn.

Dropout keyed by (seed, step, row, place in the row) gives the same masks
however a global batch is split over trainers, and needs no generator state in
a snapshot. Counter-based generators of this kind are described in Salmon et
al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; the mixing steps
are those of splitmix64 (Steele et al., OOPSLA 2014).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rayrec.platform.devices import HOST
from rayrec.platform.tensor_hashing import mix64, shift_right

CHANCES = 1 << 20
"""Added to the indices of `keyed_chance`: no network has so many dropouts."""


def token_keys(seed: int, step: int, row_keys_N: Tensor, place_N: Tensor) -> Tensor:
    """[N] key of every token from the run's seed, the step, its row and its place there."""
    # A number of the host: two scalar hashes, and a copy to the device would be waited for.
    root = int(mix64(mix64(torch.tensor(seed)) ^ step))
    return mix64(mix64(row_keys_N ^ root) ^ place_N)


def level_keys(keys_N: Tensor, num_levels: int) -> Tensor:
    """[N, L] a key for every level of every token."""
    levels_L = torch.arange(num_levels, device=keys_N.device)
    return mix64(keys_N[:, None] ^ mix64(levels_L)[None, :])


def keyed_chance(keys_N: Tensor, probability: float, index: int) -> Tensor:
    """[N] bool, true with a probability (rounded to 2^-24): hashes of (token key, index).

    Args:
        index: of what is decided; dropouts have others, see `CHANCES`.
    """
    # Made on the device: a copy from the host would be waited for.
    stream_1 = mix64(torch.full((1,), (CHANCES + index) << 32, device=keys_N.device))
    return shift_right(mix64(keys_N ^ stream_1), 40) < round(probability * 2**24)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (token key, index of this layer, element).

    Probabilities are rounded to 1/65536: one 64-bit hash yields four 16-bit draws.
    """

    compiled_methods = ("forward",)

    def __init__(self, probability: float, index: int) -> None:
        super().__init__()
        self.probability = probability
        self.index = index

    def forward(self, x_ND: Tensor, keys_N: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x_ND
        words = (x_ND.shape[1] + 3) // 4
        counters_W = mix64(torch.arange(words, device=x_ND.device) + (self.index << 32))
        draw = round(self.probability * 65536) - 32768, 1.0 - self.probability
        if _has_kernel(x_ND):
            # The kernel reads a key for every row, wherever that lies: torch refuses too few of them.
            dropped_ND: Tensor = _Dropped.apply(x_ND, keys_N.expand(len(x_ND)), counters_W, draw)
            return dropped_ND
        threshold, kept = draw
        bits = mix64(keys_N[:, None] ^ counters_W[None, :])
        draws = bits.view(torch.int16)[:, : x_ND.shape[1]]
        return x_ND * (draws >= threshold).to(x_ND.dtype) / kept


def _has_kernel(x_ND: Tensor) -> bool:
    """Whether code that is not torch's may read the numbers."""
    if torch.compiler.is_compiling():  # compilers fuse the operations themselves
        return False
    # Of other classes, numbers may be on several devices, or nowhere.
    is_plain = type(x_ND) is Tensor and x_ND.device.type == HOST.kind and x_ND.dtype == torch.float32
    return is_plain and _kernel() is not None


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """Imported when it is called first: what serves has no use for numba, and torch alone does without."""
    try:
        from rayrec.platform.keyed_dropout import drop
    except ImportError:
        return None
    return drop


class _Dropped(torch.autograd.Function):
    """By the kernel. Masks are made again for the gradient, so only keys are kept for it."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, keys_N: Tensor, counters_W: Tensor, draw: tuple[int, float]
    ) -> Tensor:
        # Keys may have been made in inference mode, of which autograd keeps no tensors.
        ctx.save_for_backward(keys_N.clone() if keys_N.is_inference() else keys_N, counters_W)
        ctx.draw = draw
        return _dropped(x_ND, keys_N, counters_W, draw)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        keys_N, counters_W = ctx.saved_tensors
        return _dropped(grad_ND, keys_N, counters_W, ctx.draw), None, None, None


def _dropped(x_ND: Tensor, keys_N: Tensor, counters_W: Tensor, draw: tuple[int, float]) -> Tensor:
    kernel = _kernel()
    assert kernel is not None, "it was asked for"
    # Of torch, which aligns memory as products of matrices like it.
    out_ND = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    kernel(x_ND.detach().numpy(), keys_N.numpy(), counters_W.numpy(), *draw, out_ND.numpy())
    return out_ND
