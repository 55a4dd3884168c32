"""Attention by our Triton kernels: jagged, without padding, forward and backward, every mask and bias.

For CUDA; under `TRITON_INTERPRET=1`, set before triton is imported, also on a CPU, slowly, for tests.

Axes: N queries, M keys, H heads, C width of a query or key head, E width of a value head, B rows, K blocks
of keys of all rows.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayrec.models.attention.bias import RelativeBias, time_bounds
from rayrec.models.attention.call import AttentionCall, Backend, Scoring, Silu, Softmax
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Spans
from rayrec.platform.devices import device_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED_DTYPES = (torch.float32, torch.float64)
"""The interpreter has no matrix products in half precision."""
MAX_WIDTH = 128
TABLE_COPIES = 32
"""Of the bias tables' gradients: programs that add to one entry wait for each other."""
SUM_BITS = 62
"""Of an int64 that holds such a sum, sign aside."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of all rows, those of long rows first: the program that starts last should have little to do."""

    row_K: Tensor
    start_K: Tensor
    """Place of the block's first token in its row."""


def attend(call: AttentionCall) -> Tensor:
    bias = call.bias or RelativeBias()
    return _Jagged.apply(call.query_NHC, call.key_MHC, call.value_MHE, bias.place_HP, bias.time_HD, call)


def why_not(call: AttentionCall) -> str | None:
    query, value = call.query_NHC, call.value_MHE
    interpreted = not device_of(query.device).has_own_memory
    if interpreted and os.environ.get("TRITON_INTERPRET") != "1":
        return "it is for CUDA alone, but for tests under TRITON_INTERPRET=1"
    if not interpreted and "triton" not in device_of(query.device).attention_backends:
        return "it is for CUDA alone"
    if not _is_installed():
        return "triton is not installed"
    if query.dtype not in (INTERPRETED_DTYPES if interpreted else DTYPES):
        return f"it has no {query.dtype} on this device"
    if max(query.shape[2], value.shape[2]) > MAX_WIDTH:
        return f"its heads are at most {MAX_WIDTH} wide"
    return None


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def block_size(interpreted: bool, row_bytes: int) -> int:
    """Queries and keys of a block: fixed, since the bits of a sum depend on it.

    Args:
        row_bytes: of one token's head; what three stages of a pipeline hold of two operands must fit in the
            memory that the programs of a multiprocessor share, 160 kB on the smaller ones.
    """
    if interpreted:
        return 16  # the least that a matrix product takes
    return 64 if row_bytes <= 256 else 32


class _Jagged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_NHC: Tensor,
        key_MHC: Tensor,
        value_MHE: Tensor,
        place_HP: Tensor | None,
        time_HD: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        inner = [x if x.stride(-1) == 1 else x.contiguous() for x in (query_NHC, key_MHC, value_MHE)]
        launch = _Launch(call, inner, place_HP, time_HD)
        out_NHE = query_NHC.new_empty(len(query_NHC), launch.num_heads, value_MHE.shape[2])
        lse_NH = query_NHC.new_empty(out_NHE.shape[:2], dtype=launch.sums) if launch.softmax else None
        blocks = launch.blocks(call.queries, launch.block)
        launch("forward", blocks, (out_NHE, lse_NH), ())
        ctx.launch = launch
        ctx.save_for_backward(*inner, place_HP, time_HD, out_NHE, lse_NH)
        return out_NHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHE: Tensor) -> tuple[Tensor | None, ...]:
        query_NHC, key_MHC, value_MHE, place_HP, time_HD, out_NHE, lse_NH = ctx.saved_tensors
        launch: _Launch = ctx.launch
        grad_NHE = grad_NHE.contiguous()
        delta_NH = None
        if launch.softmax:
            delta_NH = (out_NHE.to(launch.sums) * grad_NHE.to(launch.sums)).sum(-1)
        given = (grad_NHE, lse_NH, delta_NH)
        tables = [
            None
            if table is None
            else torch.zeros(TABLE_COPIES, *table.shape, dtype=torch.int64, device=table.device)
            for table in (place_HP, time_HD)
        ]
        units = None if place_HP is None and time_HD is None else launch.units(grad_NHE, value_MHE)
        d_query_NHC = torch.empty(query_NHC.shape, dtype=query_NHC.dtype, device=query_NHC.device)
        query_blocks = launch.blocks(launch.queries, launch.block)
        launch(
            "query_gradients",
            query_blocks,
            (*given, d_query_NHC, *tables, units),
            (),
            TABLE_COPIES=TABLE_COPIES,
            BLOCK_TIMES=1 if time_HD is None else padded_width(time_HD.shape[1]),
        )
        d_key_MHC = torch.empty(key_MHC.shape, dtype=key_MHC.dtype, device=key_MHC.device)
        d_value_MHE = torch.empty(value_MHE.shape, dtype=value_MHE.dtype, device=value_MHE.device)
        key_blocks = launch.blocks(launch.keys, launch.block)
        launch("key_gradients", key_blocks, (*given, d_key_MHC, d_value_MHE), launch.seen_by(key_blocks))
        d_tables = [
            None if total is None or units is None else (total.sum(0).to(launch.sums) / units).to(table.dtype)
            for total, table in zip(tables, (place_HP, time_HD), strict=True)
        ]
        return d_query_NHC, d_key_MHC, d_value_MHE, *d_tables, None


class _Launch:
    """Starts kernels with what all of them are given."""

    def __init__(
        self, call: AttentionCall, inner: list[Tensor], place_HP: Tensor | None, time_HD: Tensor | None
    ) -> None:
        query_NHC, _, value_MHE = inner
        self.queries, self.keys = call.queries, call.keys
        self.num_heads = query_NHC.shape[1]
        self.sums = torch.float64 if query_NHC.dtype == torch.float64 else torch.float32
        self.softmax = isinstance(call.scoring, Softmax)
        self._call, self._spans, self._inner = call, call.spans, inner
        width, value_width = query_NHC.shape[2], value_MHE.shape[2]
        self.block = block_size(
            not device_of(query_NHC.device).has_own_memory, max(width, value_width) * query_NHC.element_size()
        )
        bias = call.bias or RelativeBias()
        device = query_NHC.device
        self._biases = (
            None if place_HP is None else place_HP.contiguous(),
            None if time_HD is None else time_HD.contiguous(),
            bias.query_time_N,
            bias.key_time_M,
            None if time_HD is None else time_bounds(time_HD.shape[1], device),
        )
        self._constants = {
            "H": self.num_heads,
            "C": width,
            "E": value_width,
            "BLOCK_C": padded_width(width),
            "BLOCK_E": padded_width(value_width),
            "BLOCK_T": self.block,
            "BLOCK_S": self.block,
            "SOFTMAX": self.softmax,
            "NUM_SPANS": len(self._spans.first_WN),
            "NUM_PLACES": 0 if place_HP is None else place_HP.shape[1],
            "NUM_TIMES": 0 if time_HD is None else time_HD.shape[1],
        }

    def __call__(
        self,
        name: str,
        blocks: Blocks,
        tensors: tuple[Tensor | None, ...],
        seen_by: tuple[Tensor, ...],
        **constants: Any,
    ) -> None:
        import triton.language as tl

        from rayrec.models.attention import triton_kernels

        call, (query_NHC, key_MHC, value_MHE) = self._call, self._inner
        sums = tl.float64 if self.sums == torch.float64 else tl.float32
        # Products in full float32 unless the user of torch has allowed less.
        exact = query_NHC.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
        getattr(triton_kernels, name)[len(blocks.row_K), self.num_heads](
            query_NHC,
            key_MHC,
            value_MHE,
            *tensors,
            *(stride for x in self._inner for stride in x.stride()[:2]),
            _offsets(call.queries),
            _offsets(call.keys),
            blocks.row_K,
            blocks.start_K,
            *seen_by,
            self._spans.first_WN,
            self._spans.stop_WN,
            call.queries.num_tokens,
            *self._biases,
            call.scale,
            1.0 if self.softmax else _length(call.scoring),
            **self._constants,
            **constants,
            ACC=sums,
            PRECISION="ieee" if exact else "tf32",
        )

    def blocks(self, layout: JaggedLayout, size: int) -> Blocks:
        return layout.derived(("blocks", size), lambda: _blocks(layout, size))

    def seen_by(self, key_blocks: Blocks) -> tuple[Tensor, Tensor]:
        what = ("seen by", self._call.mask, self.keys, self.block)
        return self.queries.derived(
            what, lambda: seen_by(self.queries, self.keys, self._spans, key_blocks, self.block)
        )

    def units(self, grad_NHE: Tensor, value_MHE: Tensor) -> Tensor:
        """[1] units of fixed point in 1: a power of two, such that no table's sum can overflow.

        By Cauchy-Schwarz, no weight's gradient is larger than the longest gradient of an output times the
        longest value; the scores' gradients follow. There are as many terms as pairs.
        """
        largest = grad_NHE.to(self.sums).norm(dim=-1).max() * value_MHE.to(self.sums).norm(dim=-1).max()
        # Softmax: the sum of two such products. SiLU: its slope is less than 1.1.
        largest = largest * (2.0 if self.softmax else 1.1 / _length(self._call.scoring))
        num_pairs = int((self.queries.lengths_B * self.keys.lengths_B).sum())
        bits = SUM_BITS - math.ceil(math.log2(num_pairs + 1)) - 1  # one for rounding to whole units
        exponent = torch.floor(bits - torch.log2(largest.clamp(min=2.0**-60)))
        # Not more than float32 holds; where nothing is finite, nothing must look as if it were.
        return torch.where(largest.isfinite(), torch.exp2(exponent.clamp(max=120.0)), torch.nan).view(1)


def seen_by(
    queries: JaggedLayout, keys: JaggedLayout, spans: Spans, key_blocks: Blocks, size: int
) -> tuple[Tensor, Tensor]:
    """For each block of keys, places in the row between which all queries lie that see one of its keys.

    Query n sees keys in the blocks `low_n` to `high_n` at most. Queries that see block k have `high_n >= k`
    and `low_n <= k`, so the first with the one and the last with the other bound them.

    Returns:
        [K] first and [K] stop, int32.
    """
    some_WN = spans.stop_WN > spans.first_WN
    first_N = torch.where(some_WN, spans.first_WN, keys.longest).amin(0)
    stop_N = torch.where(some_WN, spans.stop_WN, 0).amax(0)
    num_blocks = -(-max(keys.longest, 1) // size)
    low_N, high_N = first_N // size, (stop_N - 1).clamp(min=0) // size
    sees_N = stop_N > first_N
    place_N = queries.place_N.int()
    far = queries.longest
    shape = (keys.num_rows * num_blocks,)
    from_K = torch.full(shape, far, dtype=torch.int32, device=queries.device)
    from_K.scatter_reduce_(
        0, queries.row_N * num_blocks + high_N, torch.where(sees_N, place_N, far).int(), "amin"
    )
    to_K = torch.zeros(shape, dtype=torch.int32, device=queries.device)
    low_N = low_N.clamp(max=num_blocks - 1)  # of those who see nothing
    to_K.scatter_reduce_(
        0, queries.row_N * num_blocks + low_N, torch.where(sees_N, place_N + 1, 0).int(), "amax"
    )
    from_BK = from_K.view(-1, num_blocks).flip(1).cummin(1).values.flip(1)
    to_BK = to_K.view(-1, num_blocks).cummax(1).values
    at_K = key_blocks.row_K, key_blocks.start_K // size
    return from_BK[at_K].contiguous(), to_BK[at_K].contiguous()


def _blocks(layout: JaggedLayout, size: int) -> Blocks:
    num_B = -(-layout.lengths_B // size)
    row_K = np.repeat(np.arange(layout.num_rows), num_B)
    start_K = (np.arange(len(row_K)) - np.repeat(np.cumsum(num_B) - num_B, num_B)) * size
    order_K = np.argsort(-layout.lengths_B[row_K], kind="stable")
    return Blocks(
        torch.from_numpy(row_K[order_K].astype(np.int32)).to(layout.device),
        torch.from_numpy(start_K[order_K].astype(np.int32)).to(layout.device),
    )


def _offsets(layout: JaggedLayout) -> Tensor:
    return layout.derived("offsets", lambda: torch.from_numpy(layout.offsets_B1).to(layout.device))


def _length(scoring: Scoring) -> float:
    assert isinstance(scoring, Silu)
    return float(scoring.length)


def padded_width(width: int) -> int:
    """To a power of two that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


BACKEND = Backend("triton", why_not, attend)
