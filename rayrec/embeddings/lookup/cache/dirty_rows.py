"""Changed rows between a cache that had no room for them and the update that takes them to the servers.

Until that update is sent they exist here and nowhere else.

Axes: K rows that leave, W words of a record, M ids of one call.
"""

from __future__ import annotations

import numpy as np

from rayrec.embeddings.storage.index import MISSING, IdIndex
from rayrec.platform.arrays import Int32Array, Int64Array


class LeavingRows:
    """Of one table. Not thread-safe."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64Array, Int32Array]] = []

    def add(self, ids_K: Int64Array, records_KW: Int32Array) -> None:
        """Rows that are not here yet."""
        if len(ids_K):
            self._parts.append((ids_K, records_KW))

    def take_back(self, ids_M: Int64Array) -> tuple[Int64Array, Int32Array | None]:
        """Rows that are wanted again and need not leave.

        Returns:
            ([K] positions in ids_M of those that were here, [K, W] their records; None where there are none).
        """
        positions, records = [], []
        for number, (ids_K, records_KW) in enumerate(self._parts):
            index = IdIndex(expected_ids=len(ids_K))
            index.find_or_add(ids_K)
            at_M = index.find(ids_M)
            found = np.flatnonzero(at_M != MISSING)
            if len(found):
                positions.append(found)
                records.append(records_KW[at_M[found]])
                stays_K = np.ones(len(ids_K), dtype=np.bool_)
                stays_K[at_M[found]] = False
                self._parts[number] = ids_K[stays_K], records_KW[stays_K]
        if not positions:
            return np.empty(0, dtype=np.int64), None
        return np.concatenate(positions), np.concatenate(records)

    def take_all(self) -> tuple[Int64Array, Int32Array] | None:
        """([K] ids, [K, W] records) of everything here, for the servers; None if there is nothing."""
        parts, self._parts = [part for part in self._parts if len(part[0])], []
        if len(parts) < 2:
            return parts[0] if parts else None
        ids, records = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(records)
