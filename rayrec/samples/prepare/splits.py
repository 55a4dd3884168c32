"""Rows per user, as `SequenceBuilder` makes them, become the files of a data set.

Axes: U users of one partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import LABELS, Label
from rayrec.samples.base.event_labels import HISTORY_LABELS, LABEL_COLUMNS, LABEL_TYPE, TARGET_LABELS
from rayrec.samples.base.event_times import HISTORY_TIMES, TIMES
from rayrec.samples.base.jagged import list_rows
from rayrec.samples.dataset.dataset_folder import TRAIN_FOLDER, FileEntry
from rayrec.samples.dataset.manifest import (
    EVALUATION_FILES,
    HISTORY_FILE,
    Split,
)
from rayrec.samples.prepare.sequences import PER_USER
from rayrec.samples.prepare.writer import RowGroupWriter

_EVALUATION = {
    "user_id": pa.int64(),
    "history": pa.list_(pa.int64()),
    HISTORY_TIMES: pa.list_(pa.int64()),
    "target": pa.int64(),
    "timestamp": pa.int64(),
}
_HISTORY = {"user_id": pa.int64(), "item_ids": pa.list_(pa.int64()), TIMES: pa.list_(pa.int64())}
"""Columns that every data set has, labels of events aside."""


class SplitRows:
    """Sequences as the rows of training, history, validation and test."""

    def __init__(self, schema: pa.Schema) -> None:
        """
        Args:
            schema: that of the sequences.
        """
        self._columns = [name for name in schema.names if name not in PER_USER]
        self._labels = [label for label in LABELS if LABEL_COLUMNS[label] in schema.names]
        codes = pa.list_(LABEL_TYPE)
        self.train_schema = pa.schema([schema.field(name) for name in self._columns])
        self.history_schema = pa.schema(_HISTORY | {LABEL_COLUMNS[label]: codes for label in self._labels})
        self.evaluation_schema = pa.schema(
            _EVALUATION
            | {HISTORY_LABELS[label]: codes for label in self._labels}
            | {TARGET_LABELS[label]: LABEL_TYPE for label in self._labels}
        )

    def training(self, sequences: pa.Table) -> pa.Table:
        """The training events of users who have some."""
        num_train_U = sequences["num_train"].to_numpy()
        rows_U = np.flatnonzero(num_train_U)
        columns = {}
        for name in self._columns:
            column = sequences[name].combine_chunks()
            columns[name] = (
                _front(column, rows_U, num_train_U[rows_U])
                if pa.types.is_list(column.type)
                else column.take(pa.array(rows_U))
            )
        return pa.table(columns)

    def history(self, sequences: pa.Table) -> pa.Table:
        """All events of every user."""
        return sequences.select(self.history_schema.names)

    def targets(self, sequences: pa.Table, split: Split) -> pa.Table:
        """The targets of validation or test, with what was before them."""
        return _targets(sequences, sequences[f"{split}_at"].to_numpy(), self._labels)


def train_file(number: int) -> str:
    """Name of a file of training rows, below the folder of the data set."""
    return f"{TRAIN_FOLDER}/part-{number:05d}.parquet"


class SplitWriter:
    """Training, validation, test and history rows, written as partitions arrive."""

    def __init__(self, folder: Path, schema: pa.Schema, rows_per_group: int, rows_per_file: int) -> None:
        """
        Args:
            schema: that of the rows that will be added.
        """
        self._folder = folder
        self._rows = SplitRows(schema)
        self._train = RowGroupWriter(
            lambda number: folder / train_file(number),
            self._rows.train_schema,
            rows_per_group,
            rows_per_file,
        )
        self._history = RowGroupWriter(
            lambda number: folder / HISTORY_FILE, self._rows.history_schema, rows_per_group
        )
        self._evaluation = {
            split: RowGroupWriter(
                lambda number, name=name: folder / name,  # type: ignore[misc]
                self._rows.evaluation_schema,
                rows_per_group,
            )
            for split, name in EVALUATION_FILES.items()
        }

    def add(self, sequences: pa.Table) -> Int64Array:
        """Write the rows of some users; returns the item ids of their training events."""
        sequences = sequences.combine_chunks()
        train = self._rows.training(sequences)
        self._train.write(train)
        self._history.write(self._rows.history(sequences))
        for split, writer in self._evaluation.items():
            writer.write(self._rows.targets(sequences, split))
        return train["item_ids"].combine_chunks().flatten().to_numpy()

    def close(self) -> dict[str, FileEntry]:
        """Finish the files; name below the folder -> entry of the manifest."""
        rows: dict[Path, int] = {}
        for writer in (self._train, self._history, *self._evaluation.values()):
            rows |= writer.close()
        return {
            path.relative_to(self._folder).as_posix(): FileEntry.of(path, count)
            for path, count in rows.items()
        }


def _targets(sequences: pa.Table, target_at_U: Int64Array, labels: Sequence[Label]) -> pa.Table:
    """History with its times and labels, target with its, of the users whose target is at an index >= 0."""
    rows_U = np.flatnonzero(target_at_U >= 0)
    at_U = target_at_U[rows_U]
    items, times = sequences["item_ids"].combine_chunks(), sequences["timestamps"].combine_chunks()
    indices_U = items.offsets.to_numpy()[rows_U] + at_U
    codes = {label: sequences[LABEL_COLUMNS[label]].combine_chunks() for label in labels}
    return pa.table(
        {
            "user_id": sequences["user_id"].combine_chunks().take(pa.array(rows_U)),
            "history": _front(items, rows_U, at_U),
            HISTORY_TIMES: _front(times, rows_U, at_U),
            "target": items.values.take(pa.array(indices_U)),
            "timestamp": times.values.take(pa.array(indices_U)),
            **{HISTORY_LABELS[label]: _front(lists, rows_U, at_U) for label, lists in codes.items()},
            **{
                TARGET_LABELS[label]: lists.values.take(pa.array(indices_U)) for label, lists in codes.items()
            },
        }
    )


def _front(lists: pa.ListArray, rows_U: Int64Array, lengths_U: Int64Array) -> pa.ListArray:
    """The first `lengths_U` values of the chosen rows."""
    starts_U = lists.offsets.to_numpy()[rows_U].astype(np.int64)
    return list_rows(lists.values, starts_U, lengths_U)
