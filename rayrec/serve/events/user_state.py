"""What users did since the data set was made, oldest first.

Two implementations with one meaning: a set of events, so that one that comes again changes nothing.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.circuit import Circuit
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.manifest import Manifest
from rayrec.samples.stores import AppendReport, EventBatch, KeyValueEvents, StoreManifest, open_store
from rayrec.samples.stores.manifest import BEHAVIORS, PER_SECOND
from rayrec.samples.stores.recent import UserEvents, converted, newest_events
from rayrec.samples.stores.store import append_sides, check_sides
from rayrec.serve.config.events import EventsConfig
from rayrec.serve.events.grouping import Grouped


class UserState(Protocol):
    """Events by user; safe to call from several threads."""

    @property
    def behaviors(self) -> tuple[str, ...] | None:
        """Names of the codes of behaviors; None: they are not kept."""

    def append(self, user_ids_E: Int64Array, events: UserEvents) -> int:
        """Add events: all of them, or none. Returns how many were not there.

        Raises:
            UnavailableError: its store does not answer.
        """

    def histories(self, user_ids: Sequence[int]) -> list[UserEvents]:
        """The newest events of users, in one request.

        Raises:
            UnavailableError: its store does not answer, or did not a moment ago.
        """

    def close(self) -> None: ...


class ProcessState:
    """In the memory of the process."""

    def __init__(self, last: int, max_users: int, behaviors: tuple[str, ...] = ()) -> None:
        self._last, self._max_users, self._behaviors = last, max_users, behaviors
        self._events: OrderedDict[int, list[tuple[int, int, int]]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def behaviors(self) -> tuple[str, ...] | None:
        return self._behaviors or None

    def append(self, user_ids_E: Int64Array, events: UserEvents) -> int:
        columns = (user_ids_E, events.times_us_E, events.items_E, events.behaviors_E)
        num_new = 0
        with self._lock:
            for user, *event in zip(*(column.tolist() for column in columns), strict=True):
                known = self._events.setdefault(user, [])
                self._events.move_to_end(user)
                if tuple(event) not in known:
                    # Sorted in, since events may come late: the newest by time stay, not the last to come.
                    insort(known, (event[0], event[1], event[2]))
                    del known[: -self._last]
                    num_new += 1
            while len(self._events) > self._max_users:
                self._events.popitem(last=False)
        return num_new

    def histories(self, user_ids: Sequence[int]) -> list[UserEvents]:
        found = []
        with self._lock:
            for user in user_ids:
                if user in self._events:
                    self._events.move_to_end(user)
                rows = np.array(self._events.get(user, []), dtype=np.int64).reshape(-1, 3)
                found.append(UserEvents(rows[:, 0], rows[:, 1], rows[:, 2]))
        return found

    def close(self) -> None:
        """Nothing is left to do."""


class StoredState:
    """In an event store, which replicas share and `join_history` reads in training."""

    def __init__(
        self,
        store: KeyValueEvents,
        last: int,
        pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        by_item: KeyValueEvents | None = None,
    ) -> None:
        """
        Args:
            by_item: the other side of the store, if it is to be written too.
        """
        self._store, self._last, self._by_item = store, last, by_item
        self._append = Grouped(self._append_group)
        self._per_s = PER_SECOND[store.manifest.time_unit]
        self._circuit = Circuit(pause_s, clock)

    @property
    def behaviors(self) -> tuple[str, ...] | None:
        manifest = self._store.manifest
        return manifest.behaviors if BEHAVIORS in manifest.columns else None

    def append(self, user_ids_E: Int64Array, events: UserEvents) -> int:
        further = {} if self.behaviors is None else {BEHAVIORS: events.behaviors_E}
        times_E = converted(events.times_us_E, 1_000_000, self._per_s)
        return self._append(EventBatch(user_ids_E, times_E, events.items_E, further)).added

    def _append_group(self, batches: Sequence[EventBatch]) -> list[AppendReport]:
        sides = [(self._store, batches)]
        if self._by_item is not None:
            sides.append((self._by_item, [batch.reversed() for batch in batches]))
        return append_sides(sides)

    def histories(self, user_ids: Sequence[int]) -> list[UserEvents]:
        return self._circuit(lambda: newest_events(self._store, user_ids, self._last))

    def close(self) -> None:
        self._store.close()
        if self._by_item is not None:
            self._by_item.close()


def open_state(config: EventsConfig, data: Manifest) -> UserState:
    """Open the users' state that the settings name.

    Args:
        data: of the data set whose users and items events are of.

    Raises:
        InputError: the store cannot be used, or is one of other ids.
        StoreUnavailableError: it does not answer.
    """
    if config.store is None:
        return ProcessState(config.last, config.max_users, data.behaviors)
    made = StoreManifest(
        name=data.name,
        id_kinds=data.id_kinds,
        columns={BEHAVIORS: "int16"} if data.behaviors else {},
        behaviors=data.behaviors,
    )
    store, by_item = open_store(config.store, config.retry, create=made), None
    try:
        _check(store, data)
        if config.by_item:
            other = store.manifest.model_copy(update={"by": "item"})
            by_item = open_store(config.store, config.retry, create=other, by="item")
            check_sides(store, by_item)
            store.take_behaviors(by_item.manifest.behaviors)
            by_item.take_behaviors(store.manifest.behaviors)
            if by_item.is_empty() and not store.is_empty():
                raise InputError(
                    f"{store.name}: events.by_item writes who met each item, and the store knows that of no "
                    "event yet; build this first of the same log (rayrec data store SOURCE STORE --by item)"
                )
    except BaseException:
        store.close()
        if by_item is not None:
            by_item.close()
        raise
    return StoredState(store, config.last, config.pause_s, by_item=by_item)


def _check(store: KeyValueEvents, data: Manifest) -> None:
    manifest = store.manifest
    if manifest.id_kinds != data.id_kinds:
        raise InputError(
            f"{store.name}: ids of this event store are {manifest.id_kinds}, those of the data set "
            f"{data.name} {data.id_kinds}; build the store of the log that the data set was prepared from"
        )
    if further := sorted(set(manifest.columns) - {BEHAVIORS}):
        raise InputError(
            f"{store.name}: events of this store have {', '.join(further)}, which events that come to a "
            "service have not; build one without (rayrec data store without --keep)"
        )
