"""What the modes share that read the next batch ahead and stay exact.

    prefetch t + 1   what no step in flight can change is requested now
    rows t           wait for what was requested
    update t         gradients to the servers; what t + 1 needs of this step is known or requested behind it

The modes differ in where the rows are that two batches share: on the servers (`exact_prefetch`), with the
only trainer until the next step (`shared_row_write_back`), or in a cache (`cache.cached_lookups`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from rayrec.embeddings.lookup.cache.cached_records import Rows
from rayrec.embeddings.lookup.lookups import Lookups, LookupStats, OnRows, TrainerLink, ignore_rows
from rayrec.embeddings.transport.client import PendingRecords
from rayrec.embeddings.transport.protocol import Reply
from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array


@dataclass
class PrefetchedBatch:
    """A batch between its prefetch and its update."""

    step: int


BatchT = TypeVar("BatchT", bound=PrefetchedBatch)


class PrefetchingLookups(ABC, Generic[BatchT]):
    """Called as prefetch(t + 1), rows(t), update(t).

    A batch whose predecessor was not prefetched is read after the predecessor's update: later, but just as
    exact. A refused update raises in the next `update` or in `drain`, and in `rows` if those depend on it.
    """

    def __init__(self, link: TrainerLink) -> None:
        self.stats = LookupStats()
        self.on_rows: OnRows = ignore_rows
        self._tables = {table.name: table for table in link.tables}
        self._link = link
        self._client = link.client()
        self._clock = link.clock
        self._batches: dict[int, BatchT] = {}
        """By step."""
        self._unacknowledged: list[Reply[int]] = []
        """Of the last update."""

    @abstractmethod
    def prefetch(self, step: int, lookups: Lookups) -> None:
        """Request what may be read of a batch before the update of the step before."""

    def receive(self, step: int) -> None:
        """Wait for what was requested of a batch, before the update of the step before."""
        self._receive(self._batches[step])

    @abstractmethod
    def rows(self, step: int, lookups: Lookups) -> dict[str, Rows]:
        """As `LookupMode.rows`."""

    @abstractmethod
    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Rows]) -> None:
        """As `LookupMode.update`."""

    def drain(self) -> None:
        """As `LookupMode.drain`."""
        self._acknowledge()

    @abstractmethod
    def _receive(self, batch: BatchT) -> None:
        """Wait for what was requested of a batch."""

    def _acknowledge(self) -> None:
        """Wait for the servers' answers to the last update; raises what they refused."""
        sent, self._unacknowledged = self._unacknowledged, []
        started = self._clock()
        for reply in sent:
            reply.result()
        self.stats.update_wait_s += self._clock() - started

    def _write_back(self, after_step: int, dirty: Mapping[str, tuple[Int64Array, Int32Array]]) -> None:
        """Bring records that only this trainer has to the servers, and wait until they have them."""
        started = self._clock()
        for reply in self._client.write_back(self._link.incarnation, after_step, dirty):
            reply.result()
        self.stats.update_wait_s += self._clock() - started

    def _count_requested(self, num_ids: int, is_late: bool) -> None:
        if is_late:
            self.stats.num_late += num_ids
        else:
            self.stats.num_early += num_ids

    def _request_records(
        self, step: int, ids: Mapping[str, Int64Array], positions: Mapping[str, Int64Array], after_step: int
    ) -> PendingRecords:
        """Request whole records of a batch, at these positions of its ids."""
        num_ids = sum(map(len, positions.values()))
        pending = self._client.request_records(ids, positions, after_step)
        self.stats.num_cache_misses += num_ids
        self._count_requested(num_ids, is_late=after_step == step - 1)
        return pending

    def _received(
        self, requests: list[PendingRecords]
    ) -> list[tuple[str, Int64Array, Int32Array, BoolArray]]:
        """Wait for requested records, and empty the list; see `PendingRecords.received`."""
        started = self._clock()
        arrived = [part for pending in requests for part in pending.received()]
        self.stats.rows_wait_s += self._clock() - started
        requests.clear()
        return arrived


def refuse_rows(step: int, name: str, num_requested: int, num_ids: int) -> None:
    """Raise unless all rows of a table are requested: they are written into uninitialized memory.

    Raises:
        RuntimeError: other numbers of ids.
    """
    if num_requested != num_ids:
        raise RuntimeError(
            f"step {step}, table {name!r}: rows of {num_requested} of {num_ids} ids were asked for; the rows "
            "of a step can be taken once"
        )


def everything(ids: Mapping[str, Int64Array]) -> dict[str, Int64Array]:
    """All positions of each table's ids."""
    return {name: np.arange(len(ids_M)) for name, ids_M in ids.items()}
