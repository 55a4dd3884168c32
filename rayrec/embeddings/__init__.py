"""Sparse engine: id index, tables, optimizers, sharding. No Ray in here.

    from rayrec.embeddings import EmbeddingShard, ExactPrefetch, TableConfig

May import `platform`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.platform.lazy_names import lazy_names

if TYPE_CHECKING:
    from rayrec.embeddings.base.routing import ShardMap as ShardMap
    from rayrec.embeddings.config import RowwiseAdagradConfig as RowwiseAdagradConfig
    from rayrec.embeddings.config import TableConfig as TableConfig
    from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch as ExactPrefetch
    from rayrec.embeddings.lookup.lookups import SyncLookups as SyncLookups
    from rayrec.embeddings.lookup.lookups import TrainerLink as TrainerLink
    from rayrec.embeddings.shard.shard import EmbeddingShard as EmbeddingShard
    from rayrec.embeddings.snapshot.snapshot import load_tables as load_tables
    from rayrec.embeddings.snapshot.snapshot import write_table as write_table
    from rayrec.embeddings.table.table import EmbeddingTable as EmbeddingTable
    from rayrec.embeddings.transport.client import LocalTransport as LocalTransport
    from rayrec.embeddings.transport.client import ShardClient as ShardClient

__all__, __getattr__ = lazy_names(__name__, __file__)
