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
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from rayrec.platform.arrays import Int16Array, Int64Array
from rayrec.platform.compiled import mix64
from rayrec.samples.graph.runs import EMPTY, Run

MAX_RUNS = 8
"""Of one direction; fewer are filled up with empty ones, so kernels are compiled for one number."""
ANY_TIME = np.iinfo(np.int64).max
"""Before which all edges are."""

Column = tuple[Any, ...]


class Side(NamedTuple):
    """One direction of a graph, as kernels take it."""

    nodes: Column
    offsets: Column
    others: Column
    times: Column
    kinds: Column
    floor: np.int64
    """Older edges are not there any more."""

    @classmethod
    def of(cls, runs: Sequence[Run], floor: int) -> Side:
        assert len(runs) <= MAX_RUNS, "they are merged"
        filled = [*runs, *[EMPTY] * (MAX_RUNS - len(runs))]
        nodes, offsets, others, times, kinds = zip(*filled, strict=True)
        return cls(nodes, offsets, others, times, kinds, np.int64(floor))


@njit(nogil=True, cache=True)
def ranges_before(side: Side, node: int, before: int, low_S: Int64Array, high_S: Int64Array) -> int:
    """Where each run has the node's edges before a time: low_S[s]:high_S[s].

    Returns:
        How many edges these are.
    """
    count = 0
    for s in range(MAX_RUNS):
        low_S[s] = high_S[s] = 0
        nodes = side.nodes[s]
        if len(nodes) == 0:
            continue
        place = np.searchsorted(nodes, node)
        if place == len(nodes) or nodes[place] != node:
            continue
        start, stop = side.offsets[s][place], side.offsets[s][place + 1]
        times = side.times[s]
        if before <= times[stop - 1]:
            stop = start + np.searchsorted(times[start:stop], before)
        if stop > start and times[start] < side.floor:
            start += np.searchsorted(times[start:stop], side.floor)
        low_S[s], high_S[s] = start, stop
        count += stop - start
    return count


@njit(nogil=True, cache=True)
def newest_run(side: Side, low_S: Int64Array, high_S: Int64Array) -> int:
    """The run with the newest of the edges that are left: the one at high_S[s] - 1."""
    best = -1
    for s in range(MAX_RUNS):
        if high_S[s] <= low_S[s]:
            continue
        if best < 0 or _is_newer(side, s, high_S[s] - 1, best, high_S[best] - 1):
            best = s
    return best


@njit(nogil=True, cache=True)
def _is_newer(side: Side, s: int, place: int, other_s: int, other_place: int) -> bool:
    """Whether one edge of a node stands behind another, in the order of `Run`."""
    time, other_time = side.times[s][place], side.times[other_s][other_place]
    if time != other_time:
        return bool(time > other_time)
    key = mix64(np.uint64(side.others[s][place]))
    other_key = mix64(np.uint64(side.others[other_s][other_place]))
    if key != other_key:
        return bool(key > other_key)
    return bool(side.kinds[s][place] > side.kinds[other_s][other_place])


@njit(nogil=True, cache=True)
def view(
    side: Side,
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
    count = min(ranges_before(side, node, before, low_S, high_S), len(others_E))
    e = 0
    while e < count:
        s = only_run(low_S, high_S)
        rest = count - e  # where only one run has edges left, they follow as they stand
        if s < 0:
            s, rest = newest_run(side, low_S, high_S), 1
        # Looked up once: taking a run's columns out of a tuple costs more than what is read of them.
        others, times, kinds = side.others[s], side.times[s], side.kinds[s]
        place = high_S[s]
        for _ in range(rest):
            place -= 1
            others_E[e], times_E[e], kinds_E[e] = others[place], times[place], kinds[place]
            e += 1
        high_S[s] = place
    return count


@njit(nogil=True, cache=True)
def only_run(low_S: Int64Array, high_S: Int64Array) -> int:
    """The only run that has edges left; -1 where there are several."""
    found = -1
    for s in range(MAX_RUNS):
        if high_S[s] > low_S[s]:
            if found >= 0:
                return -1
            found = s
    return found


@njit(nogil=True, cache=True)
def nth_newest(side: Side, low_S: Int64Array, high_S: Int64Array, n: int) -> int:
    """The neighbor at the n-th newest of the edges in these ranges, from 0."""
    s = only_run(low_S, high_S)
    while s < 0:
        s = newest_run(side, low_S, high_S)
        if n == 0:
            break
        high_S[s] -= 1
        n -= 1
        s = only_run(low_S, high_S)
    return int(side.others[s][high_S[s] - 1 - n])
