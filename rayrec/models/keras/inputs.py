"""Which input of a Keras model gets what of a batch, by its name.

| input | what it gets |
|---|---|
| a column of ids `[B, D]` | the row of each id |
| `ids` `[B, C, D]` | the rows of all columns of ids, in their order: one tensor that nobody has to stack |
| a column of lists `[B, D]` | the mean of the rows of each list; 0 for an empty one |
| a column of lists `[B, L, D]` | the rows of each list, padded with 0 behind; with a length L, the newest L |
| its name with `_mask` `[B, L]` | 1 where there is an element |
| a column of numbers `[B, 1]` | the numbers |
| `numbers` `[B, F]` | all columns of numbers, in their order |

Columns go before the names `ids`, `numbers` and `_mask`.

Axes: B impressions, C columns of one id each, F columns of numbers, L elements of a list, D width of a row,
N elements of all lists of a column, M distinct ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.ctr.tensors import IdLists, ImpressionTensors
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema

Kind = Literal["id", "ids", "pooled", "padded", "mask", "number", "numbers"]

ALL_IDS, ALL_NUMBERS, MASK = "ids", "numbers", "_mask"

Shape = tuple[int | None, ...]
"""None is any size, as the batch's always is."""


class DeclaredInput(NamedTuple):
    """What a model says of an input."""

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class ModelInput:
    """What an input gets."""

    name: str
    kind: Kind
    column: str = ""
    place: int = 0
    """Of the column among those of ids, or of numbers."""
    length: int | None = None
    """Of `padded` and `mask`: L; None is that of the longest list of the batch."""


def match_inputs(
    declared: Sequence[DeclaredInput], schema: ImpressionSchema, dim: int
) -> tuple[ModelInput, ...]:
    """What each of a model's inputs gets, in their order.

    Raises:
        InputError: an input is of no column, or of another shape or type than what it would get, or a column
            of the schema goes nowhere.
    """
    matched = tuple(_match(one, schema, dim) for one in declared)
    by_name = {one.name: one for one in matched}
    for one in matched:
        if one.kind == "mask":
            _check_mask(one, by_name.get(one.column))
    if unread := [column for column in schema.features if not _is_read(column, schema, matched)]:
        raise InputError(
            f"the Keras model has no input for {_named(unread)}; add keras.Input(..., name={unread[0]!r}), "
            "or prepare the impressions without what it does not need (rayrec impressions: do not name the "
            "column, or --leave-out it)"
        )
    return matched


def _match(declared: DeclaredInput, schema: ImpressionSchema, dim: int) -> ModelInput:
    name, rank = declared.name, len(declared.shape)
    numbers, ids = list(schema.numbers), list(schema.ids)
    length = declared.shape[1] if rank > 1 else None
    expected: tuple[Shape, ...]
    if name in ids:
        found, expected = ModelInput(name, "id", name, ids.index(name)), ((None, dim),)
    elif name in schema.lists:
        padded = rank == 3
        found = ModelInput(name, "padded" if padded else "pooled", name, length=length if padded else None)
        expected = ((None, dim), (None, length if padded else None, dim))
    elif name in numbers:
        found, expected = ModelInput(name, "number", name, numbers.index(name)), ((None, 1),)
    elif name == ALL_IDS and ids:
        found, expected = ModelInput(name, "ids"), ((None, len(ids), dim),)
    elif name == ALL_NUMBERS and numbers:
        found, expected = ModelInput(name, "numbers"), ((None, len(numbers)),)
    elif (column := name.removesuffix(MASK)) != name and column in schema.lists:
        found, expected = ModelInput(name, "mask", column, length=length), ((None, length),)
    else:
        raise InputError(
            f"the Keras model has an input {name!r}, which is no column of the run; there are "
            f"{_named(schema.features) or 'none'}, and {ALL_IDS!r} and {ALL_NUMBERS!r} for all of a kind"
        )
    if found.kind in ("id", "ids", "pooled", "padded") and "int" in declared.dtype:
        raise InputError(
            f"the Keras model's input {name!r} is {declared.dtype}, but rows are looked up already: declare "
            f"keras.Input({expected[0][1:]}, name={name!r}), and leave out its Embedding layer"
        )
    if not any(_fits(declared.shape, shape) for shape in expected):
        raise InputError(
            f"the Keras model's input {name!r} has the shape {declared.shape}, but gets "
            f"{' or '.join(map(str, expected))} with model.dim {dim}; change one of them"
        )
    types = ("float32", "bool") if found.kind == "mask" else ("float32",)
    if declared.dtype not in types:
        raise InputError(
            f"the Keras model's input {name!r} is {declared.dtype}, but gets {types[0]}; "
            f"declare it with dtype={types[0]!r}"
        )
    return found


def _fits(declared: Shape, expected: Shape) -> bool:
    if len(declared) != len(expected) or declared[0] is not None:
        return False
    return all(mine in (None, size) for mine, size in zip(declared, expected, strict=True))


def _check_mask(mask: ModelInput, of: ModelInput | None) -> None:
    if of is None or of.kind != "padded":
        raise InputError(
            f"the Keras model has an input {mask.name!r}, but none {mask.column!r} of the shape (None, None, "
            "dim) whose elements it would be of; add that one, or leave the mask out"
        )
    if of.length != mask.length:
        raise InputError(
            f"the Keras model's inputs {of.name!r} and {mask.name!r} have the lengths {of.length} and "
            f"{mask.length}; give them the same"
        )


def _is_read(column: str, schema: ImpressionSchema, inputs: Sequence[ModelInput]) -> bool:
    together = "numbers" if column in schema.numbers else "ids" if column in schema.ids else None
    return any(one.kind == together or (one.column == column and one.kind != "mask") for one in inputs)


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def gather(inputs: Sequence[ModelInput], batch: ImpressionTensors) -> list[Tensor]:
    """What the inputs get; gradients of it add up in the rows of the batch."""
    parts = _Parts(batch)
    return [parts.of(one) for one in inputs]


class _Parts:
    """Each thing that several inputs are made of is made once."""

    def __init__(self, batch: ImpressionTensors) -> None:
        self._batch = batch
        self._by_column: tuple[Tensor, ...] | None = None
        self._indices: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, one: ModelInput) -> Tensor:
        batch = self._batch
        if one.kind == "id":
            return self._id_rows()[one.place]
        if one.kind == "ids":
            return batch.embed_ids()
        if one.kind == "pooled":
            return batch.pool_list(one.column)
        if one.kind == "number":
            return batch.numbers_BF[:, one.place : one.place + 1]
        if one.kind == "numbers":
            return batch.numbers_BF
        index_BL, mask_BL = self._padded(one)
        if one.kind == "mask":
            return mask_BL
        if not len(batch.rows_MD):  # every list is empty, and there is no row that padding could take
            return batch.rows_MD.new_zeros(*index_BL.shape, batch.rows_MD.shape[1])
        return rows_of_ids(batch.rows_MD, index_BL) * mask_BL.unsqueeze(2)

    def _id_rows(self) -> tuple[Tensor, ...]:
        """[B, D] of each column of ids, each in one piece of memory; one gradient [M, D] for all of them."""
        if self._by_column is None:
            index_CB = self._batch.inverse_BC.T.contiguous()
            self._by_column = rows_of_ids(self._batch.rows_MD, index_CB).unbind(0)
        return self._by_column

    def _padded(self, one: ModelInput) -> tuple[Tensor, Tensor]:
        if one.column not in self._indices:
            self._indices[one.column] = _padded(self._batch.lists[one.column], one.length)
        return self._indices[one.column]


def _padded(ids: IdLists, length: int | None) -> tuple[Tensor, Tensor]:
    """[B, L] row of each element (0 for padding), and [B, L] 1.0 where there is one."""
    layout = ids.layout
    longest = max(layout.longest, 1) if length is None else length
    lengths_B = torch.from_numpy(layout.offsets_B1).to(ids.inverse_N.device).diff()
    place_N = layout.place_N - (lengths_B - longest).clamp(min=0)[layout.row_N]
    newest_N = place_N >= 0
    slot_N = (layout.row_N * longest + place_N)[newest_N]
    index = ids.inverse_N.new_zeros(layout.num_rows * longest)
    index[slot_N] = ids.inverse_N[newest_N]
    mask = torch.zeros(len(index), device=index.device)
    mask[slot_N] = 1.0
    return index.view(-1, longest), mask.view(-1, longest)
