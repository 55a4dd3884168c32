"""Causal attention of histories to themselves on a CPU: rows of like length go through PyTorch's fused kernel
together.

The kernel keeps no scores, and stops at the diagonal; what it wastes is padding. So rows are put into
buckets of like length; tokens are brought into the rectangles of all buckets in one go, and come back in
one go. Since each token has one slot, both ways are gathers or copies in the backward pass, too: nothing is
added up.

Axes: N tokens, H heads, C width of a query or key head, E width of a value head, R rows of a bucket, T its
longest row, X slots of the rectangles of all buckets, one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rayrec.models.attention.call import AttentionCall, Backend, Softmax
from rayrec.models.attention.jagged import JaggedLayout, length_class
from rayrec.models.attention.masks import Causal
from rayrec.platform.devices import device_of

SHORT = 16
"""Rows up to this length are one bucket: the work in them is less than that of starting it."""
LENGTH_RATIO = 1.5
"""Longest to shortest row of the other buckets."""


@dataclass(frozen=True)
class Buckets:
    """Where the tokens of a layout stand in the rectangles."""

    token_X: Tensor
    """Padding repeats its row's first token, which no query before it sees."""
    slot_N: Tensor
    shapes: list[tuple[int, int]]
    """(R, T) of each bucket."""

    @staticmethod
    def of(layout: JaggedLayout) -> Buckets:
        tokens, slot_N, shapes = [], np.empty(layout.num_tokens, np.int64), []
        num_slots = 0
        for rows in rows_of_buckets(layout.lengths_B):
            starts_R, lengths_R = layout.offsets_B1[rows], layout.lengths_B[rows]
            place_T = np.arange(lengths_R.max())
            real_RT = place_T < lengths_R[:, None]
            token_RT = starts_R[:, None] + np.where(real_RT, place_T, 0)
            slot_N[token_RT[real_RT]] = num_slots + np.flatnonzero(real_RT)
            tokens.append(token_RT.ravel())
            shapes.append(token_RT.shape)
            num_slots += token_RT.size
        return Buckets(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(slot_N), shapes)


def rows_of_buckets(lengths_B: np.ndarray) -> list[np.ndarray]:
    """Rows by bucket, short ones first; rows without tokens are in none."""
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths_B.tolist()):
        if length:
            rows_of[length_class(length, SHORT, LENGTH_RATIO)].append(row)
    return [np.array(rows) for _, rows in sorted(rows_of.items())]


def attend(call: AttentionCall) -> Tensor:
    buckets = call.queries.derived("buckets", lambda: Buckets.of(call.queries))
    query, key, value = (
        _Spread.apply(x_NHC, buckets) for x_NHC in (call.query_NHC, call.key_MHC, call.value_MHE)
    )
    sizes = [num_rows * longest for num_rows, longest in buckets.shapes]
    outs = []
    for shape, *inputs in zip(buckets.shapes, *(x.split(sizes) for x in (query, key, value)), strict=True):
        query_RHTC, key_RHTC, value_RHTE = (x.unflatten(0, shape).transpose(1, 2) for x in inputs)
        out_RHTE = functional.scaled_dot_product_attention(
            query_RHTC, key_RHTC, value_RHTE, is_causal=True, scale=call.scale
        )
        outs.append(out_RHTE.transpose(1, 2).flatten(0, 1))
    return _Collect.apply(torch.cat(outs), buckets)


def why_not(call: AttentionCall) -> str | None:
    if "bucketed" not in device_of(call.query_NHC.device).attention_backends:
        return "it is for the host's processor alone"
    if not isinstance(call.scoring, Softmax):
        return "it has no scoring but the softmax"
    if not (isinstance(call.mask, Causal) and call.is_self):
        return "it has no mask but that of a history that looks at its own past"
    return None if call.bias is None else "it has no bias"


class _Spread(torch.autograd.Function):
    """[N, H, C] to [X, H, C]. Nobody who counts sees padding, so no gradient comes back from it."""

    @staticmethod
    def forward(ctx: Any, x_NHC: Tensor, buckets: Buckets) -> Tensor:
        ctx.buckets = buckets
        return x_NHC.index_select(0, buckets.token_X)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XHC: Tensor) -> tuple[Tensor, None]:
        return grad_XHC.index_select(0, ctx.buckets.slot_N), None


class _Collect(torch.autograd.Function):
    """[X, H, E] to [N, H, E]."""

    @staticmethod
    def forward(ctx: Any, x_XHE: Tensor, buckets: Buckets) -> Tensor:
        ctx.buckets = buckets
        return x_XHE.index_select(0, buckets.slot_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHE: Tensor) -> tuple[Tensor, None]:
        grad_XHE = grad_NHE.new_zeros(len(ctx.buckets.token_X), *grad_NHE.shape[1:])
        return grad_XHE.index_copy_(0, ctx.buckets.slot_N, grad_NHE), None


BACKEND = Backend("bucketed", why_not, attend)
