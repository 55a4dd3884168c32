"""Events of a partition become one row per user: ordered, free of duplicates, split.

Axes: E events of the partition, U users of the partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import LABELS, Label
from rayrec.platform.hashing import combine64, mix64
from rayrec.samples.base.event_labels import LABEL_COLUMNS, LABEL_TYPE
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.dataset.manifest import SplitInfo
from rayrec.samples.importers.tables import PART
from rayrec.samples.prepare.validation import EVENT_COLUMNS, SOURCE_ROW

PER_USER = ("num_train", "valid_at", "test_at", "duplicates", "first_duplicate", "first_row", "ties")
"""Columns of the result that the training rows do not have."""


@dataclass(frozen=True)
class SequenceBuilder:
    """Events of some users -> one row for each of these users, in order of `mix64(user_id)`.

    Columns of the result: `user_id`; the lists `item_ids`, `timestamps` (UNIX seconds), one of codes per
    label (`LABEL_COLUMNS`) and one per further column, oldest event first; `num_train`, the events at the
    front that are for training; `valid_at` and `test_at`, the indices of the targets or -1; `duplicates`,
    events dropped because the user already had the same item, time and behavior; `first_duplicate`, the
    source row of the first of them or -1; `first_row`, the source row of the user's oldest event; `ties`,
    neighboring events with the same time.
    """

    split: SplitInfo
    ties: Literal["shuffle", "file"]
    seed: int
    labels: tuple[Label, ...] = ()
    """Those that the events have."""

    def __call__(self, events: pa.Table) -> pa.Table:
        duplicate_E = _duplicates(events)
        kept = events.take(np.flatnonzero(~duplicate_E)) if duplicate_E.any() else events
        kept = kept.take(self._order(kept)).combine_chunks()
        user_E, time_E = kept["user_id"].to_numpy(), kept["timestamp"].to_numpy()
        first_E = np.diff(user_E, prepend=user_E[:1]) != 0
        first_E[:1] = True
        starts_U = np.flatnonzero(first_E)
        lengths_U = np.diff(starts_U, append=len(user_E))
        tied_E = (np.diff(time_E, prepend=-1) == 0) & ~first_E
        num_train_U, valid_at_U, test_at_U = self._split(kept, starts_U, lengths_U)
        duplicates_U, first_duplicate_U = _duplicates_of_users(events, duplicate_E, user_E[starts_U])

        columns = {
            "user_id": pa.array(user_E[starts_U]),
            "item_ids": _lists(kept["item_id"], lengths_U),
            "timestamps": _lists(pa.chunked_array([time_E // 1_000_000]), lengths_U),
        }
        for label in self.labels:
            columns[LABEL_COLUMNS[label]] = _lists(kept[label].cast(LABEL_TYPE), lengths_U)
        for name in kept.schema.names:
            if name not in (*EVENT_COLUMNS, *LABELS, SOURCE_ROW, PART):
                columns[name] = _lists(kept[name], lengths_U)
        columns |= {
            "num_train": pa.array(num_train_U),
            "valid_at": pa.array(valid_at_U),
            "test_at": pa.array(test_at_U),
            "duplicates": pa.array(duplicates_U),
            "first_duplicate": pa.array(first_duplicate_U),
            "first_row": pa.array(kept[SOURCE_ROW].to_numpy()[starts_U]),
            "ties": pa.array(np.add.reduceat(tied_E.astype(np.int64), starts_U)),
        }
        return pa.table(columns)

    def _order(self, events: pa.Table) -> Int64Array:
        """Events by user and time; among equal times by a hash of the event itself, so that neither the
        order of the file nor the partitioning shows."""
        user_E, time_E = events["user_id"].to_numpy(), events["timestamp"].to_numpy()
        if self.ties == "file":
            tie_E = events[SOURCE_ROW].to_numpy()
        else:
            item_E, behavior_E = events["item_id"].to_numpy(), events["behavior"].to_numpy()
            tie_E = combine64(self.seed, user_E, item_E, time_E, behavior_E)
        keys = [tie_E, time_E, mix64(user_E)]
        if self.split.kind == "given":  # whatever the times say
            keys.insert(2, events[PART].to_numpy())
        return np.lexsort(keys)

    def _split(
        self, events: pa.Table, starts_U: Int64Array, lengths_U: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(num_train_U, valid_at_U, test_at_U)."""
        if self.split.kind == "leave_one_out":
            long_enough_U = lengths_U >= 3
            return (
                np.where(long_enough_U, lengths_U - 2, lengths_U),
                np.where(long_enough_U, lengths_U - 2, -1),
                np.where(long_enough_U, lengths_U - 1, -1),
            )
        if self.split.kind == "given":
            part_E = events[PART].to_numpy()
            before_valid_U = np.add.reduceat((part_E < 1).astype(np.int64), starts_U)
            before_test_U = np.add.reduceat((part_E < 2).astype(np.int64), starts_U)
        else:
            assert self.split.valid_start is not None, "a split by time has boundaries"
            assert self.split.test_start is not None, "a split by time has boundaries"
            time_E = events["timestamp"].to_numpy()
            before_valid_U = _count_before(time_E, self.split.valid_start, starts_U)
            before_test_U = _count_before(time_E, self.split.test_start, starts_U)
        # A target without a history before it cannot be recommended for.
        has_valid_U = (before_valid_U > 0) & (before_valid_U < before_test_U)
        has_test_U = (before_test_U > 0) & (before_test_U < lengths_U)
        return (
            before_valid_U,
            np.where(has_valid_U, before_valid_U, -1),
            np.where(has_test_U, before_test_U, -1),
        )


def _count_before(time_E: Int64Array, boundary_s: float, starts_U: Int64Array) -> Int64Array:
    before_E = time_E < round(boundary_s * 1_000_000)
    return np.add.reduceat(before_E.astype(np.int64), starts_U)


def _duplicates(events: pa.Table) -> np.ndarray:
    """[E] whether an earlier row of the source is the same event; rows are in source order."""
    keys = events.select(list(EVENT_COLUMNS)).to_pandas()
    return keys.duplicated(keep="first").to_numpy()


def _duplicates_of_users(
    events: pa.Table, duplicate_E: np.ndarray, user_U: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """(duplicates_U, source row of each user's first duplicate, -1 without)."""
    counts_U = np.zeros(len(user_U), dtype=np.int64)
    first_U = np.full(len(user_U), -1, dtype=np.int64)
    where_D = np.flatnonzero(duplicate_E)
    if len(where_D):
        position_D = pd.Index(user_U).get_indexer(pd.Index(events["user_id"].to_numpy()[where_D]))
        np.add.at(counts_U, position_D, 1)
        # Backwards, so that each user's earliest row is written last.
        first_U[position_D[::-1]] = events[SOURCE_ROW].to_numpy()[where_D[::-1]]
    return counts_U, first_U


def _lists(column: pa.ChunkedArray, lengths_U: Int64Array) -> pa.ListArray:
    """The rows of a column, which stand user after user, as one list per user."""
    offsets = pa.array(offsets_from_lengths(lengths_U), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.concat_arrays(column.chunks))
