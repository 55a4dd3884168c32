"""The store as a service: one Redis server (or its primary behind a proxy), for many machines.

All values of a request go in one MGET, all changes of an append in one MULTI/EXEC that fails if anybody else
changed what it was made from. Not for Redis Cluster, where neither goes across slots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urldefrag, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff

from rayrec.platform.errors import InputError
from rayrec.samples.stores.encoding import Value
from rayrec.samples.stores.feed import MOST_ENTRIES, START, FeedGoneError
from rayrec.samples.stores.key_values import Commit, KeyValues, Read
from rayrec.samples.stores.manifest import By, StoreManifest
from rayrec.samples.stores.retry import Retry, RetryConfig
from rayrec.samples.stores.store import KeyValueEvents

DEFAULT_PREFIX = "rayrec"

_EVENTS = b"events"
"""The field of a feed's entries."""
_KEYS_PER_SCAN = 10_000
_LOST_RACES = 20
"""How often a transaction is tried again at once before that counts as a failure."""


class RedisValues(KeyValues):
    """Values in a Redis database, under names that begin with the URL's fragment.

    Args:
        url: redis://[[user]:password@]host[:port][/database][#prefix]; with TLS, rediss:// and its options
            as the client has them (`?ssl_ca_certs=ca.pem`).
        config: its timeout is that of connecting and of every request.

    Raises:
        InputError: the URL is none.
    """

    # A lost race against another writer passes as well.
    _transient = (redis.ConnectionError, redis.TimeoutError, redis.WatchError, redis.ReadOnlyError)

    def __init__(self, url: str, config: RetryConfig, retry: Retry) -> None:
        address, fragment = urldefrag(url)
        prefix = fragment or DEFAULT_PREFIX
        name = _without_password(url)
        if not re.fullmatch(r"[\w.-]+", prefix):
            raise InputError(
                f"{name}: the prefix after # is {prefix!r}; expected letters, digits, '.', '_' and '-'"
            )
        self._name, self._retry = name, retry
        self._prefix = f"{prefix}:".encode()
        try:
            self._client: Any = redis.Redis.from_url(
                address,
                socket_timeout=config.timeout_s,
                socket_connect_timeout=config.timeout_s,
                retry=redis.retry.Retry(NoBackoff(), 0),  # ours counts, waits and names the store
            )
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{name}: {error}; expected redis://[[user]:password@]host[:port][/database][#prefix]"
            ) from error
        self._feed = self._prefix + b"feed"

    def close(self) -> None:
        self._client.close()

    def names_after(self, prefix: bytes) -> Iterator[bytes]:
        """In their order."""
        return self._scanned(prefix + b"*")

    def _scanned(self, pattern: bytes) -> Iterator[bytes]:
        def scan() -> set[bytes]:
            with self._told_apart():
                # A set: SCAN may name a key twice while the table grows.
                names = self._client.scan_iter(match=self._prefix + pattern, count=_KEYS_PER_SCAN)
                return {name[len(self._prefix) :] for name in names}

        return iter(sorted(self._attempt(scan)))

    @contextmanager
    def _snapshot(self) -> Iterator[Read]:
        # No snapshot in truth: chunks do not change, and those that a writer removed are missed.
        with self._told_apart():
            yield lambda names: self._client.mget(self._full(names)) if names else []

    def _transact(self, change: Callable[[Read], Commit]) -> None:
        for _ in range(_LOST_RACES):
            try:
                return self._transact_once(change)
            except redis.WatchError:  # the server answers: another writer was first, of a popular item, say
                continue
        self._transact_once(change)

    def _transact_once(self, change: Callable[[Read], Commit]) -> None:
        with self._told_apart(), self._client.pipeline(transaction=True) as pipeline:

            def read(names: Sequence[bytes]) -> list[Value | None]:
                if not names:
                    return []
                full = self._full(names)
                pipeline.watch(*full)
                values: list[Value | None] = pipeline.mget(full)
                return values

            changes, feed = change(read)
            pipeline.multi()
            written = {
                self._prefix + name: content for name, content in changes.items() if content is not None
            }
            removed = [self._prefix + name for name, content in changes.items() if content is None]
            if written:
                pipeline.mset(written)
            if removed:
                pipeline.unlink(*removed)
            for entry in feed:
                pipeline.xadd(self._feed, {_EVENTS: entry}, maxlen=MOST_ENTRIES, approximate=True)
            pipeline.execute()

    def _full(self, names: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + name for name in names]

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """What no later attempt can mend is the caller's to mend."""
        try:
            yield
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise InputError(
                f"{self._name}: refused: {error}; give the user and password of the service in the URL"
            ) from error


class RedisStore(RedisValues, KeyValueEvents):
    """Events in a Redis database.

    Args:
        url: as `RedisValues` takes it, like config.
        create: make the store if there is none.

    Raises:
        InputError: the URL is none, the password is wrong, or there is no store.
        StoreUnavailableError: the server does not answer.
    """

    def __init__(
        self,
        url: str,
        config: RetryConfig,
        retry: Retry,
        create: StoreManifest | None = None,
        by: By = "user",
    ) -> None:
        RedisValues.__init__(self, url, config, retry)
        try:
            KeyValueEvents.__init__(self, self._name, retry, create, by)
        except BaseException:
            self.close()
            raise

    def _names(self) -> Iterator[bytes]:
        """Of heads, in their order."""
        return self._scanned(self._prefix_of_side + b"e" + b"?" * 8)

    def _feed_position(self) -> str:
        with self._told_apart():
            newest = self._client.xrevrange(self._feed, count=1)
        return newest[0][0].decode() if newest else START

    def _feed_after(self, position: str, most: int) -> tuple[Sequence[bytes], str]:
        if position != START and not re.fullmatch(r"\d+-\d+", position):
            raise FeedGoneError(position)  # of a store of another kind
        with self._told_apart(), self._client.pipeline(transaction=True) as pipeline:
            # From the position on: that its entry is there says that none after it was removed.
            pipeline.xrange(self._feed, min=position or "-", count=most + (position != START))
            pipeline.xlen(self._feed)
            found, length = pipeline.execute()
        if position == START:
            if length >= MOST_ENTRIES:
                raise FeedGoneError(position)
        elif not found or found[0][0].decode() != position:
            raise FeedGoneError(position)
        else:
            found = found[1:]
        entries = [fields[_EVENTS] for _, fields in found]
        return entries, found[-1][0].decode() if found else position


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))
