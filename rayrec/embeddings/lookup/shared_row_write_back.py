"""The lookup and update stages of the only trainer: `exact_prefetch` with shared-row write-back.

    prefetch t + 1   records of the ids that batch t does not update: they need step t - 1 only; the others'
                     records, which this trainer has, are copied for t + 1
    rows t           what was requested earlier and what was held
    dense t          the servers work on what prefetch requested
    update t         first the rows that t + 1 shares: they are changed here, without waiting for a server.
                     Then, beside dense t + 1, to the servers: gradients of rows that they have, and dirty
                     rows that t + 1 does not read

A held row is dirty: it is the row, and the server's copy is older until the record is written back. Ids
without a row are never held: whether one gets a row is the server's decision, so those of the overlap are
requested after the update. Where step t evicts, every held row goes to the servers with update t, and
everything that t + 1 reads is requested after it. So rows stay those of `sync`, bit for bit. With several
trainers a row that is held would have to have one owner: see `cached_lookups`.

Axes: M distinct ids of one table, K of them, W words of a record, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rayrec.embeddings.lookup.lookups import Lookups, TrainerLink
from rayrec.embeddings.lookup.overlap import NO_POSITIONS, Overlap, all_but
from rayrec.embeddings.lookup.prefetching import PrefetchedBatch, PrefetchingLookups, refuse_rows
from rayrec.embeddings.storage.records import RecordArray
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.embeddings.transport.client import PendingRecords
from rayrec.platform.arrays import BoolArray, Float32Array, Int32Array, Int64Array

_NOWHERE, _HELD = -1, 0
"""Among `_BatchRows.sources`."""


class _BatchRows:
    """The rows of one table and batch: where each record is, and the weights."""

    def __init__(self, ids_M: Int64Array, ops: RowOperations) -> None:
        self.ids_M = ids_M
        self.rows_MD = np.empty((len(ids_M), ops.layout.dim), dtype=np.float32)
        self.num_arrived = 0
        """Positions with weights; none any more when they were taken."""
        self.overlap = Overlap()
        """With the batch before."""
        self.late = NO_POSITIONS
        """Positions that are asked for behind the update of the batch before."""
        self._ops = ops
        self._sources = [RecordArray(np.empty((0, ops.num_words), dtype=np.int32))]
        """What was held, then what has arrived."""
        self._source_M = np.full(len(ids_M), _NOWHERE, dtype=np.int16)
        """Which of them has the record; NOWHERE of an id without a row."""
        self._row_M = np.zeros(len(ids_M), dtype=np.int64)
        """And which of its records it is."""
        self._held_places = NO_POSITIONS

    @property
    def held(self) -> tuple[Int64Array, Int32Array]:
        """(ids [K], records [K, W]) of rows that no server has as they are here."""
        return self.ids_M[self._held_places], self._sources[_HELD].array

    def take_arrived(self, positions_K: Int64Array, records_KW: Int32Array, is_row_K: BoolArray) -> None:
        self._ops.scatter_weights(records_KW, positions_K, self.rows_MD)
        self._source_M[positions_K] = np.where(is_row_K, len(self._sources), _NOWHERE)
        self._row_M[positions_K] = np.arange(len(positions_K))
        self._sources.append(RecordArray(records_KW))
        self.num_arrived += len(positions_K)

    def take_held(self, positions_K: Int64Array, records_KW: Int32Array) -> None:
        self._ops.scatter_weights(records_KW, positions_K, self.rows_MD)
        self._source_M[positions_K] = _HELD
        self._row_M[positions_K] = np.arange(len(positions_K))
        self._sources[_HELD] = RecordArray(records_KW)
        self._held_places = positions_K
        self.num_arrived += len(positions_K)

    def copies(self, positions_K: Int64Array) -> Int32Array:
        """[K, W] records of positions that have one."""
        records_KW = np.empty((len(positions_K), self._ops.num_words), dtype=np.int32)
        source_K, row_K = self._source_M[positions_K], self._row_M[positions_K]
        for number, source in enumerate(self._sources):
            at = np.flatnonzero(source_K == number)
            source.copy_to(row_K[at], records_KW, at)
        return records_KW

    def has_record(self, positions_K: Int64Array) -> BoolArray:
        return self._source_M[positions_K] != _NOWHERE

    def is_held(self, positions_K: Int64Array) -> BoolArray:
        return self._source_M[positions_K] == _HELD


@dataclass
class _Shared:
    """Rows of one table that the next batch reads again."""

    of_this: Int64Array
    """[K] positions among this batch's ids."""
    of_next: Int64Array
    """[K] positions among the next batch's."""
    records_KW: Int32Array


@dataclass
class _SharingBatch(PrefetchedBatch):
    tables: dict[str, _BatchRows] = field(default_factory=dict)
    requests: list[PendingRecords] = field(default_factory=list)
    is_behind: bool = False
    """Whether what was asked for needs the update of the step before."""
    shared: dict[str, _Shared] | None = None
    """With the next batch; None until it is set apart."""


class SharedRowWriteBack(PrefetchingLookups[_SharingBatch]):
    """Keeps rows that the next batch reads again, and writes them back when a batch no longer reads them.

    Gradients that are not finite raise in the `update` that has them.
    """

    def __init__(self, link: TrainerLink) -> None:
        super().__init__(link)
        self._ops = {table.name: RowOperations(table) for table in link.tables}
        self._last_step = -1

    def prefetch(self, step: int, lookups: Lookups) -> None:
        if step in self._batches:
            # A second prefetch would request dirty rows from servers, whose copies are older.
            return
        batch, before = _SharingBatch(step), self._batches.get(step - 1)
        early = {}
        for name, ids in lookups.items():
            batch.tables[name] = mine = _BatchRows(ids.ids_M, self._operations(name))
            if before is not None and self._tables[name].evicts_at(step - 1):
                # Any row may be given up when that step commits, also one that it does not touch.
                mine.late = np.arange(len(mine.ids_M))
            elif before is not None and name in before.tables:
                mine.overlap = Overlap.of_sole_trainer(before.tables[name].ids_M, mine.ids_M)
            early[name] = all_but(len(mine.ids_M), mine.late, mine.overlap.of_next)
        batch.is_behind = before is None
        self._request(batch, early, after_step=step - 1 if before is None else step - 2)
        self._batches[step] = batch  # last: a batch whose requests could not be sent may be prefetched again
        if before is not None:
            before.shared = None
            # Now, beside dense compute, if the rows of the batch before have arrived; else in its update.
            if not before.requests:
                self._set_apart(before, batch)

    def rows(self, step: int, lookups: Lookups) -> dict[str, Float32Array]:
        if step not in self._batches:
            self.prefetch(step, lookups)
        batch = self._batches[step]
        self._request_late(batch)
        self._receive(batch)
        for name, mine in batch.tables.items():
            refuse_rows(step, name, mine.num_arrived, len(mine.ids_M))
            mine.num_arrived = -1
        return {name: mine.rows_MD for name, mine in batch.tables.items()}

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Float32Array]) -> None:
        self._acknowledge()
        if step not in self._batches:
            raise RuntimeError(f"step {step}: there is no update without rows, and one for them")
        batch, following = self._batches[step], self._batches.get(step + 1)
        ids = {name: mine.ids_M for name, mine in batch.tables.items()}
        self._client.check_shapes(step, ids, grads)
        # Before anything changes: shared rows take the step here, and a server that refused the rest later
        # could not take that back.
        self._client.check_finite(step, ids, grads)
        del self._batches[step]
        if following is not None:
            self._hand_on(batch, following, grads)
            if not following.is_behind and all(len(mine.late) == 0 for mine in following.tables.values()):
                self._receive(following)
                # What dense compute waits for comes before what only the servers wait for.
                self.on_rows(step + 1, {name: mine.rows_MD for name, mine in following.tables.items()})
        self._send(batch, grads)
        self._last_step = step
        if following is not None:
            self._request_late(following)

    def drain(self) -> None:
        """Bring every held row to the servers; they stay here, too."""
        self._acknowledge()
        held = {}
        if (batch := self._batches.get(self._last_step + 1)) is not None:
            held = {name: mine.held for name, mine in batch.tables.items() if len(mine.held[0])}
        self._write_back(self._last_step, held)

    def _operations(self, name: str) -> RowOperations:
        if name not in self._ops:
            raise ValueError(f"there is no embedding table {name!r}; tables: {', '.join(self._ops)}")
        return self._ops[name]

    def _set_apart(self, batch: _SharingBatch, following: _SharingBatch) -> None:
        """Copy the records that the next batch reads again; the rest of its overlap is late."""
        batch.shared = {}
        for name, mine in batch.tables.items():
            if name not in following.tables:
                continue
            next_ = following.tables[name]
            # An id without a row cannot be held: admission counts it on the server, which may create the row.
            has_record_K = mine.has_record(next_.overlap.of_this)
            if not has_record_K.all():
                next_.late = np.concatenate([next_.late, next_.overlap.of_next[~has_record_K]])
            of_this = next_.overlap.of_this[has_record_K]
            of_next = next_.overlap.of_next[has_record_K]
            # Copies, since records that arrived lie in the transport's memory, read-only and soon used again.
            batch.shared[name] = _Shared(of_this, of_next, mine.copies(of_this))

    def _hand_on(
        self, batch: _SharingBatch, following: _SharingBatch, grads: Mapping[str, Float32Array]
    ) -> None:
        """Let the shared rows take the step, and the next batch have them."""
        if batch.shared is None:
            self._set_apart(batch, following)
        assert batch.shared is not None
        for name, shared in batch.shared.items():
            self._apply(name, shared.of_this, batch, shared.records_KW, grads)
            following.tables[name].take_held(shared.of_next, shared.records_KW)
            self.stats.num_early += len(shared.of_next)
            self.stats.num_cache_hits += len(shared.of_next)

    def _send(self, batch: _SharingBatch, grads: Mapping[str, Float32Array]) -> None:
        """To the servers, what the next batch does not read again."""
        dirty, sent = {}, {}
        for name, mine in batch.tables.items():
            shared = batch.shared.get(name) if batch.shared is not None else None
            others = all_but(len(mine.ids_M), *([] if shared is None else [shared.of_this]))
            # A row that was held cannot be sent as a gradient: the server's copy lacks the steps since.
            is_held = mine.is_held(others)
            leaving = others[is_held]
            if len(leaving):
                records_KW = mine.copies(leaving)
                self._apply(name, leaving, batch, records_KW, grads)
                dirty[name] = mine.ids_M[leaving], records_KW
            if name in grads:
                sent[name] = others[~is_held]
        ids = {name: mine.ids_M for name, mine in batch.tables.items()}
        split = self._client.split_ids(ids, sent)
        self._unacknowledged = self._client.send_split(self._link.tag(batch.step), grads, split, dirty)

    def _apply(
        self,
        name: str,
        positions_K: Int64Array,
        batch: _SharingBatch,
        records_KW: Int32Array,
        grads: Mapping[str, Float32Array],
    ) -> None:
        """Let the optimizer change records of the batch in place, as a server would."""
        if name in grads:
            ids_K, grads_KD = batch.tables[name].ids_M[positions_K], grads[name].take(positions_K, axis=0)
            records, rows_K = RecordArray(records_KW), np.arange(len(positions_K))
            self._ops[name].apply(records, rows_K, ids_K, grads_KD, batch.step)

    def _request(self, batch: _SharingBatch, positions: Mapping[str, Int64Array], after_step: int) -> None:
        ids = {name: mine.ids_M for name, mine in batch.tables.items()}
        batch.requests.append(self._request_records(batch.step, ids, positions, after_step))

    def _request_late(self, batch: _SharingBatch) -> None:
        late = {name: mine.late for name, mine in batch.tables.items() if len(mine.late)}
        if late:
            self._request(batch, late, after_step=batch.step - 1)
            for mine in batch.tables.values():
                mine.late = NO_POSITIONS

    def _receive(self, batch: _SharingBatch) -> None:
        for name, positions, records, is_row in self._received(batch.requests):
            batch.tables[name].take_arrived(positions, records, is_row)
