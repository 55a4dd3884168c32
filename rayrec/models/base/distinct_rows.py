"""From the distinct rows of a batch to the row of every id, and gradients back to one per distinct row.

Axes: M distinct rows, N ids, D numbers of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.devices import HOST

SumByInverse = Callable[[Float32Array, Int64Array, int], Float32Array]


def rows_of_ids(rows_MD: Tensor, inverse: Tensor) -> Tensor:
    """[..., D] the row of every id, `rows_MD[inverse]`.

    Gradients add up per row in the order of the ids, the same bits on any path. On a CPU a compiled kernel
    adds them, since the backward of `functional.embedding` takes six times as long there (100,000 ids,
    37,000 rows of 64 numbers, one thread), and longer with more threads: each of them looks at every id.
    """
    is_compiled_sum = (
        rows_MD.requires_grad
        and rows_MD.device == HOST.torch
        and rows_MD.dtype == torch.float32
        and not torch.compiler.is_compiling()
    )
    if is_compiled_sum and torch.is_grad_enabled() and _sum_by_inverse() is not None:
        rows: Tensor = _RowsOfIds.apply(rows_MD, inverse)
        return rows
    return functional.embedding(inverse, rows_MD)


class _RowsOfIds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_rows = len(rows_MD)
        return functional.embedding(inverse, rows_MD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        grads_ND = grads.reshape(-1, grads.shape[-1])
        sum_by_inverse = _sum_by_inverse()
        assert sum_by_inverse is not None
        sums_MD = sum_by_inverse(grads_ND.numpy(), inverse.reshape(-1).numpy(), ctx.num_rows)
        return torch.from_numpy(sums_MD), None


@functools.cache
def _sum_by_inverse() -> SumByInverse | None:
    # Here, not at the top: models also run where torch and numpy are all there is.
    try:
        from rayrec.platform.deduplication import sum_by_inverse
    except ImportError:
        return None
    return sum_by_inverse
