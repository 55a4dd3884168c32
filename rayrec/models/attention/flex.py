"""FlexAttention: PyTorch writes a kernel for the mask, and skips blocks that see nothing.

Rows are padded, but blocks of padding are skipped like others. Compiled for CUDA, where it needs triton; on a
CPU torch 2.13 has no backward pass, and it runs as its own definition: for comparison, not for speed.

Axes as in `rayrec.models.attention.call`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rayrec.models.attention.call import AttentionCall, Backend, Softmax
from rayrec.platform.devices import device_of

BLOCK = 128
"""Queries and keys of a block, as FlexAttention has them by default."""


def attend(call: AttentionCall) -> Tensor:
    query, key, value = call.padded()
    blocks = call.queries.derived(("flex", call.mask, call.keys), lambda: _block_mask(call))
    out_BHTE = _flex_attention(device_of(query.device).has_own_memory)(
        query, key, value, block_mask=blocks, scale=call.scale
    )
    return call.queries.unpad(out_BHTE.transpose(1, 2))


def why_not(call: AttentionCall) -> str | None:
    device = device_of(call.query_NHC.device)
    if "flex" not in device.attention_backends:
        return "it has no kernels for this device"
    if not isinstance(call.scoring, Softmax):
        return "it has no scoring but the softmax"
    if call.bias is not None:
        return "it has no relative bias here"
    if call.needs_gradients and "flex" in device.attention_without_backward:
        return "it has no backward pass on this device"
    if device.has_own_memory and call.query_NHC.dtype == torch.float64:
        return "its kernels have no float64"
    return None


def _block_mask(call: AttentionCall) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    first_BTW, stop_BTW = call.spans.padded(call.queries)

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= first_BTW[row, query, 0]) & (key < stop_BTW[row, query, 0])
        for span in range(1, first_BTW.shape[2]):
            further = (key >= first_BTW[row, query, span]) & (key < stop_BTW[row, query, span])
            seen = seen | further
        return seen

    return create_block_mask(
        mask,
        call.queries.num_rows,
        None,
        call.queries.longest,
        call.keys.longest,
        device=call.queries.device,
        BLOCK_SIZE=BLOCK,
    )


@cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


BACKEND = Backend("flex", why_not, attend)
