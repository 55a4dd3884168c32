"""One embedding table: rows for 64-bit ids, created when an update first names them.

A row's record is described in `rayrec.embeddings.layout`.

An id that no update has named, that is not admitted yet, or whose row was evicted has its initial value
(see `rayrec.embeddings.row_operations`).

Axes: M ids of one call, D numbers of a row, S numbers of its optimizer state, W words of a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rayrec.embeddings.admission import Sighted, SightingCounters
from rayrec.embeddings.compiled import kernel_input
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.eviction import Evicted, Tombstones, choose_victims
from rayrec.embeddings.index import MISSING, IdIndex
from rayrec.embeddings.layout import NEVER
from rayrec.embeddings.records import Records
from rayrec.embeddings.routing import bucket_of
from rayrec.embeddings.row_operations import RowOperations

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class TableRows:
    """Rows of a table with everything needed to go on training them."""

    ids_M: Int64Array
    weights_MD: Float32Array
    """Float32, also where the table keeps 16 bits of them."""
    state_MS: Float32Array
    steps_M: Int32Array
    """Last step that changed the row."""
    counts_M: Int32Array
    """Steps that changed the row."""
    sighted: Sighted = field(default_factory=Sighted.nothing)
    """Ids that wait for admission."""
    evicted: Evicted = field(default_factory=Evicted.nothing)
    """Ids whose rows were given up."""


@dataclass(frozen=True)
class TableCounts:
    """What has become of ids in this table since it was made."""

    num_created: int = 0
    num_evicted: int = 0
    num_not_admitted: int = 0
    """Gradients dropped because their id had not been seen often enough."""
    num_waiting: int = 0
    """Ids that are counted until they are admitted."""


class EmbeddingTable:
    """Rows of one table, or of one shard of it. Not thread-safe; `EmbeddingShard` locks."""

    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self._ops = RowOperations(config)
        self._index = IdIndex()
        self._records = Records(self._ops.num_words)
        self._sightings = SightingCounters(config.admission)
        self._tombstones = Tombstones(config.eviction.remember_steps if config.eviction else 0)
        self._num_created = self._num_evicted = self._num_not_admitted = 0

    @property
    def num_rows(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that were in use at once, of the index, and of what waits for admission."""
        rows = 4 * self._ops.num_words * self._index.num_rows
        return rows + self._index.num_bytes + self._sightings.num_bytes + self._tombstones.num_bytes

    @property
    def counts(self) -> TableCounts:
        return TableCounts(self._num_created, self._num_evicted, self._num_not_admitted, len(self._sightings))

    def lookup(self, ids_M: Int64Array, empty: Callable[..., Float32Array] = np.empty) -> Float32Array:
        """[M, D] weights of each id; creates nothing, an absent id has its initial value.

        Args:
            empty: makes the array of the rows where the caller wants them; called as `np.empty`.
        """
        self._check_ids(ids_M)
        ids_M = kernel_input(ids_M, np.int64)
        rows_MD = empty((len(ids_M), self.config.dim), dtype=np.float32)
        self._ops.gather(self._records, self._index.find(ids_M), ids_M, rows_MD)
        return rows_MD

    def read_records(self, ids_M: Int64Array) -> tuple[Int32Array, NDArray[np.bool_]]:
        """([M, W] records, [M] whether there is a row); an absent id has the record of a new row."""
        self._check_ids(ids_M)
        rows_M = self._index.find(ids_M)
        records_MW = np.empty((len(ids_M), self._ops.num_words), dtype=np.int32)
        present_M = rows_M != MISSING
        absent = np.flatnonzero(~present_M)
        records_MW[present_M] = self._records.read(rows_M[present_M], 0, records_MW.shape[1])
        records_MW[absent] = self._ops.new_records(ids_M[absent])
        return records_MW, present_M

    def write_records(self, ids_M: Int64Array, records_MW: Int32Array) -> None:
        """Set the whole records of distinct ids, which must have rows: they were read from here."""
        rows_M = self._index.find(ids_M)
        assert not np.any(rows_M == MISSING), f"{self.config.name!r}: a record came back to no row"
        self._records.write(rows_M, 0, records_MW)

    def apply(self, ids_M: Int64Array, grads_MD: Float32Array, step: int) -> None:
        """One step's update: admit ids, create their rows, let the optimizer change all of them, evict.

        Args:
            ids_M: [M] distinct ids.
            grads_MD: [M, D] their gradients, float32.
            step: number of the step, from 0.

        Raises:
            ValueError: wrong shape or dtype, or a gradient that is not finite; nothing has changed.
            MemoryError: no room for the new rows; nothing has changed.
        """
        self.check_update(ids_M, grads_MD)
        self.reserve(ids_M)
        self.apply_checked(ids_M, grads_MD, step)
        self.evict(step)

    def check_update(self, ids_M: Int64Array, grads_MD: Float32Array) -> None:
        """Raise the ValueError that `apply` would raise; changes nothing."""
        self._ops.check_gradients(ids_M, grads_MD)

    def num_missing(self, ids_M: Int64Array) -> int:
        """How many of these distinct ids have no row."""
        return int(np.count_nonzero(self._index.find(ids_M) == MISSING))

    def bytes_after(self, num_more: int) -> int:
        """Most that `num_bytes` is, and takes on the way, when so many more ids have rows."""
        rows = self._index.rows_after(num_more) - self._index.num_rows
        growth = 4 * self._ops.num_words * rows + self._index.growth_bytes(num_more)
        if self.config.admission.min_sightings > 1:
            growth += self._sightings.growth_bytes(num_more)
        return self.num_bytes + growth

    def reserve(self, ids_M: Int64Array) -> None:
        """Make room for the rows of those ids, so that `apply_checked` cannot fail for memory.

        Raises:
            MemoryError: there is none; nothing has changed.
        """
        num_missing = self.num_missing(ids_M)
        if num_missing:
            if self.config.admission.min_sightings > 1:
                self._sightings.reserve(num_missing)
            self._records.reserve(self._index.rows_after(num_missing))
            self._index.reserve(num_missing)

    def apply_checked(self, ids_M: Int64Array, grads_MD: Float32Array, step: int) -> None:
        """The part of `apply` that changes rows, for an update that was checked and has room."""
        ids_M = kernel_input(ids_M, np.int64)
        rows_M = self._index.find(ids_M)
        missing = np.flatnonzero(rows_M == MISSING)
        if len(missing):
            admitted_M = self._sightings.admit(ids_M[missing], step)
            new = missing[admitted_M]
            rows_M[new] = self._create(ids_M[new])
            if len(new) < len(missing):
                self._num_not_admitted += len(missing) - len(new)
                has_row_M = rows_M != MISSING
                ids_M, rows_M, grads_MD = ids_M[has_row_M], rows_M[has_row_M], grads_MD[has_row_M]
        self._ops.apply(self._records, rows_M, ids_M, grads_MD, step)

    def evict(self, step: int) -> None:
        """Give up the rows that the config wants given up when this step commits."""
        self._sightings.forget(step)
        if self.config.eviction is None or not self.config.eviction.is_due(step):
            return
        ids_R, rows_R = self._index.items()
        stamps_R2 = self._ops.stamps(self._records, rows_R)
        victims_R = choose_victims(self.config.eviction, ids_R, stamps_R2[:, 0], stamps_R2[:, 1], step)
        ids_V = ids_R[victims_R]
        self._index.remove(ids_V)
        self._tombstones.add(ids_V, step)
        self._num_evicted += len(ids_V)

    def evicted_since(self, step: int) -> Evicted:
        """Ids whose rows commits after `step` gave up, and which have none now."""
        evicted = self._tombstones.since(step)
        absent_V = self._index.find(evicted.ids_V) == MISSING
        return Evicted(evicted.ids_V[absent_V], evicted.steps_V[absent_V])

    def export(self) -> TableRows:
        """A copy of every row, ordered by virtual bucket, then by id as uint64."""
        ids_M, rows_M = self._index.items()
        order_M = np.lexsort((ids_M.view(np.uint64), bucket_of(ids_M)))
        ids_M, rows_M = ids_M[order_M], rows_M[order_M]
        weights_MD = np.empty((len(ids_M), self.config.dim), dtype=np.float32)
        self._ops.gather(self._records, rows_M, ids_M, weights_MD)
        stamps_M2 = self._ops.stamps(self._records, rows_M)
        return TableRows(
            ids_M=ids_M,
            weights_MD=weights_MD,
            state_MS=self._ops.state(self._records, rows_M),
            steps_M=np.ascontiguousarray(stamps_M2[:, 0]),
            counts_M=np.ascontiguousarray(stamps_M2[:, 1]),
            sighted=self._sightings.export(),
            evicted=self._tombstones.since(NEVER),
        )

    def load(self, rows: TableRows) -> None:
        """Fill an empty table.

        Raises:
            ValueError: the table has rows, an id comes twice, or a shape is not this table's.
        """
        self._check_ids(rows.ids_M)
        layout, num_rows = self._ops.layout, len(rows.ids_M)
        if self.num_rows:
            raise ValueError(f"table {self.config.name!r} has {self.num_rows} rows; load into an empty one")
        found = (rows.weights_MD.shape, rows.state_MS.shape, rows.steps_M.shape, rows.counts_M.shape)
        expected = ((num_rows, layout.dim), (num_rows, layout.state_size), (num_rows,), (num_rows,))
        if found != expected:
            raise ValueError(
                f"table {self.config.name!r}: expected weights, state, steps and counts of shapes "
                f"{expected}, found {found}"
            )
        index = IdIndex()
        rows_M = index.find_or_add(rows.ids_M)
        if len(index) != num_rows:
            repeated = rows.ids_M[rows_M != np.arange(num_rows)][0]
            raise ValueError(f"table {self.config.name!r}: id {repeated} comes twice in the rows to load")
        self._records.reserve(num_rows)
        self._ops.set_weights(self._records, rows_M, rows.weights_MD)
        self._ops.set_state(self._records, rows_M, rows.state_MS)
        self._ops.set_stamps(self._records, rows_M, np.column_stack((rows.steps_M, rows.counts_M)))
        self._index = index
        self._sightings.load(rows.sighted)
        self._tombstones.load(rows.evicted)

    def _check_ids(self, ids_M: Int64Array) -> None:
        if ids_M.ndim != 1 or ids_M.dtype != np.int64:
            raise ValueError(
                f"table {self.config.name!r}: ids must be one-dimensional int64, "
                f"got {ids_M.dtype} of shape {ids_M.shape}"
            )

    def _create(self, ids_M: Int64Array) -> Int64Array:
        """[M] rows of ids that have none yet."""
        self._records.reserve(self._index.rows_after(len(ids_M)))
        rows_M = self._index.find_or_add(ids_M)
        self._records.write(rows_M, 0, self._ops.new_records(ids_M))
        self._num_created += len(ids_M)
        return rows_M
