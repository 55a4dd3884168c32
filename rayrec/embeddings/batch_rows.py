"""From rows of distinct ids to rows of a batch, and from its gradients back to one per distinct id.

Axes: N ids of a batch, M distinct ones, D numbers of a row.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.embeddings.compiled import LANES, add_lanes, copy_lanes, kernel_input
from rayrec.embeddings.threads import in_parts

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


def expand_rows(
    rows_MD: Float32Array,
    inverse_N: Int64Array,
    out_ND: Float32Array | None = None,
    num_threads: int = 1,
) -> Float32Array:
    """[N, D] `rows_MD[inverse_N]`.

    Args:
        out_ND: where to write it: memory that was used before costs half of what new memory does.

    Raises:
        ValueError: a place in inverse_N is not one of rows_MD, or out_ND has another shape.
    """
    rows_MD, inverse_N = kernel_input(rows_MD, np.float32), kernel_input(inverse_N, np.int64)
    result_ND = _output(out_ND, (len(inverse_N), rows_MD.shape[1]))
    in_range = in_parts(
        num_threads,
        len(inverse_N),
        lambda first, last: _expand(rows_MD, inverse_N[first:last], result_ND[first:last]),
    )
    if not all(in_range):
        raise ValueError(f"places must be from 0 to {len(rows_MD) - 1}, the distinct ids")
    return result_ND


def sum_rows(
    grads_ND: Float32Array,
    inverse_N: Int64Array,
    num_rows: int,
    out_MD: Float32Array | None = None,
) -> Float32Array:
    """[M, D] sums of the gradients of each distinct id, added in the order of the batch.

    On one thread: it reads the gradients as fast as memory gives them, and two that share the columns
    or the ids, so that each keeps the order, both read them all.

    Args:
        inverse_N: place of each id among the distinct ones, which are numbered in order of first
            appearance, as `deduplicate` does.
        num_rows: M.
        out_MD: where to write it: memory that was used before costs half of what new memory does.

    Raises:
        ValueError: places are not numbered like that from 0 to M - 1, or a shape does not fit.
    """
    grads_ND, inverse_N = kernel_input(grads_ND, np.float32), kernel_input(inverse_N, np.int64)
    if len(grads_ND) != len(inverse_N):
        raise ValueError(f"there are {len(grads_ND)} gradients for a batch of {len(inverse_N)} ids")
    result_MD = _output(out_MD, (num_rows, grads_ND.shape[1]))
    if _sum(grads_ND, inverse_N, result_MD) != num_rows:
        raise ValueError(f"places must be 0 to {num_rows - 1}, numbered in order of first appearance")
    return result_MD


def _output(given: Float32Array | None, shape: tuple[int, int]) -> Float32Array:
    if given is None:
        return np.empty(shape, dtype=np.float32)
    if given.shape != shape or given.dtype != np.float32 or not given.flags.c_contiguous:
        raise ValueError(f"expected a contiguous float32 array of shape {shape} to write to")
    return given


@njit(nogil=True, cache=True)
def _expand(rows_MD: Float32Array, inverse_N: Int64Array, out_ND: Float32Array) -> bool:
    dim = out_ND.shape[1]
    rows, out = np.uint64(rows_MD.ctypes.data), np.uint64(out_ND.ctypes.data)
    whole = dim - dim % LANES
    for n in range(len(inverse_N)):
        m = inverse_N[n]
        if not 0 <= m < len(rows_MD):
            return False
        source, target = rows + np.uint64(4 * dim * m), out + np.uint64(4 * dim * n)
        for d in range(0, whole, LANES):
            copy_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
        for d in range(whole, dim):
            out_ND[n, d] = rows_MD[m, d]
    return True


@njit(nogil=True, cache=True)
def _sum(grads_ND: Float32Array, inverse_N: Int64Array, out_MD: Float32Array) -> int:
    """Returns how many distinct ids there are, -1 if they are not numbered in order of appearance."""
    num_found, dim = 0, out_MD.shape[1]
    grads, out = np.uint64(grads_ND.ctypes.data), np.uint64(out_MD.ctypes.data)
    whole = dim - dim % LANES
    for n in range(len(inverse_N)):
        m = inverse_N[n]
        if not 0 <= m <= num_found or m >= len(out_MD):
            return -1
        source, target = grads + np.uint64(4 * dim * n), out + np.uint64(4 * dim * m)
        if m == num_found:
            num_found += 1
            for d in range(0, whole, LANES):
                copy_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
            for d in range(whole, dim):
                out_MD[m, d] = grads_ND[n, d]
        else:
            for d in range(0, whole, LANES):
                add_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
            for d in range(whole, dim):
                out_MD[m, d] += grads_ND[n, d]
    return num_found
