"""From rows as they were read to features: the run's operations, then sequences.

RowBatch ─ FeatureProgram ─► columns `user_id`, `item_ids` ─ SequenceFeatures ─► one FeatureBatch per trainer
                             and `timestamps`, for models that need them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.errors import InputError
from rayrec.samples.batches import FeatureBatch, Int64Array, RowBatch, SampleBatch
from rayrec.samples.event_times import TIMES, are_event_times, as_type
from rayrec.samples.features import SequenceFeatures
from rayrec.samples.jagged import list_array
from rayrec.samples.operations.columns import value_type
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram


class History(NamedTuple):
    """Whom a row is of, and what that user did, oldest first."""

    user_id: int
    item_ids_N: Int64Array
    times_N: Int64Array | None
    """UNIX seconds, for models that need them; None where the row has none."""


class RowFeatures:
    """The same operations for training rows, for users to be ranked for, and for rows that serving gets."""

    def __init__(
        self,
        sequences: SequenceFeatures,
        program: FeatureProgram,
        seed: int = 0,
        is_prepared: bool = False,
    ) -> None:
        """
        Args:
            program: makes `user_id`, `item_ids` and, for models that need them, `timestamps` of the columns
                there are.
            seed: of the run, for the program's random draws.
            is_prepared: training rows have been through the program already when they were read.
        """
        self._sequences = sequences
        self._program = program
        self._seed = seed
        self._is_prepared = is_prepared
        self._takes_histories = not program.is_empty and _are_histories(program)
        """Whether the program can be run on histories: of users to rank for, nothing else is stored."""

    def training(self, step: int, rows: RowBatch) -> list[FeatureBatch]:
        """Features of a step's rows; see `SequenceFeatures`.

        Raises:
            InputError: an operation refuses a row.
            StoreUnavailableError: a store that an operation asks did not answer.
        """
        if not self._is_prepared:
            context = RowContext(rows.row_keys_B, self._seed, step)
            rows = RowBatch(rows.row_keys_B, self._program(rows.rows, context), rows.cursor)
        return self._sequences(SampleBatch.of(step, rows))

    def ranking(self, samples: SampleBatch) -> FeatureBatch:
        """Features to rank what comes next."""
        return self._sequences.ranking(self._prepared(samples))

    def seen(self, samples: SampleBatch) -> Int64Array:
        """[B, E] catalogue positions of all that each history has, whatever operations leave of it."""
        return self._sequences.seen(samples)

    def history_of(self, row: Mapping[str, Any]) -> History:
        """Of a raw row by field name, as a training row would have it.

        Raises:
            InputError: a field is missing, unknown or of the wrong type.
        """
        made = self._program.one(row)
        user, items, times = made["user_id"], made["item_ids"] or [], made.get(TIMES) or []
        if user is None or None in items or None in times:
            what = (
                "user_id" if user is None else "an item of item_ids" if None in items else f"one of {TIMES}"
            )
            raise InputError(
                f"{what} is null after the operations of the run; give the row what it is made of"
            )
        if made.get(TIMES) is None:
            return History(int(user), np.array(items, dtype=np.int64), None)
        arrays = [pa.array([made[field.name]], field.type) for field in self._program.schema]
        rows = pa.RecordBatch.from_arrays(arrays, schema=self._program.schema)
        sample = SampleBatch.of(0, RowBatch(np.zeros(1, dtype=np.int64), rows))
        return History(int(user), sample.item_ids_N, sample.times_N)

    def _prepared(self, samples: SampleBatch) -> SampleBatch:
        if not self._takes_histories:
            return samples
        schema = self._program.input_schema
        try:
            arrays = [_column(samples, field).cast(field.type) for field in schema]
        except pa.ArrowException as error:
            raise InputError(
                f"ids of the data set do not fit the types of the training rows ({error}); prepare the data "
                "set from the same ids, or store the rows' as int64"
            ) from error
        rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
        made = self._program(rows, RowContext(samples.row_keys_B, self._seed, samples.step))
        return SampleBatch.of(samples.step, RowBatch(samples.row_keys_B, made))


def _are_histories(program: FeatureProgram) -> bool:
    """Whether the columns are those of users, of their items, both by ids, and of times; texts would be the
    source's keys."""
    return all(
        (field.name in ("user_id", "item_ids") and pt.is_integer(value_type(field.type)))
        or (field.name == TIMES and are_event_times(field.type))
        for field in program.input_schema
    )


def _column(samples: SampleBatch, field: pa.Field) -> pa.Array:
    if field.name == "user_id":
        return pa.array(samples.user_ids_B)
    if field.name == "item_ids":
        return list_array(samples.item_ids_N, samples.offsets_B1)
    assert samples.times_N is not None, "a program asks for times only where the model needs them"
    offsets = pa.array(samples.offsets_B1, pa.int32())
    return pa.ListArray.from_arrays(offsets, as_type(samples.times_N, field.type.value_type))
