"""What kernels read of a graph: the newest edges of a node before a time, out of several sorted runs.

Every operation sees a node through a *view*: its newest `most` edges strictly before the time of the
question. A hub costs no more than that, and what an answer is made of does not depend on how its edges are
spread over runs.

*Before* is strict, as in `rayrec.samples.stores.lookup`: an edge at the time of the question may be its
answer.

Axes: S runs, E edges of a view, newest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rayrec.platform.arrays import Int16Array, Int64Array
from rayrec.platform.compiled import mix64
from rayrec.samples.graph.runs import NO_KIND, Run

ANY_TIME = np.iinfo(np.int64).max
"""Before which all edges are."""
_EVER = np.iinfo(np.int64).min

NODES, OFFSETS, OTHERS, TIMES, KINDS, NUM_NODES, NUM_EDGES, MOST = range(8)


@dataclass(frozen=True)
class Side:
    """One direction of a graph."""

    runs: tuple[Run, ...]
    table_S8: Int64Array
    """Of each run, where its five columns lie in memory, how many nodes and edges it has, and how many edges
    of a node there are in all runs at most (0: any number). Kernels take this: arrays in tuples would have
    their references counted at every access, which costs more than what is read. The runs are held beside
    it."""
    floor: int
    """Older edges are not there any more."""

    @classmethod
    def of(cls, runs: Sequence[Run], floor: int, has_kinds: bool, most: int | None = None) -> Side:
        """Without names of kinds, the column of kinds is not looked at: all are `NO_KIND`.

        Args:
            most: newest edges of a node that are there at all; None: all.
        """
        rows = [
            [*(column.ctypes.data for column in run), len(run.nodes_V), run.num_edges, most or 0]
            for run in runs
        ]
        table_S8 = np.array(rows, dtype=np.int64).reshape(-1, 8)
        if not has_kinds:
            table_S8[:, KINDS] = 0
        return cls(tuple(runs), table_S8, floor)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@njit(nogil=True, cache=True)
def _column(table_S8: Any, s: int, column: int, size: int) -> Any:
    address: Any = table_S8[s, column]
    return carray(_pointer(address), (size,), np.int64)  # type: ignore[call-arg]


@njit(nogil=True, cache=True)
def _kinds(table_S8: Any, s: int) -> Any:
    address: Any = table_S8[s, KINDS]
    return carray(_pointer(address), (table_S8[s, NUM_EDGES],), np.int16)  # type: ignore[call-arg]


@njit(nogil=True, cache=True)
def ranges_before(
    table_S8: Any, floor: int, node: int, before: int, low_S: Int64Array, high_S: Int64Array
) -> int:
    """Where each run has the node's edges before a time: low_S[s]:high_S[s].

    Returns:
        How many edges these are.
    """
    count = 0
    for s in range(len(table_S8)):
        low_S[s] = high_S[s] = 0
        num_nodes = table_S8[s, NUM_NODES]
        place = place_of(_column(table_S8, s, NODES, num_nodes), node)
        if place >= 0:
            offsets = _column(table_S8, s, OFFSETS, num_nodes + 1)
            low_S[s], high_S[s] = offsets[place], offsets[place + 1]
            count += high_S[s] - low_S[s]
    if count and 0 < table_S8[0, MOST] < count:
        _skip_oldest(table_S8, low_S, high_S, count - table_S8[0, MOST])
    count = 0
    for s in range(len(table_S8)):
        start, stop = low_S[s], high_S[s]
        if start == stop:
            continue
        times = _column(table_S8, s, TIMES, table_S8[s, NUM_EDGES])
        if before != ANY_TIME and before <= times[stop - 1]:
            stop = start + np.searchsorted(times[start:stop], before)
        if floor > _EVER and stop > start and times[start] < floor:
            start += np.searchsorted(times[start:stop], floor)
        low_S[s], high_S[s] = start, stop
        count += stop - start
    return count


@njit(nogil=True, cache=True)
def _skip_oldest(table_S8: Any, low_S: Int64Array, high_S: Int64Array, count: int) -> None:
    """Leave out the oldest of the edges in these ranges.

    A run has no more of a node than there may be; so it is what came since runs were merged that is skipped.
    """
    while count > 0:
        oldest: Any = np.int64(-1)  # a literal would be a type of its own to what is called
        for s in range(len(table_S8)):
            if high_S[s] > low_S[s] and (
                oldest < 0 or _is_newer(table_S8, oldest, low_S[oldest], s, low_S[s])
            ):
                oldest = s
        low_S[oldest] += 1
        count -= 1


@njit(nogil=True, cache=True)
def place_of(nodes_V: Any, node: int) -> int:
    """Where a node stands among those of a run, which are in the order of their hashes; -1 if nowhere.

    Hashes are spread evenly, so the first guess is nearly right: from there, steps that double.
    """
    count = len(nodes_V)
    if count == 0:
        return -1
    wanted = mix64(np.uint64(node))
    low: Any = np.int64((wanted >> np.uint64(32)) * np.uint64(count) >> np.uint64(32))
    high: Any = low + 1
    step = 1
    while low > 0 and mix64(np.uint64(nodes_V[low])) > wanted:
        high = low
        low = max(low - step, 0)
        step *= 2
    step = 1
    while high < count and mix64(np.uint64(nodes_V[high - 1])) < wanted:
        low = high
        high = min(high + step, count)
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if nodes_V[middle] == node:
            return middle
        if mix64(np.uint64(nodes_V[middle])) < wanted:
            low = middle + 1
        else:
            high = middle
    return -1


@njit(nogil=True, cache=True)
def only_run(low_S: Int64Array, high_S: Int64Array, num_runs: int) -> int:
    """The only run that has edges left; -1 where there are several."""
    found = -1
    for s in range(num_runs):
        if high_S[s] > low_S[s]:
            if found >= 0:
                return -1
            found = s
    return found


@njit(nogil=True, cache=True)
def newest_run(table_S8: Any, low_S: Int64Array, high_S: Int64Array) -> int:
    """The run with the newest of the edges that are left: the one at high_S[s] - 1."""
    best: Any = np.int64(-1)
    for s in range(len(table_S8)):
        if high_S[s] <= low_S[s]:
            continue
        if best < 0 or _is_newer(table_S8, s, high_S[s] - 1, best, high_S[best] - 1):
            best = s
    return best


@njit(nogil=True, cache=True)
def _is_newer(table_S8: Any, s: int, place: int, other_s: int, other_place: int) -> bool:
    """Whether one edge of a node stands behind another, in the order of `Run`."""
    time = _column(table_S8, s, TIMES, table_S8[s, NUM_EDGES])[place]
    other_time = _column(table_S8, other_s, TIMES, table_S8[other_s, NUM_EDGES])[other_place]
    if time != other_time:
        return bool(time > other_time)
    key = mix64(np.uint64(_column(table_S8, s, OTHERS, table_S8[s, NUM_EDGES])[place]))
    other_key = mix64(
        np.uint64(_column(table_S8, other_s, OTHERS, table_S8[other_s, NUM_EDGES])[other_place])
    )
    if key != other_key:
        return bool(key > other_key)
    if table_S8[s, KINDS] == 0:
        return False
    return bool(_kinds(table_S8, s)[place] > _kinds(table_S8, other_s)[other_place])


@njit(nogil=True, cache=True)
def view(
    table_S8: Any,
    floor: int,
    node: int,
    before: int,
    low_S: Int64Array,
    high_S: Int64Array,
    others_E: Int64Array,
    times_E: Int64Array,
    kinds_E: Int16Array,
) -> int:
    """Write a node's newest edges before a time, as many as there is room for.

    Returns:
        How many these are.
    """
    count = min(ranges_before(table_S8, floor, node, before, low_S, high_S), len(others_E))
    e = 0
    while e < count:
        s = only_run(low_S, high_S, len(table_S8))
        rest = count - e  # where only one run has edges left, they follow as they stand
        if s < 0:
            s, rest = newest_run(table_S8, low_S, high_S), 1
        num_edges, place = table_S8[s, NUM_EDGES], high_S[s]
        others, times = _column(table_S8, s, OTHERS, num_edges), _column(table_S8, s, TIMES, num_edges)
        for n in range(rest):
            others_E[e + n], times_E[e + n] = others[place - 1 - n], times[place - 1 - n]
        if table_S8[s, KINDS] == 0:
            kinds_E[e : e + rest] = NO_KIND
        else:
            kinds = _kinds(table_S8, s)
            for n in range(rest):
                kinds_E[e + n] = kinds[place - 1 - n]
        place -= rest
        e += rest
        high_S[s] = place
    return count


@njit(nogil=True, cache=True)
def nth_newest(table_S8: Any, low_S: Int64Array, high_S: Int64Array, n: int) -> int:
    """The neighbor at the n-th newest of the edges in these ranges, from 0."""
    s = only_run(low_S, high_S, len(table_S8))
    while s < 0:
        s = newest_run(table_S8, low_S, high_S)
        if n == 0:
            break
        high_S[s] -= 1
        n -= 1
        s = only_run(low_S, high_S, len(table_S8))
    return int(_column(table_S8, s, OTHERS, table_S8[s, NUM_EDGES])[high_S[s] - 1 - n])
