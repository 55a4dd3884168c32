"""A worker follows events and keeps the products of users up to date.

    feed of the events ─► due: enough new events, or long enough ago ─► a batch, active users first
        └ gone, or a new version: all users                               │ histories of the batch
    position ◄─ one transaction ─ products ◄─ kinds, of what is not there for these very events ◄─┘

The position that is kept is that before the first event whose user is still due, and it is written with the
products. So a worker that is killed at any moment reads those events again, finds the products that it wrote,
and computes no more than the batch that it was at.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.pipelines.nearline.kinds import ProductKind, SummariesKind, summaries_of
from rayrec.pipelines.nearline.product_store import ProductStore, Work
from rayrec.pipelines.nearline.products import Product, ProductKey, events_hash, stands_for
from rayrec.pipelines.nearline.source import Events, is_mine
from rayrec.platform.errors import UnavailableError
from rayrec.platform.hashing import mix64
from rayrec.samples.stores.feed import FeedGoneError

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0
BATCHES_AHEAD = 32
"""Are chosen at a time: who is due is looked for among all that are waited for."""


@dataclass
class _Pending:
    """A user with events that no product has seen."""

    since: float
    newest_s: float
    before: str | None
    """The position before the first of these events; None: all users are looked at."""
    num_events: int = 0


class Coverage(NamedTuple):
    """Products of active users."""

    num_users: int
    num_valid: int

    @property
    def share(self) -> float:
        return self.num_valid / self.num_users if self.num_users else 1.0


class NearlineWorker:
    """Computes the products of one version, of some or all users. Not thread-safe."""

    def __init__(
        self,
        recommender: Recommender,
        kinds: Sequence[ProductKind],
        events: Events,
        store: ProductStore,
        config: NearlineConfig,
        part: int = 0,
        num_parts: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            kinds: as `kinds_of` gives them.
            part: of `num_parts` workers, which divide the users by a hash.
            clock: UNIX seconds.
        """
        self._recommender, self._kinds, self._events, self._store = recommender, list(kinds), events, store
        self._config, self._part, self._num_parts, self._clock = config, part, num_parts, clock
        names = "-".join(sorted(f"{kind.name}.{kind.identity[:8]}" for kind in kinds))
        settings = "-".join(f"{kind.settings:016x}" for kind in sorted(kinds, key=lambda kind: kind.name))
        own = f"{names}:{settings}:{part}of{num_parts}"
        self._position_name = f"{recommender.identity}:{own}"
        self._coverage_name = f"{recommender.identity}:coverage:{own}"
        self._work_name = f"{recommender.identity}:work:{own}"
        self._num_looked_at = 0
        """Users that were due when all were looked at."""
        self._num_left = 0
        """Of these, those who are not done."""
        self._chosen: list[int] = []
        """The next users, in their order."""
        self._pending: dict[int, _Pending] = {}
        """In the order of the first events that are not done."""
        self._read: str | None = None
        """The position after the last event that was read; None before anything was."""
        self._kept: str | None = None
        self.num_computed = self.num_valid = self.num_errors = 0
        self.num_users = 0
        self.seconds = 0.0
        self._warned_at = float("-inf")

    def run(self, is_stopped: Callable[[float], bool], poll_s: float = 0.5) -> None:
        """Work until told to stop; a store that does not answer is asked again.

        Args:
            is_stopped: waits so many seconds, or until it is told.
        """
        while True:
            try:
                wait_s = 0.0 if self.step() else poll_s
            except UnavailableError as error:
                self.num_errors += 1
                wait_s = poll_s
                if (now := self._clock()) - self._warned_at > WARN_EVERY_S or now < self._warned_at:
                    self._warned_at = now
                    logger.warning("near-line work waits: %s", error)
            if is_stopped(wait_s):
                return

    def finish(self) -> None:
        """Bring everything up to date that is known by now, debounced or not.

        Raises:
            UnavailableError: a store does not answer.
        """
        self._take_in()
        while self._pending:
            self._refresh(self._next(self._pending))

    def step(self) -> int:
        """Take in what came, and do a batch if one is due; returns the users of it.

        Raises:
            UnavailableError: a store does not answer; nothing is lost.
        """
        self._take_in()
        batch = self._next() if self._chosen else self._next(self._due())
        if batch:
            try:
                self._refresh(batch)
            except UnavailableError:
                self._chosen = []  # they stay due
                raise
        elif self._done_to() != self._kept:
            self._write({}, ())
        return len(batch)

    def _due(self) -> dict[int, _Pending]:
        now = self._clock()
        return {
            user: pending
            for user, pending in self._pending.items()
            if pending.before is None
            or pending.num_events >= self._config.debounce_events
            # A clock that was set back must not keep anybody waiting.
            or not 0 <= now - pending.since < self._config.debounce_s
        }

    def _next(self, due: dict[int, _Pending] | None = None) -> list[int]:
        """A batch of those who were chosen; if there are none, some of those who are due, the most active."""
        size = self._config.batch_users
        if not self._chosen and due:
            chosen = sorted(due, key=lambda user: -due[user].newest_s)
            self._chosen = chosen[: BATCHES_AHEAD * size]
        batch, self._chosen = self._chosen[:size], self._chosen[size:]
        return batch

    def _take_in(self) -> None:
        """Read the events that came."""
        if self._read is None:
            # Others had this part with other settings, or divide the users in another way, and are gone. With
            # their positions: if they come back, they look at all users again, and note what they cover.
            for name in (self._position_name, self._coverage_name, self._work_name):
                self._store.forget_others(name)
            self._read = self._kept = self._store.position(self._position_name)
            if self._read is None:
                self._look_at_all()
        assert self._read is not None
        while True:
            try:
                arrivals = self._events.after(self._read)
            except FeedGoneError:
                logger.info("events between are not known; all users are looked at")
                self._look_at_all()
                return
            if arrivals.position == self._read:
                return
            now, before = self._clock(), self._read
            users_E, times_E = arrivals.users_E, arrivals.times_s_E
            mine_E = is_mine(users_E, self._part, self._num_parts)
            for user, time_s in zip(users_E[mine_E].tolist(), times_E[mine_E].tolist(), strict=True):
                pending = self._pending.setdefault(user, _Pending(now, time_s, before))
                pending.num_events += 1
                pending.newest_s = max(pending.newest_s, time_s)
            self._read = arrivals.position

    def _look_at_all(self) -> None:
        position, now = self._events.position(), self._clock()
        oldest = float("-inf") if self._config.active_s is None else now - self._config.active_s
        for users_B, newest_B in self._events.all_users():
            chosen_B = is_mine(users_B, self._part, self._num_parts) & (newest_B >= oldest)
            for user, newest_s in zip(users_B[chosen_B].tolist(), newest_B[chosen_B].tolist(), strict=True):
                self._pending.pop(user, None)
                self._pending[user] = _Pending(now, newest_s, None)
        self._num_looked_at = sum(pending.before is None for pending in self._pending.values())
        self._num_left = self._num_looked_at
        self._read = position

    def _done_to(self, without: Sequence[int] = ()) -> str | None:
        """The position before which everything is done, once some users are; None while all are looked at."""
        done, position = set(without), self._read
        is_first = True
        for user, pending in self._pending.items():
            if user in done:
                continue
            if pending.before is None:
                return None
            if is_first:
                position, is_first = pending.before, False
        return position

    def _refresh(self, users: Sequence[int]) -> None:
        began = time.perf_counter()
        keys, queries = self._events.queries(self._recommender, users)
        has_events = [len(query.history_ids) > 0 for query in queries]
        keys = list(itertools.compress(keys, has_events))
        queries = list(itertools.compress(queries, has_events))
        of_users = list(itertools.compress(users, has_events))
        written: dict[ProductKey, Product | None] = {}
        for kind in self._kinds if queries else ():
            names = [ProductKey(kind.name, kind.identity, user) for user in of_users]
            there = self._store.get_many(names)
            lacking = [
                place
                for place, product in enumerate(there)
                if product is None or not _is_valid(self._recommender, kind, product, queries[place])
            ]
            self.num_valid += len(names) - len(lacking)
            made = {}
            if lacking:
                made_now = kind.make(
                    [keys[place] for place in lacking],
                    [queries[place] for place in lacking],
                    [there[place] for place in lacking],
                )
                made = dict(zip(lacking, made_now, strict=True))
            now = self._clock()
            for place, arrays in made.items():
                if arrays is None:
                    if there[place] is not None:  # what was said of earlier events is not said any more
                        written[names[place]] = there[place] = None
                    continue
                query = queries[place]
                hashed, num_events = events_hash(self._recommender, query), len(query.history_ids)
                product = Product(hashed, num_events, now, arrays, kind.settings)
                written[names[place]] = there[place] = product
            self.num_computed += len(made)
            if isinstance(kind, SummariesKind):
                queries = [
                    query if product is None else replace(query, summaries=summaries_of(product))
                    for query, product in zip(queries, there, strict=True)
                ]
        self.num_users += len(users)
        self._write(written, users)
        self.seconds += time.perf_counter() - began

    def _write(self, products: Mapping[ProductKey, Product | None], users: Sequence[int]) -> None:
        position = self._done_to(users)
        positions = {} if position is None else {self._position_name: position}
        if self._num_looked_at or self._kept is None:
            num_left = self._num_left - sum(self._pending[user].before is None for user in users)
            positions[self._coverage_name] = f"{1 - num_left / max(self._num_looked_at, 1):.6f}"
        if products or position != self._kept:
            num_waiting = len(self._pending) - len(users)
            positions[self._work_name] = Work(self.num_users, self.seconds, num_waiting).to_text()
            self._store.put_many(products, positions)
        for user in users:
            self._num_left -= self._pending.pop(user).before is None
        if not self._num_left:
            self._num_looked_at = 0
        if position is not None:
            self._kept = position

    @property
    def is_complete(self) -> bool:
        """Whether all users that were looked at at first are done."""
        return self._kept is not None

    def coverage(self) -> Coverage:
        """Of the products that this worker makes, and the users that it looks at; see `coverage`."""
        config = self._config
        return coverage(
            self._recommender, self._kinds, self._events, self._store, config.active_s, self._clock
        )

    @property
    def num_pending(self) -> int:
        """Users with events that no product has seen."""
        return len(self._pending)


def _is_valid(recommender: Recommender, kind: ProductKind, product: Product, query: Query) -> bool:
    """Whether a product is what a kind would make of a query."""
    return product.settings == kind.settings and stands_for(recommender, product, query)


def coverage(
    recommender: Recommender,
    kinds: Sequence[ProductKind],
    events: Events,
    store: ProductStore,
    active_s: float | None = None,
    clock: Callable[[], float] = time.time,
    most_users: int = 1000,
) -> Coverage:
    """Of the active users, and of at most so many of them by a hash, those who have valid products of every
    kind.

    Args:
        active_s: how old the newest event of an active user is at most; None: all are.

    Raises:
        UnavailableError: the event store does not answer.
    """
    oldest = float("-inf") if active_s is None else clock() - active_s
    active = [users_B[newest_B >= oldest] for users_B, newest_B in events.all_users()]
    users = np.concatenate([np.zeros(0, np.int64), *active])
    users = users[np.argsort(mix64(users), kind="stable")][:most_users].tolist()
    _, queries = events.queries(recommender, users)
    asked = [(user, query) for user, query in zip(users, queries, strict=True) if len(query.history_ids)]
    keys = [ProductKey(kind.name, kind.identity, user) for user, _ in asked for kind in kinds]
    found = iter(store.get_many(keys))
    num_valid = 0
    for _, query in asked:
        products = list(itertools.islice(found, len(kinds)))
        num_valid += all(
            product is not None and _is_valid(recommender, kind, product, query)
            for kind, product in zip(kinds, products, strict=True)
        )
    return Coverage(len(asked), num_valid)
