"""Event stores: the histories that samples name by a key instead of carrying them.

    rayrec data store clicks/ stores/clicks     # or redis://host:6379/0#clicks; again, when files have come
    rayrec data keys stores/clicks samples/     # user, item, time of every event that has one before it

    data:
      features:
        - {op: join_history, store: stores/clicks, last: 200,
           outputs: {item_ids: items, item_times: times, kinds: behaviors}}
        - {op: concat, inputs: [item_ids, item_id], output: item_ids}

What a row gets is what its key had before the row's time, whatever was appended since with later times. An
event that comes late, with a time of the past, is there from then on, for rows that are read again too.

A run's folder keeps its settings in plain text: put a password into the environment, as in
`redis://trainer:${STORE_PASSWORD}@host:6379/0#clicks`.

`store` says what a store keeps, `chunks` and `encoding` how, `key_values` on what, `lmdb_store` and
`redis_store` where; `feed` is what came of late, `recent` what users did last; `lookup` cuts histories at a
time, `join` makes an operation of it; `build` and `key_samples` are the commands.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, urlsplit

from rayrec.platform.errors import InputError
from rayrec.samples.stores.batches import AppendReport, EventBatch, Histories, TimeWindow
from rayrec.samples.stores.errors import StoreUnavailableError
from rayrec.samples.stores.key_values import KeyValues
from rayrec.samples.stores.manifest import By, StoreManifest
from rayrec.samples.stores.retry import Retry, RetryConfig
from rayrec.samples.stores.store import EventStore, KeyValueEvents

__all__ = [
    "AppendReport",
    "EventBatch",
    "EventStore",
    "Histories",
    "KeyValueEvents",
    "KeyValues",
    "RetryConfig",
    "StoreManifest",
    "StoreUnavailableError",
    "TimeWindow",
    "open_store",
    "open_values",
]


def open_store(
    address: str | Path,
    config: RetryConfig | None = None,
    create: StoreManifest | None = None,
    sleep: Callable[[float], None] = time.sleep,
    by: By = "user",
) -> KeyValueEvents:
    """The store at a path (LMDB) or a URL (redis://, rediss://).

    Args:
        address: `${NAME}` in a URL stands for a variable of the environment.
        create: make the store if there is none.
        by: which side of it: what users did, or who met an item.

    Raises:
        InputError: there is no store, it cannot be read, nothing knows such an address, or the environment
            lacks a variable of it.
        StoreUnavailableError: it does not answer.
    """
    config = config or RetryConfig()
    retry = Retry(config, sleep)
    if _is_url(address):
        return _redis().RedisStore(_with_variables(str(address)), config, retry, create, by)
    from rayrec.samples.stores.lmdb_store import LmdbStore

    return LmdbStore(address, retry, create, by)


def open_values(
    address: str | Path,
    config: RetryConfig | None = None,
    create: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> KeyValues:
    """The values at a path (LMDB) or a URL (redis://, rediss://), whatever is kept there.

    Args:
        address: as `open_store` takes it.
        create: make the folder if there is none.

    Raises:
        InputError: as `open_store`; that a server does not answer is seen with the first request.
    """
    config = config or RetryConfig()
    retry = Retry(config, sleep)
    if _is_url(address):
        return _redis().RedisValues(_with_variables(str(address)), config, retry)
    from rayrec.samples.stores.lmdb_store import LmdbValues

    return LmdbValues(address, retry, create)


def _is_url(address: str | Path) -> bool:
    scheme = urlsplit(str(address)).scheme if "://" in str(address) else ""
    if scheme in ("", "redis", "rediss"):
        return bool(scheme)
    raise InputError(f"expected a folder, or a redis:// or rediss:// URL; nothing here reads {scheme}://")


def _redis() -> ModuleType:
    try:
        from rayrec.samples.stores import redis_store
    except ImportError as error:
        raise InputError(
            "an event store in Redis needs its client; install it with `pip install 'rayrec[redis]'`"
        ) from error
    return redis_store


def _with_variables(url: str) -> str:
    def value_of(name: re.Match[str]) -> str:
        if name[1] not in os.environ:
            raise InputError(
                f"{url}: the environment has no variable {name[1]}; set it for every process that opens the "
                "event store (on a Ray cluster, on every node)"
            )
        return quote(os.environ[name[1]], safe="")

    return re.sub(r"\$\{(\w+)\}", value_of, url)
