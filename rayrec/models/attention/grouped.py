"""Attention on a CPU without padding rows to the longest: rows of like length are computed together.

Rows are grouped by length, a group is cut into pieces of a few rows, and the queries of a piece are taken in
blocks: a block's scores for the keys that any of its queries sees stay in the cache, and what no query of a
block sees is not computed. Nothing of size T x S is kept for the backward pass, which computes the scores
again; activations, their gradients and masks are applied in place.

Pieces have no row in common. Threads take whole pieces, each without threads of its own: they meet once in a
call, not once in each of its hundreds of small operations, which costs most where cores are shared. The order
of every sum depends on the lengths alone, not on the threads.

Axes: N queries, M keys, H heads, C width of a query or key head, E width of a value head, R rows of a piece,
T and S its longest rows of queries and of keys, t and s the queries and keys of a block, W spans of a query,
K buckets of a bias table.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rayrec.models.attention.bias import RelativeBias, place_buckets, time_buckets
from rayrec.models.attention.call import HIDDEN, AttentionCall, Backend, Scoring, Softmax
from rayrec.models.attention.jagged import JaggedLayout, length_class
from rayrec.models.attention.masks import Spans, own_places_N, visible
from rayrec.platform.devices import HOST, device_of

SHORT = 16
"""Rows up to this length are one group: the work in them is less than that of starting it."""
LENGTH_RATIO = 1.25
"""Longest to shortest row of the other groups."""
BLOCK_QUERIES = 64
BLOCK_SCORES = 2**18
"""Of all heads and rows of a piece: 1 MB in float32, so that passes over them find them in the cache."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Block:
    """Some queries of every row of a piece, and the keys that any of them sees."""

    queries: slice
    keys: slice
    hidden_RTS: Tensor | None
    """[R, t, s]; None where every query sees all of the keys."""
    blind_RT: Tensor | None
    """[R, t] queries and padding that see nothing; None where there are none."""


@dataclass(frozen=True)
class Padded:
    """Tokens of a piece's rows in a rectangle, [R, T]."""

    token_RT: Tensor
    """Padding repeats some token, which no mask lets be seen."""
    real_X: Tensor | None
    """Slots of the flat rectangle that are no padding; None where all are."""

    def gather(self, x_NHC: Tensor) -> Tensor:
        """[R, H, T, C], at least in float32."""
        x_RTHC = x_NHC.index_select(0, self.token_RT.flatten()).view(*self.token_RT.shape, *x_NHC.shape[1:])
        x_RHTC = x_RTHC.transpose(1, 2).contiguous()
        return x_RHTC if x_RHTC.dtype == torch.float64 else x_RHTC.float()

    def scatter(self, x_RHTC: Tensor, into_NHC: Tensor) -> None:
        flat_XHC, token_X = x_RHTC.transpose(1, 2).flatten(0, 1), self.token_RT.flatten()
        if self.real_X is not None:
            flat_XHC, token_X = flat_XHC.index_select(0, self.real_X), token_X.index_select(0, self.real_X)
        into_NHC.index_copy_(0, token_X, flat_XHC.to(into_NHC.dtype))


@dataclass(frozen=True)
class Piece:
    """A few rows of like length."""

    queries: Padded
    keys: Padded
    own_RT: Tensor
    """Place of each query's own key."""
    blocks: list[Block]


def attend(call: AttentionCall) -> Tensor:
    num_heads = call.query_NHC.shape[1]
    pieces = call.queries.derived(
        ("pieces", call.mask, call.keys, num_heads),
        lambda: cut(call.queries, call.keys, call.spans, num_heads),
    )
    bias = call.bias or RelativeBias()
    return _Grouped.apply(
        call.query_NHC, call.key_MHC, call.value_MHE, bias.place_HP, bias.time_HD, call, pieces
    )


def why_not(call: AttentionCall) -> str | None:
    known = device_of(call.query_NHC.device).attention_backends
    return None if "grouped" in known else "it is for the host's processor alone"


def cut(queries: JaggedLayout, keys: JaggedLayout, spans: Spans, num_heads: int) -> list[Piece]:
    """The pieces of a batch, those of long rows first: the thread that starts last should have little to do.

    Rows without queries or without keys are in none.
    """
    rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    classes = partial(length_class, short=SHORT, ratio=LENGTH_RATIO)
    for row, lengths in enumerate(zip(queries.lengths_B.tolist(), keys.lengths_B.tolist(), strict=True)):
        if all(lengths):
            rows_of[classes(lengths[0]), classes(lengths[1])].append(row)
    own_N = own_places_N(queries, keys)
    rows_of_pieces = []
    for _, rows in sorted(rows_of.items(), reverse=True):
        longest, longest_keys = int(queries.lengths_B[rows].max()), int(keys.lengths_B[rows].max())
        num_rows = max(1, BLOCK_SCORES // (num_heads * min(longest, BLOCK_QUERIES) * longest_keys))
        for start in range(0, len(rows), num_rows):
            rows_of_pieces.append(rows[start : start + num_rows])
    return _on_threads(partial(_piece, queries, keys, spans, own_N), rows_of_pieces)


def _piece(queries: JaggedLayout, keys: JaggedLayout, spans: Spans, own_N: Tensor, rows: list[int]) -> Piece:
    padded, padded_keys = _padded(queries, rows), _padded(keys, rows)
    token_RT = padded.token_RT
    first_RTW, stop_RTW = spans.first_WN.T[token_RT], spans.stop_WN.T[token_RT]
    if padded.real_X is not None:
        is_padding_X = torch.ones(token_RT.numel(), dtype=torch.bool).index_fill_(0, padded.real_X, False)
        stop_RTW = stop_RTW.masked_fill(is_padding_X.view(*token_RT.shape, 1), 0)
    blocks = list(_blocks(first_RTW, stop_RTW, padded_keys.token_RT.shape[1]))
    return Piece(padded, padded_keys, own_N[token_RT], blocks)


def _padded(layout: JaggedLayout, rows: list[int]) -> Padded:
    starts_R, lengths_R = layout.offsets_B1[rows], layout.lengths_B[rows]
    place_T = np.arange(lengths_R.max())
    real_RT = place_T < lengths_R[:, None]
    token_RT = torch.from_numpy(np.where(real_RT, starts_R[:, None] + place_T, starts_R[:, None]))
    return Padded(token_RT, None if real_RT.all() else torch.from_numpy(np.flatnonzero(real_RT)))


def _blocks(first_RTW: Tensor, stop_RTW: Tensor, num_keys: int) -> Iterator[Block]:
    for start in range(0, first_RTW.shape[1], BLOCK_QUERIES):
        queries = slice(start, min(start + BLOCK_QUERIES, first_RTW.shape[1]))
        first, stop = first_RTW[:, queries], stop_RTW[:, queries]
        some = stop > first
        if not some.any():
            continue
        keys = slice(int(first[some].min()), int(stop[some].max()))
        seen_RTS = visible(first, stop, torch.arange(num_keys)[keys])
        sees_RT = some.any(-1)
        yield Block(
            queries,
            keys,
            None if seen_RTS.all() else ~seen_RTS,
            None if sees_RT.all() else ~sees_RT,
        )


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_NHC: Tensor,
        key_MHC: Tensor,
        value_MHE: Tensor,
        place_HP: Tensor | None,
        time_HD: Tensor | None,
        call: AttentionCall,
        pieces: list[Piece],
    ) -> Tensor:
        inputs = query_NHC, key_MHC, value_MHE
        ctx.save_for_backward(*inputs, place_HP, time_HD)
        ctx.call, ctx.pieces = call, pieces
        out_NHE = query_NHC.new_zeros(len(query_NHC), query_NHC.shape[1], value_MHE.shape[2])
        work = _Work(call, (place_HP, time_HD))
        _on_threads(partial(work.forward, inputs=inputs, out_NHE=out_NHE), pieces)
        return out_NHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHE: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, place_HP, time_HD = ctx.saved_tensors
        d_inputs = [torch.zeros_like(x) for x in inputs]
        work = _Work(ctx.call, (place_HP, time_HD))
        backward = partial(work.backward, inputs=inputs, grad_NHE=grad_NHE, d_inputs=d_inputs)
        of_pieces = _on_threads(backward, ctx.pieces)
        d_tables: list[Tensor | None] = []
        for index, table in enumerate((place_HP, time_HD)):
            if table is None:
                d_tables.append(None)
                continue
            total_HK = torch.zeros(table.shape, dtype=torch.float64)
            for tables in of_pieces:  # in their order, whichever thread computed them
                part_HK = tables[index]
                assert part_HK is not None
                total_HK += part_HK
            d_tables.append(total_HK.to(table.dtype))
        return *d_inputs, *d_tables, None, None


class _Work:
    """What is done with a piece; threads share it."""

    def __init__(self, call: AttentionCall, tables: Sequence[Tensor | None]) -> None:
        self._scoring: Scoring = call.scoring
        self._scale, self._bias, self._tables = call.scale, call.bias, tables

    def forward(self, piece: Piece, inputs: Sequence[Tensor], out_NHE: Tensor) -> None:
        query, key, value = _of_piece(piece, inputs)
        out_RHTE = query.new_zeros(*query.shape[:3], value.shape[3])
        for block in piece.blocks:
            weights = self._weights(block, self._scores(piece, block, query, key))
            out_RHTE[:, :, block.queries] = weights @ value[:, :, block.keys]
        piece.queries.scatter(out_RHTE, out_NHE)

    def backward(
        self, piece: Piece, inputs: Sequence[Tensor], grad_NHE: Tensor, d_inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Writes the gradients of the piece's rows, and returns those of the tables."""
        query, key, value = _of_piece(piece, inputs)
        grad = piece.queries.gather(grad_NHE)
        d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, key, value))
        d_tables = [
            None if table is None else torch.zeros(table.shape, dtype=torch.float64) for table in self._tables
        ]
        for block in piece.blocks:
            at_q, at_k = (..., block.queries, slice(None)), (..., block.keys, slice(None))
            scores = self._scores(piece, block, query, key)
            d_weights = grad[at_q] @ value[at_k].transpose(2, 3)
            if isinstance(self._scoring, Softmax):
                weights = self._weights(block, scores)
                d_value[at_k] += weights.transpose(2, 3) @ grad[at_q]
                # weights * (d_weights - sum(weights * d_weights))
                d_scores = d_weights.mul_(weights)
                d_scores.sub_(weights.mul_(d_scores.sum(-1, keepdim=True)))
            else:
                d_scores = torch.ops.aten.silu_backward(d_weights.div_(self._scoring.length), scores)
                weights = self._weights(block, scores)
                d_value[at_k] += weights.transpose(2, 3) @ grad[at_q]
            self._add_to_tables(d_tables, piece, block, d_scores)
            d_scores.mul_(self._scale)
            d_query[at_q] = d_scores @ key[at_k]
            d_key[at_k] += d_scores.transpose(2, 3) @ query[at_q]
        for padded, x, into in zip(
            (piece.queries, piece.keys, piece.keys), (d_query, d_key, d_value), d_inputs, strict=True
        ):
            padded.scatter(x, into)
        return d_tables

    def _scores(self, piece: Piece, block: Block, query_RHTC: Tensor, key_RHSC: Tensor) -> Tensor:
        """[R, H, t, s]; those of hidden pairs are HIDDEN."""
        scores_RHTS = query_RHTC[:, :, block.queries] @ key_RHSC[:, :, block.keys].transpose(2, 3)
        scores_RHTS.mul_(self._scale)
        for table_HK, bucket_RTS in self._buckets(piece, block):
            entries_HX = table_HK.to(scores_RHTS.dtype).index_select(1, bucket_RTS.flatten())
            scores_RHTS += entries_HX.view(-1, *bucket_RTS.shape).transpose(0, 1)
        if block.hidden_RTS is not None:
            scores_RHTS.masked_fill_(block.hidden_RTS[:, None], HIDDEN)
        return scores_RHTS

    def _weights(self, block: Block, scores_RHTS: Tensor) -> Tensor:
        """[R, H, t, s]; takes the scores' memory."""
        if not isinstance(self._scoring, Softmax):
            return functional.silu(scores_RHTS, inplace=True).div_(self._scoring.length)
        torch.softmax(scores_RHTS, dim=-1, out=scores_RHTS)
        if block.blind_RT is not None:
            scores_RHTS.masked_fill_(block.blind_RT[:, None, :, None], 0.0)
        return scores_RHTS

    def _buckets(self, piece: Piece, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        """Each table that there is with the [R, t, s] buckets of its pairs."""
        place_HP, time_HD = self._tables
        if place_HP is not None:
            place_S = torch.arange(block.keys.start, block.keys.stop)
            yield place_HP, place_buckets(piece.own_RT[:, block.queries], place_S, place_HP.shape[1])
        if time_HD is not None:
            assert self._bias is not None
            assert self._bias.query_time_N is not None
            assert self._bias.key_time_M is not None
            query_RT = self._bias.query_time_N[piece.queries.token_RT[:, block.queries]]
            key_RS = self._bias.key_time_M[piece.keys.token_RT[:, block.keys]]
            yield time_HD, time_buckets(query_RT, key_RS, time_HD.shape[1])

    def _add_to_tables(
        self, d_tables: list[Tensor | None], piece: Piece, block: Block, d_scores_RHTS: Tensor
    ) -> None:
        present = [d_table_HK for d_table_HK in d_tables if d_table_HK is not None]
        for d_table_HK, (_, bucket_RTS) in zip(present, self._buckets(piece, block), strict=True):
            bucket_X = bucket_RTS.flatten()
            for head, d_scores_RTS in enumerate(d_scores_RHTS.unbind(1)):
                d_table_HK[head] += torch.bincount(
                    bucket_X, d_scores_RTS.flatten(), minlength=d_table_HK.shape[1]
                )


def _of_piece(piece: Piece, inputs: Sequence[Tensor]) -> list[Tensor]:
    query_NHC, key_MHC, value_MHE = inputs
    return [piece.queries.gather(query_NHC), piece.keys.gather(key_MHC), piece.keys.gather(value_MHE)]


def _on_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What the work returns of each, in their order; on as many threads as torch has here."""
    num_threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    alone = partial(_alone, work, inference)
    if min(num_threads, len(items)) < 2:
        return [alone(item) for item in items]
    return list(_threads(num_threads).map(alone, items))


def _alone(work: Callable[[Item], Result], inference: bool, item: Item) -> Result:
    # All three are settings of the thread; tensors of the caller's inference mode are written to.
    with torch.inference_mode(inference), torch.no_grad(), torch.autocast(HOST.kind, enabled=False):
        return work(item)


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    """Threads whose torch has no threads of its own."""
    started = Barrier(number + 1)

    def begin() -> None:
        torch.get_num_threads()  # the first call takes over what is set for the process
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(number, "attention", begin)
    for _ in range(number):
        pool.submit(lambda: None)
    started.wait()
    # Setting it in a thread has also set what threads to come will take over.
    torch.set_num_threads(number)
    return pool


# A forked process has none of these threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


BACKEND = Backend("grouped", why_not, attend)
