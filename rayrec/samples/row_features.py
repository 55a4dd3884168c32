"""From rows as they were read to features: the run's operations, then sequences.

RowBatch ─ FeatureProgram ─► columns `user_id`, `item_ids` ─ SequenceFeatures ─► one FeatureBatch per trainer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.errors import InputError
from rayrec.samples.batches import FeatureBatch, Int64Array, RowBatch, SampleBatch
from rayrec.samples.features import SequenceFeatures
from rayrec.samples.jagged import list_array
from rayrec.samples.operations.columns import value_type
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram


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
            program: makes `user_id` and `item_ids` of the columns there are.
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

    def history_of(self, row: Mapping[str, Any]) -> tuple[int, Int64Array]:
        """(user, items, oldest first) of a raw row by field name, as a training row would have them.

        Raises:
            InputError: a field is missing, unknown or of the wrong type.
        """
        made = self._program.one(row)
        user, items = made["user_id"], made["item_ids"] or []
        if user is None or None in items:
            what = "user_id" if user is None else "an item of item_ids"
            raise InputError(
                f"{what} is null after the operations of the run; give the row what it is made of"
            )
        return int(user), np.array(items, dtype=np.int64)

    def _prepared(self, samples: SampleBatch) -> SampleBatch:
        if not self._takes_histories:
            return samples
        columns = {
            "user_id": pa.array(samples.user_ids_B),
            "item_ids": list_array(samples.item_ids_N, samples.offsets_B1),
        }
        schema = self._program.input_schema
        try:
            arrays = [columns[field.name].cast(field.type) for field in schema]
        except pa.ArrowException as error:
            raise InputError(
                f"ids of the data set do not fit the types of the training rows ({error}); prepare the data "
                "set from the same ids, or store the rows' as int64"
            ) from error
        rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
        made = self._program(rows, RowContext(samples.row_keys_B, self._seed, samples.step))
        return SampleBatch.of(samples.step, RowBatch(samples.row_keys_B, made))


def _are_histories(program: FeatureProgram) -> bool:
    """Whether the columns are those of users and their items, by ids; texts would be the source's keys."""
    return all(
        field.name in ("user_id", "item_ids") and pt.is_integer(value_type(field.type))
        for field in program.input_schema
    )
