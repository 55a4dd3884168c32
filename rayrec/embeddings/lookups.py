"""The lookup and update stages of one trainer: which rows are read when.

Two modes give a trainer the rows of step t as they are after the update of step t - 1:

    sync             rows t ─► dense t ─► update t ─► rows t + 1 ...        each waits for the servers

    exact_prefetch   prefetch t + 1   ids that batch t does not touch: they need step t - 1 only
                     rows t           what was asked for earlier, most of it here already
                     dense t          the servers work on what prefetch asked for
                     update t         sent, not waited for; behind it goes the request for the overlap,
                                      the ids of t + 1 that batch t touches: they need step t

A request names the step it needs and the server holds it until that step is committed, so rows can be
late, never stale: both modes read the same bits. Not thread-safe; every trainer has its own object.

Axes: M distinct ids of one table, D numbers of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rayrec.embeddings.client import PendingRows, Reply, ShardClient, ShardTransport
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.index import MISSING, IdIndex
from rayrec.embeddings.routing import ShardMap
from rayrec.embeddings.shard import UpdateTag

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


class TableIds(Protocol):
    """The ids of one table that a batch reads; `rayrec.samples.batches.TableLookup` is one."""

    @property
    def ids_M(self) -> Int64Array:
        """Distinct ids of this trainer's share of the batch."""
        ...

    @property
    def touched(self) -> Int64Array:
        """Distinct ids of the whole global batch: those its update may change."""
        ...


Lookups = Mapping[str, TableIds]


@dataclass(frozen=True)
class TrainerLink:
    """How one trainer reaches the shards, and who it is to them."""

    tables: Sequence[TableConfig]
    shard_map: ShardMap
    transport: ShardTransport
    source: int = 0
    """Rank of the trainer."""
    incarnation: int = 0
    """Of the servers, under which its updates are sent."""
    clock: Callable[[], float] = time.perf_counter

    def client(self) -> ShardClient:
        return ShardClient(self.tables, self.shard_map, self.transport)

    def tag(self, step: int) -> UpdateTag:
        """Of the trainer's contribution to a step."""
        return UpdateTag(self.incarnation, step, self.source)


@dataclass
class LookupStats:
    """What one trainer waited for, and what was hidden from it."""

    rows_wait_s: float = 0.0
    """Time `rows` waited for servers."""
    update_wait_s: float = 0.0
    """Time `update` and `drain` waited for servers, not that of preparing what is sent."""
    num_early: int = 0
    """Rows asked for before the update of the step before was sent."""
    num_late: int = 0
    """Rows that had to wait for it."""
    num_cache_hits: int = 0
    """Rows that this trainer's cache held."""
    num_cache_misses: int = 0
    """Rows that it did not."""
    staleness_sum: int = 0
    """Over all batches, the updates that were not acknowledged when the rows were asked for."""
    max_staleness: int = 0
    """The most of them for one batch."""


OnRows = Callable[[int, dict[str, Float32Array]], None]
"""Called with a step and its rows when they are known before anybody asks for them."""


def ignore_rows(step: int, rows: dict[str, Float32Array]) -> None:
    """The rows will be asked for."""


class LookupMode(Protocol):
    """One trainer's view of the tables; the steps of a run come in order, without gaps."""

    on_rows: OnRows

    @property
    def stats(self) -> LookupStats: ...

    def prefetch(self, step: int, lookups: Lookups) -> None:
        """Announce a batch; its rows may be read ahead."""
        ...

    def receive(self, step: int) -> None:
        """Wait for what was asked for ahead of an announced batch, as a thread beside dense compute can."""
        ...

    def rows(self, step: int, lookups: Lookups) -> dict[str, Float32Array]:
        """[M, D] rows by table, in the order of ids_M, after the update of step - 1."""
        ...

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Float32Array]) -> None:
        """Send [M, D] gradients by table, in the order of ids_M; a table may be left out.

        Called for every step, also for one without ids: the servers wait for every trainer.
        """
        ...

    def drain(self) -> None:
        """Wait until the servers have every update that was sent; raises what they refused."""
        ...


class SyncLookups:
    """Everything in its turn; what the other mode is measured against."""

    def __init__(self, link: TrainerLink) -> None:
        self.stats = LookupStats()
        self.on_rows: OnRows = ignore_rows
        self._link = link
        self._client = link.client()
        self._clock = link.clock

    def prefetch(self, step: int, lookups: Lookups) -> None:
        """Nothing: rows are read when they are asked for."""

    def receive(self, step: int) -> None:
        """Nothing was asked for."""

    def rows(self, step: int, lookups: Lookups) -> dict[str, Float32Array]:
        ids = ids_by_table(lookups)
        everything = {name: np.arange(len(ids_M)) for name, ids_M in ids.items()}
        rows = self._client.empty_rows(ids)
        pending = self._client.request(ids, everything, after_step=step - 1)
        started = self._clock()
        pending.write_to(rows)
        self.stats.rows_wait_s += self._clock() - started
        self.stats.num_late += sum(map(len, ids.values()))
        return rows

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Float32Array]) -> None:
        sent = self._client.send(self._link.tag(step), ids_by_table(lookups), grads)
        started = self._clock()
        for reply in sent:
            reply.result()
        self.stats.update_wait_s += self._clock() - started

    def drain(self) -> None:
        """Nothing: every update was waited for."""


@dataclass
class _Announced:
    """A batch between its announcement and its update."""

    step: int
    lookups: Lookups
    requests: list[PendingRows] = field(default_factory=list)
    overlap: dict[str, Int64Array] = field(default_factory=dict)
    """Places, by table, of the ids that are asked for after the update of the step before."""
    num_requested: dict[str, int] = field(default_factory=dict)
    """Places, by table, that `requests` will fill; no place is asked for twice."""
    rows: dict[str, Float32Array] | None = None
    """What has arrived, in its place."""


class ExactPrefetch:
    """Reads the next batch ahead, except what the batch before it may still change.

    Called as prefetch(t + 1), rows(t), update(t). A batch whose predecessor was not announced is read
    after the predecessor's update: later, but just as exact. A refused update raises in the next
    `update` or in `drain`, and in `rows` if those rows depend on it.
    """

    def __init__(self, link: TrainerLink) -> None:
        self.stats = LookupStats()
        self.on_rows: OnRows = ignore_rows
        self._tables = {table.name: table for table in link.tables}
        self._link = link
        self._client = link.client()
        self._clock = link.clock
        self._announced: dict[int, _Announced] = {}
        self._unacknowledged: list[Reply[int]] = []

    def prefetch(self, step: int, lookups: Lookups) -> None:
        batch = _Announced(step, lookups)
        before = self._announced.get(step - 1)
        if before is None:
            # Updated already, or never announced: then any id may depend on it.
            everything = {name: np.arange(len(ids.ids_M)) for name, ids in lookups.items()}
            self._request(batch, everything, after_step=step - 1)
        else:
            early, batch.overlap = _split_by_touched(lookups, before.lookups)
            for name in lookups:
                if self._tables[name].evicts_at(step - 1):
                    # Any row may be given up when that step commits, also one that it does not touch.
                    early[name], batch.overlap[name] = early[name][:0], np.arange(len(lookups[name].ids_M))
            self._request(batch, early, after_step=step - 2)
        self._announced[step] = batch  # last: a batch whose requests could not be sent is not announced

    def receive(self, step: int) -> None:
        self._receive(self._announced[step])

    def rows(self, step: int, lookups: Lookups) -> dict[str, Float32Array]:
        if step not in self._announced:
            self.prefetch(step, lookups)
        batch = self._announced[step]
        self._request_overlap(batch)
        _check_complete(batch)
        self._receive(batch)
        rows, batch.rows = batch.rows, None
        batch.num_requested.clear()
        assert rows is not None
        return rows

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Float32Array]) -> None:
        # The servers keep contributions one step ahead of the slowest trainer, no more; to have sent
        # this one a step after an update that has not arrived would be two.
        self.drain()
        self._unacknowledged = self._client.send(self._link.tag(step), ids_by_table(lookups), grads)
        self._announced.pop(step, None)
        following = self._announced.get(step + 1)
        if following is not None:
            self._request_overlap(following)

    def drain(self) -> None:
        sent, self._unacknowledged = self._unacknowledged, []
        started = self._clock()
        for reply in sent:
            reply.result()
        self.stats.update_wait_s += self._clock() - started

    def _receive(self, batch: _Announced) -> None:
        if batch.rows is None:
            batch.rows = self._client.empty_rows(ids_by_table(batch.lookups))
        started = self._clock()
        for pending in batch.requests:
            pending.write_to(batch.rows)
        self.stats.rows_wait_s += self._clock() - started
        batch.requests.clear()

    def _request_overlap(self, batch: _Announced) -> None:
        if batch.overlap:
            self._request(batch, batch.overlap, after_step=batch.step - 1)
            batch.overlap = {}

    def _request(self, batch: _Announced, places: Mapping[str, Int64Array], after_step: int) -> None:
        batch.requests.append(self._client.request(ids_by_table(batch.lookups), places, after_step))
        for name, places_M in places.items():
            batch.num_requested[name] = batch.num_requested.get(name, 0) + len(places_M)
        num_ids = sum(map(len, places.values()))
        if after_step == batch.step - 1:
            self.stats.num_late += num_ids
        else:
            self.stats.num_early += num_ids


def ids_by_table(lookups: Lookups) -> dict[str, Int64Array]:
    return {name: ids.ids_M for name, ids in lookups.items()}


def _check_complete(batch: _Announced) -> None:
    """Rows are written into uninitialised memory: every place needs a request of its own."""
    for name, ids in batch.lookups.items():
        num_requested = batch.num_requested.get(name, 0)
        if num_requested != len(ids.ids_M):
            raise RuntimeError(
                f"step {batch.step}, table {name!r}: rows of {num_requested} of {len(ids.ids_M)} ids were "
                "asked for; the rows of a step can be taken once"
            )


def _split_by_touched(
    lookups: Lookups, before: Lookups
) -> tuple[dict[str, Int64Array], dict[str, Int64Array]]:
    """Places, by table, of the ids that the batch before does not touch, and of those it does."""
    early, overlap = {}, {}
    for name, ids in lookups.items():
        touched = IdIndex()
        if name in before:
            touched.find_or_add(before[name].touched)
        is_touched_M = touched.find(ids.ids_M) != MISSING
        early[name] = np.flatnonzero(~is_touched_M)
        overlap[name] = np.flatnonzero(is_touched_M)
    return early, overlap
