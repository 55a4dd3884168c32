"""From rows as they were read to features: the run's operations, then sequences.

RowBatch ─ FeatureProgram ─► columns `user_id`, `item_ids` ─ SequenceFeatures ─► one FeatureBatch per trainer
                             and `timestamps` and labels,
                             for models that need them

Histories to rank for go the same way if all that the operations read is stored of histories; so an operation
may read times and labels that the model does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import LABELS, Label
from rayrec.platform.hashing import combine64
from rayrec.samples.base.batches import FeatureBatch, RowBatch, SampleBatch
from rayrec.samples.base.event_labels import LABEL_COLUMNS, are_event_labels
from rayrec.samples.base.event_times import TIMES, are_event_times, as_type
from rayrec.samples.base.jagged import concatenated_ranges, list_array
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.neighbors import NO_TIME
from rayrec.samples.operations.columns import value_type
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram

_TIES_STREAM = 4
"""Orders of a step come from the hash of (seed, 4, step, row, index of the event in its row)."""


class History(NamedTuple):
    """A user and the events of their history, oldest first."""

    user_id: int
    item_ids_N: Int64Array
    times_N: Int64Array | None
    """UNIX seconds, for models that need them; None where the row has none."""
    labels: Mapping[Label, Int64Array]
    """[N] codes, of the labels that the model needs; those are left out which the row has not."""


class HistoryColumns(NamedTuple):
    """Which columns of histories, besides users and items, the model reads, and which the data set has."""

    reads_times: bool = False
    reads_labels: tuple[Label, ...] = ()
    stores_times: bool = True
    stores_labels: tuple[Label, ...] = LABELS

    @property
    def names(self) -> tuple[str, ...]:
        """Columns that the model reads."""
        labels = (LABEL_COLUMNS[label] for label in self.reads_labels)
        return ("user_id", "item_ids", *([TIMES] if self.reads_times else []), *labels)

    def store(self, field: pa.Field) -> bool:
        """Whether a column of training rows is one of histories, too: of texts it would be the source's keys,
        and ids are stored."""
        if field.name in ("user_id", "item_ids"):
            return pt.is_integer(value_type(field.type))
        if field.name == TIMES:
            return self.stores_times and are_event_times(field.type)
        stored = [LABEL_COLUMNS[label] for label in self.stores_labels]
        return field.name in stored and are_event_labels(field.type)


class RowFeatures:
    """The same operations for training rows, for users to be ranked for, and for rows that serving gets."""

    def __init__(
        self,
        sequences: SequenceFeatures,
        program: FeatureProgram,
        seed: int = 0,
        is_prepared: bool = False,
        histories: HistoryColumns | None = None,
        redraws_ties: bool = False,
        tells_newest_event: bool = False,
    ) -> None:
        """
        Args:
            program: makes `user_id`, `item_ids` and, for models that need them, `timestamps` and lists of
                labels of the columns there are.
            seed: of the run, for the program's random numbers.
            is_prepared: training rows have been through the program already when they were read.
            histories: what is read of those to rank for; None: users and items.
            redraws_ties: training rows have times, and an order of events of one time that is the step's.
            tells_newest_event: training rows have times, and batches say which was the newest.
        """
        self._sequences = sequences
        self._program = program
        self._seed = seed
        self._is_prepared = is_prepared
        self._redraws_ties = redraws_ties
        self._tells_newest_event = tells_newest_event
        self._histories = histories = histories or HistoryColumns()
        # Training rows may have more: labels of targets, which are unknown for the next event.
        self._of_histories = program.narrowed(histories.names)
        columns = self._of_histories.input_schema
        self._takes_histories = not self._of_histories.is_empty and all(map(histories.store, columns))
        """Whether the program can be run on histories: of users to rank for, nothing else is stored."""
        operated = columns.names if self._takes_histories else []
        self.history_labels: tuple[Label, ...] = tuple(
            label
            for label, name in LABEL_COLUMNS.items()
            if label in histories.reads_labels or name in operated
        )
        """Labels that histories to rank for have to bring: for the model, or for operations."""
        self.needs_history_times = histories.reads_times or TIMES in operated
        """Likewise their times."""

    def training(self, step: int, rows: RowBatch) -> list[FeatureBatch]:
        """Features of a step's rows; see `SequenceFeatures`.

        Raises:
            InputError: an operation refuses a row.
            StoreUnavailableError: a store that an operation asks did not answer.
        """
        if not self._is_prepared:
            context = RowContext(rows.row_keys_B, self._seed, step)
            rows = RowBatch(rows.row_keys_B, self._program(rows.rows, context), rows.cursor)
        samples = SampleBatch.of(step, rows)
        newest_event: int | None = None
        if self._tells_newest_event and samples.times_N is not None:
            newest_event = _time_of(samples)
        if self._redraws_ties:
            samples = with_shuffled_ties(samples, self._seed)
        if not self._histories.reads_times:
            samples = replace(samples, times_N=None)
        batches = self._sequences(samples)
        if newest_event is None:
            return batches
        return [replace(batch, newest_event=newest_event) for batch in batches]

    def ranking(self, samples: SampleBatch, is_prepared: bool = False) -> FeatureBatch:
        """Features to rank what comes next. A trigger is the newest event, which no operation sees.

        Args:
            samples: with `history_labels` and, if `needs_history_times`, times.
            is_prepared: they are of `history_of`, where operations have run.
        """
        prepared = self._as_read(samples) if is_prepared else self._prepared(samples)
        return self._sequences.ranking(self._sequences.with_triggers(prepared))

    def seen(self, samples: SampleBatch) -> Int64Array:
        """[B, E] catalog positions of all that each history has, whatever operations leave of it, and of
        its trigger."""
        return self._sequences.seen(self._sequences.with_triggers(samples))

    def history_of(self, row: Mapping[str, Any]) -> History:
        """Of a raw row by field name, as a training row would have it.

        Raises:
            InputError: a field is missing, unknown or of the wrong type, or a code of a label has no name.
        """
        made = self._program.one(row)
        if made["user_id"] is None:
            raise _is_null("user_id")
        # No list may have gaps; what is said of events beside their items may be missing as a whole.
        there = [f for f in self._program.schema if f.name == "item_ids" or made[f.name] is not None]
        for field in there:
            if field.name != "user_id" and None in (made[field.name] or []):
                raise _is_null(f"one of {field.name}")
        arrays = [pa.array([made[field.name]], field.type) for field in there]
        rows = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(there))
        sample = SampleBatch.of(0, RowBatch(np.zeros(1, dtype=np.int64), rows))
        self._sequences.check_labels(sample)
        return History(int(made["user_id"]), sample.item_ids_N, sample.times_N, sample.labels)

    def _as_read(self, samples: SampleBatch) -> SampleBatch:
        """Without what only operations read."""
        times_N = samples.times_N if self._histories.reads_times else None
        labels = {label: samples.labels[label] for label in self._histories.reads_labels}
        return replace(samples, times_N=times_N, labels=labels)

    def _prepared(self, samples: SampleBatch) -> SampleBatch:
        if not self._takes_histories:
            return samples
        schema = self._of_histories.input_schema
        try:
            arrays = [_column(samples, field).cast(field.type) for field in schema]
        except pa.ArrowException as error:
            raise InputError(
                f"ids of the data set do not fit the types of the training rows ({error}); prepare the data "
                "set from the same ids, or store the rows' as int64"
            ) from error
        rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
        made = self._of_histories(rows, RowContext(samples.row_keys_B, self._seed, samples.step))
        prepared = SampleBatch.of(samples.step, RowBatch(samples.row_keys_B, made))
        if samples.times_N is not None and prepared.times_N is not None:
            # Operations see 1970 for a history without times; what reads the result knows better.
            is_timeless_B = np.zeros(samples.num_rows, np.bool_)
            is_timeless_B[_row_of_N(samples)[samples.times_N == NO_TIME]] = True
            times_N = np.where(is_timeless_B[_row_of_N(prepared)], NO_TIME, prepared.times_N)
            prepared = replace(prepared, times_N=times_N)
        return replace(prepared, instruction=samples.instruction)


def _is_null(what: str) -> InputError:
    return InputError(f"{what} is null after the operations of the run; give the row what it is made of")


def _column(samples: SampleBatch, field: pa.Field) -> pa.Array:
    if field.name == "user_id":
        return pa.array(samples.user_ids_B)
    if field.name == "item_ids":
        return list_array(samples.item_ids_N, samples.offsets_B1)
    for label, name in LABEL_COLUMNS.items():
        if field.name == name:
            return list_array(samples.labels[label], samples.offsets_B1)
    assert samples.times_N is not None, "histories have times where `needs_history_times`"
    offsets = pa.array(samples.offsets_B1, pa.int32())
    times_N = np.where(samples.times_N == NO_TIME, 0, samples.times_N)
    return pa.ListArray.from_arrays(offsets, as_type(times_N, field.type.value_type))


def _row_of_N(samples: SampleBatch) -> Int64Array:
    """[N] the row of each event."""
    return np.repeat(np.arange(samples.num_rows), np.diff(samples.offsets_B1))


def with_shuffled_ties(batch: SampleBatch, seed: int) -> SampleBatch:
    """The same rows, with ties (neighboring events of one time) in another order at every step.

    A data set holds one arbitrary order of ties; reshuffling keeps a model from memorizing it.

    Items, times and labels move together. The order depends on the seed, the step, the row and the
    indices of the events alone.
    """
    assert batch.times_N is not None, "ties cannot be told without times"
    lengths_B = np.diff(batch.offsets_B1)
    row_N = _row_of_N(batch)
    position_N = concatenated_ranges(np.zeros_like(lengths_B), lengths_B)
    begins_N = (np.diff(batch.times_N, prepend=0) != 0) | (position_N == 0)
    bits_N = combine64(seed, _TIES_STREAM, batch.step, batch.row_keys_B[row_N], position_N)
    order_N = np.lexsort((bits_N, begins_N.cumsum()))
    return replace(
        batch,
        item_ids_N=batch.item_ids_N[order_N],
        times_N=batch.times_N[order_N],
        labels={label: codes_N[order_N] for label, codes_N in batch.labels.items()},
    )


def _time_of(samples: SampleBatch) -> int | None:
    """The newest event of the row in the middle, by time: events with a wrong time do not move it."""
    assert samples.times_N is not None, "it is asked for"
    has_any_B = np.diff(samples.offsets_B1) > 0
    if not has_any_B.any():
        return None
    newest_B = np.maximum.reduceat(samples.times_N, samples.offsets_B1[:-1][has_any_B])
    middle = (len(newest_B) - 1) // 2
    return int(np.partition(newest_B, middle)[middle])
