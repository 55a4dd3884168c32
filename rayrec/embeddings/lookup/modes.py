"""Which of the lookup modes a trainer uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.embeddings.base.exchange import Exchange
from rayrec.embeddings.base.row_codec import Wire
from rayrec.embeddings.lookup.bounded_stale import BoundedStale
from rayrec.embeddings.lookup.cache.cached_lookups import CachedLookups
from rayrec.embeddings.lookup.cache.row_cache import MakeCache, RowCache
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import LookupMode, NoLookups, SyncLookups, TrainerLink
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from rayrec.platform.devices import Device


@dataclass(frozen=True)
class LookupSettings:
    """How rows are read."""

    mode: Literal["sync", "exact_prefetch", "bounded_stale"] = "exact_prefetch"
    max_staleness: int = 0
    """In mode `bounded_stale`: updates that the rows of a batch may lack."""
    cache_rows: int = 0
    """In mode `exact_prefetch`: rows of each table that the trainer may hold."""
    wire: Wire = "float32"
    """How rows and gradients travel; rows can be held with float32 only."""


def make_lookups(
    settings: LookupSettings,
    link: TrainerLink,
    exchange: Exchange | None,
    make_cache: MakeCache = RowCache,
) -> LookupMode:
    """One trainer's view of the tables; all but `sync` in a thread.

    Args:
        exchange: how the trainers reach each other; None if this is the only one.
        make_cache: where a cache keeps its rows; see `caches_on`.
    """
    if not link.tables:
        return NoLookups()
    match settings.mode:
        case "sync":
            return SyncLookups(link)
        case "bounded_stale":
            return ThreadedLookups(BoundedStale(link, max_staleness=settings.max_staleness))
        case "exact_prefetch" if settings.cache_rows:
            cached = CachedLookups(
                link, cache_rows=settings.cache_rows, exchange=exchange, make_cache=make_cache
            )
            return ThreadedLookups(cached)
        case "exact_prefetch":
            # Held rows need one owner, which the only trainer is; and they are not what a narrow wire gives.
            holds_rows = exchange is None and settings.wire == "float32"
            return ThreadedLookups(SharedRowWriteBack(link) if holds_rows else ExactPrefetch(link))


def caches_on(device: Device) -> MakeCache:
    """Caches that keep their rows where the device computes."""
    if not device.has_own_memory:
        return RowCache
    # Only here: the sparse engine does without torch where it can.
    from rayrec.embeddings.lookup.cache.device_cache import device_caches

    return device_caches(device.torch)
