"""The records of a cache's rows, by slot; `row_cache` says which slot has which id.

They lie in host memory here. `device_cache` keeps them in the memory of an accelerator, with the same bits;
rows and gradients are tensors there, which is all that tells the two apart.

Axes: M rows of one call, W words of a record, D numbers of a row, C slots of the cache.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.storage.records import Records
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array

Rows = Any
"""[M, D] float32 rows or gradients: an array, or a tensor where the cache's records are tensors."""


class CachedRecords(Protocol):
    """Not thread-safe. Slots of one call are distinct."""

    @property
    def num_bytes(self) -> int:
        """Memory of the records, wherever it is."""
        ...

    def reserve(self, num_slots: int) -> None:
        """Make slots 0 to num_slots - 1 addressable."""
        ...

    def read(self, slots_M: Int64Array) -> Int32Array:
        """[M, W] copies."""
        ...

    def write(self, slots_M: Int64Array, records_MW: Int32Array) -> None: ...

    def gather(self, slots_M: Int64Array, ids_M: Int64Array) -> Rows:
        """[M, D] weights of each slot, as a copy; where the slot is -1, the initial value of the id."""
        ...

    def weights(self, records_MW: Int32Array) -> Rows:
        """[M, D] weights of records that are not in the cache, where those of the cache are."""
        ...

    def check_gradients(self, ids_M: Int64Array, grads_MD: Rows) -> None:
        """Raises the ValueError with which a server would refuse them."""
        ...

    def apply(self, slots_M: Int64Array, ids_M: Int64Array, grads_MD: Rows, step: int) -> None:
        """Let the optimizer change the rows, as the server would."""
        ...


class HostRecords:
    """Records in memory of this process, which are changed by compiled kernels."""

    def __init__(self, config: TableConfig, capacity: int) -> None:
        """Make room for no record yet.

        Args:
            capacity: slots that there may be; memory is taken as they come into use.
        """
        self._ops = RowOperations(config)
        self._records = Records(self._ops.num_words)
        self._num_slots = 0

    @property
    def num_bytes(self) -> int:
        return 4 * self._ops.num_words * self._num_slots

    def reserve(self, num_slots: int) -> None:
        self._records.reserve(num_slots)
        self._num_slots = num_slots

    def read(self, slots_M: Int64Array) -> Int32Array:
        return self._records.read(slots_M, 0, self._ops.num_words)

    def write(self, slots_M: Int64Array, records_MW: Int32Array) -> None:
        self._records.write(slots_M, 0, records_MW)

    def gather(self, slots_M: Int64Array, ids_M: Int64Array) -> Float32Array:
        weights_MD = np.empty((len(slots_M), self._ops.layout.dim), dtype=np.float32)
        self._ops.gather(self._records, slots_M, ids_M, weights_MD)
        return weights_MD

    def weights(self, records_MW: Int32Array) -> Float32Array:
        return self._ops.weights(records_MW)

    def check_gradients(self, ids_M: Int64Array, grads_MD: Float32Array) -> None:
        self._ops.check_gradients(ids_M, grads_MD)

    def apply(self, slots_M: Int64Array, ids_M: Int64Array, grads_MD: Float32Array, step: int) -> None:
        self._ops.apply(self._records, slots_M, ids_M, grads_MD, step)


def on_host(values: Rows) -> Float32Array:
    """The array itself, or a copy of a tensor: for what goes to servers and to other trainers."""
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()
