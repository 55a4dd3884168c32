"""Batches as a fixed list of tensors of fixed shapes, and back.

Rows are padded on the right, where no real event looks, and batches at the end, where nobody reads; so
padding changes no answer.

Axes: B rows of a bucket, T events of a row that are read, E places of a row's excluded items, N real events,
M rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.models.program.program import Rows
from rayrec.models.sequence.tensor_batch import Features, TensorBatch

Axis = Literal["event", "row", "excluded", "table"]


@dataclass(frozen=True)
class TableInput:
    """A table whose looked-up rows a batch brings along."""

    name: str
    axis: Literal["event", "row"]
    """What the first axis of its inverse counts."""
    inner: tuple[int, ...]
    """The other axes of the inverse."""
    width: int


@dataclass(frozen=True)
class Input:
    """One tensor of a program."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int
    """What stands in the padding."""


@dataclass(frozen=True)
class Signature:
    """Which inputs a model's batches have; the same for all of them."""

    max_length: int
    """Events of a row that the model reads at most."""
    has_times: bool = False
    labels: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    """Of instructions: all that the model reads; a batch may lack some, of which nothing is said then."""
    tables: tuple[TableInput, ...] = ()

    @classmethod
    def of(cls, features: Features, rows: Rows, max_length: int, parts: Sequence[str] = ()) -> Signature:
        """From any batch to be ranked.

        Args:
            parts: of instructions, that the model reads.
        """
        num_rows = len(features.offsets_B1) - 1
        tables = []
        for name, lookup in sorted(features.lookups.items()):
            axis: Literal["event", "row"] = "row" if name == "user" else "event"
            expected = num_rows if axis == "row" else len(features.items_N)
            if len(lookup.inverse) != expected:
                raise ValueError(
                    f"the inverse of table {name!r} has {len(lookup.inverse)} entries for {num_rows} rows of "
                    f"{len(features.items_N)} events: nothing says how it is laid out"
                )
            tables.append(TableInput(name, axis, tuple(lookup.inverse.shape[1:]), rows[name].shape[1]))
        return cls(
            max_length,
            features.times_N is not None,
            tuple(sorted(features.labels)),
            tuple(sorted(parts)),
            tuple(tables),
        )

    def inputs(self, bucket: Bucket) -> list[Input]:
        """What a program of the bucket takes, in order."""
        num_rows, num_read = bucket.num_rows, bucket.num_read(self.max_length)
        events, int64 = (num_rows, num_read), torch.int64
        inputs = [
            Input("lengths", (num_rows,), int64, 0),
            Input("items", events, int64, 0),
            Input("excluded", (num_rows, bucket.length), int64, -1),
        ]
        if self.has_times:
            inputs.append(Input("times", events, int64, 0))
        inputs += [Input(f"label {name}", events, int64, -1) for name in self.labels]
        inputs += [Input(f"part {name}", (num_rows,), int64, -1) for name in self.parts]
        for table in self.tables:
            shape = (events if table.axis == "event" else (num_rows,)) + table.inner
            inputs.append(Input(f"inverse {table.name}", shape, int64, 0))
            inputs.append(Input(f"rows {table.name}", (math.prod(shape), table.width), torch.float32, 0))
        return inputs

    def padded(
        self, bucket: Bucket, features: Features, rows: Rows, excluded_BE: np.ndarray | None
    ) -> list[Tensor] | None:
        """The inputs of a batch, in the host's memory; None for one that does not fit into them."""
        lengths_B = np.diff(features.offsets_B1)
        num_rows, num_read = len(lengths_B), bucket.num_read(self.max_length)
        if lengths_B.max(initial=0) > num_read or not set(features.instruction) <= set(self.parts):
            return None
        is_event_BT = np.arange(num_read) < lengths_B[:, None]
        values: dict[str, np.ndarray] = {"lengths": lengths_B, "items": features.items_N}
        if excluded_BE is not None:
            values["excluded"] = excluded_BE
        if self.has_times:
            assert features.times_N is not None, "as in the batch that the signature is of"
            values["times"] = features.times_N
        values |= {f"label {name}": features.labels[name] for name in self.labels}
        values |= {f"part {name}": codes_B for name, codes_B in features.instruction.items()}
        for table in self.tables:
            values[f"inverse {table.name}"] = features.lookups[table.name].inverse
            found = rows[table.name]
            values[f"rows {table.name}"] = found.cpu().numpy() if isinstance(found, Tensor) else found
        per_event = {"items", "times", *(f"label {name}" for name in self.labels)}
        per_event |= {f"inverse {table.name}" for table in self.tables if table.axis == "event"}
        tensors = []
        for wanted in self.inputs(bucket):
            tensor = torch.full(wanted.shape, wanted.fill, dtype=wanted.dtype)
            if wanted.name in values:
                array, value = tensor.numpy(), values[wanted.name]
                if wanted.name in per_event:
                    array[:num_rows][is_event_BT] = value
                elif len(value) > len(array) or (value.ndim > 1 and value.shape[1] > array.shape[1]):
                    return None
                elif wanted.name == "excluded":
                    array[:num_rows, : value.shape[1]] = value
                else:
                    array[: len(value)] = value
            tensors.append(tensor)
        return tensors

    def batch(self, bucket: Bucket, tensors: Sequence[Tensor]) -> tuple[TensorBatch, Tensor]:
        """(Batch, excluded items) of inputs."""
        by_name = dict(zip((each.name for each in self.inputs(bucket)), tensors, strict=True))
        items_BT, lengths_B = by_name["items"], by_name["lengths"]
        batch = TensorBatch(
            layout=PaddedLayout.of_lengths(lengths_B, items_BT.shape[1]),
            keys_N=torch.zeros_like(items_BT).flatten(),  # of dropout, of which ranking has none
            items_N=items_BT.flatten(),
            targets_N=None,
            negatives_S=None,
            inverse={table.name: self._inverse(table, by_name) for table in self.tables},
            rows={table.name: by_name[f"rows {table.name}"] for table in self.tables},
            times_N=by_name["times"].flatten() if self.has_times else None,
            labels={name: by_name[f"label {name}"].flatten() for name in self.labels},
            instruction={name: by_name[f"part {name}"] for name in self.parts},
        )
        return batch, by_name["excluded"]

    @staticmethod
    def _inverse(table: TableInput, by_name: Mapping[str, Tensor]) -> Tensor:
        inverse = by_name[f"inverse {table.name}"]
        return inverse.flatten(0, 1) if table.axis == "event" else inverse

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Signature:
        tables = [TableInput(**{**table, "inner": tuple(table["inner"])}) for table in values["tables"]]
        names = {name: tuple(values[name]) for name in ("labels", "parts")}
        return cls(values["max_length"], values["has_times"], **names, tables=tuple(tables))


@dataclass(frozen=True, eq=False)
class PaddedLayout(JaggedLayout):
    """Rows of one length for the host, with the real ends of rows on the device alone.

    For networks in which no real event looks to its right, and which take the lengths of rows from
    `last_B` and `lengths_on_device_B`.
    """

    @staticmethod
    def of_lengths(lengths_B: Tensor, num_places: int) -> PaddedLayout:
        num_rows, device = len(lengths_B), lengths_B.device
        even = JaggedLayout.even(num_rows, num_places, device)
        last_B = torch.arange(num_rows, device=device) * num_places + (lengths_B - 1).clamp(min=0)
        return PaddedLayout(
            num_rows,
            num_places,
            even.row_N,
            even.place_N,
            even.slot_N,
            last_B,
            even.offsets_B1,
            {"lengths": lengths_B},
        )

    @property
    def is_padded(self) -> bool:
        return True

    @property
    def is_even(self) -> bool:
        """Only on the device is known where rows end."""
        return False

    def repeated(self, count: int) -> JaggedLayout:
        make = lambda: PaddedLayout.of_lengths(count * self.lengths_on_device_B(), count * self.longest)  # noqa: E731
        return self.derived(("repeated", count), make)

    def some_rows(self, rows: slice) -> tuple[JaggedLayout, slice]:
        tokens = slice(rows.start * self.longest, min(rows.stop, self.num_rows) * self.longest)
        return PaddedLayout.of_lengths(self.lengths_on_device_B()[rows], self.longest), tokens
