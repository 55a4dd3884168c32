"""Attention on a CPU without padding rows to the longest: rows of like length are computed together.

Rows are grouped by length, and the queries of a group are taken in blocks: a block's scores for the keys
that any of its queries sees stay in the cache, and blocks that see nothing of a stretch of keys do not
compute it. Nothing of size T x S is kept for the backward pass, which computes the scores again; the
activation, its gradient and the mask are applied in place.

The order of every sum depends on the lengths alone, so that the same inputs give the same bits.

Axes: N queries, M keys, H heads, C width of a query or key head, E width of a value head, G rows of a
group, R rows of a piece of it, T and S its longest rows of queries and of keys, t and s the queries and keys
of a block, W spans of a query.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from rayrec.models.attention.bias import RelativeBias, place_buckets, time_buckets
from rayrec.models.attention.call import HIDDEN, AttentionCall, Backend, Scoring, Softmax
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Spans, own_places_N, visible

SHORT = 16
"""Rows up to this length are one group: the work in them is less than that of starting it."""
LENGTH_RATIO = 1.25
"""Longest to shortest row of the other groups."""
BLOCK_QUERIES = 64
PIECE_SCORES = 2**18
"""Scores computed at a time: 1 MB in float32, so that the passes over them find them in the cache."""


@dataclass(frozen=True)
class Block:
    """Some queries of every row of a group, and the keys that any of them sees."""

    queries: slice
    keys: slice
    hidden_GTS: Tensor | None
    """[G, t, s]; None where every query sees all of the keys."""
    blind_GT: Tensor | None
    """[G, t] queries and padding that see nothing; None where there are none."""


@dataclass(frozen=True)
class Group:
    """Rows of like length; padding of the indices points past the last token."""

    query_GT: Tensor
    key_GS: Tensor
    own_GT: Tensor
    """Place of each query's own key."""
    blocks: list[Block]


def attend(call: AttentionCall) -> Tensor:
    groups = call.queries.derived(
        ("groups", call.mask, call.keys), lambda: group_rows(call.queries, call.keys, call.spans)
    )
    bias = call.bias or RelativeBias()
    return _Grouped.apply(
        call.query_NHC, call.key_MHC, call.value_MHE, bias.place_HP, bias.time_HD, call, groups
    )


def why_not(call: AttentionCall) -> str | None:
    return None if call.query_NHC.device.type == "cpu" else "it is for the CPU alone"


def group_rows(queries: JaggedLayout, keys: JaggedLayout, spans: Spans) -> list[Group]:
    """The groups of a batch; rows without queries or without keys are in none."""
    rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, lengths in enumerate(zip(queries.lengths_B.tolist(), keys.lengths_B.tolist(), strict=True)):
        if all(lengths):
            rows_of[_length_class(lengths[0]), _length_class(lengths[1])].append(row)
    own_N = own_places_N(queries, keys)
    groups = []
    for _, rows in sorted(rows_of.items()):
        query_GT = _token_indices(queries, rows)
        sights = (_at(x, query_GT, 0) for x in (*spans.first_WN, *spans.stop_WN))
        first_GTW, stop_GTW = torch.stack(list(sights), dim=-1).chunk(2, dim=-1)
        key_GS = _token_indices(keys, rows)
        blocks = list(_blocks(first_GTW, stop_GTW, key_GS.shape[1]))
        groups.append(Group(query_GT, key_GS, _at(own_N, query_GT, 0), blocks))
    return groups


def _length_class(length: int) -> int:
    return 0 if length <= SHORT else math.ceil(math.log(length / SHORT, LENGTH_RATIO))


def _token_indices(layout: JaggedLayout, rows: list[int]) -> Tensor:
    starts_G, lengths_G = layout.offsets_B1[rows], layout.lengths_B[rows]
    place_T = np.arange(lengths_G.max())
    index_GT = np.where(place_T < lengths_G[:, None], starts_G[:, None] + place_T, layout.num_tokens)
    return torch.from_numpy(index_GT)


def _at(x_N: Tensor, index_GT: Tensor, padding: int) -> Tensor:
    return functional.pad(x_N, (0, 1), value=padding)[index_GT]


def _blocks(first_GTW: Tensor, stop_GTW: Tensor, num_keys: int) -> Iterator[Block]:
    for start in range(0, first_GTW.shape[1], BLOCK_QUERIES):
        queries = slice(start, min(start + BLOCK_QUERIES, first_GTW.shape[1]))
        first, stop = first_GTW[:, queries], stop_GTW[:, queries]
        some = stop > first
        if not some.any():
            continue
        keys = slice(int(first[some].min()), int(stop[some].max()))
        seen_GTS = visible(first, stop, torch.arange(num_keys)[keys])
        sees_GT = some.any(-1)
        yield Block(
            queries,
            keys,
            None if seen_GTS.all() else ~seen_GTS,
            None if sees_GT.all() else ~sees_GT,
        )


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query_NHC: Tensor,
        key_MHC: Tensor,
        value_MHE: Tensor,
        place_HP: Tensor | None,
        time_HD: Tensor | None,
        call: AttentionCall,
        groups: list[Group],
    ) -> Tensor:
        ctx.save_for_backward(query_NHC, key_MHC, value_MHE, place_HP, time_HD)
        ctx.scoring, ctx.scale, ctx.bias, ctx.groups = call.scoring, call.scale, call.bias, groups
        out_NHE = query_NHC.new_zeros(len(query_NHC) + 1, query_NHC.shape[1], value_MHE.shape[2])
        with torch.autocast("cpu", enabled=False):
            for group in groups:
                query, key, value = _of_group(group, query_NHC, key_MHC, value_MHE)
                out_GHTE = query.new_zeros(*query.shape[:3], value_MHE.shape[2])
                for block, rows in _pieces(group, query.shape[1]):
                    k, v = key[rows, :, block.keys], value[rows, :, block.keys]
                    scores = _scores(ctx, group, block, rows, query, k, place_HP, time_HD)
                    out_GHTE[rows, :, block.queries] = _weights(ctx.scoring, block, rows, scores) @ v
                _scatter(out_NHE, group.query_GT, out_GHTE)
        return out_NHE[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_NHC, key_MHC, value_MHE, place_HP, time_HD = ctx.saved_tensors
        # Of padding nothing is read: its place past the end takes what is computed for it.
        grads = [x.new_zeros(len(x) + 1, *x.shape[1:]) for x in (query_NHC, key_MHC, value_MHE)]
        tables = [
            None if table is None else table.new_zeros(table.shape, dtype=torch.float64)
            for table in (place_HP, time_HD)
        ]
        with torch.autocast("cpu", enabled=False):
            for group in ctx.groups:
                query, key, value = _of_group(group, query_NHC, key_MHC, value_MHE)
                grad = _gathered(grad_NHE, group.query_GT)
                into = [torch.zeros_like(x) for x in (query, key, value)]
                for block, rows in _pieces(group, query.shape[1]):
                    at_q, at_k = (rows, slice(None), block.queries), (rows, slice(None), block.keys)
                    q, k, v, g = query[at_q], key[at_k], value[at_k], grad[at_q]
                    scores = _scores(ctx, group, block, rows, query, k, place_HP, time_HD)
                    d_weights = g @ v.transpose(2, 3)
                    if isinstance(ctx.scoring, Softmax):
                        weights = _weights(ctx.scoring, block, rows, scores)
                        into[2][at_k] += weights.transpose(2, 3) @ g
                        # of the softmax: weights * (d_weights - sum(weights * d_weights))
                        d_scores = d_weights.mul_(weights)
                        d_scores.sub_(weights.mul_(d_scores.sum(-1, keepdim=True)))
                    else:
                        d_weights.div_(ctx.scoring.length)
                        d_scores = torch.ops.aten.silu_backward(d_weights, scores)
                        weights = _weights(ctx.scoring, block, rows, scores)
                        into[2][at_k] += weights.transpose(2, 3) @ g
                    _add_to_tables(ctx.bias, tables, group, block, rows, d_scores)
                    d_scores.mul_(ctx.scale)
                    into[0][at_q] += d_scores @ k
                    into[1][at_k] += d_scores.transpose(2, 3) @ q
                for out, index, x in zip(
                    grads, (group.query_GT, group.key_GS, group.key_GS), into, strict=True
                ):
                    _scatter(out, index, x)
        d_tables = [
            None if d is None else d.to(t.dtype) for d, t in zip(tables, (place_HP, time_HD), strict=True)
        ]
        return (*(grad[:-1] for grad in grads), *d_tables, None, None)


def _of_group(group: Group, query_NHC: Tensor, key_MHC: Tensor, value_MHE: Tensor) -> list[Tensor]:
    return [
        _gathered(x, index)
        for x, index in ((query_NHC, group.query_GT), (key_MHC, group.key_GS), (value_MHE, group.key_GS))
    ]


def _gathered(x_NHC: Tensor, index_GT: Tensor) -> Tensor:
    """[G, H, T, C], at least in float32; padding repeats the last token, which no mask lets be seen."""
    index = index_GT.clamp(max=len(x_NHC) - 1).flatten()
    x_GTHC = x_NHC.index_select(0, index).view(*index_GT.shape, *x_NHC.shape[1:])
    x_GHTC = x_GTHC.transpose(1, 2).contiguous()
    return x_GHTC if x_GHTC.dtype == torch.float64 else x_GHTC.float()


def _scatter(out_NHC: Tensor, index_GT: Tensor, x_GHTC: Tensor) -> None:
    out_NHC.index_copy_(0, index_GT.flatten(), x_GHTC.transpose(1, 2).flatten(0, 1).to(out_NHC.dtype))


def _pieces(group: Group, num_heads: int) -> Iterator[tuple[Block, slice]]:
    """Blocks, each for as many rows at a time as fit."""
    for block in group.blocks:
        scores_of_row = num_heads * (block.queries.stop - block.queries.start)
        scores_of_row *= block.keys.stop - block.keys.start
        num_rows = max(1, PIECE_SCORES // scores_of_row)
        for start in range(0, len(group.query_GT), num_rows):
            yield block, slice(start, start + num_rows)


def _scores(
    ctx: FunctionCtx | Any,
    group: Group,
    block: Block,
    rows: slice,
    query_GHTC: Tensor,
    key_RHSC: Tensor,
    place_HP: Tensor | None,
    time_HD: Tensor | None,
) -> Tensor:
    """[R, H, t, s]; those of hidden pairs are HIDDEN."""
    scores_RHTS = query_GHTC[rows, :, block.queries] @ key_RHSC.transpose(2, 3)
    scores_RHTS.mul_(ctx.scale)
    if ctx.bias is not None:
        buckets = _buckets(ctx.bias, group, block, rows)
        for table_HK, bucket_RTS in zip((place_HP, time_HD), buckets, strict=True):
            if table_HK is not None and bucket_RTS is not None:
                entries_H = table_HK.to(scores_RHTS.dtype).index_select(1, bucket_RTS.flatten())
                scores_RHTS += entries_H.view(-1, *bucket_RTS.shape).transpose(0, 1)
    if block.hidden_GTS is not None:
        scores_RHTS.masked_fill_(block.hidden_GTS[rows, None], HIDDEN)
    return scores_RHTS


def _weights(scoring: Scoring, block: Block, rows: slice, scores_RHTS: Tensor) -> Tensor:
    """[R, H, t, s]; takes the scores' memory."""
    if not isinstance(scoring, Softmax):
        return functional.silu(scores_RHTS, inplace=True).div_(scoring.length)
    torch.softmax(scores_RHTS, dim=-1, out=scores_RHTS)
    if block.blind_GT is not None:
        scores_RHTS.masked_fill_(block.blind_GT[rows, None, :, None], 0.0)
    return scores_RHTS


def _buckets(bias: RelativeBias, group: Group, block: Block, rows: slice) -> tuple[Tensor | None, Tensor | None]:
    place = time = None
    if bias.place_HP is not None:
        place_S = torch.arange(block.keys.start, block.keys.stop)
        place = place_buckets(group.own_GT[rows, block.queries], place_S, bias.place_HP.shape[1])
    if bias.time_HD is not None:
        assert bias.query_time_N is not None
        assert bias.key_time_M is not None
        query_RT = _at(bias.query_time_N, group.query_GT[rows, block.queries], 0)
        key_RS = _at(bias.key_time_M, group.key_GS[rows, block.keys], 0)
        time = time_buckets(query_RT, key_RS, bias.time_HD.shape[1])
    return place, time


def _add_to_tables(
    bias: RelativeBias | None,
    tables: list[Tensor | None],
    group: Group,
    block: Block,
    rows: slice,
    d_scores_RHTS: Tensor,
) -> None:
    if bias is None:
        return
    for table_HK, bucket_RTS in zip(tables, _buckets(bias, group, block, rows), strict=True):
        if table_HK is not None and bucket_RTS is not None:
            flat = bucket_RTS.flatten()
            for head, d_scores_RTS in enumerate(d_scores_RHTS.unbind(1)):
                table_HK[head] += torch.bincount(flat, d_scores_RTS.flatten(), minlength=table_HK.shape[1])


BACKEND = Backend("grouped", why_not, attend)
