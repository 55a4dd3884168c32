"""`negatives`: random items that a row did not choose, sampled for each row independently.

Axes: R rows, I items that may be sampled, K items sampled for a row, N own items of all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
from numba import njit
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rayrec.platform.arrays import Float64Array, Int32Array, Int64Array
from rayrec.platform.compiled import extend64, kernel_input, mix64
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.samples.operations.columns import input_type, list_column
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.operations.sequences import joined_lists
from rayrec.samples.prepare.ids import hash_strings

_TRIES = 32
"""Attempts for one negative, after which the next item that is not excluded is taken."""
_LOOK_AT_ALL = 32
"""Own items up to which each is compared; more are sorted."""


class ItemTable(Config):
    """Items to sample from, in a Parquet file such as `items.parquet` of a prepared data set."""

    path: str
    column: str = "item_id"
    """Their ids: integers, each once."""
    counts: str | None = None
    """Column of whole numbers in proportion to which items are sampled, such as `train_count`; None: all
    alike."""


class NegativesConfig(OperationSettings):
    """As many item ids for every row, sampled with replacement: a list, never null.

    They depend on the run's seed, the row's key, the name of the output and the index in the list;
    neither on the batch nor on the step. A row whose own items are all there are gets an empty list.
    """

    op: Literal["negatives"] = "negatives"
    output: str
    num: int = Field(ge=1)
    """Items per row."""
    items: ItemTable | None = None
    counts: tuple[int, ...] | None = None
    """Instead of `items`: item i has the id i and is sampled in proportion to counts[i]."""
    exclude: tuple[str, ...] = ()
    """Columns of item ids (or lists of them) that are not sampled for their row; nulls exclude nothing."""

    @model_validator(mode="after")
    def _items_come_from_somewhere(self) -> NegativesConfig:
        if (self.items is None) == (self.counts is None):
            raise ValueError("negatives needs items (a Parquet file) or counts, one of the two")
        return self

    def bind(self, schema: pa.Schema) -> NegativeSampler:
        for name in self.exclude:
            input_type(schema, name, lambda dtype: dtype == pa.int64(), "int64 or lists of them")
        ids_I, counts_I = self._read_items()
        if counts_I is None:
            thresholds_I, aliases_I = np.empty(0), np.empty(0, dtype=np.int64)
        else:
            thresholds_I, aliases_I = _alias_table(kernel_input(counts_I, np.int64))
        return NegativeSampler(
            inputs=self.exclude,
            outputs={self.output: pa.list_(pa.int64())},
            num=self.num,
            ids_I=kernel_input(ids_I, np.int64),
            thresholds_I=kernel_input(thresholds_I, np.float64),
            aliases_I=kernel_input(aliases_I, np.int64),
            stream=int(hash_strings([self.output])[0]),
        )

    def with_absolute_paths(self) -> Self:
        if self.items is None:
            return self
        items = self.items.model_copy(update={"path": str(Path(self.items.path).resolve())})
        return self.model_copy(update={"items": items})

    def content(self) -> str:
        """sha256 of the items and their counts."""
        digest = hashlib.sha256()
        for array_I in self._read_items():
            digest.update(b"" if array_I is None else array_I.tobytes())
        return digest.hexdigest()

    def _read_items(self) -> tuple[Int64Array, Int64Array | None]:
        """(ids_I, counts_I); no count is 0, and counts are None where all items are alike."""
        if self.items is not None:
            return _read(self.items)
        counts = np.array(self.counts, dtype=np.int64)
        return _checked("counts", np.arange(len(counts)), counts)


@dataclass(frozen=True)
class NegativeSampler:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    num: int
    ids_I: Int64Array
    thresholds_I: Float64Array
    """Of Walker's alias method; empty where all items are alike."""
    aliases_I: Int64Array
    stream: int

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        keys_R = combine64(context.seed, self.stream, context.row_keys_B)
        own = joined_lists([columns[name] for name in self.inputs]) if self.inputs else None
        own_N = np.empty(0, dtype=np.int64) if own is None else own.values.drop_null().to_numpy()
        if own is None:
            own_R1 = np.zeros(len(keys_R) + 1, dtype=np.int32)
        else:
            own_R1 = _without_nulls(own.offsets_R1, own.values)
        drawn_N, offsets_R1 = _draw(
            kernel_input(keys_R, np.uint64),
            self.num,
            # Pickled arrays come out writable.
            kernel_input(self.ids_I, np.int64),
            kernel_input(self.thresholds_I, np.float64),
            kernel_input(self.aliases_I, np.int64),
            kernel_input(own_N, np.int64),
            kernel_input(own_R1, np.int32),
        )
        return {output: list_column(pa.array(drawn_N), offsets_R1)}


def _read(table: ItemTable) -> tuple[Int64Array, Int64Array | None]:
    path = Path(table.path)
    names = [table.column] if table.counts is None else [table.column, table.counts]
    try:
        schema = pq.read_schema(path)
        for name in names:
            dtype = input_type(schema, name, pt.is_integer, "integers")
            if not pt.is_integer(dtype):
                raise InputError(f"column {name!r} is {dtype}, expected integers")
        columns = [column.combine_chunks() for column in pq.read_table(path, columns=names).columns]
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a readable Parquet file of items ({error})") from error
    for name, column in zip(names, columns, strict=True):
        if column.null_count:
            raise InputError(
                f"{path}: column {name!r} has {column.null_count} nulls; every item needs a value"
            )
    ids_I, *counts = (column.to_numpy().astype(np.int64) for column in columns)
    return _checked(str(path), ids_I, counts[0] if counts else None)


def _checked(
    source: str, ids_I: Int64Array, counts_I: Int64Array | None
) -> tuple[Int64Array, Int64Array | None]:
    if len(np.unique(ids_I)) < len(ids_I):
        raise InputError(f"{source}: an item stands there twice; every item has one row")
    if counts_I is not None:
        if (counts_I < 0).any():
            raise InputError(f"{source}: an item has the negative count {counts_I.min()}")
        drawn_I = counts_I > 0
        ids_I, counts_I = ids_I[drawn_I], counts_I[drawn_I]
    if not len(ids_I):
        raise InputError(f"{source}: there is no item to sample; an item needs a row and a count above 0")
    return ids_I, counts_I


def _without_nulls(offsets_R1: Int32Array, values: pa.Array) -> Int32Array:
    """Offsets of the lists once their nulls are dropped."""
    if not values.null_count:
        return offsets_R1
    before_N1 = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(values.is_valid().to_numpy(zero_copy_only=False), out=before_N1[1:])
    return before_N1[offsets_R1]


@njit(nogil=True, cache=True)
def _alias_table(counts_I: Int64Array) -> tuple[Float64Array, Int64Array]:
    """Bucket i of I equal ones means item i below thresholds_I[i], and aliases_I[i] from there on.

    Source: A. J. Walker, "An Efficient Method for Generating Discrete Random Variables with General
    Distributions", ACM TOMS 1977; built as by Vose, IEEE TSE 1991.
    """
    num_items = len(counts_I)
    thresholds_I, aliases_I = np.ones(num_items), np.arange(num_items)
    weights_I = counts_I / counts_I.sum() * num_items
    low_I, high_I = np.empty(num_items, dtype=np.int64), np.empty(num_items, dtype=np.int64)
    num_low = num_high = 0
    for i in range(num_items):
        if weights_I[i] < 1:
            low_I[num_low] = i
            num_low += 1
        else:
            high_I[num_high] = i
            num_high += 1
    while num_low and num_high:
        num_low -= 1
        low, high = low_I[num_low], high_I[num_high - 1]
        thresholds_I[low], aliases_I[low] = weights_I[low], high
        weights_I[high] -= 1 - weights_I[low]
        if weights_I[high] < 1:
            num_high -= 1
            low_I[num_low] = high
            num_low += 1
    return thresholds_I, aliases_I


@njit(nogil=True, cache=True, inline="always")
def _unit(bits: Any) -> Any:
    """53 bits as a number in [0, 1)."""
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@njit(nogil=True, cache=True)
def _is_among(item: int, own: Int64Array) -> bool:
    """Whether an item is in an array, which is sorted if it is long."""
    if len(own) > _LOOK_AT_ALL:
        index = np.searchsorted(own, item)
        return bool(index < len(own) and own[index] == item)
    found = False
    for other in own:
        found |= other == item
    return found


@njit(nogil=True, cache=True)
def _draw(
    keys_R: NDArray[np.uint64],
    num: int,
    ids_I: Int64Array,
    thresholds_I: Float64Array,
    aliases_I: Int64Array,
    own_N: Int64Array,
    own_R1: Int32Array,
) -> tuple[Int64Array, Int32Array]:
    """(sampled items, their offsets_R1)."""
    num_items = len(ids_I)
    drawn_N = np.empty(len(keys_R) * num, dtype=np.int64)
    offsets_R1 = np.zeros(len(keys_R) + 1, dtype=np.int32)
    n = 0
    for r in range(len(keys_R)):
        own = own_N[own_R1[r] : own_R1[r + 1]]
        if len(own) > _LOOK_AT_ALL:
            own = np.sort(own)
        for k in range(num):
            key = extend64(keys_R[r], np.uint64(k))
            item, found = np.int64(0), False
            for attempt in range(_TRIES):
                bits = extend64(key, np.uint64(attempt))
                item = np.int64(_unit(bits) * num_items)
                if len(thresholds_I) and _unit(mix64(bits)) >= thresholds_I[item]:
                    item = aliases_I[item]
                if not _is_among(ids_I[item], own):
                    found = True
                    break
            walked = 0
            while not found and walked < num_items:
                item = (item + 1) % num_items
                found = not _is_among(ids_I[item], own)
                walked += 1
            if not found:
                break  # nor will there be one for the rest of the list
            drawn_N[n] = ids_I[item]
            n += 1
        offsets_R1[r + 1] = n
    return drawn_N[:n], offsets_R1
