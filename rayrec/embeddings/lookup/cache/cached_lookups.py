"""The lookup and update stages of a trainer that holds rows: `exact_prefetch` with a cache.

Every id belongs to one trainer (by its virtual bucket), whatever trainer's batch names it. Only the owner
asks servers for it, holds its row, adds up its gradients in rank order and applies them; so no two caches
can disagree, and rows stay those of `sync`, bit for bit.

    prefetch t + 1   ids to their owners; the owner asks servers for what it does not hold, except ids that
                     batch t is still waiting for: where those are is known after update t
    rows t           replies into the cache; rows from their owners to whose batch it is
    update t         gradients to the owners, who change the rows they hold. To the servers go: rows that
                     had to leave the cache, and gradients of ids without a row or without room in a cache

An id without a row is never cached: whether it gets one is the server's decision, and it has counts to
keep for it. Where step t evicts, every changed row goes to the servers with update t, so that they choose
by what all steps left behind; the evicted rows leave the caches, and nothing of those tables is read ahead
across that commit.

Axes: M distinct ids of one table in this trainer's part of the batch, U distinct ids that this trainer owns
of the global batch, K rows that leave the cache, W words of a record, D numbers of a row, T trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rayrec.embeddings.base.exchange import Exchange
from rayrec.embeddings.lookup.cache.cached_records import Rows, on_host
from rayrec.embeddings.lookup.cache.ownership import OwnersByBucket, Ownership, Route, SoleOwner
from rayrec.embeddings.lookup.cache.row_cache import NOT_CACHED, MakeCache, RowCache
from rayrec.embeddings.lookup.lookups import (
    Lookups,
    TrainerLink,
    ids_by_table,
)
from rayrec.embeddings.lookup.prefetching import PrefetchedBatch, PrefetchingLookups
from rayrec.embeddings.storage.index import MISSING, IdIndex
from rayrec.embeddings.transport.client import PendingRecords
from rayrec.platform.arrays import BoolArray, Float32Array, Int32Array, Int64Array

_NO_IDS = np.empty(0, dtype=np.int64)


@dataclass
class _OwnedIds:
    """The ids of one table and one batch that this trainer owns."""

    route: Route
    slots_U: Int64Array
    """Where the cache has the row; NOT_CACHED until then, or for good."""
    deferred: Int64Array = field(default_factory=lambda: _NO_IDS)
    """Positions that are looked at again behind the update of the step before."""
    num_arrived: int = 0
    """Ids whose rows are here; none any more when they were taken."""
    uncached: list[tuple[Int64Array, Rows]] = field(default_factory=list)
    """Positions and rows of what arrived and is not in the cache."""

    @property
    def ids_U(self) -> Int64Array:
        return self.route.owned_ids_U

    def is_undecided(self, ids_M: Int64Array) -> BoolArray:
        """[M] whether the update of this batch decides where the id's row is, and what it is."""
        index = IdIndex()
        index.find_or_add(self.ids_U[self.slots_U == NOT_CACHED])
        return index.find(ids_M) != MISSING


class _LeavingRows:
    """Dirty rows of one table, between a cache without room for them and the update that sends them.

    Until that update is sent they exist here and nowhere else. Not thread-safe.
    """

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


@dataclass
class _OwnedBatch(PrefetchedBatch):
    owned: dict[str, _OwnedIds] = field(default_factory=dict)
    requests: list[PendingRecords] = field(default_factory=list)


class CachedLookups(PrefetchingLookups[_OwnedBatch]):
    """One trainer's part; all trainers call the same methods in the same order.

    Without the prefetch a batch is read in its turn.
    """

    def __init__(
        self,
        link: TrainerLink,
        *,
        cache_rows: int,
        exchange: Exchange | None = None,
        make_cache: MakeCache = RowCache,
    ) -> None:
        """Make an empty cache for each table.

        Args:
            cache_rows: rows of each table that this trainer may hold.
            exchange: how the trainers reach each other; None if this is the only one.
            make_cache: where the rows are held. What a cache gives and takes, rows and gradients, may be
                tensors of a device; they are arrays to servers and other trainers.
        """
        super().__init__(link)
        self._caches = {table.name: make_cache(table, cache_rows) for table in link.tables}
        self._owners: Ownership = SoleOwner() if exchange is None else OwnersByBucket(exchange)
        self._leaving = {name: _LeavingRows() for name in self._tables}
        self._last_step = -1
        self._taken: dict[int, dict[str, Rows]] = {}
        """Rows of a batch that nobody has asked for yet."""

    @property
    def num_bytes(self) -> int:
        """Memory of the caches."""
        return sum(cache.num_bytes for cache in self._caches.values())

    def prefetch(self, step: int, lookups: Lookups) -> None:
        batch = _OwnedBatch(step)
        before = self._batches.get(step - 1)
        early: dict[str, Int64Array] = {}
        for name in self._tables:
            ids_M = lookups[name].ids_M if name in lookups else _NO_IDS
            route = self._owners.collect(ids_M)
            batch.owned[name] = owned = _OwnedIds(route, _no_slots(len(route.owned_ids_U)))
            if before is not None and self._tables[name].evicts_at(step - 1):
                owned.deferred = np.arange(len(owned.ids_U))
                continue
            owned.slots_U = self._caches[name].find(owned.ids_U)
            self._hold(name, owned, owned.slots_U)
            self._take_back(name, owned)
            absent = np.flatnonzero(owned.slots_U == NOT_CACHED)
            is_late = np.isin(absent, owned.deferred)
            if before is not None:
                is_late |= before.owned[name].is_undecided(owned.ids_U[absent])
            owned.deferred, early[name] = absent[is_late], absent[~is_late]
        self._request(batch, early, after_step=step - 1 if before is None else step - 2)
        self._batches[step] = batch

    def rows(self, step: int, lookups: Lookups) -> dict[str, Rows]:
        if step not in self._batches:
            self.prefetch(step, lookups)
        if step not in self._taken:
            self._take_rows(self._batches[step])
        return {name: rows_MD for name, rows_MD in self._taken.pop(step).items() if name in lookups}

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Rows]) -> None:
        self._client.check_shapes(step, ids_by_table(lookups), grads)
        batch = self._batches[step]
        owned_grads = {
            name: self._owners.gradients(batch.owned[name].route, grads.get(name), table.dim)
            for name, table in self._tables.items()
        }
        for name, (positions, grads_UD) in owned_grads.items():
            self._caches[name].check_gradients(batch.owned[name].ids_U[positions], grads_UD)
        self._acknowledge()
        uncached = {
            name: self._apply(name, batch.owned[name], positions, grads_UD, step)
            for name, (positions, grads_UD) in owned_grads.items()
        }
        swept = [name for name, table in self._tables.items() if table.evicts_at(step)]
        for name in swept:
            self._leaving[name].add(*self._caches[name].take_changed())
        following = self._batches.get(step + 1)
        if following is not None and self._is_complete(following):
            # What dense compute waits for comes before what only the servers wait for.
            self._take_rows(following)
        ids = {name: ids_M for name, (ids_M, _) in uncached.items()}
        uncached_grads = {name: grads_MD for name, (_, grads_MD) in uncached.items()}
        self._unacknowledged = self._client.send(
            self._link.tag(step), ids, uncached_grads, self._take_leaving()
        )
        del self._batches[step]
        self._last_step = step
        if swept:
            started = self._clock()
            for name, ids_V in self._client.evicted(since_step=step - 1, after_step=step).items():
                self._caches[name].forget(ids_V)
            self.stats.update_wait_s += self._clock() - started
        if following is not None and step + 1 not in self._taken:
            self._decide_deferred(following)

    def drain(self) -> None:
        """Bring every changed row to the servers; the caches keep them."""
        self._acknowledge()
        for name, cache in self._caches.items():
            self._leaving[name].add(*cache.take_changed())
        self._write_back(self._last_step, self._take_leaving())

    def _hold(self, name: str, owned: _OwnedIds, slots_M: Int64Array) -> None:
        """Pin the rows of a batch that the cache has."""
        held = slots_M[slots_M != NOT_CACHED]
        owned.num_arrived += len(held)
        self._caches[name].pin(held)
        self.stats.num_early += len(held)
        self.stats.num_cache_hits += len(held)

    def _take_back(self, name: str, owned: _OwnedIds) -> None:
        """Rows that left the cache, but not yet for the servers, return to it: no server has them."""
        absent = np.flatnonzero(owned.slots_U == NOT_CACHED)
        found, records = self._leaving[name].take_back(owned.ids_U[absent])
        if records is None:
            return
        positions, cache = absent[found], self._caches[name]
        owned.slots_U[positions], leaving = cache.insert(owned.ids_U[positions], records, changed=True)
        self._leaving[name].add(*leaving)
        no_room = owned.slots_U[positions] == NOT_CACHED
        owned.deferred = positions[no_room]
        self._leaving[name].add(owned.ids_U[owned.deferred], records[no_room])
        owned.num_arrived += len(positions) - len(owned.deferred)
        self.stats.num_cache_hits += len(positions) - len(owned.deferred)

    def _request(self, batch: _OwnedBatch, positions: Mapping[str, Int64Array], after_step: int) -> None:
        ids = {name: owned.ids_U for name, owned in batch.owned.items()}
        batch.requests.append(self._request_records(batch.step, ids, positions, after_step))

    def _receive(self, batch: _OwnedBatch) -> None:
        """Wait for the requested records; into the cache with the rows among them."""
        for name, positions, records_MW, is_row_M in self._received(batch.requests):
            owned, cache = batch.owned[name], self._caches[name]
            rows = positions if is_row_M.all() else positions[is_row_M]
            records = records_MW if is_row_M.all() else records_MW[is_row_M]
            slots, leaving = cache.insert(owned.ids_U[rows], records)
            self._leaving[name].add(*leaving)
            owned.slots_U[rows] = slots
            outside_M = owned.slots_U[positions] == NOT_CACHED
            if outside_M.any():
                owned.uncached.append((positions[outside_M], cache.weights(records_MW[outside_M])))
            owned.num_arrived += len(positions)

    def _is_complete(self, batch: _OwnedBatch) -> bool:
        """Whether the rows of a batch need nothing but what the caches hold or have received."""
        # With other trainers it takes their part to put rows together, and one that waits for them before
        # it has sent its update could be waited for by them.
        return self._owners.is_sole and all(
            owned.num_arrived == len(owned.ids_U) for owned in batch.owned.values()
        )

    def _take_rows(self, batch: _OwnedBatch) -> None:
        self._receive(batch)
        self._taken[batch.step] = {
            name: self._owners.rows_back(owned.route, self._owned_rows(name, owned))
            for name, owned in batch.owned.items()
        }
        self.on_rows(batch.step, self._taken[batch.step])

    def _owned_rows(self, name: str, owned: _OwnedIds) -> Rows:
        if owned.num_arrived != len(owned.ids_U):
            raise RuntimeError(
                f"table {name!r}: rows of {owned.num_arrived} of {len(owned.ids_U)} ids have arrived; the "
                "rows of a step can be taken once, behind the update of the step before"
            )
        owned.num_arrived = 0
        # Where the cache has nothing this writes first values; what did arrive is written over them.
        rows_UD = self._caches[name].gather(owned.slots_U, owned.ids_U)
        for positions, rows_MD in owned.uncached:
            rows_UD[positions] = rows_MD
        return rows_UD

    def _apply(
        self, name: str, owned: _OwnedIds, positions: Int64Array, grads_MD: Rows, step: int
    ) -> tuple[Int64Array, Float32Array]:
        """Change the rows in the cache and let go of them; (ids, gradients) of the others."""
        cache, slots_M, ids_M = self._caches[name], owned.slots_U[positions], owned.ids_U[positions]
        is_held_M = slots_M != NOT_CACHED
        if is_held_M.all():  # most often, and then there is nothing to pick
            cache.apply(slots_M, ids_M, grads_MD, step)
        else:
            cache.apply(slots_M[is_held_M], ids_M[is_held_M], grads_MD[is_held_M], step)
        cache.unpin(owned.slots_U[owned.slots_U != NOT_CACHED])
        return ids_M[~is_held_M], on_host(grads_MD[~is_held_M])

    def _decide_deferred(self, batch: _OwnedBatch) -> None:
        """The update before this batch is sent: what is not in the cache now is asked for behind it."""
        late: dict[str, Int64Array] = {}
        for name, owned in batch.owned.items():
            positions, owned.deferred = owned.deferred, _NO_IDS
            slots_M = self._caches[name].find(owned.ids_U[positions])
            owned.slots_U[positions] = slots_M
            self._hold(name, owned, slots_M)
            late[name] = positions[slots_M == NOT_CACHED]
        self._request(batch, late, after_step=batch.step - 1)

    def _take_leaving(self) -> dict[str, tuple[Int64Array, Int32Array]]:
        parts = {name: leaving.take_all() for name, leaving in self._leaving.items()}
        return {name: part for name, part in parts.items() if part is not None}


def _no_slots(num_ids: int) -> Int64Array:
    return np.full(num_ids, NOT_CACHED, dtype=np.int64)
