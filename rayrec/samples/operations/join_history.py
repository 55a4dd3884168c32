"""`join_history`: samples that carry a key and a time get the history that the key had then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pydantic import Field

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import absolute
from rayrec.samples.base.config import TimeUnit
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.operations.columns import input_type, is_list, is_time, normal_type
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.prepare.ids import ids_of_kind
from rayrec.samples.stores import open_store
from rayrec.samples.stores.lookup import histories_before
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS, TIMES, StoreManifest
from rayrec.samples.stores.retry import RetryConfig
from rayrec.samples.stores.store import EventStore
from rayrec.samples.stores.times import converted, times_of

UNITS: dict[str, TimeUnit] = {"s": "s", "ms": "ms", "us": "us", "ns": "ns"}
"""Of Arrow's timestamps."""


class JoinHistoryConfig(OperationSettings):
    """The newest events of a row's key before the row's time, from an event store.

    Strictly before: events at the row's time are left out, see `lookup`. A row without a key or a time, or
    whose key the store does not know, has an empty history. For a sequence that ends with the row's own
    item, `concat` puts it behind the history.
    """

    op: Literal["join_history"] = "join_history"
    store: str
    """Folder (LMDB) or URL (redis://, rediss://). `${NAME}` in a URL stands for a variable of the
    environment: settings are kept in the run's folder, where no password should be."""
    key: str = "user_id"
    """Integers are keys; texts are turned into them as they were when the store was built."""
    time: str = "timestamp"
    time_unit: TimeUnit = "s"
    """Of integers in that column; timestamps have their own."""
    last: int = Field(200, ge=1)
    """At most so many events, the newest."""
    outputs: dict[str, str] = Field({"item_ids": ITEMS}, min_length=1)
    """Column to write: column of the store. `times` come in the unit and type of the row's time."""
    behaviors: tuple[str, ...] | None = None
    """Only events of these kinds; None for all."""
    fingerprint: str | None = None
    """Refuse stores with another one; `rayrec data store` prints it."""
    retry: RetryConfig = RetryConfig()

    def bind(self, schema: pa.Schema) -> JoinHistory:
        input_type(
            schema, self.key, lambda dtype: pt.is_integer(dtype) or pt.is_string(dtype), "integers or texts"
        )
        time_type = input_type(schema, self.time, is_time, "integers or timestamps")
        for name in (self.key, self.time):
            if is_list(schema.field(name).type):
                raise InputError(f"column {name!r} holds lists; expected one value in each row")
        store = open_store(self.store, self.retry)
        manifest = store.manifest
        if self.fingerprint is not None and manifest.fingerprint != self.fingerprint:
            store.close()
            raise InputError(
                f"{store.name}: this event store has the fingerprint {manifest.fingerprint}, expected "
                f"{self.fingerprint}; its samples were made for another store"
            )
        outputs = {
            output: pa.list_(_type_of(manifest, column, time_type, store.name))
            for output, column in self.outputs.items()
        }
        return JoinHistory(
            config=self,
            inputs=tuple(dict.fromkeys((self.key, self.time))),
            outputs=outputs,
            manifest=manifest,
            codes=_codes(self.behaviors, manifest, store.name),
            time_unit=UNITS[time_type.unit] if pt.is_timestamp(time_type) else self.time_unit,
            _store=store,
        )

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"store": absolute(self.store)})

    def content(self) -> str:
        """What kind of store; not what is in it: histories before a time do not change as events follow."""
        store = open_store(self.store, self.retry)
        try:
            return store.manifest.fingerprint
        finally:
            store.close()


@dataclass
class JoinHistory:
    """See `JoinHistoryConfig`. It travels between processes; each opens the store for itself."""

    config: JoinHistoryConfig
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    manifest: StoreManifest
    codes: tuple[int, ...] | None
    time_unit: TimeUnit
    _store: EventStore | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None}

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        """Join the events before the time of each row.

        Raises:
            InputError: a time looks like another unit than the one that was set.
            StoreUnavailableError: the store did not answer; nothing was written.
        """
        config = self.config
        keys, times = columns[config.key], columns[config.time]
        known = pc.and_(keys.is_valid(), times.is_valid())
        keys_K = self._keys(keys.filter(known))
        where = f"column {config.time!r}"
        times_K = times_of(times.filter(known), self.time_unit, self.manifest.time_unit, where)
        wanted = set(config.outputs.values())
        histories = histories_before(self._opened(), keys_K, times_K, config.last, wanted, self.codes)
        known_B = known.to_numpy(zero_copy_only=False)
        lengths_B = np.zeros(len(known_B), dtype=np.int64)
        lengths_B[known_B] = np.diff(histories.offsets_K1)
        offsets = pa.array(offsets_from_lengths(lengths_B), pa.int32())
        return {
            output: pa.ListArray.from_arrays(offsets, self._values(output, histories.columns[name]))
            for output, name in config.outputs.items()
        }

    def _keys(self, column: pa.Array) -> Int64Array:
        if pt.is_string(column.type):  # without blanks around them, as the store's keys are
            keys = pc.utf8_trim_whitespace(column)
            return ids_of_kind(keys, self.manifest.id_kinds["user"], "user")
        return column.to_numpy().view(np.int64)  # uint64 too: the same bits, as ids are made

    def _opened(self) -> EventStore:
        if self._store is None:
            store = open_store(self.config.store, self.config.retry)
            if store.manifest.fingerprint != self.manifest.fingerprint:
                store.close()
                raise InputError(
                    f"{store.name}: another event store is there than when the run was checked; "
                    "start the run again"
                )
            self._store = store
        return self._store

    def _values(self, output: str, values_N: np.ndarray) -> pa.Array:
        dtype = self.outputs[output].value_type
        values_N = values_N.astype(_array_type(dtype), copy=False)
        if self.config.outputs[output] == TIMES:
            values_N = converted(values_N, self.manifest.time_unit, self.time_unit, output)
        return pa.array(values_N).cast(dtype)


def _type_of(manifest: StoreManifest, column: str, time_type: pa.DataType, store: str) -> pa.DataType:
    """Type of what a column of the store becomes, in the form of `normal_type`."""
    if column not in manifest.types:
        raise InputError(
            f"{store}: the event store has no column {column!r}, only {', '.join(manifest.types)}; build one "
            "that has it (rayrec data store --keep)"
        )
    return time_type if column == TIMES else normal_type(pa.from_numpy_dtype(manifest.types[column]))


def _array_type(dtype: pa.DataType) -> np.dtype:
    return np.dtype(dtype.to_pandas_dtype()) if pt.is_floating(dtype) else np.dtype(np.int64)


def _codes(behaviors: tuple[str, ...] | None, manifest: StoreManifest, store: str) -> tuple[int, ...] | None:
    if behaviors is None:
        return None
    for name in behaviors:
        if name not in manifest.behaviors:
            known = ", ".join(manifest.behaviors) or "none: it has no column " + BEHAVIORS
            raise InputError(f"{store}: no event has the behavior {name!r}; the store knows {known}")
    return tuple(manifest.behaviors.index(name) for name in behaviors)
