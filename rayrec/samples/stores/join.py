"""`join_history`: samples that carry a key and a time get the history that the key had then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from pydantic import Field, model_validator

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import absolute
from rayrec.samples.batches import Int64Array
from rayrec.samples.ids import ids_of_kind
from rayrec.samples.jagged import offsets_from_lengths
from rayrec.samples.operations.columns import input_type, normal_type
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.stores import open_store
from rayrec.samples.stores.encoding import copy_ranges
from rayrec.samples.stores.lookup import histories_before
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS, TIMES, StoreManifest, TimeUnit
from rayrec.samples.stores.retry import RetryConfig
from rayrec.samples.stores.store import EventStore
from rayrec.samples.stores.times import converted, refuse_other_unit

_KEYS = "integers or texts"
_TIMES = "integers or timestamps"
_UNITS: dict[str, TimeUnit] = {"s": "s", "ms": "ms", "us": "us", "ns": "ns"}


class JoinHistoryConfig(OperationSettings):
    """The newest events of a row's key before the row's time, from an event store.

    Strictly before: events at the row's time are left out, see `lookup`. A row without a key, or whose key
    the store does not know, has an empty history.
    """

    op: Literal["join_history"] = "join_history"
    store: str
    """Folder (LMDB) or URL (redis://, rediss://)."""
    key: str = "user_id"
    """Integers are keys; texts are turned into them as they were when the store was built."""
    time: str = "timestamp"
    time_unit: TimeUnit = "s"
    """Of integers in that column; timestamps have their own."""
    last: int = Field(200, ge=1)
    """At most so many events, the newest; what is appended comes on top."""
    outputs: dict[str, str] = Field({"item_ids": ITEMS}, min_length=1)
    """Column to write: column of the store. `times` come in the unit and type of the row's time."""
    append: dict[str, str] = Field(default_factory=dict)
    """Column to write: column of the row whose value stands behind the history, such as the item that the
    row is about."""
    behaviors: tuple[str, ...] | None = None
    """Only events of these kinds; None for all."""
    fingerprint: str | None = None
    """Refuse stores with another one; `rayrec data store` prints it."""
    retry: RetryConfig = RetryConfig()

    @model_validator(mode="after")
    def _check_append(self) -> Self:
        for name in self.append:
            if name not in self.outputs:
                raise ValueError(f"append.{name}: no such output; outputs has {', '.join(self.outputs)}")
        return self

    def bind(self, schema: pa.Schema) -> JoinHistory:
        input_type(schema, self.key, lambda dtype: pt.is_integer(dtype) or pt.is_string(dtype), _KEYS)
        input_type(schema, self.time, lambda dtype: pt.is_integer(dtype) or pt.is_timestamp(dtype), _TIMES)
        for name in (self.key, self.time, *self.append.values()):
            if pt.is_list(schema.field(name).type if name in schema.names else pa.null()):
                raise InputError(f"column {name!r} holds lists; expected one value in each row")
        store = open_store(self.store, self.retry)
        manifest = store.manifest
        if self.fingerprint is not None and manifest.fingerprint != self.fingerprint:
            store.close()
            raise InputError(
                f"{store.name}: this event store has the fingerprint {manifest.fingerprint}, expected "
                f"{self.fingerprint}; its samples were made for another store"
            )
        time_type = schema.field(self.time).type
        outputs = {
            output: pa.list_(_type_of(manifest, column, time_type, store.name))
            for output, column in self.outputs.items()
        }
        for output, name in self.append.items():
            _check_own(schema, name, outputs[output].value_type, is_item=self.outputs[output] == ITEMS)
        return JoinHistory(
            config=self,
            inputs=tuple(dict.fromkeys((self.key, self.time, *self.append.values()))),
            outputs=outputs,
            manifest=manifest,
            codes=_codes(self.behaviors, manifest, store.name),
            time_unit=_UNITS[time_type.unit] if pt.is_timestamp(time_type) else self.time_unit,
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
        """
        Raises:
            InputError: a row has no time, or a time that looks like another unit.
            StoreUnavailableError: the store did not answer; nothing was written.
        """
        config = self.config
        known_B = columns[config.key].is_valid().to_numpy(zero_copy_only=False)
        keys_B = self._ids(columns[config.key].drop_null(), "user")
        times_B = self._times(columns[config.time])
        wanted = set(config.outputs.values())
        histories = histories_before(
            self._opened(), keys_B, times_B[known_B], config.last, wanted, self.codes
        )
        lengths_B = np.zeros(len(known_B), dtype=np.int64)
        lengths_B[known_B] = np.diff(histories.offsets_K1)
        return {
            output: self._column(output, histories.columns[name], lengths_B, columns)
            for output, name in config.outputs.items()
        }

    def _ids(self, column: pa.Array, entity: Literal["user", "item"]) -> Int64Array:
        if pt.is_string(column.type):
            return ids_of_kind(column, self.manifest.id_kinds[entity], entity)
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

    def _times(self, column: pa.Array) -> Int64Array:
        """In the unit of the store, rounded down.

        So nothing leaks where the units differ: an event before the rounded time is before the time.
        """
        name = self.config.time
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise InputError(
                f"column {name!r}: no time in row {row + 1} of a batch ({column.null_count} rows have none); "
                "without it nobody knows what came before; leave such rows out"
            )
        times_B = column.view(pa.int64()).to_numpy()
        if not pt.is_timestamp(column.type):
            refuse_other_unit(times_B, self.time_unit, f"column {name!r}")
        return converted(times_B, self.time_unit, self.manifest.time_unit, f"column {name!r}")

    def _column(
        self, output: str, values_N: np.ndarray, lengths_B: Int64Array, columns: Mapping[str, pa.Array]
    ) -> pa.Array:
        dtype = self.outputs[output].value_type
        values_N = values_N.astype(_array_type(dtype), copy=False)
        if self.config.outputs[output] == TIMES:
            values_N = converted(values_N, self.manifest.time_unit, self.time_unit, output)
        offsets_B1 = offsets_from_lengths(lengths_B)
        if output in self.config.append:
            ends_B = self._own(output, columns[self.config.append[output]])
            starts_B, offsets_B1 = offsets_B1[:-1], offsets_from_lengths(lengths_B + 1)
            longer_N = np.empty(offsets_B1[-1], dtype=values_N.dtype)
            copy_ranges(values_N, starts_B, lengths_B, longer_N, offsets_B1[:-1])
            longer_N[offsets_B1[1:] - 1] = ends_B
            values_N = longer_N
        return pa.ListArray.from_arrays(pa.array(offsets_B1, pa.int32()), pa.array(values_N).cast(dtype))

    def _own(self, output: str, column: pa.Array) -> np.ndarray:
        """[B] values of the rows themselves that stand behind their histories."""
        name = self.config.append[output]
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise InputError(
                f"column {name!r}: no value in row {row + 1} of a batch ({column.null_count} rows have "
                f"none), but it is appended to {output!r}; leave such rows out"
            )
        if self.config.outputs[output] == ITEMS:
            return self._ids(column, "item")
        dtype = self.outputs[output].value_type
        return (column.view(pa.int64()) if pt.is_timestamp(dtype) else column).to_numpy()


def _type_of(manifest: StoreManifest, column: str, time_type: pa.DataType, store: str) -> pa.DataType:
    """Type of what a column of the store becomes, in the form of `normal_type`."""
    if column not in manifest.types:
        raise InputError(
            f"{store}: the event store has no column {column!r}, only {', '.join(manifest.types)}; build one "
            "that has it (rayrec data store --keep)"
        )
    return time_type if column == TIMES else normal_type(pa.from_numpy_dtype(manifest.types[column]))


def _check_own(schema: pa.Schema, name: str, expected: pa.DataType, is_item: bool) -> None:
    def accepts(dtype: pa.DataType) -> bool:
        return dtype == expected or (is_item and (pt.is_integer(dtype) or pt.is_string(dtype)))

    input_type(schema, name, accepts, f"{expected}, as the values that it follows")


def _array_type(dtype: pa.DataType) -> np.dtype:
    return np.dtype(dtype.to_pandas_dtype()) if pt.is_floating(dtype) else np.dtype(np.int64)


def _codes(behaviors: tuple[str, ...] | None, manifest: StoreManifest, store: str) -> tuple[int, ...] | None:
    if behaviors is None:
        return None
    for name in behaviors:
        if name not in manifest.behaviors:
            known = ", ".join(manifest.behaviors) or "none: it has no column " + BEHAVIORS
            raise InputError(f"{store}: no event has the behaviour {name!r}; the store knows {known}")
    return tuple(manifest.behaviors.index(name) for name in behaviors)
