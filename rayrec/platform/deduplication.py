"""Distinct integers by a compiled hash table, in order of first appearance, and sums over equal ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input

_MIN_SLOTS = 64


def deduplicate(ids: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Distinct ids in order of first appearance, and the inverse in the shape of `ids`.

    `distinct[inverse]` equals `ids`.
    """
    ids_N = np.ascontiguousarray(ids, dtype=np.int64).reshape(-1).view()
    ids_N.flags.writeable = False  # always: to the compiler, read-only arrays of Ray's store are another type
    slots_C = np.zeros(max(_MIN_SLOTS, 1 << (2 * len(ids_N)).bit_length()), dtype=np.int32)
    distinct_N = np.empty(len(ids_N), dtype=np.int64)
    inverse_N = np.empty(len(ids_N), dtype=np.int64)
    num_distinct = _deduplicate(ids_N, slots_C, distinct_N, inverse_N)
    return distinct_N[:num_distinct].copy(), inverse_N.reshape(ids.shape)


def sum_by_inverse(values_ND: Float32Array, inverse_N: Int64Array, num_rows: int) -> Float32Array:
    """[M, D] sums of the values of each distinct id, added to zero in the order of the ids.

    Args:
        inverse_N: which of `num_rows` distinct ids each value is of, as `deduplicate` gives it.
    """
    sums_MD = np.zeros((num_rows, values_ND.shape[1]), dtype=np.float32)
    _add(kernel_input(values_ND, np.float32), kernel_input(inverse_N, np.int64), sums_MD)
    return sums_MD


@njit(nogil=True, cache=True)
def _add(values_ND: Float32Array, inverse_N: Int64Array, sums_MD: Float32Array) -> None:
    for n in range(len(inverse_N)):
        m = inverse_N[n]
        for d in range(values_ND.shape[1]):
            sums_MD[m, d] += values_ND[n, d]


@njit(nogil=True, cache=True)
def _deduplicate(
    ids_N: Int64Array, slots_C: Int32Array, distinct_N: Int64Array, inverse_N: Int64Array
) -> int:
    """Open addressing; a slot holds 1 + the index of its id in distinct_N, or 0 if it is free."""
    mask = np.uint64(len(slots_C) - 1)
    shift = np.uint64(64)
    while np.uint64(1) << (np.uint64(64) - shift) < np.uint64(len(slots_C)):
        shift -= np.uint64(1)
    num_distinct = 0
    for n in range(len(ids_N)):
        # Two rounds of multiply and fold (the finalizer of MurmurHash3) spread ids that count up, or
        # that differ in their high bits only; their own top bits then choose the slot.
        hashed = np.uint64(ids_N[n])
        hashed = (hashed ^ (hashed >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        hashed = (hashed ^ (hashed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        slot = hashed >> shift
        while slots_C[slot] != 0 and distinct_N[slots_C[slot] - 1] != ids_N[n]:
            slot = (slot + np.uint64(1)) & mask
        if slots_C[slot] == 0:
            distinct_N[num_distinct] = ids_N[n]
            num_distinct += 1
            slots_C[slot] = num_distinct
        inverse_N[n] = slots_C[slot] - 1
    return num_distinct
