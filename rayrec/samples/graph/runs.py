"""Sorted runs: edges of one direction, by node and then in order of time, in compressed sparse rows.

A run never changes. What was appended is a run of its own until it is merged with others, so readers need no
lock, and a large run can be a memory-mapped file.

Ties of time stand in the order of a hash of the neighbor: the order of a log would leak (the events of a day
are often sorted by item), and that of the appends would make what is read depend on them.

Axes: V nodes of a run, E edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit

from rayrec.platform.arrays import Int16Array, Int64Array
from rayrec.platform.compiled import SIGN_BIT, kernel_input, mix64, stable_order
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.hashing import mix64 as mix64_of
from rayrec.samples.base.jagged import offsets_from_lengths

NO_KIND = -1
"""Kind of an edge whose behavior is not known."""


class Edges(NamedTuple):
    """Edges of one direction, in any order."""

    nodes_E: Int64Array
    others_E: Int64Array
    times_E: Int64Array
    kinds_E: Int16Array
    """Codes of behaviors, `NO_KIND` where there is none."""

    @classmethod
    def joined(cls, parts: Iterable[Edges]) -> Edges:
        """All of several, one after another."""
        nothing = np.zeros(0, np.int64)
        parts = [cls(nothing, nothing, nothing, np.zeros(0, np.int16)), *parts]
        return cls(
            np.concatenate([part.nodes_E for part in parts]),
            np.concatenate([part.others_E for part in parts]),
            np.concatenate([part.times_E for part in parts]),
            np.concatenate([part.kinds_E for part in parts]),
        )

    def reversed(self) -> Edges:
        return Edges(self.others_E, self.nodes_E, self.times_E, self.kinds_E)

    def take(self, chosen: Any) -> Edges:
        return Edges(*(column[chosen] for column in self))


class Run(NamedTuple):
    """Edges of one direction, sorted, none twice."""

    nodes_V: Int64Array
    """In the order of their hashes: `views.place_of` finds one in a few steps."""
    offsets_V1: Int64Array
    """The edges of node v are offsets_V1[v]:offsets_V1[v + 1]."""
    others_E: Int64Array
    times_E: Int64Array
    kinds_E: Int16Array

    @property
    def num_edges(self) -> int:
        return len(self.others_E)

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self)

    @classmethod
    def of(cls, edges: Edges) -> Run:
        """Sort edges; of those that are equal, one is kept. The order in which they come does not matter."""
        distinct, inverse_E = deduplicate(edges.nodes_E)
        order = np.argsort(mix64_of(distinct))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        number_E = rank[inverse_E]
        offsets_V1 = offsets_from_lengths(np.bincount(number_E, minlength=len(order)))
        columns = (np.empty(len(number_E), np.int64), np.empty(len(number_E), np.int64))
        kinds = np.empty(len(number_E), np.int16)
        _place(
            kernel_input(number_E, np.int64),
            offsets_V1[:-1].copy(),
            kernel_input(edges.others_E, np.int64),
            kernel_input(edges.times_E, np.int64),
            kernel_input(edges.kinds_E, np.int16),
            *columns,
            kinds,
        )
        num_kept = _sort_nodes(offsets_V1, *columns, kinds)
        others, times = (column[:num_kept] for column in columns)
        return cls.readable(distinct[order], offsets_V1, others, times, kinds[:num_kept])

    @classmethod
    def readable(cls, *columns: Any) -> Run:
        """Of columns as kernels take them."""
        nodes, offsets, others, times, kinds = columns
        nodes, offsets, others, times = (
            kernel_input(column, np.int64) for column in (nodes, offsets, others, times)
        )
        return cls(nodes, offsets, others, times, kernel_input(kinds, np.int16))

    @classmethod
    def merged(cls, first: Run, second: Run) -> Run:
        """All edges of two runs, each once."""
        num_nodes, num_edges = len(first.nodes_V) + len(second.nodes_V), first.num_edges + second.num_edges
        made = (
            np.empty(num_nodes, np.int64),
            np.zeros(num_nodes + 1, np.int64),
            np.empty(num_edges, np.int64),
            np.empty(num_edges, np.int64),
            np.empty(num_edges, np.int16),
        )
        # Without Python's lock: who reads meanwhile does not wait.
        num_nodes, num_edges = _merge(*first, *second, *made)
        nodes, offsets, others, times, kinds = made
        return cls.readable(
            nodes[:num_nodes].copy(),
            offsets[: num_nodes + 1].copy(),
            others[:num_edges],
            times[:num_edges],
            kinds[:num_edges],
        )

    def newest(self, most: int | None) -> Run:
        """With no more than so many edges of each node, the last of them; None: all."""
        lengths_V = np.diff(self.offsets_V1)
        if most is None or not len(lengths_V) or lengths_V.max() <= most:
            return self
        offsets_V1 = offsets_from_lengths(np.minimum(lengths_V, most))
        num_edges = int(offsets_V1[-1])
        made = (np.empty(num_edges, np.int64), np.empty(num_edges, np.int64), np.empty(num_edges, np.int16))
        _take_last(self.offsets_V1, self.others_E, self.times_E, self.kinds_E, offsets_V1, *made)
        return Run.readable(self.nodes_V, offsets_V1, *made)

    def edges(self) -> Edges:
        nodes_E = np.repeat(self.nodes_V, np.diff(self.offsets_V1))
        return Edges(nodes_E, self.others_E, self.times_E, self.kinds_E)

    def named_columns(self, side: str) -> dict[str, pa.Array]:
        """One row of lists, as a segment's file has it."""
        return {f"{side}_{name}": _list(column) for name, column in self._asdict().items()}

    @classmethod
    def of_columns(cls, side: str, batch: pa.RecordBatch) -> Run:
        """As `named_columns` made it; reads from the mapped file, nothing is copied."""
        return cls.readable(*(batch.column(f"{side}_{name}").values.to_numpy() for name in cls._fields))


def _list(column: np.ndarray) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array([0, len(column)], pa.int64()), pa.array(column))


@njit(nogil=True, cache=True)
def _take_last(
    offsets_V1: Any,
    others_E: Any,
    times_E: Any,
    kinds_E: Any,
    kept_V1: Any,
    kept_others_E: Any,
    kept_times_E: Any,
    kept_kinds_E: Any,
) -> None:
    """Copy the last edges of each node, as many as there is room for by `kept_V1`."""
    for v in range(len(kept_V1) - 1):
        start, count = kept_V1[v], kept_V1[v + 1] - kept_V1[v]
        first = offsets_V1[v + 1] - count
        for e in range(count):
            kept_others_E[start + e] = others_E[first + e]
            kept_times_E[start + e] = times_E[first + e]
            kept_kinds_E[start + e] = kinds_E[first + e]


@njit(nogil=True, cache=True)
def _place(
    number_E: Int64Array,
    next_V: Int64Array,
    others_E: Int64Array,
    times_E: Int64Array,
    kinds_E: Int16Array,
    placed_others_E: Int64Array,
    placed_times_E: Int64Array,
    placed_kinds_E: Int16Array,
) -> None:
    """Put the edges of each node beside each other."""
    for e in range(len(number_E)):
        place = next_V[number_E[e]]
        next_V[number_E[e]] += 1
        placed_others_E[place] = others_E[e]
        placed_times_E[place] = times_E[e]
        placed_kinds_E[place] = kinds_E[e]


@njit(nogil=True, cache=True)
def _sort_nodes(
    offsets_V1: Int64Array, others_E: Int64Array, times_E: Int64Array, kinds_E: Int16Array
) -> int:
    """Sort the edges of each node in place and leave out repetitions; offsets are adapted.

    Returns:
        How many edges are left; they stand at the beginning.
    """
    kept = 0
    start = offsets_V1[0]
    for v in range(len(offsets_V1) - 1):
        stop = offsets_V1[v + 1]
        times = times_E[start:stop]
        for e in range(1, len(times)):
            if times[e] < times[e - 1]:
                order = stable_order(times)
                times_E[start:stop] = times[order]
                others_E[start:stop] = others_E[start:stop][order]
                kinds_E[start:stop] = kinds_E[start:stop][order]
                break
        first = start
        while first < stop:
            last = first + 1
            while last < stop and times_E[last] == times_E[first]:
                last += 1
            if last - first > 1:
                _sort_tie(others_E[first:last], kinds_E[first:last])
            first = last
        offsets_V1[v] = kept
        for e in range(start, stop):
            if (
                e > start
                and times_E[e] == times_E[kept - 1]
                and others_E[e] == others_E[kept - 1]
                and kinds_E[e] == kinds_E[kept - 1]
            ):
                continue
            others_E[kept], times_E[kept], kinds_E[kept] = others_E[e], times_E[e], kinds_E[e]
            kept += 1
        start = stop
    offsets_V1[-1] = kept
    return kept


@njit(nogil=True, cache=True)
def _sort_tie(others_T: Int64Array, kinds_T: Int16Array) -> None:
    """Sort edges of one time by the hash of the neighbor, then by kind."""
    hashes_T, wide_T = np.empty(len(others_T), np.int64), np.empty(len(others_T), np.int64)
    for t in range(len(others_T)):
        # In the order of uint64.
        hashes_T[t], wide_T[t] = np.int64(mix64(np.uint64(others_T[t]))) ^ SIGN_BIT, kinds_T[t]
    # Stable, so the second sort keeps the order of kinds.
    order_T = stable_order(wide_T)
    order_T = order_T[stable_order(hashes_T[order_T])]
    others_T[:] = others_T[order_T]
    kinds_T[:] = kinds_T[order_T]


@njit(nogil=True, cache=True)
def _merge(
    nodes_A: Any,
    offsets_A1: Any,
    others_A: Any,
    times_A: Any,
    kinds_A: Any,
    nodes_B: Any,
    offsets_B1: Any,
    others_B: Any,
    times_B: Any,
    kinds_B: Any,
    nodes_V: Any,
    offsets_V1: Any,
    others_E: Any,
    times_E: Any,
    kinds_E: Any,
) -> tuple[int, int]:
    """Merge two runs, A and B; returns the numbers of nodes and edges."""
    a = b = v = e = 0
    while a < len(nodes_A) or b < len(nodes_B):
        of_a, of_b = a < len(nodes_A), b < len(nodes_B)
        if of_a and of_b:
            hash_a, hash_b = mix64(np.uint64(nodes_A[a])), mix64(np.uint64(nodes_B[b]))
            of_a, of_b = hash_a <= hash_b, hash_b <= hash_a
        i, i_stop = (offsets_A1[a], offsets_A1[a + 1]) if of_a else (0, 0)
        j, j_stop = (offsets_B1[b], offsets_B1[b + 1]) if of_b else (0, 0)
        nodes_V[v] = nodes_A[a] if of_a else nodes_B[b]
        while i < i_stop or j < j_stop:
            order = -1 if j == j_stop else 1
            if i < i_stop and j < j_stop:
                order = order_of(others_A[i], times_A[i], kinds_A[i], others_B[j], times_B[j], kinds_B[j])
            if order <= 0:
                others_E[e], times_E[e], kinds_E[e] = others_A[i], times_A[i], kinds_A[i]
                i += 1
            else:
                others_E[e], times_E[e], kinds_E[e] = others_B[j], times_B[j], kinds_B[j]
            if order >= 0:
                j += 1
            e += 1
        v += 1
        offsets_V1[v] = e
        a += of_a
        b += of_b
    return v, e


@njit(nogil=True, cache=True)
def order_of(other: int, time: int, kind: int, other_2: int, time_2: int, kind_2: int) -> int:
    """-1, 0 or 1: whether one edge of a node stands before another, is the same, or stands behind it."""
    if time != time_2:
        return -1 if time < time_2 else 1
    if other != other_2:
        return -1 if mix64(np.uint64(other)) < mix64(np.uint64(other_2)) else 1
    return -1 if kind < kind_2 else int(kind > kind_2)
