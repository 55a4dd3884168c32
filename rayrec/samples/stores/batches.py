"""What goes into event stores and comes out of them.

Axes: K keys, E events appended, N events read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.stores.encoding import Column
from rayrec.samples.stores.manifest import ITEMS, TIMES, StoreManifest


@dataclass(frozen=True)
class EventBatch:
    """Events to append, in any order."""

    keys_E: Int64Array
    times_E: Int64Array
    items_E: Int64Array
    columns: Mapping[str, Column] = field(default_factory=dict)
    """[E] each: exactly those that the manifest declares."""

    def reversed(self) -> EventBatch:
        """The same events for the other side: by item instead of by user, or the other way round."""
        return EventBatch(self.items_E, self.times_E, self.keys_E, self.columns)


@dataclass(frozen=True)
class TimeWindow:
    """Which events of each key are needed: the newest `last` before any time from earliest to latest."""

    earliest_K: Int64Array
    latest_K: Int64Array
    last: int


@dataclass(frozen=True)
class Histories:
    """Events of K keys, key after key, each in order of time."""

    offsets_K1: Int64Array
    columns: Mapping[str, Column]
    """[N] each; `times` is always there."""

    @property
    def times_N(self) -> Int64Array:
        return self.columns[TIMES]


@dataclass(frozen=True)
class AppendReport:
    """What became of the events of one append."""

    added: int
    duplicates: int
    """Were there already, or twice in the batch."""
    late: int
    """Added, though older than the newest event that their key had."""


def columns_of(events: EventBatch, manifest: StoreManifest, store: str) -> dict[str, Column]:
    """The columns of a batch, in the types of the store.

    Raises:
        InputError: a column is missing, too much, of another length, or does not fit its type.
    """
    given: dict[str, Column] = {TIMES: events.times_E, ITEMS: events.items_E, **events.columns}
    if given.keys() != manifest.types.keys():
        raise InputError(
            f"{store}: events have the columns {', '.join(given)}; append exactly those that the store has, "
            f"{', '.join(manifest.types)}"
        )
    columns = {}
    for name, kind in manifest.types.items():
        column = np.asarray(given[name])
        if len(column) != len(events.keys_E):
            raise InputError(
                f"{store}: column {name} has {len(column)} values for {len(events.keys_E)} events"
            )
        columns[name] = np.ascontiguousarray(column, dtype=kind)
        if column.dtype != kind and kind.kind == "i" and not np.array_equal(columns[name], column):
            raise InputError(
                f"{store}: column {name} holds {kind} and cannot hold all values, which lie between "
                f"{column.min()} and {column.max()}"
            )
    return columns
