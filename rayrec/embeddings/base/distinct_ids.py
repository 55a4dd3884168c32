"""Ids that are distinct: checked where they should be, and made so where several parts share some.

Axes: M distinct ids of one part, D numbers of a row, R distinct ids of all parts, C slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from rayrec.embeddings.base.compiled import LANES, add_lanes, prefetch_words
from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input, mix64
from rayrec.platform.deduplication import deduplicate

_AHEAD = 16  # rows asked for this many gradients early


def first_repeated(ids_M: Int64Array) -> int | None:
    """The first id that has come before in the same array; None if all are distinct."""
    ids_M = kernel_input(ids_M, np.int64)
    bits = (2 * len(ids_M)).bit_length()
    found = _first_repeated(ids_M, np.zeros(1 << bits, dtype=np.int32), np.uint64(64 - bits))
    return None if found < 0 else int(ids_M[found])


def positions_among(ids_M: Int64Array, others_R: Int64Array) -> Int64Array:
    """[M] where each id is among other distinct ids; -1 where it is not."""
    ids_M, others_R = kernel_input(ids_M, np.int64), kernel_input(others_R, np.int64)
    bits = max(1, (2 * len(others_R)).bit_length())
    slots_C = np.zeros(1 << bits, dtype=np.int32)
    positions_M = np.empty(len(ids_M), dtype=np.int64)
    _positions_among(ids_M, others_R, slots_C, np.uint64(64 - bits), positions_M)
    return positions_M


def sum_by_id(parts: Sequence[tuple[Int64Array, Float32Array]]) -> tuple[Int64Array, Float32Array]:
    """Add up gradients per id, in the order of the parts, whatever order they arrived in.

    Args:
        parts: one or more of (distinct ids [M], gradients [M, D]).

    Returns:
        (distinct ids in order of first appearance, their summed gradients).
    """
    ids_R, numbers = deduplicate(np.concatenate([ids_M for ids_M, _ in parts]))
    sums_RD = np.empty((len(ids_R), parts[0][1].shape[1]), dtype=np.float32)
    first = num_summed = 0
    for ids_M, grads_MD in parts:
        numbers_M = kernel_input(numbers[first : first + len(ids_M)], np.int64)
        num_summed = _add_part(sums_RD, num_summed, numbers_M, kernel_input(grads_MD, np.float32))
        first += len(ids_M)
    return ids_R, sums_RD


def add_part(sums_RD: Float32Array, num_summed: int, numbers_M: Int64Array, grads_MD: Float32Array) -> None:
    """Add one part to sums of which so many rows have begun; new ones come in the order of their numbers."""
    _add_part(sums_RD, num_summed, kernel_input(numbers_M, np.int64), kernel_input(grads_MD, np.float32))


def add_rows(sum_RD: Float32Array, rows_M: Int64Array, grads_MD: Float32Array) -> None:
    """sum_RD[rows_M] += grads_MD, one after the other; a row may come several times."""
    _add_part(sum_RD, len(sum_RD), kernel_input(rows_M, np.int64), kernel_input(grads_MD, np.float32))


@njit(nogil=True, cache=True)
def _first_repeated(ids_M: Int64Array, slots_C: Int32Array, shift: np.uint64) -> int:
    """Place of the first id that comes again; -1 if there is none. A slot holds 1 + a place, 0 if free."""
    mask = len(slots_C) - 1
    for m in range(len(ids_M)):
        slot = np.int64(mix64(np.uint64(ids_M[m])) >> shift)
        while slots_C[slot] != 0:
            if ids_M[slots_C[slot] - 1] == ids_M[m]:
                return m
            slot = (slot + 1) & mask
        slots_C[slot] = m + 1
    return -1


@njit(nogil=True, cache=True)
def _positions_among(
    ids_M: Int64Array, others_R: Int64Array, slots_C: Int32Array, shift: np.uint64, positions_M: Int64Array
) -> None:
    """A slot holds 1 + the place of one of the others, 0 if it is free."""
    mask = len(slots_C) - 1
    for r in range(len(others_R)):
        slot = np.int64(mix64(np.uint64(others_R[r])) >> shift)
        while slots_C[slot] != 0:
            slot = (slot + 1) & mask
        slots_C[slot] = r + 1
    for m in range(len(ids_M)):
        slot = np.int64(mix64(np.uint64(ids_M[m])) >> shift)
        while slots_C[slot] != 0 and others_R[slots_C[slot] - 1] != ids_M[m]:
            slot = (slot + 1) & mask
        positions_M[m] = slots_C[slot] - 1


@njit(nogil=True, cache=True)
def _add_part(sums_RD: Float32Array, num_summed: int, numbers_M: Int64Array, grads_MD: Float32Array) -> int:
    """Add gradients to their sums, of which so many have begun; returns how many have then."""
    dim = sums_RD.shape[1]
    whole, row_bytes = dim - dim % LANES, np.uint64(4 * dim)
    sums, grads = np.uint64(sums_RD.ctypes.data), np.uint64(grads_MD.ctypes.data)
    for m in range(len(numbers_M)):
        if m + _AHEAD < len(numbers_M) and numbers_M[m + _AHEAD] < num_summed:
            prefetch_words(sums + row_bytes * np.uint64(numbers_M[m + _AHEAD]), dim)
        number = numbers_M[m]
        if number == num_summed:
            num_summed += 1
            for d in range(dim):
                sums_RD[number, d] = np.float32(0) + grads_MD[m, d]  # which makes 0 of -0, as any sum does
        else:
            target, source = sums + row_bytes * np.uint64(number), grads + row_bytes * np.uint64(m)
            for d in range(0, whole, LANES):
                add_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
            for d in range(whole, dim):
                sums_RD[number, d] += grads_MD[m, d]
    return num_summed
