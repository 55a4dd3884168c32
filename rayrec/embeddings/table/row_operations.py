"""What a table's settings say of its rows, as operations on records wherever they lie.

A row that no update has named has its initial value, a function of the table's seed, the id and the
element alone (`combine64` of `rayrec.platform.hashing`; ids as uint64):

    h = combine64(seed, id, element);  u = (h >> 40) * 2**-23 - 1;  value = float32(init_scale) * u

so u is uniform in [-1, 1), exact in float32, and the product is rounded once. (In a table of 16-bit
weights it is then rounded like an update of step -1.)

Axes: M ids of one call, D numbers of a row, S numbers of its optimizer state, W words of a record.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from rayrec.embeddings.base.compiled import (
    LANES,
    RowAddresses,
    copy_lanes,
    float32_at,
    int32_at,
    prefetch_words,
    row_address,
)
from rayrec.embeddings.base.layout import (
    FLOAT32,
    NEVER,
    RecordLayout,
    load_weights,
    record_words,
    store_weights,
)
from rayrec.embeddings.base.threads import in_parts
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.optim.optimizers import make_optimizer
from rayrec.embeddings.optim.row_kernels import apply_rows
from rayrec.embeddings.storage.index import MISSING
from rayrec.embeddings.storage.records import RecordAccess
from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array
from rayrec.platform.compiled import extend64, kernel_input

_AHEAD = 24  # records prefetched this many rows early, as many as a core keeps in flight from memory


class RowOperations:
    """Stateless: the rows are in the `Records` of the caller. The same bits with any number of threads."""

    def __init__(self, config: TableConfig, num_threads: int = 1) -> None:
        self._name = config.name
        self._num_threads = num_threads
        self._optimizer = make_optimizer(config.optimizer, config.schedule)
        self.layout = RecordLayout.of(config.weight_dtype, config.dim, self._optimizer.state_size(config.dim))
        self._seed_hash = np.uint64(extend64(np.uint64(0), np.uint64(config.seed)))
        self._init_scale = np.float32(config.init_scale)

    @property
    def num_words(self) -> int:
        """W: 4-byte words of a record."""
        return record_words(self.layout)

    def gather(
        self, records: RecordAccess, rows_M: Int64Array, ids_M: Int64Array, out_MD: Float32Array
    ) -> None:
        """Write the weights of each row to out_MD; where the row is -1, the initial value of the id."""
        rows_M, ids_M = kernel_input(rows_M, np.int64), kernel_input(ids_M, np.int64)

        def gather_part(first: int, last: int) -> None:
            _gather(
                records.addresses,
                self.layout,
                rows_M[first:last],
                ids_M[first:last],
                self._seed_hash,
                self._init_scale,
                out_MD[first:last],
            )

        in_parts(self._num_threads, len(rows_M), gather_part)

    def apply(
        self, records: RecordAccess, rows_M: Int64Array, ids_M: Int64Array, grads_MD: Float32Array, step: int
    ) -> Int32Array:
        """Let the optimizer change distinct rows in place, and stamp them with the step.

        Returns:
            [M] step that changed each row last before this one; `NEVER` for a new row.
        """
        if not 0 <= step < 2**31:
            raise ValueError(f"table {self._name!r}: step must be from 0 to 2**31 - 1, got {step}")
        rows_M, ids_M = kernel_input(rows_M, np.int64), kernel_input(ids_M, np.int64)
        grads_MD = kernel_input(grads_MD, np.float32)
        rates = self._optimizer.rates(step)
        before_M = np.empty(len(rows_M), dtype=np.int32)

        def apply_part(first: int, last: int) -> int:
            return apply_rows(
                self._optimizer.kernel,
                records.addresses,
                self.layout,
                rows_M[first:last],
                ids_M[first:last],
                grads_MD[first:last],
                step,
                rates,
                self._seed_hash,
                before_M[first:last],
            )

        repeated = sum(in_parts(self._num_threads, len(rows_M), apply_part))
        assert not repeated, f"{repeated} rows of {self._name!r} were given step {step} twice"
        return before_M

    def new_records(self, ids_M: Int64Array) -> Int32Array:
        """[M, W] records of rows that no step has changed."""
        records_MW = np.empty((len(ids_M), self.num_words), dtype=np.int32)
        initial_state = np.float32(self._optimizer.initial_state)
        ids_M = kernel_input(ids_M, np.int64)
        _new_records(self.layout, ids_M, self._seed_hash, self._init_scale, initial_state, records_MW)
        return records_MW

    def weights(self, records_MW: Int32Array) -> Float32Array:
        """[M, D] weights of whole records."""
        if self.layout.kind == FLOAT32:
            return np.ascontiguousarray(records_MW[:, : self.layout.dim]).view(np.float32)
        weights_MD = np.empty((len(records_MW), self.layout.dim), dtype=np.float32)
        _weights(self.layout.kind, kernel_input(records_MW, np.int32), weights_MD)
        return weights_MD

    def scatter_weights(self, records_KW: Int32Array, positions_K: Int64Array, out_MD: Float32Array) -> None:
        """out_MD[positions_K] = the weights of whole records."""
        records_KW, positions_K = kernel_input(records_KW, np.int32), kernel_input(positions_K, np.int64)
        if self.layout.kind == FLOAT32:
            _scatter_floats(records_KW, positions_K, out_MD)
        else:
            _scatter_weights(self.layout.kind, records_KW, positions_K, out_MD)

    def set_weights(
        self, records: RecordAccess, rows_M: Int64Array, ids_M: Int64Array, weights_MD: Float32Array
    ) -> None:
        """Set weights, those of a table of the same kind as they were.

        Others, of a run that was begun with or of published rows, are rounded like an update of step -1.
        """
        rows_M, ids_M = kernel_input(rows_M, np.int64), kernel_input(ids_M, np.int64)
        weights_MD = kernel_input(weights_MD, np.float32)
        _set_weights(records.addresses, self.layout, rows_M, ids_M, self._seed_hash, weights_MD)

    def state(self, records: RecordAccess, rows_M: Int64Array) -> Float32Array:
        """[M, S] optimizer state of each row."""
        words_MS = records.read(rows_M, self.layout.weight_words, self.layout.state_size)
        return words_MS.view(np.float32)

    def set_state(self, records: RecordAccess, rows_M: Int64Array, state_MS: Float32Array) -> None:
        records.write(rows_M, self.layout.weight_words, state_MS.view(np.int32))

    def stamps(self, records: RecordAccess, rows_M: Int64Array) -> Int32Array:
        """[M, 2] last step and count of each row."""
        return records.read(rows_M, self.layout.weight_words + self.layout.state_size, 2)

    def set_stamps(self, records: RecordAccess, rows_M: Int64Array, stamps_M2: Int32Array) -> None:
        records.write(rows_M, self.layout.weight_words + self.layout.state_size, stamps_M2)

    def check_gradients(self, ids_M: Int64Array, grads_MD: Float32Array) -> None:
        """Check ids and gradients of one update.

        Raises:
            ValueError: wrong shape or dtype, or a gradient that is not finite; names table, id, element.
        """
        if ids_M.ndim != 1 or ids_M.dtype != np.int64:
            raise ValueError(
                f"table {self._name!r}: ids must be one-dimensional int64, "
                f"got {ids_M.dtype} of shape {ids_M.shape}"
            )
        expected = (len(ids_M), self.layout.dim)
        if grads_MD.shape != expected or grads_MD.dtype != np.float32:
            raise ValueError(
                f"table {self._name!r}: gradients must be float32 of shape {expected}, "
                f"one row per id; got {grads_MD.dtype} of shape {grads_MD.shape}"
            )

        def first_bad(first: int, last: int) -> int:
            found = first_not_finite(grads_MD[first:last])
            return len(grads_MD) if found < 0 else first + found

        bad = min(in_parts(self._num_threads, len(grads_MD), first_bad))
        if bad < len(grads_MD):
            element = int(np.flatnonzero(~np.isfinite(grads_MD[bad]))[0])
            raise ValueError(
                f"table {self._name!r}: the gradient of id {ids_M[bad]} is {grads_MD[bad, element]} "
                f"at element {element}; the update is refused and no row has changed"
            )


@njit(nogil=True, cache=True)
def _initial_row(id_hash: np.uint64, scale: np.float32, weights_D: Float32Array) -> None:
    for d in range(len(weights_D)):
        hashed = extend64(id_hash, np.uint64(d))
        uniform = np.float32(hashed >> np.uint64(40)) * np.float32(2.0**-23) - np.float32(1)
        weights_D[d] = scale * uniform


@njit(nogil=True, cache=True)
def _new_records(
    layout: RecordLayout,
    ids_M: Int64Array,
    seed_hash: np.uint64,
    scale: np.float32,
    initial_state: np.float32,
    out_MW: Int32Array,
) -> None:
    first_stamp = layout.weight_words + layout.state_size
    wide_D = np.empty(layout.dim, dtype=np.float32)
    for m in range(len(ids_M)):
        id_hash = extend64(seed_hash, np.uint64(ids_M[m]))
        _initial_row(id_hash, scale, wide_D)
        store_weights(layout.kind, out_MW[m], wide_D, extend64(id_hash, np.uint64(np.int64(NEVER))))
        out_MW[m, layout.weight_words : first_stamp].view(np.float32)[:] = initial_state
        out_MW[m, first_stamp] = NEVER
        out_MW[m, first_stamp + 1] = 0


@njit(nogil=True, cache=True)
def _gather(
    rows: RowAddresses,
    layout: RecordLayout,
    rows_M: Int64Array,
    ids_M: Int64Array,
    seed_hash: np.uint64,
    scale: np.float32,
    out_MD: Float32Array,
) -> None:
    # One loop for each case: what a loop might have to do costs a fast one a third of its speed.
    if layout.kind == FLOAT32:
        num_missing = _copy_rows(rows, rows_M, out_MD)
    else:
        num_missing = _widen_rows(rows, layout, rows_M, out_MD)
    if num_missing:
        _initial_rows(layout, rows_M, ids_M, seed_hash, scale, out_MD)


@njit(nogil=True, cache=True)
def _copy_rows(rows: RowAddresses, rows_M: Int64Array, out_MD: Float32Array) -> int:
    """Float32 weights of each row, where there is one; returns how many there are not."""
    num_missing, dim = 0, out_MD.shape[1]
    whole, out = dim - dim % LANES, np.uint64(out_MD.ctypes.data)
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M) and rows_M[m + _AHEAD] != MISSING:
            prefetch_words(row_address(rows, rows_M[m + _AHEAD]), dim)
        if rows_M[m] == MISSING:
            num_missing += 1
            continue
        source, target = row_address(rows, rows_M[m]), out + np.uint64(4 * dim * m)
        for d in range(0, whole, LANES):
            copy_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
        if whole < dim:
            record = carray(float32_at(source), dim)
            for d in range(whole, dim):
                out_MD[m, d] = record[d]
    return num_missing


@njit(nogil=True, cache=True)
def _widen_rows(rows: RowAddresses, layout: RecordLayout, rows_M: Int64Array, out_MD: Float32Array) -> int:
    """16-bit weights of each row, where there is one; returns how many there are not."""
    num_missing = 0
    for m in range(len(rows_M)):
        if m + _AHEAD < len(rows_M) and rows_M[m + _AHEAD] != MISSING:
            prefetch_words(row_address(rows, rows_M[m + _AHEAD]), layout.weight_words)
        if rows_M[m] == MISSING:
            num_missing += 1
        else:
            load_weights(layout.kind, carray(int32_at(row_address(rows, rows_M[m])), rows.words), out_MD[m])
    return num_missing


@njit(nogil=True, cache=True)
def _initial_rows(
    layout: RecordLayout,
    rows_M: Int64Array,
    ids_M: Int64Array,
    seed_hash: np.uint64,
    scale: np.float32,
    out_MD: Float32Array,
) -> None:
    """Initial values of the ids that have no row, as a new record would hold them."""
    rounded = np.empty(layout.weight_words, dtype=np.int32)
    for m in range(len(rows_M)):
        if rows_M[m] != MISSING:
            continue
        id_hash = extend64(seed_hash, np.uint64(ids_M[m]))
        _initial_row(id_hash, scale, out_MD[m])
        if layout.kind != FLOAT32:
            store_weights(layout.kind, rounded, out_MD[m], extend64(id_hash, np.uint64(np.int64(NEVER))))
            load_weights(layout.kind, rounded, out_MD[m])


@njit(nogil=True, cache=True)
def _weights(kind: int, records_MW: Int32Array, weights_MD: Float32Array) -> None:
    for m in range(len(records_MW)):
        load_weights(kind, records_MW[m], weights_MD[m])


@njit(nogil=True, cache=True)
def _scatter_floats(records_KW: Int32Array, positions_K: Int64Array, out_MD: Float32Array) -> None:
    dim = out_MD.shape[1]
    whole, out = dim - dim % LANES, np.uint64(out_MD.ctypes.data)
    first, record_bytes = np.uint64(records_KW.ctypes.data), np.uint64(4 * records_KW.shape[1])
    floats_KW = records_KW.view(np.float32)
    for k in range(len(positions_K)):
        target = out + np.uint64(4 * dim) * np.uint64(positions_K[k])
        source = first + record_bytes * np.uint64(k)
        for d in range(0, whole, LANES):
            copy_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
        for d in range(whole, dim):
            out_MD[positions_K[k], d] = floats_KW[k, d]


@njit(nogil=True, cache=True)
def _scatter_weights(
    kind: int, records_KW: Int32Array, positions_K: Int64Array, out_MD: Float32Array
) -> None:
    for k in range(len(positions_K)):
        load_weights(kind, records_KW[k], out_MD[positions_K[k]])


@njit(nogil=True, cache=True)
def _set_weights(
    rows: RowAddresses,
    layout: RecordLayout,
    rows_M: Int64Array,
    ids_M: Int64Array,
    seed_hash: np.uint64,
    weights_MD: Float32Array,
) -> None:
    wide_D = np.empty(layout.dim, dtype=np.float32)
    for m in range(len(rows_M)):
        for d in range(layout.dim):
            wide_D[d] = weights_MD[m, d]
        words = carray(int32_at(row_address(rows, rows_M[m])), rows.words)
        # By the id: with the same bits for every row, a column would be rounded alike in all of them.
        id_hash = extend64(seed_hash, np.uint64(ids_M[m]))
        store_weights(layout.kind, words, wide_D, extend64(id_hash, np.uint64(np.int64(NEVER))))


def first_not_finite(rows_MD: Float32Array) -> int:
    """First row with a NaN or an infinity; -1 if there is none."""
    return int(_first_not_finite(kernel_input(rows_MD, np.float32).view(np.int32)))


@njit(nogil=True, cache=True)
def _first_not_finite(bits_MD: Int32Array) -> int:
    """`first_not_finite`, seen by the exponents' bits."""
    all_ones = np.int32(0x7F800000)
    for m in range(bits_MD.shape[0]):
        largest = np.int32(0)
        for d in range(bits_MD.shape[1]):
            largest = max(largest, bits_MD[m, d] & all_ones)
        if largest == all_ones:
            return m
    return -1
