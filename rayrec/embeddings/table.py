"""One embedding table: rows for 64-bit ids, created when an update first names them.

A row's record is contiguous: weights D | optimizer state S | last step int32 | count int32.

A row that no update has named has its initial value, a function of the table's seed, the id and the
element alone (`combine64` of `rayrec.platform.hashing`; ids as uint64):

    h = combine64(seed, id, element);  u = (h >> 40) * 2**-23 - 1;  value = float32(init_scale) * u

so u is uniform in [-1, 1), exact in float32, and the product is rounded once.

Axes: M ids of one call, D numbers of a row, S numbers of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from rayrec.embeddings.compiled import (
    RowAddresses,
    extend64,
    float32_at,
    kernel_input,
    prefetch_row,
    row_address,
)
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.index import MISSING, IdIndex
from rayrec.embeddings.optimizers import make_optimizer
from rayrec.embeddings.records import Records
from rayrec.embeddings.routing import bucket_of

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

_NEVER = -1  # last step of a row that no step has changed
_AHEAD = 4  # records asked for this many rows early


@dataclass(frozen=True)
class TableRows:
    """Rows of a table with everything needed to go on training them."""

    ids_M: Int64Array
    weights_MD: Float32Array
    state_MS: Float32Array
    steps_M: NDArray[np.int32]
    """Last step that changed the row."""
    counts_M: NDArray[np.int32]
    """Steps that changed the row."""


class EmbeddingTable:
    """Rows of one table, or of one shard of it. Not thread-safe; `EmbeddingShard` locks."""

    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self._optimizer = make_optimizer(config.optimizer, config.schedule)
        self._state_size = self._optimizer.state_size(config.dim)
        self._index = IdIndex()
        self._records = Records(config.dim + self._state_size + 2)
        self._seed_hash = np.uint64(extend64(np.uint64(0), np.uint64(config.seed)))
        self._init_scale = np.float32(config.init_scale)

    @property
    def num_rows(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows in use and of the index."""
        return 4 * self._records.addresses.words * self.num_rows + self._index.num_bytes

    def lookup(self, ids_M: Int64Array, empty: Callable[..., Float32Array] = np.empty) -> Float32Array:
        """[M, D] weights of each id; creates nothing, an absent id has its initial value.

        Args:
            empty: makes the array of the rows where the caller wants them; called as `np.empty`.
        """
        self._check_ids(ids_M)
        ids_M = kernel_input(ids_M, np.int64)
        rows_MD = empty((len(ids_M), self.config.dim), dtype=np.float32)
        _lookup(
            self._records.addresses,
            self._index.find(ids_M),
            ids_M,
            self._seed_hash,
            self._init_scale,
            rows_MD,
        )
        return rows_MD

    def apply(self, ids_M: Int64Array, grads_MD: Float32Array, step: int) -> None:
        """Create the missing rows, then let the optimizer change all of them; one call per step.

        Args:
            ids_M: [M] distinct ids.
            grads_MD: [M, D] their gradients, float32.
            step: number of the step, from 0.

        Raises:
            ValueError: wrong shape or dtype, or a gradient that is not finite; nothing has changed.
            MemoryError: no room for the new rows; nothing has changed.
        """
        self.check_update(ids_M, grads_MD)
        self.apply_checked(ids_M, grads_MD, step)

    def check_update(self, ids_M: Int64Array, grads_MD: Float32Array) -> None:
        """Raise the ValueError that `apply` would raise; changes nothing."""
        self._check_ids(ids_M)
        expected = (len(ids_M), self.config.dim)
        if grads_MD.shape != expected or grads_MD.dtype != np.float32:
            raise ValueError(
                f"table {self.config.name!r}: gradients must be float32 of shape {expected}, "
                f"one row per id; got {grads_MD.dtype} of shape {grads_MD.shape}"
            )
        bad = _first_not_finite(kernel_input(grads_MD, np.float32).view(np.int32))
        if bad >= 0:
            element = int(np.flatnonzero(~np.isfinite(grads_MD[bad]))[0])
            raise ValueError(
                f"table {self.config.name!r}: the gradient of id {ids_M[bad]} is {grads_MD[bad, element]} "
                f"at element {element}; the update is refused and no row has changed"
            )

    def apply_checked(self, ids_M: Int64Array, grads_MD: Float32Array, step: int) -> None:
        """`apply` for an update that `check_update` has passed."""
        if not 0 <= step < 2**31:
            raise ValueError(f"table {self.config.name!r}: step must be from 0 to 2**31 - 1, got {step}")
        ids_M = kernel_input(ids_M, np.int64)
        rows_M = self._find_or_create(ids_M)
        repeated = self._optimizer.apply(
            self._records.addresses,
            kernel_input(rows_M, np.int64),
            kernel_input(grads_MD, np.float32),
            step,
        )
        assert not repeated, f"{repeated} rows of {self.config.name!r} were given step {step} twice"

    def export(self) -> TableRows:
        """A copy of every row, ordered by virtual bucket, then by id as uint64."""
        ids_M, rows_M = self._index.items()
        order_M = np.lexsort((ids_M.view(np.uint64), bucket_of(ids_M)))
        ids_M, rows_M = ids_M[order_M], rows_M[order_M]
        dim, state_size = self.config.dim, self._state_size
        stamps_M2 = self._records.read(rows_M, dim + state_size, 2)
        return TableRows(
            ids_M=ids_M,
            weights_MD=self._records.read(rows_M, 0, dim).view(np.float32),
            state_MS=self._records.read(rows_M, dim, state_size).view(np.float32),
            steps_M=np.ascontiguousarray(stamps_M2[:, 0]),
            counts_M=np.ascontiguousarray(stamps_M2[:, 1]),
        )

    def load(self, rows: TableRows) -> None:
        """Fill an empty table.

        Raises:
            ValueError: the table has rows, an id comes twice, or a shape is not this table's.
        """
        self._check_ids(rows.ids_M)
        num_rows, dim, state_size = len(rows.ids_M), self.config.dim, self._state_size
        if self.num_rows:
            raise ValueError(f"table {self.config.name!r} has {self.num_rows} rows; load into an empty one")
        found = (rows.weights_MD.shape, rows.state_MS.shape, rows.steps_M.shape, rows.counts_M.shape)
        expected = ((num_rows, dim), (num_rows, state_size), (num_rows,), (num_rows,))
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
        self._records.write(rows_M, 0, rows.weights_MD.view(np.int32))
        self._records.write(rows_M, dim, rows.state_MS.view(np.int32))
        self._records.write(rows_M, dim + state_size, np.column_stack((rows.steps_M, rows.counts_M)))
        self._index = index

    def _check_ids(self, ids_M: Int64Array) -> None:
        if ids_M.ndim != 1 or ids_M.dtype != np.int64:
            raise ValueError(
                f"table {self.config.name!r}: ids must be one-dimensional int64, "
                f"got {ids_M.dtype} of shape {ids_M.shape}"
            )

    def _find_or_create(self, ids_M: Int64Array) -> Int64Array:
        rows_M = self._index.find(ids_M)
        num_missing = int(np.count_nonzero(rows_M == MISSING))
        if not num_missing:
            return rows_M
        first_new = self.num_rows
        # Memory first: the index must not name a row that could not be made.
        self._records.reserve(first_new + num_missing)
        rows_M = self._index.find_or_add(ids_M)
        _initialise(
            self._records.addresses,
            kernel_input(rows_M, np.int64),
            ids_M,
            first_new,
            self._seed_hash,
            self._init_scale,
            self.config.dim,
            np.float32(self._optimizer.initial_state),
        )
        return rows_M


@njit(nogil=True, cache=True)
def _initial_value(id_hash: np.uint64, element: int, scale: np.float32) -> np.float32:
    hashed = extend64(id_hash, np.uint64(element))
    uniform = np.float32(hashed >> np.uint64(40)) * np.float32(2.0**-23) - np.float32(1)
    return scale * uniform


@njit(nogil=True, cache=True)
def _lookup(
    rows: RowAddresses,
    rows_M: Int64Array,
    ids_M: Int64Array,
    seed_hash: np.uint64,
    scale: np.float32,
    out_MD: Float32Array,
) -> None:
    dim = out_MD.shape[1]
    for m in range(len(ids_M)):
        if m + _AHEAD < len(ids_M) and rows_M[m + _AHEAD] != MISSING:
            prefetch_row(rows, rows_M[m + _AHEAD])
        if rows_M[m] == MISSING:
            id_hash = extend64(seed_hash, np.uint64(ids_M[m]))
            for d in range(dim):
                out_MD[m, d] = _initial_value(id_hash, d, scale)
        else:
            record = carray(float32_at(row_address(rows, rows_M[m])), rows.words)
            for d in range(dim):
                out_MD[m, d] = record[d]


@njit(nogil=True, cache=True)
def _initialise(
    rows: RowAddresses,
    rows_M: Int64Array,
    ids_M: Int64Array,
    first_new: int,
    seed_hash: np.uint64,
    scale: np.float32,
    dim: int,
    initial_state: np.float32,
) -> None:
    for m in range(len(ids_M)):
        if rows_M[m] < first_new:
            continue
        record = carray(float32_at(row_address(rows, rows_M[m])), rows.words)
        id_hash = extend64(seed_hash, np.uint64(ids_M[m]))
        for d in range(dim):
            record[d] = _initial_value(id_hash, d, scale)
        for s in range(dim, rows.words - 2):
            record[s] = initial_state
        stamps = record[rows.words - 2 :].view(np.int32)
        stamps[0] = _NEVER
        stamps[1] = 0


@njit(nogil=True, cache=True)
def _first_not_finite(bits_MD: NDArray[np.int32]) -> int:
    """First row with a NaN or an infinity, seen by its exponent bits; -1 if there is none."""
    exponent = np.int32(0x7F800000)
    for m in range(bits_MD.shape[0]):
        found = 0
        for d in range(bits_MD.shape[1]):
            found |= (bits_MD[m, d] & exponent) == exponent
        if found:
            return m
    return -1
