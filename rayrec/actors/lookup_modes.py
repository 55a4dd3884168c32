"""Which of the lookup modes a trainer uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayrec.embeddings.bounded_stale import BoundedStale
from rayrec.embeddings.cached_lookups import CachedLookups
from rayrec.embeddings.client import ShardTransport
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.exchange import Exchange
from rayrec.embeddings.lookups import ExactPrefetch, LookupMode, SyncLookups
from rayrec.embeddings.routing import ShardMap
from rayrec.embeddings.threaded_lookups import ThreadedLookups


@dataclass(frozen=True)
class LookupSettings:
    """How rows are read."""

    mode: Literal["sync", "exact_prefetch", "bounded_stale"] = "exact_prefetch"
    max_staleness: int = 0
    """In mode `bounded_stale`: updates that the rows of a batch may lack."""
    cache_rows: int = 0
    """In mode `exact_prefetch`: rows of each table that the trainer may hold."""


def make_lookups(
    settings: LookupSettings,
    tables: Sequence[TableConfig],
    shard_map: ShardMap,
    transport: ShardTransport,
    source: int,
    incarnation: int,
    exchange: Exchange | None,
) -> LookupMode:
    """One trainer's view of the tables under an incarnation of the servers; all but `sync` in a thread.

    Args:
        exchange: how the trainers reach each other; None if this is the only one.
    """
    arguments = (settings, tables, shard_map, transport, source, incarnation, exchange)
    mode = _mode(*arguments)
    return mode if settings.mode == "sync" else ThreadedLookups(mode)


def _mode(
    settings: LookupSettings,
    tables: Sequence[TableConfig],
    shard_map: ShardMap,
    transport: ShardTransport,
    source: int,
    incarnation: int,
    exchange: Exchange | None,
) -> LookupMode:
    match settings.mode:
        case "sync":
            return SyncLookups(tables, shard_map, transport, source, incarnation)
        case "bounded_stale":
            return BoundedStale(
                tables, shard_map, transport, source, incarnation, max_staleness=settings.max_staleness
            )
        case "exact_prefetch" if settings.cache_rows:
            return CachedLookups(
                tables,
                shard_map,
                transport,
                source,
                incarnation,
                cache_rows=settings.cache_rows,
                exchange=exchange,
            )
        case "exact_prefetch":
            return ExactPrefetch(tables, shard_map, transport, source, incarnation)
