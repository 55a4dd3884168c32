"""Whose events came, and what the history of each user is: an event store, a data set, or both.

Axes: B users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.user_histories import with_events
from rayrec.pipelines.nearline.config import MOST_EVENTS
from rayrec.platform.arrays import Int64Array
from rayrec.platform.hashing import mix64
from rayrec.samples.stores import KeyValueEvents
from rayrec.samples.stores.feed import START
from rayrec.samples.stores.manifest import PER_SECOND
from rayrec.samples.stores.recent import UserEvents, newest_events

_SCANNED = 4096


class Arrivals(NamedTuple):
    """Events that came after a position."""

    users_E: Int64Array
    times_s_E: np.ndarray
    """UNIX seconds."""
    position: str
    """After them."""


class Events(Protocol):
    """What a worker asks about events."""

    def position(self) -> str:
        """After all that came so far."""
        ...

    def after(self, position: str) -> Arrivals:
        """What came after a position, as much as is read at once; the same position again where nothing did.

        Raises:
            FeedGoneError: what came is not known; look at all users.
            UnavailableError: the store does not answer.
        """
        ...

    def all_users(self) -> Iterator[tuple[Int64Array, np.ndarray]]:
        """Users of whom anything is known, each once, and UNIX seconds of the newest event of each."""
        ...

    def queries(self, recommender: Recommender, users: Sequence[int]) -> tuple[list[str], list[Query]]:
        """Key and query of each user, as a service understands a request of the user's."""
        ...


class UserEventsSource:
    """Users of a data set, and of an event store that services write."""

    def __init__(
        self, recommender: Recommender, store: KeyValueEvents | None, last: int = MOST_EVENTS
    ) -> None:
        """
        Args:
            recommender: of the data set.
            store: None: nobody has other events than those of the data set.
            last: newest events of a user that are read from the store.
        """
        self._store, self._last, self._users = store, last, recommender.dataset.users
        self._dataset = recommender.dataset
        self._has_feed = store is not None and store.feed_position() is not None

    def position(self) -> str:
        """See `Events.position`."""
        found = self._store.feed_position() if self._store is not None and self._has_feed else None
        return START if found is None else found

    def after(self, position: str) -> Arrivals:
        """See `Events.after`."""
        if self._store is None or not self._has_feed:
            return Arrivals(np.zeros(0, np.int64), np.zeros(0), position)
        events, after = self._store.feed_after(position)
        return Arrivals(events.users_E, events.times_E / PER_SECOND[self._store.manifest.time_unit], after)

    def all_users(self) -> Iterator[tuple[Int64Array, np.ndarray]]:
        """See `Events.all_users`."""
        ids_U, there = self._users["user_id"].to_numpy(), set[int]()
        if self._store is not None:
            for users_B in self._store.key_batches(_SCANNED):
                there.update(users_B.tolist())
                found = newest_events(self._store, users_B.tolist(), 1)
                yield (
                    users_B,
                    np.array([each.times_us_E[-1] / 1e6 if len(each.items_E) else 0.0 for each in found]),
                )
        others_U = ids_U[~np.isin(ids_U, np.fromiter(there, np.int64, len(there)))]
        for first in range(0, len(others_U), _SCANNED):
            some_B = others_U[first : first + _SCANNED]
            yield some_B, np.array([self._newest_time(user) for user in some_B.tolist()])

    def _newest_time(self, user: int) -> float:
        if not self._dataset.has_times():
            return 0.0
        times = self._dataset.history_times_of(self._key_of[user])
        return 0.0 if times is None or not len(times) else float(times[-1])

    @cached_property
    def _key_of(self) -> dict[int, str]:
        ids_U, keys_U = self._users["user_id"].to_pylist(), self._users["user_key"].to_pylist()
        return dict(zip(ids_U, keys_U, strict=True))

    def queries(self, recommender: Recommender, users: Sequence[int]) -> tuple[list[str], list[Query]]:
        """See `Events.queries`."""
        none = np.zeros(0, np.int64)
        events = [UserEvents(none, none, none)] * len(users)
        behaviors = tuple[str, ...]()
        if self._store is not None:
            events, behaviors = newest_events(self._store, users, self._last), self._store.manifest.behaviors
        keys, queries = list[str](), list[Query]()
        for user, recent in zip(users, events, strict=True):
            key = self._key_of.get(user)
            stored = None if key is None else recommender.query_of_user(key)
            if len(recent.items_E):
                stored = with_events(recommender, key, stored, recent, behaviors)
            keys.append(str(user) if key is None else key)
            queries.append(Query(none) if stored is None else stored)
        return keys, queries


def is_mine(users_B: Int64Array, part: int, num_parts: int) -> np.ndarray:
    """[B] whether each user is one of a worker's, of several."""
    return mix64(users_B) % np.uint64(num_parts) == np.uint64(part)
