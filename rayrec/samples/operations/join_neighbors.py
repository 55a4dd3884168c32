"""`join_neighbors`: what others met beside a row's items, and how many met its item, before its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pydantic import Field, model_validator

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import absolute
from rayrec.samples.base.jagged import offsets_from_lengths, without_nulls
from rayrec.samples.graph.candidates import CoVisitation, Histories, co_visited
from rayrec.samples.graph.sampling import degrees
from rayrec.samples.graph.saved import SavedGraph
from rayrec.samples.operations.columns import input_type, is_list, is_time
from rayrec.samples.operations.join_history import UNITS
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.prepare.ids import ids_of_kind
from rayrec.samples.stores.manifest import PER_SECOND, TimeUnit
from rayrec.samples.stores.times import times_of


class JoinNeighborsConfig(OperationSettings):
    """Features of a graph of users and items, strictly before each row's time.

    `output` gets other items that users met beside the row's newest ones (co-visitation), best first;
    `counts` how many events the row's item had within some time. A row without a time has neither.
    """

    op: Literal["join_neighbors"] = "join_neighbors"
    graph: str
    """Folder that `rayrec data graph` wrote, without `--max-per-node`."""
    time: str = "timestamp"
    time_unit: TimeUnit = "s"
    """Of integers in that column; timestamps have their own."""
    items: str | None = None
    """Lists of items, oldest first, beside which others are looked for."""
    output: str | None = None
    """Column for these others."""
    k: int = Field(20, ge=1)
    """At most so many of them."""
    last: int = Field(20, ge=1)
    """Items of a list that are looked at, the newest."""
    item: str | None = None
    """Column with the item that is counted."""
    counts: dict[str, int] = Field(default_factory=dict)
    """Column to write: seconds before the row's time in which events of `item` count."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if (self.items is None) != (self.output is None) or (self.item is None) != (not self.counts):
            raise ValueError("`items` goes with `output`, and `item` with `counts`")
        if self.output is None and not self.counts:
            raise ValueError(
                "say what to write: `output` for items near `items`, `counts` for events of `item`"
            )
        if any(seconds <= 0 for seconds in self.counts.values()):
            raise ValueError("counts: seconds must be positive")
        return self

    def bind(self, schema: pa.Schema) -> JoinNeighbors:
        time_type = input_type(schema, self.time, is_time, "integers or timestamps")
        if is_list(time_type):
            raise InputError(f"column {self.time!r} holds lists; expected one value in each row")
        for name, wants_list in ((self.items, True), (self.item, False)):
            if name is None:
                continue
            dtype = input_type(
                schema, name, lambda found: pt.is_integer(found) or pt.is_string(found), "integers or texts"
            )
            if is_list(dtype) != wants_list:
                raise InputError(
                    f"column {name!r} is {dtype}; expected {'lists' if wants_list else 'one value'}"
                )
        outputs: dict[str, pa.DataType] = {} if self.output is None else {self.output: pa.list_(pa.int64())}
        outputs |= dict.fromkeys(self.counts, pa.int64())
        return JoinNeighbors(
            config=self,
            inputs=tuple(
                dict.fromkeys(name for name in (self.time, self.items, self.item) if name is not None)
            ),
            outputs=outputs,
            graph=SavedGraph(self.graph),
            time_unit=UNITS[time_type.unit] if pt.is_timestamp(time_type) else self.time_unit,
        )

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"graph": absolute(self.graph)})

    def content(self) -> str:
        """Of what log the graph is, what it has forgotten, and whether events came late; what was before a
        time does not change as others follow."""
        graph = SavedGraph(self.graph)
        return f"{graph.config.log} {graph.floor} {graph.past}".rstrip()


@dataclass
class JoinNeighbors:
    """See `JoinNeighborsConfig`."""

    config: JoinNeighborsConfig
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    graph: SavedGraph
    time_unit: TimeUnit

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        """Find the neighbors of each row, and count.

        Raises:
            InputError: a time looks like another unit than the one that was set, or another graph is there.
        """
        config, graph = self.config, self.graph.current()
        times = columns[config.time]
        known_B = times.is_valid().to_numpy(zero_copy_only=False)
        before_B = np.full(len(times), np.iinfo(np.int64).min)
        where, unit = f"column {config.time!r}", graph.config.time_unit
        before_B[known_B] = times_of(times.drop_null(), self.time_unit, unit, where)
        made: dict[str, pa.Array] = {}
        if config.items is not None and config.output is not None:
            lists = without_nulls(columns[config.items])
            lengths_B = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
            histories = Histories(
                self._ids(lists.flatten()), offsets_from_lengths(lengths_B.astype(np.int64)), before_B
            )
            own_BE = histories.padded()
            found = co_visited(graph, histories, config.k, CoVisitation(last=config.last), own_BE)
            is_there_BK = found.scores_BK > -np.inf
            offsets = pa.array(offsets_from_lengths(is_there_BK.sum(axis=1)), pa.int32())
            made[config.output] = pa.ListArray.from_arrays(offsets, pa.array(found.ids_BK[is_there_BK]))
        if config.item is not None:
            items = columns[config.item]
            has_item_B = items.is_valid().to_numpy(zero_copy_only=False)
            items_B = np.zeros(len(items), np.int64)
            items_B[has_item_B] = self._ids(items.drop_null())
            for name, seconds in config.counts.items():
                within = min(seconds * PER_SECOND[unit], np.iinfo(np.int64).max)
                counts_B = degrees(graph, "item", items_B, before_B, within)
                made[name] = pa.array(np.where(has_item_B, counts_B, 0))
        return made

    def _ids(self, values: pa.Array) -> Int64Array:
        if pt.is_string(values.type):  # without blanks around them, as the graph's are
            keys = pc.utf8_trim_whitespace(values)
            return ids_of_kind(keys, self.graph.config.id_kinds["item"], "item")
        ids: Int64Array = values.to_numpy().view(np.int64)
        return ids
