"""Events as bytes.

The events of a key lie in values of these 64-bit words, little endian:

    header      magic and version | tag of the manifest
                number of events | number of chunks in the directory
                number of the next chunk
    directory   one entry for each chunk, oldest first:
                number of the chunk | number of its events, time of its first event, of its last
    columns     times, items, further ones: each an array of its type, padded to whole words

The *head* of a key has its newest events and the directory; a *chunk* has older events, no directory,
and never changes: a reader of a head can still read the chunks that it names, or finds them deleted.

Axes: V values, E events, R directory entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.jagged import concatenated_ranges, offsets_from_lengths
from rayrec.samples.stores.manifest import StoreManifest

Column = NDArray[Any]
Value = bytes | memoryview

HEADER, ENTRY = 3, 3
"""Words of the header, and of one entry of the directory."""

_WORD = 8
_VERSION = 0x5252_4501  # "RRE", version 1
_LOW = (1 << 32) - 1


@dataclass(frozen=True)
class Directory:
    """The chunks of several heads, one after the other, oldest first."""

    offsets_V1: Int64Array
    """Value v has the entries offsets_V1[v]:offsets_V1[v + 1]."""
    numbers_R: Int64Array
    num_events_R: Int64Array
    first_times_R: Int64Array
    last_times_R: Int64Array

    @classmethod
    def empty(cls, num_values: int) -> Directory:
        nothing = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(num_values + 1, dtype=np.int64), nothing, nothing, nothing, nothing)

    def take(self, rows: Int64Array, owner_R: Int64Array, num_values: int) -> Directory:
        """Some entries, in the order asked for, as those of the values `owner_R`, which do not decrease."""
        return Directory(
            offsets_from_lengths(np.bincount(owner_R, minlength=num_values)),
            self.numbers_R[rows],
            self.num_events_R[rows],
            self.first_times_R[rows],
            self.last_times_R[rows],
        )

    def followed_by(self, newer: Directory) -> Directory:
        """For each value, the entries of this directory and then those of another."""
        num_values = len(self.offsets_V1) - 1
        both = Directory(
            np.zeros(0, dtype=np.int64),  # of no value yet
            *(
                np.concatenate([getattr(self, name), getattr(newer, name)])
                for name in ("numbers_R", "num_events_R", "first_times_R", "last_times_R")
            ),
        )
        owner_R = np.concatenate(
            [np.repeat(np.arange(num_values), np.diff(part.offsets_V1)) for part in (self, newer)]
        )
        order_R = np.argsort(owner_R, kind="stable")
        return both.take(order_R, owner_R[order_R], num_values)


@dataclass(frozen=True)
class Layout:
    """What a manifest says about bytes."""

    types: Mapping[str, np.dtype]
    """Every column, in the order in which it is stored."""
    signature: np.int64
    """First word of every value."""

    @classmethod
    def of(cls, manifest: StoreManifest) -> Layout:
        return cls(manifest.types, np.uint64((_VERSION << 32) | manifest.tag).view(np.int64))

    def num_words(self, num_events_V: Int64Array, num_chunks_V: Int64Array) -> Int64Array:
        columns_V = sum(_padded(num_events_V, kind) for kind in self.types.values())
        return HEADER + ENTRY * num_chunks_V + columns_V


@dataclass(frozen=True)
class Values:
    """Values of a store, one after the other in one buffer."""

    layout: Layout
    words: Int64Array
    starts_V: Int64Array
    """Word at which each value begins."""
    num_events_V: Int64Array
    num_chunks_V: Int64Array

    @classmethod
    def parse(cls, values: Sequence[Value], layout: Layout, store: str) -> Values:
        """Join values into one buffer.

        Raises:
            InputError: one of them is not what this store's manifest says.
        """
        lengths_V = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
        content = b"".join(values)
        words = np.frombuffer(content, dtype=np.int64, count=len(content) // _WORD)
        starts_V = offsets_from_lengths(lengths_V // _WORD)[:-1]
        whole = bool((lengths_V % _WORD == 0).all() and (lengths_V >= HEADER * _WORD).all())
        if whole:
            counts_V = words[starts_V + 1]
            parsed = cls(layout, words, starts_V, counts_V >> 32, counts_V & _LOW)
            expected_V = layout.num_words(parsed.num_events_V, parsed.num_chunks_V)
            whole = bool(
                (words[starts_V] == layout.signature).all() and (expected_V == lengths_V // _WORD).all()
            )
        if not whole:
            raise InputError(
                f"{store}: a value is damaged or was written under another manifest than the one that is "
                "there; build the store again"
            )
        return parsed

    @property
    def next_numbers_V(self) -> Int64Array:
        return self.words[self.starts_V + 2]

    @cached_property
    def directory(self) -> Directory:
        entries_R = concatenated_ranges(self.starts_V + HEADER, ENTRY * self.num_chunks_V)[::ENTRY]
        counts_R = self.words[entries_R]
        return Directory(
            offsets_from_lengths(self.num_chunks_V),
            counts_R >> 32,
            counts_R & _LOW,
            self.words[entries_R + 1],
            self.words[entries_R + 2],
        )

    @property
    def times_V(self) -> Int64Array:
        """Word at which the times of each value begin."""
        return self.starts_V + HEADER + ENTRY * self.num_chunks_V

    def copy_to(
        self,
        columns: Mapping[str, Column],
        firsts_V: Int64Array,
        lengths_V: Int64Array,
        indices_V: Int64Array,
    ) -> None:
        """Copy lengths_V[v] events of value v, from firsts_V[v] on, to places_V[v] and following of the
        columns that are given."""
        words_V = self.times_V
        for name, kind in self.layout.types.items():
            if name in columns:
                starts_V = words_V * (_WORD // kind.itemsize) + firsts_V
                copy_ranges(self.words.view(kind), starts_V, lengths_V, columns[name], indices_V)
            words_V = words_V + _padded(self.num_events_V, kind)


def encode(
    layout: Layout,
    columns: Mapping[str, Column],
    starts_V: Int64Array,
    num_events_V: Int64Array,
    directories: Directory,
    next_numbers_V: Int64Array,
) -> list[bytes]:
    """One value for each run of events.

    Args:
        columns: every column of the layout; value v has the events from starts_V[v] on.
    """
    num_chunks_V = np.diff(directories.offsets_V1)
    begins_V1 = offsets_from_lengths(layout.num_words(num_events_V, num_chunks_V))
    words = np.zeros(begins_V1[-1], dtype=np.int64)
    begins_V = begins_V1[:-1]
    words[begins_V] = layout.signature
    words[begins_V + 1] = (num_events_V << 32) | num_chunks_V
    words[begins_V + 2] = next_numbers_V
    entries_R = concatenated_ranges(begins_V + HEADER, ENTRY * num_chunks_V)[::ENTRY]
    words[entries_R] = (directories.numbers_R << 32) | directories.num_events_R
    words[entries_R + 1] = directories.first_times_R
    words[entries_R + 2] = directories.last_times_R
    words_V = begins_V + HEADER + ENTRY * num_chunks_V
    for name, kind in layout.types.items():
        indices_V = words_V * (_WORD // kind.itemsize)
        copy_ranges(columns[name], starts_V, num_events_V, words.view(kind), indices_V)
        words_V = words_V + _padded(num_events_V, kind)
    content = memoryview(words.tobytes())
    bounds = (begins_V1 * _WORD).tolist()
    return [bytes(content[start:stop]) for start, stop in itertools.pairwise(bounds)]


def copy_ranges(
    source: Column, starts_R: Int64Array, lengths_R: Int64Array, target: Column, indices_R: Int64Array
) -> None:
    """target[places_R[r] + i] = source[starts_R[r] + i] for i below lengths_R[r], of one type."""
    # Numbers of one width are the same to a copy, and a buffer may or may not be writable: few types
    # mean little to compile.
    width = np.dtype(f"u{source.dtype.itemsize}")
    read = source.view(width)
    read.flags.writeable = False
    _copy_ranges(read, starts_R, lengths_R, target.view(width), indices_R)


@njit(nogil=True, cache=True)
def _copy_ranges(
    source: Column, starts_R: Int64Array, lengths_R: Int64Array, target: Column, indices_R: Int64Array
) -> None:
    for r in range(len(starts_R)):
        # Slices first: their indices count from 0, so the loop has no negative ones to look out for.
        values = source[starts_R[r] : starts_R[r] + lengths_R[r]]
        room = target[indices_R[r] : indices_R[r] + lengths_R[r]]
        for i in range(lengths_R[r]):
            room[i] = values[i]


def _padded(num_events_V: Int64Array, kind: np.dtype) -> Int64Array:
    """Words that a column takes."""
    return -(-num_events_V * kind.itemsize // _WORD)
