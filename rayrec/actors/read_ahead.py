"""Which rows coming batches will read, told to the servers that hold them on disk, batches before they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.samples.base.batches import BatchShare


class ReadAhead:
    """Announces batches to the parameter servers; nobody waits for an answer, and none changes a result."""

    def __init__(self, tables: Sequence[TableConfig], servers: Sequence[Any]) -> None:
        self._tables = tables
        self._servers = servers
        shard_map = ShardMap(len(servers)) if servers else None
        self._on_disk = {
            table.name: shard_map.among(table.servers)
            for table in tables
            if table.disk is not None and shard_map is not None
        }

    def to(self, servers: Sequence[Any]) -> ReadAhead:
        """The same to other servers."""
        return ReadAhead(self._tables, servers)

    def __call__(self, shares: Sequence[BatchShare]) -> None:
        """Start reading the rows of a step before they are asked for.

        Args:
            shares: of one global batch, one per trainer.
        """
        requests: list[dict[str, np.ndarray]] = [{} for _ in self._servers]
        for name, shard_map in self._on_disk.items():
            ids_M = shares[0].lookups[name].updated_ids  # of all shares
            for shard, at in enumerate(shard_map.split(ids_M)):
                if len(at):
                    requests[shard][name] = ids_M[at]
        for server, request in zip(self._servers, requests, strict=True):
            if request:
                server.prefetch.remote(request)
