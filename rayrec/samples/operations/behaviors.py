"""`select_events` and `merge_events`: histories of several behaviors, taken apart and put together.

Axes: R rows, N events of all rows, S behaviors to be merged, 1 an extra element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numba import njit
from pydantic import Field, model_validator

from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input, stable_order
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.operations.columns import (
    both_valid,
    complete_lists,
    is_time,
    list_column,
    list_type,
    numbers_of,
    parallel_lists,
)
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.operations.python_values import is_value_of
from rayrec.samples.operations.sequences import outputs_for, side_by_side

_OLDEST = np.iinfo(np.int64).min


class SelectEventsConfig(OperationSettings):
    """The events of parallel lists that have one of some behaviors, in their order.

    An event whose behavior is null is left out; where the list of behaviors is null, so is the result.
    """

    op: Literal["select_events"] = "select_events"
    by: str
    """List of the events' behaviors: integers or texts."""
    values: tuple[int | str, ...] = Field(min_length=1)
    """Behaviors to keep."""
    inputs: tuple[str, ...] = Field(min_length=1)
    """Lists with as many events as `by` in every row; `by` may be one of them."""
    outputs: tuple[str, ...] | None = None
    """As many; None replaces the inputs."""

    def bind(self, schema: pa.Schema) -> SelectEvents:
        by = list_type(
            schema,
            self.by,
            lambda dtype: dtype == pa.int64() or pt.is_string(dtype),
            " of integers or texts",
        )
        for value in self.values:
            if not is_value_of(value, by.value_type):
                raise InputError(f"column {self.by!r} is {by}, among which {value!r} cannot be")
        types = [list_type(schema, name) for name in self.inputs]
        outputs = outputs_for(self.inputs, self.outputs)
        return SelectEvents(
            inputs=(self.by, *(name for name in self.inputs if name != self.by)),
            outputs=dict(zip(outputs, types, strict=True)),
            selected=self.inputs,
            values=pa.array(self.values, by.value_type),
        )


@dataclass(frozen=True)
class SelectEvents:
    inputs: tuple[str, ...]
    """First the behaviors."""
    outputs: Mapping[str, pa.DataType]
    selected: tuple[str, ...]
    """In the order of `outputs`."""
    values: pa.Array

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        lists = dict(zip(self.inputs, parallel_lists(columns, self.inputs), strict=True))
        by = lists[self.inputs[0]]
        keep_N = self._chosen(by.values)
        made = {}
        for name, output in zip(self.selected, self.outputs, strict=True):
            mine = lists[name]
            indices_N, offsets_R1 = _kept_indices(keep_N, by.offsets_R1, mine.offsets_R1)
            values = mine.values.take(pa.array(indices_N))
            made[output] = list_column(values, offsets_R1, both_valid(by.valid_R, mine.valid_R))
        return made

    def _chosen(self, behaviors: pa.Array) -> BoolArray:
        if pt.is_string(behaviors.type):
            chosen_N = pc.is_in(behaviors, value_set=self.values).to_numpy(zero_copy_only=False)
        else:
            numbers_N, valid_N = numbers_of(behaviors)
            chosen_N = np.zeros(len(numbers_N), dtype=np.bool_)
            for value in self.values.to_numpy():  # a few: a tenth of the time of a hash table
                chosen_N |= numbers_N == value
            if valid_N is not None:
                chosen_N &= valid_N
        return kernel_input(chosen_N, np.bool_)


class EventSource(Config):
    """Events of one behavior."""

    behavior: int = Field(ge=-(2**63), lt=2**63)
    """What stands for it in the merged list."""
    time: str
    """List of the events' times."""
    values: tuple[str, ...] = Field(min_length=1)
    """Lists of what else is known of them, parallel to `time`."""


class MergeEventsConfig(OperationSettings):
    """Events of several behaviors as one history, oldest first, with the behavior of each.

    Events of one time stay in the order of the sources, and within one of them in its order. A null
    time is older than any. Where one of a source's lists is null, there are none of its events; the results
    are never null.
    """

    op: Literal["merge_events"] = "merge_events"
    sources: tuple[EventSource, ...] = Field(min_length=2)
    time: str
    """Name for the merged times."""
    values: tuple[str, ...] = Field(min_length=1)
    """Names for the merged values, in the order of the sources' `values`."""
    behavior: str
    """Name for the list of behaviors (int64)."""

    @model_validator(mode="after")
    def _sources_have_the_same_values(self) -> MergeEventsConfig:
        for source in self.sources:
            if len(source.values) != len(self.values):
                raise ValueError(
                    f"merge_events makes {len(self.values)} columns of values ({', '.join(self.values)}), "
                    f"and the source with time {source.time!r} has {len(source.values)}; give as many"
                )
        if len({self.time, self.behavior, *self.values}) < 2 + len(self.values):
            raise ValueError("merge_events has two outputs of one name; give each its own")
        return self

    def bind(self, schema: pa.Schema) -> MergeEvents:
        names = [(source.time, *source.values) for source in self.sources]
        outputs = {}
        for index, output in enumerate((self.time, *self.values)):
            types = [
                list_type(schema, of_source[index], *(() if index else (is_time, " of times")))
                for of_source in names
            ]
            for of_source, dtype in zip(names, types, strict=True):
                if dtype != types[0]:
                    raise InputError(
                        f"columns {names[0][index]!r} ({types[0]}) and {of_source[index]!r} ({dtype}) do not "
                        "go into one list; they need the same type"
                    )
            outputs[output] = types[0]
        return MergeEvents(
            inputs=tuple(dict.fromkeys(name for of_source in names for name in of_source)),
            outputs={**outputs, self.behavior: pa.list_(pa.int64())},
            sources=tuple(names),
            behaviors=kernel_input([source.behavior for source in self.sources], np.int64),
        )


@dataclass(frozen=True)
class MergeEvents:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    """Times, values, behaviors."""
    sources: tuple[tuple[str, ...], ...]
    """Columns of each: time, values."""
    behaviors: Int64Array

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        lists = [complete_lists(columns, names) for names in self.sources]
        starts_S, offsets_SR1 = side_by_side([of_source[0] for of_source in lists])
        times = pa.concat_arrays([of_source[0].values for of_source in lists])
        times_N, valid_N = numbers_of(times)
        if valid_N is not None:
            times_N = np.where(valid_N, times_N, _OLDEST)
        indices_N, sources_N, offsets_R1 = _merged_indices(
            kernel_input(times_N, np.int64), starts_S, offsets_SR1
        )
        *names, behavior = self.outputs
        taken = pa.array(indices_N)
        made = {}
        for index, output in enumerate(names):
            values = pa.concat_arrays([of_source[index].values for of_source in lists])
            made[output] = list_column(values.take(taken), offsets_R1)
        made[behavior] = list_column(pa.array(self.behaviors[sources_N]), offsets_R1)
        return made


@njit(nogil=True, cache=True)
def _kept_indices(
    keep_N: BoolArray, by_R1: Int32Array, offsets_R1: Int32Array
) -> tuple[Int64Array, Int32Array]:
    """(indices of the kept events, their offsets_R1) in lists parallel to those of keep_N, or null."""
    kept_R1 = np.zeros(len(by_R1), dtype=np.int32)
    indices_N = np.empty(offsets_R1[-1], dtype=np.int64)
    n = 0
    for r in range(len(by_R1) - 1):
        if offsets_R1[r + 1] - offsets_R1[r] == by_R1[r + 1] - by_R1[r]:
            for e in range(by_R1[r + 1] - by_R1[r]):
                indices_N[n] = offsets_R1[r] + e
                n += keep_N[by_R1[r] + e]  # to be written over if it does not stay: no branch to predict
        kept_R1[r + 1] = n
    return indices_N[:n], kept_R1


@njit(nogil=True, cache=True)
def _merged_indices(
    times_N: Int64Array, starts_S: Int64Array, offsets_SR1: Any
) -> tuple[Int64Array, Int64Array, Int32Array]:
    """(indices_N in order of time, their sources_N, offsets_R1); ties in order of source and index."""
    num_rows = offsets_SR1.shape[1] - 1
    merged_R1 = np.zeros(num_rows + 1, dtype=np.int32)
    indices_N, sources_N = np.empty(len(times_N), dtype=np.int64), np.empty(len(times_N), dtype=np.int64)
    heads_S, ends_S = np.empty_like(starts_S), np.empty_like(starts_S)
    n = 0
    for r in range(num_rows):
        first, in_order = n, True
        for s in range(len(starts_S)):
            heads_S[s] = starts_S[s] + offsets_SR1[s, r]
            ends_S[s] = starts_S[s] + offsets_SR1[s, r + 1]
            for index in range(heads_S[s] + 1, ends_S[s]):
                in_order &= times_N[index - 1] <= times_N[index]
            if not in_order:
                break
        if in_order:
            while True:
                next_s = -1
                for s in range(len(starts_S)):
                    if heads_S[s] < ends_S[s] and (
                        next_s < 0 or times_N[heads_S[s]] < times_N[heads_S[next_s]]
                    ):
                        next_s = s
                if next_s < 0:
                    break
                indices_N[n], sources_N[n] = heads_S[next_s], next_s
                heads_S[next_s] += 1
                n += 1
        else:
            for s in range(len(starts_S)):
                for index in range(starts_S[s] + offsets_SR1[s, r], starts_S[s] + offsets_SR1[s, r + 1]):
                    indices_N[n], sources_N[n] = index, s
                    n += 1
            as_found, sources = indices_N[first:n].copy(), sources_N[first:n].copy()
            for place, found in enumerate(stable_order(times_N[as_found])):
                indices_N[first + place], sources_N[first + place] = as_found[found], sources[found]
        merged_R1[r + 1] = n
    return indices_N, sources_N, merged_R1
