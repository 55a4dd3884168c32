"""Heads and chunks of keys: their names, their order, which of them a window needs, and how they are made.

Axes: K keys, M events of some keys, N events read, V values, R chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from rayrec.platform.arrays import Int64Array
from rayrec.platform.hashing import combine64
from rayrec.samples.base.jagged import concatenated_ranges, offsets_from_lengths
from rayrec.samples.stores.batches import Histories, TimeWindow
from rayrec.samples.stores.encoding import Column, Directory, Layout, Values, encode
from rayrec.samples.stores.manifest import TIMES


def head_names(keys_K: Int64Array) -> list[bytes]:
    """Names of the heads of some keys; they sort as the keys do."""
    return [_KEY_PREFIX + key for key in _key_bytes(keys_K)]


def chunk_names(keys_R: Int64Array, numbers_R: Int64Array) -> list[bytes]:
    """Names of chunks; those of a key sort after its head, the newest first."""
    numbers = (_LAST_NUMBER - numbers_R).astype(">u4").tobytes()
    return [_KEY_PREFIX + key + numbers[4 * r : 4 * r + 4] for r, key in enumerate(_key_bytes(keys_R))]


def key_of(name: bytes) -> int | None:
    """The key whose head has this name; None if it is the name of something else."""
    if len(name) != 9 or not name.startswith(_KEY_PREFIX):
        return None
    return int.from_bytes(name[1:], "big") - (1 << 63)


_KEY_PREFIX = b"e"
_LAST_NUMBER = (1 << 32) - 1


def _key_bytes(keys_K: Int64Array) -> list[bytes]:
    # With the sign bit flipped, the order of the bytes is that of the signed numbers.
    content = (keys_K.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").tobytes()
    return [content[start : start + 8] for start in range(0, len(content), 8)]


def event_order(
    key_M: Int64Array, keys_M: Int64Array, columns: Mapping[str, Column]
) -> tuple[Int64Array, np.ndarray]:
    """The order of events by key and time, ties by a hash of the event; and which repeat the one before.

    Args:
        key_M: index of each event's key among the keys.
    """
    bits = [column.view(f"i{column.dtype.itemsize}") for column in columns.values()]
    order_M = np.lexsort((combine64(keys_M, *bits), columns[TIMES], key_M))
    # Equal hashes may belong to different events: only equal values in all columns are a repetition.
    repeated_M = np.zeros(len(order_M), dtype=np.bool_)
    repeated_M[1:] = True
    for column in (key_M, *bits):
        ordered_M = column[order_M]
        repeated_M[1:] &= ordered_M[1:] == ordered_M[:-1]
    return order_M, repeated_M


class Part(NamedTuple):
    """Values, the keys that they belong to, and which of their events are needed."""

    values: Values
    owner_V: Int64Array
    """Index of the key among the keys asked for."""
    firsts_V: Int64Array
    lengths_V: Int64Array


def part_of(values: Values, owner_V: Int64Array, window: TimeWindow | None = None) -> Part:
    if window is None:
        return Part(values, owner_V, np.zeros_like(owner_V), values.num_events_V)
    firsts_V, lengths_V = np.empty_like(owner_V), np.empty_like(owner_V)
    _needed(
        values.words,
        values.times_V,
        values.num_events_V,
        window.earliest_K[owner_V],
        window.latest_K[owner_V],
        window.last,
        firsts_V,
        lengths_V,
    )
    return Part(values, owner_V, firsts_V, lengths_V)


def histories_of(parts: Sequence[Part], num_keys: int, kinds: Mapping[str, np.dtype]) -> Histories:
    """The events of values that belong to some keys; parts of older ones first."""
    owner_V = np.concatenate([part.owner_V for part in parts])
    lengths_V = np.concatenate([part.lengths_V for part in parts])
    order_V = np.argsort(owner_V, kind="stable")
    indices_V = np.empty(len(owner_V), dtype=np.int64)
    indices_V[order_V] = offsets_from_lengths(lengths_V[order_V])[:-1]
    lengths_K = np.zeros(num_keys, dtype=np.int64)
    np.add.at(lengths_K, owner_V, lengths_V)
    columns = {name: np.empty(lengths_V.sum(), dtype=kind) for name, kind in kinds.items()}
    begin = 0
    for part in parts:
        stop = begin + len(part.owner_V)
        part.values.copy_to(columns, part.firsts_V, part.lengths_V, indices_V[begin:stop])
        begin = stop
    return Histories(offsets_from_lengths(lengths_K), columns)


def encoded(
    layout: Layout,
    size: int,
    keys_K: Int64Array,
    histories: Histories,
    left: Directory,
    next_numbers_K: Int64Array,
) -> dict[bytes, bytes]:
    """Name -> content of new heads and new chunks.

    Args:
        size: events of a chunk.
        histories: what is to be written of each key; older events are in the chunks of `left`.
        next_numbers_K: number that the key's next chunk gets.
    """
    times_N = histories.times_N
    starts_K, lengths_K = histories.offsets_K1[:-1], np.diff(histories.offsets_K1)
    # A head keeps at least as many events as a chunk has, so that the newest are mostly read with it.
    num_chunks_K = np.maximum(lengths_K // size - 1, 0)
    owner_R = np.repeat(np.arange(len(keys_K)), num_chunks_K)
    within_R = concatenated_ranges(np.zeros_like(num_chunks_K), num_chunks_K)
    starts_R, numbers_R = starts_K[owner_R] + within_R * size, next_numbers_K[owner_R] + within_R
    sizes_R = np.full(len(owner_R), size)
    chunks = encode(
        layout, histories.columns, starts_R, sizes_R, Directory.empty(len(owner_R)), np.zeros_like(starts_R)
    )
    new = Directory(
        offsets_from_lengths(num_chunks_K),
        numbers_R,
        sizes_R,
        times_N[starts_R],
        times_N[starts_R + size - 1],
    )
    heads = encode(
        layout,
        histories.columns,
        starts_K + num_chunks_K * size,
        lengths_K - num_chunks_K * size,
        left.followed_by(new),
        next_numbers_K + num_chunks_K,
    )
    names = chunk_names(keys_K[owner_R], numbers_R) + head_names(keys_K)
    return dict(zip(names, chunks + heads, strict=True))


@njit(nogil=True, cache=True)
def choose_chunks(
    words: Int64Array,
    times_V: Int64Array,
    num_events_V: Int64Array,
    offsets_V1: Int64Array,
    num_events_R: Int64Array,
    first_times_R: Int64Array,
    last_times_R: Int64Array,
    earliest_V: Int64Array,
    latest_V: Int64Array,
    last: int,
    wanted_R: np.ndarray,
) -> None:
    """Mark the chunks that a window needs besides the heads.

    From the newest chunk back, until `last` events are known to be before the earliest time. The directory
    does not tell how many events of a chunk that spans this time are before it, so such a chunk counts none.
    """
    for v in range(len(times_V)):
        start = times_V[v]
        before = np.searchsorted(words[start : start + num_events_V[v]], earliest_V[v])
        for r in range(offsets_V1[v + 1] - 1, offsets_V1[v] - 1, -1):
            if before >= last:
                break
            if first_times_R[r] < latest_V[v]:
                wanted_R[r] = True
                if last_times_R[r] < earliest_V[v]:
                    before += num_events_R[r]


@njit(nogil=True, cache=True)
def _needed(
    words: Int64Array,
    times_V: Int64Array,
    num_events_V: Int64Array,
    earliest_V: Int64Array,
    latest_V: Int64Array,
    last: int,
    firsts_V: Int64Array,
    lengths_V: Int64Array,
) -> None:
    """Which events of a value a window can need: the newest `last` before the earliest time, and those
    from there to the latest."""
    for v in range(len(times_V)):
        times = words[times_V[v] : times_V[v] + num_events_V[v]]
        firsts_V[v] = max(np.searchsorted(times, earliest_V[v]) - last, 0)
        lengths_V[v] = max(np.searchsorted(times, latest_V[v]) - firsts_V[v], 0)
