"""Feature computation of impressions: rows as read become numbers, labels and one deduplicated lookup."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema
from rayrec.samples.base.batches import RowBatch, TableLookup
from rayrec.samples.base.jagged import list_values, without_nulls
from rayrec.samples.impressions.batches import ImpressionBatch
from rayrec.samples.impressions.ids import null_id
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram


class ImpressionFeatures:
    """RowBatch -> one ImpressionBatch per trainer, of about as many rows each.

    A missing id is a category of its own, of which there is one per space; a missing number is 0, and a
    missing list is empty. A label may be null: then nothing is learned of it.
    """

    def __init__(
        self,
        schema: ImpressionSchema,
        program: FeatureProgram,
        *,
        seed: int = 0,
        num_trainers: int = 1,
        is_prepared: bool = False,
    ) -> None:
        """
        Args:
            program: makes the columns of the schema of those there are.
            seed: of the run, for the program's random numbers.
            is_prepared: training rows have been through the program already when they were read.
        """
        self.schema = schema
        self._program = program
        self._scoring_program = program.narrowed(schema.features)
        self._seed = seed
        self._num_trainers = num_trainers
        self._is_prepared = is_prepared
        self._null_ids = {space: null_id(space) for space in schema.ids.values()}

    @property
    def scored_columns(self) -> pa.Schema:
        """What rows to be scored have to have."""
        return self._scoring_program.input_schema

    def training(self, step: int, rows: RowBatch) -> list[ImpressionBatch]:
        """Trainer r gets the r-th contiguous share of the rows.

        Raises:
            InputError: an operation refuses a row, a number is not finite, or a label is neither 0 nor 1.
            StoreUnavailableError: a store that an operation asks did not answer.
        """
        made = rows.rows if self._is_prepared else self._run(self._program, step, rows)
        return self._batches(step, rows, made, self._labels(made, rows), self._num_trainers)

    def scoring(self, step: int, rows: RowBatch) -> ImpressionBatch:
        """Of rows without labels; see `training`."""
        made = self._run(self._scoring_program, step, rows)
        no_labels_BT = np.zeros((rows.num_rows, 0), dtype=np.float32)
        (batch,) = self._batches(step, rows, made, no_labels_BT, 1)
        return batch

    def _run(self, program: FeatureProgram, step: int, rows: RowBatch) -> pa.RecordBatch:
        return program(rows.rows, RowContext(rows.row_keys_B, self._seed, step))

    def _batches(
        self,
        step: int,
        rows: RowBatch,
        made: pa.RecordBatch,
        labels_BT: Float32Array,
        num_shares: int,
    ) -> list[ImpressionBatch]:
        num_rows = rows.num_rows
        numbers_BF, ids_BC = self._numbers(made, rows), self._ids(made)
        lists = {column: list_values(_column(made, column)) for column in self.schema.lists}
        bounds = [num_rows * rank // num_shares for rank in range(num_shares + 1)]
        shares = [slice(low, high) for low, high in pairwise(bounds)]

        def ids_of(mine: slice) -> Int64Array:
            elements = [values_N[_elements(mine, at)] for values_N, at in lists.values()]
            return np.concatenate([ids_BC[mine].reshape(-1), *elements])

        def offsets_of(mine: slice) -> dict[str, Int64Array]:
            return {name: at[mine.start : mine.stop + 1] - at[mine.start] for name, (_, at) in lists.items()}

        return [
            ImpressionBatch(
                step=step,
                row_keys_B=rows.row_keys_B[mine],
                num_targets=num_rows,
                numbers_BF=numbers_BF[mine],
                labels_BT=labels_BT[mine],
                lookups={FEATURE_TABLE: lookup},
                num_id_columns=ids_BC.shape[1],
                list_offsets_B1=offsets_of(mine),
            )
            for mine, lookup in zip(shares, _lookups([ids_of(mine) for mine in shares]), strict=True)
        ]

    def _numbers(self, made: pa.RecordBatch, rows: RowBatch) -> Float32Array:
        numbers_BF = np.zeros((rows.num_rows, len(self.schema.numbers)), dtype=np.float32)
        for index, column in enumerate(self.schema.numbers):
            # Not safe: large whole numbers are rounded.
            values = pc.fill_null(made[column].cast(pa.float32(), safe=False), 0.0)
            numbers_BF[:, index] = values.to_numpy(zero_copy_only=False)
        if not np.isfinite(numbers_BF).all():
            row, index = np.argwhere(~np.isfinite(numbers_BF))[0]
            raise InputError(
                f"the column {self.schema.numbers[index]!r} is {numbers_BF[row, index]} in "
                f"{_where(rows, row)}; leave such values empty, or make finite ones of them (data.features)"
            )
        return numbers_BF

    def _ids(self, made: pa.RecordBatch) -> Int64Array:
        ids_BC = np.empty((made.num_rows, len(self.schema.ids)), dtype=np.int64)
        for index, (column, space) in enumerate(self.schema.ids.items()):
            values = made[column]
            if values.null_count:
                values = pc.fill_null(values, self._null_ids[space])
            ids_BC[:, index] = values.to_numpy(zero_copy_only=False)
        return ids_BC

    def _labels(self, made: pa.RecordBatch, rows: RowBatch) -> Float32Array:
        labels_BT = np.empty((rows.num_rows, len(self.schema.labels)), dtype=np.float32)
        for index, column in enumerate(self.schema.labels):
            values = made[column].cast(pa.float32(), safe=False)
            labels_BT[:, index] = values.to_numpy(zero_copy_only=False)  # null is NaN
        if not (wrong := ~((labels_BT == 0) | (labels_BT == 1) | np.isnan(labels_BT))).any():
            return labels_BT
        row, index = np.argwhere(wrong)[0]
        raise InputError(
            f"the label {self.schema.labels[index]!r} is {labels_BT[row, index]:g} in {_where(rows, row)}; a "
            "ranking model learns 0 or 1, or nothing of an empty one"
        )


def _column(made: pa.RecordBatch, column: str) -> pa.ChunkedArray:
    return pa.chunked_array([without_nulls(pc.fill_null(made[column], []))])


def _elements(rows: slice, offsets_B1: Int64Array) -> slice:
    return slice(int(offsets_B1[rows.start]), int(offsets_B1[rows.stop]))


def _lookups(ids_of_shares: Sequence[Int64Array]) -> list[TableLookup]:
    deduplicated = [deduplicate(ids) for ids in ids_of_shares]
    updated_ids = deduplicated[0][0]
    if len(deduplicated) > 1:
        updated_ids, _ = deduplicate(np.concatenate([ids_M for ids_M, _ in deduplicated]))
    return [TableLookup(ids_M, inverse, updated_ids) for ids_M, inverse in deduplicated]


def _where(rows: RowBatch, row: int) -> str:
    """A row of the batch, as its file numbers it, if that is known."""
    ends = list(accumulate(interval.stop - interval.start for interval in rows.cursor))
    if len(ends) != 1:  # rows are shuffled, and the cursor says only which there are
        return f"row {row} of a batch" + (f" of {rows.cursor[0].file} and others" if ends else "")
    file, start, stop = rows.cursor[0]
    return f"one of the rows {start:,} to {stop - 1:,} of {file}"
