"""Records of a trainer's cache in the memory of its accelerator: rows and gradients do not cross the bus.

Which slot has which id, what is pinned, dirty or next to leave stays on the host (`row_cache`); slots and
ids of a call are copied over, two to four words per row. A record crosses the bus when it comes into the
cache or leaves it, together with the others of that call.

Order on the device: `ThreadedLookups` launches this work from a thread of its own, dense compute is launched
from the trainer's. Both launch on the device's default stream, which carries work out in the order in which
it was launched, whichever thread did; and rows and gradients are handed over after the work that makes them
was launched. So they are complete before they are read, and memory that one thread lets go is not written
for the other before its last reader is through. Nothing has to be waited for.

The only module of the room that imports torch, beside `device_kernels`; nothing imports it unless a trainer
has an accelerator.

Axes: M rows of one call, W words of a record, D numbers of a row, C slots of the cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.embeddings.base.layout import FLOAT32
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.lookup.cache.cached_records import Rows, on_host
from rayrec.embeddings.lookup.cache.row_cache import MakeCache, RowCache
from rayrec.embeddings.optim.device_kernels import load_weights, rounding_bits, store_weights
from rayrec.embeddings.optim.optimizers import make_optimizer
from rayrec.embeddings.storage.index import MISSING
from rayrec.embeddings.storage.records import Records
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.hashing import combine64
from rayrec.platform.memory import human_size


def device_caches(device: torch.device) -> MakeCache:
    """What makes caches whose rows are on the device."""
    return partial(RowCache, make_records=partial(DeviceRecords, device=device))


class DeviceRecords:
    """`cached_records.CachedRecords` as one int32 tensor [C, W]; rows and gradients are tensors too.

    Gradients may also come as arrays, as they do where several trainers' are added up on the host.
    """

    def __init__(self, config: TableConfig, capacity: int, device: torch.device) -> None:
        self._ops = RowOperations(config)
        self._layout = self._ops.layout
        self._optimizer = make_optimizer(config.optimizer, config.schedule)
        self._seed_hash = int(combine64(config.seed).view(np.int64))
        self._name = config.name
        self._capacity = capacity
        self._device = device
        self._records_CW = self._empty(0)
        self._no_records = Records(self._ops.num_words)

    @property
    def num_bytes(self) -> int:
        return self._records_CW.nbytes

    def reserve(self, num_slots: int) -> None:
        """Takes the memory of all slots with the first one: tensors that grow are there twice for a while.

        Raises:
            MemoryError: the device has too little; names the table.
        """
        assert num_slots <= self._capacity
        if num_slots and not len(self._records_CW):
            try:
                self._records_CW = self._empty(self._capacity)
            except torch.OutOfMemoryError as error:
                num_bytes = 4 * self._ops.num_words * self._capacity
                raise MemoryError(
                    f"table {self._name!r}: the device has no {human_size(num_bytes)} for a cache of "
                    f"{self._capacity:,} rows; lower sparse.cache_rows ({error})"
                ) from error

    def read(self, slots_M: Int64Array) -> Int32Array:
        if not len(slots_M):
            return np.empty((0, self._ops.num_words), dtype=np.int32)
        return self._records_CW.index_select(0, self._copied(slots_M)).cpu().numpy()

    def write(self, slots_M: Int64Array, records_MW: Int32Array) -> None:
        if len(slots_M):
            self._records_CW.index_copy_(0, self._copied(slots_M), self._copied(records_MW))

    def gather(self, slots_M: Int64Array, ids_M: Int64Array) -> Tensor:
        is_absent_M = slots_M == MISSING
        if not is_absent_M.any():
            return self._weights_of(slots_M)
        # Of ids without a row there are few, and the compiled kernel has their values.
        absent = np.flatnonzero(is_absent_M)
        initial_MD = np.empty((len(absent), self._layout.dim), dtype=np.float32)
        self._ops.gather(self._no_records, slots_M[absent], ids_M[absent], initial_MD)
        weights_MD = torch.empty(len(slots_M), self._layout.dim, device=self._device)
        weights_MD.index_copy_(0, self._copied(absent), self._copied(initial_MD))
        if len(absent) < len(slots_M):
            present = np.flatnonzero(~is_absent_M)
            weights_MD.index_copy_(0, self._copied(present), self._weights_of(slots_M[present]))
        return weights_MD

    def weights(self, records_MW: Int32Array) -> Tensor:
        return self._copied(self._ops.weights(records_MW))

    def check_gradients(self, ids_M: Int64Array, grads_MD: Rows) -> None:
        expected = (len(ids_M), self._layout.dim)
        # The only number that is waited for; what makes these gradients, dense compute has waited for.
        if not (
            isinstance(grads_MD, Tensor)
            and grads_MD.shape == expected
            and grads_MD.dtype == torch.float32
            and grads_MD.isfinite().all().item()
        ):
            # On the host it is known how to say what is wrong.
            self._ops.check_gradients(ids_M, on_host(grads_MD))

    def apply(self, slots_M: Int64Array, ids_M: Int64Array, grads_MD: Rows, step: int) -> None:
        """As the compiled kernels, bit for bit; but a row given twice, or a step, is not noticed."""
        if not len(slots_M):
            return
        layout, slots = self._layout, self._copied(slots_M)
        grads = grads_MD if isinstance(grads_MD, Tensor) else self._copied(grads_MD)
        rates = self._copied(np.array(self._optimizer.rates(step), dtype=np.float32))
        words_MW = self._records_CW.index_select(0, slots)
        state_MS = words_MW[:, layout.weight_words : layout.weight_words + layout.state_size]
        weights_MD = self._optimizer.update_on_device(
            load_weights(layout.kind, layout.dim, words_MW), state_MS.view(torch.float32), grads, rates
        )
        random_MD = None
        if layout.kind != FLOAT32:
            random_MD = rounding_bits(self._seed_hash, self._copied(ids_M), step, layout.dim)
        store_weights(layout.kind, words_MW, weights_MD, random_MD)
        words_MW[:, -2] = step
        words_MW[:, -1] += 1
        self._records_CW.index_copy_(0, slots, words_MW)

    def _empty(self, num_slots: int) -> Tensor:
        return torch.empty(num_slots, self._ops.num_words, dtype=torch.int32, device=self._device)

    def _weights_of(self, slots_M: Int64Array) -> Tensor:
        words_CW = self._records_CW[:, : self._layout.weight_words]
        words_MW = words_CW.index_select(0, self._copied(slots_M))
        return load_weights(self._layout.kind, self._layout.dim, words_MW)

    def _copied(self, values: NDArray[Any]) -> Tensor:
        # A copy also where the device is the host: arrays from other processes are read-only, and go away.
        return torch.tensor(values, device=self._device)
