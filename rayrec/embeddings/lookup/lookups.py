"""The lookup and update stages of one trainer: which rows are read when.

Mode `sync`, here, gives a trainer the rows of step t as they are after the update of step t - 1, everything
in its turn:

    rows t ─► dense t ─► update t ─► rows t + 1 ...        each waits for the servers

A request names the step it needs and the server holds it until that step is committed, so rows can be
late, never stale. Modes are not thread-safe; every trainer has its own object.

Axes: M distinct ids of one table, D numbers of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.lookup.cache.cached_records import Rows
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.transport.client import ShardClient
from rayrec.embeddings.transport.protocol import ShardTransport
from rayrec.platform.arrays import Float32Array, Int64Array


class TableIds(Protocol):
    """The ids of one table that a batch reads; `rayrec.samples.base.batches.TableLookup` is one."""

    @property
    def ids_M(self) -> Int64Array:
        """Distinct ids of this trainer's share of the batch."""
        ...

    @property
    def updated_ids(self) -> Int64Array:
        """Distinct ids of the whole global batch: those its update may change."""
        ...


Lookups = Mapping[str, TableIds]


@dataclass(frozen=True)
class TrainerLink:
    """How one trainer reaches the shards, and who it is to them."""

    tables: Sequence[TableConfig]
    shard_map: ShardMap
    transport: ShardTransport
    rank: int = 0
    """Rank of the trainer."""
    incarnation: int = 0
    """Of the servers, under which its updates are sent."""
    clock: Callable[[], float] = time.perf_counter
    is_in_group: bool = False
    """Whether the calls go to a `GroupCaller`, as if that were the only shard."""
    unasked_bytes: int | None = None
    """Of a part of a step that shards take without being asked for room (`shard.step_buffer`); None: any."""
    newest_events: dict[int, int] = field(default_factory=dict)
    """UNIX seconds of the newest event of every step in flight, for tables whose rows live for some hours."""

    def client(self) -> ShardClient:
        # The caller of a group asks for room itself, for the sum of all.
        unasked_bytes = None if self.is_in_group else self.unasked_bytes
        return ShardClient(self.tables, self.shard_map, self.transport, unasked_bytes)

    def tag(self, step: int) -> UpdateTag:
        """Of the trainer's contribution to a step."""
        return UpdateTag(self.incarnation, step, self.rank, newest_event=self.newest_events.get(step))

    def lookup_tag(self, step: int) -> UpdateTag | None:
        """Of a lookup for a step's batch; None where nobody waits for it."""
        return self.tag(step) if self.is_in_group else None


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
    """Rows that this trainer held: in its cache, or since the batch before."""
    num_cache_misses: int = 0
    """Rows that it did not."""
    max_staleness: int = 0
    """The most updates that were not acknowledged when the rows of a batch were asked for."""


OnRows = Callable[[int, dict[str, Rows]], None]
"""Called with a step and its rows when they are known before anybody asks for them."""


def ignore_rows(step: int, rows: dict[str, Rows]) -> None:
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

    def rows(self, step: int, lookups: Lookups) -> dict[str, Rows]:
        """[M, D] rows by table, in the order of ids_M, after the update of step - 1.

        Arrays, or tensors of the trainer's device where a mode holds rows there.
        """
        ...

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Rows]) -> None:
        """Send [M, D] gradients by table, in the order of ids_M; a table may be left out.

        Of the same kind as the rows of the step.

        Called for every step, also for one without ids: the servers wait for every trainer.
        """
        ...

    def drain(self) -> None:
        """Wait until the servers have every update that was sent; raises what they refused."""
        ...


class NoLookups:
    """Of a model without tables, which has no servers to ask."""

    def __init__(self) -> None:
        self.on_rows: OnRows = ignore_rows
        self.stats = LookupStats()

    def prefetch(self, step: int, lookups: Lookups) -> None:
        pass

    def receive(self, step: int) -> None:
        pass

    def rows(self, step: int, lookups: Lookups) -> dict[str, Rows]:
        assert not lookups, "there are no tables"
        return {}

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Rows]) -> None:
        assert not grads, "there are no tables"

    def drain(self) -> None:
        pass


class SyncLookups:
    """Everything in its turn; what the other modes are measured against."""

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
        pending = self._client.request(ids, everything, after_step=step - 1, tag=self._link.lookup_tag(step))
        started = self._clock()
        pending.write_to(rows)
        self.stats.rows_wait_s += self._clock() - started
        self.stats.num_late += sum(map(len, ids.values()))
        return rows

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Float32Array]) -> None:
        held_back_s = self._client.held_back_s
        sent = self._client.send(self._link.tag(step), ids_by_table(lookups), grads)
        started = self._clock()
        for reply in sent:
            reply.result()
        self.stats.update_wait_s += self._clock() - started + self._client.held_back_s - held_back_s

    def drain(self) -> None:
        """Nothing: every update was waited for."""


def ids_by_table(lookups: Lookups) -> dict[str, Int64Array]:
    return {name: ids.ids_M for name, ids in lookups.items()}
