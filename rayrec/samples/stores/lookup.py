"""What was known of a key at a time: the newest events before it.

*Before* is strict. An event that carries the sample's own time may be the sample itself, or its
consequence: a log in seconds (or days) cannot tell which came first, and a model that sees it learns to read
the answer. So events at the sample's time are left out with everything later.

Axes: B rows, K distinct keys, N events.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numba import njit

from rayrec.platform.arrays import Int64Array
from rayrec.platform.deduplication import deduplicate
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.stores.batches import Histories, TimeWindow
from rayrec.samples.stores.encoding import copy_ranges
from rayrec.samples.stores.manifest import BEHAVIORS
from rayrec.samples.stores.store import EventStore


def histories_before(
    store: EventStore,
    keys_B: Int64Array,
    times_B: Int64Array,
    last: int,
    columns: Collection[str],
    behaviors: Collection[int] | None = None,
) -> Histories:
    """For each row, the newest `last` events of its key with a time less than the row's, oldest first.

    Args:
        times_B: in the unit of the store.
        columns: which to read besides the times.
        behaviors: codes; events of others do not count. None: all count.

    Returns:
        Axis K of the result is the row.

    Raises:
        StoreUnavailableError: the store did not answer.
    """
    keys_K, key_B = deduplicate(keys_B)
    earliest_K = np.full(len(keys_K), np.iinfo(np.int64).max)
    latest_K = np.full(len(keys_K), np.iinfo(np.int64).min)
    np.minimum.at(earliest_K, key_B, times_B)
    np.maximum.at(latest_K, key_B, times_B)
    if behaviors is None:
        events = store.get_many(keys_K, columns, TimeWindow(earliest_K, latest_K, last))
    else:
        # Which of a chunk's events count is known when they are here: ask for all that are early enough.
        window = TimeWindow(earliest_K, latest_K, np.iinfo(np.int64).max)
        events = _only(store.get_many(keys_K, {*columns, BEHAVIORS}, window), behaviors)
    starts_B = np.empty(len(keys_B), dtype=np.int64)
    lengths_B = np.empty(len(keys_B), dtype=np.int64)
    _newest_before(events.times_N, events.offsets_K1, key_B, times_B, last, starts_B, lengths_B)
    offsets_B1 = offsets_from_lengths(lengths_B)
    taken = {}
    for name, column in events.columns.items():
        taken[name] = np.empty(offsets_B1[-1], dtype=column.dtype)
        copy_ranges(column, starts_B, lengths_B, taken[name], offsets_B1[:-1])
    return Histories(offsets_B1, taken)


def _only(events: Histories, behaviors: Collection[int]) -> Histories:
    counts_N = np.isin(events.columns[BEHAVIORS], list(behaviors))
    offsets_K1 = offsets_from_lengths(counts_N)[events.offsets_K1]
    return Histories(offsets_K1, {name: column[counts_N] for name, column in events.columns.items()})


@njit(nogil=True, cache=True)
def _newest_before(
    times_N: Int64Array,
    offsets_K1: Int64Array,
    key_B: Int64Array,
    times_B: Int64Array,
    last: int,
    starts_B: Int64Array,
    lengths_B: Int64Array,
) -> None:
    for b in range(len(key_B)):
        start, stop = offsets_K1[key_B[b]], offsets_K1[key_B[b] + 1]
        # From the left: the index of the first event that is not before.
        stop = start + np.searchsorted(times_N[start:stop], times_B[b])
        starts_B[b] = max(start, stop - last)
        lengths_B[b] = stop - starts_B[b]
