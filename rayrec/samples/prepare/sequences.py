"""Events of a partition become one row per user: ordered, free of duplicates, split.

Axes: E events of the partition, U users of the partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.event_labels import LABELS, Label
from rayrec.platform.hashing import combine64, mix64
from rayrec.samples.base.event_labels import LABEL_COLUMNS, LABEL_TYPE
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.dataset.manifest import Split, SplitInfo
from rayrec.samples.importers.tables import PART
from rayrec.samples.prepare.validation import EVENT_COLUMNS, SOURCE_ROW

WITHOUT_HISTORY: dict[Split, str] = {"valid": "valid_without_history", "test": "test_without_history"}
"""By split, the column that says who has events there and none that can be predicted."""
PER_USER = (
    *("num_train", "valid_at", "test_at", *WITHOUT_HISTORY.values()),
    *("duplicates", "first_duplicate", "first_row", "ties"),
)
"""Columns of the result that the training rows do not have."""
_TARGET_SEEDS: dict[Split, int] = {"valid": 0x7A1, "test": 0x7E57}
"""Of the hashes that choose random targets."""


@dataclass(frozen=True)
class _Divided:
    """Sequences of users, divided."""

    num_train_U: Int64Array
    target_at_U: dict[Split, Int64Array]
    """Indices of the targets; -1 of users without one."""
    without_history_U: dict[Split, BoolArray]
    """Who has events in a split and no target, since nothing is before it."""


@dataclass(frozen=True)
class SequenceBuilder:
    """Events of some users -> one row for each of these users, in order of `mix64(user_id)`.

    Columns of the result: `user_id`; the lists `item_ids`, `timestamps` (UNIX seconds), one of codes per
    label (`LABEL_COLUMNS`) and one per further column, oldest event first; `num_train`, the events at the
    front that are for training; `valid_at` and `test_at`, the indices of the targets or -1;
    `valid_without_history` and `test_without_history`, whether the user has events in the split but none
    that can be predicted, since nothing is before it; `duplicates`, events dropped because the user already
    had the same item, time and behavior; `first_duplicate`, the source row of the first of them or -1;
    `first_row`, the source row of the user's oldest event; `ties`, neighboring events with the same time.
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
        divided = self._split(kept, starts_U, lengths_U)
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
            "num_train": pa.array(divided.num_train_U),
            "valid_at": pa.array(divided.target_at_U["valid"]),
            "test_at": pa.array(divided.target_at_U["test"]),
            **{name: pa.array(divided.without_history_U[split]) for split, name in WITHOUT_HISTORY.items()},
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

    def _split(self, events: pa.Table, starts_U: Int64Array, lengths_U: Int64Array) -> _Divided:
        if self.split.kind == "leave_one_out":
            long_enough_U = lengths_U >= 3
            nobody_U = np.zeros(len(lengths_U), dtype=bool)
            return _Divided(
                np.where(long_enough_U, lengths_U - 2, lengths_U),
                {
                    "valid": np.where(long_enough_U, lengths_U - 2, -1),
                    "test": np.where(long_enough_U, lengths_U - 1, -1),
                },
                {"valid": nobody_U, "test": nobody_U},
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
        user_U = events["user_id"].to_numpy()[starts_U]
        periods: dict[Split, tuple[Int64Array, Int64Array]] = {
            "valid": (before_valid_U, before_test_U),
            "test": (before_test_U, lengths_U),
        }
        target_at_U = {split: self._target(split, user_U, *period) for split, period in periods.items()}
        return _Divided(
            before_valid_U,
            target_at_U,
            {
                split: (first_U < stop_U) & (target_at_U[split] < 0)
                for split, (first_U, stop_U) in periods.items()
            },
        )

    def _target(
        self, split: Split, user_U: Int64Array, first_U: Int64Array, stop_U: Int64Array
    ) -> Int64Array:
        """[U] index of the event of a period that is predicted, -1 of users without one.

        Args:
            first_U, stop_U: the period's events of each user.
        """
        if self.split.targets == "first":
            # A target without a history before it cannot be recommended for.
            return np.where((first_U > 0) & (first_U < stop_U), first_U, -1)
        candidates_U = np.maximum(first_U, 1)
        num_U = stop_U - candidates_U
        if self.split.targets == "last":
            chosen_U = stop_U - 1
        else:
            drawn_U = combine64(self.seed, _TARGET_SEEDS[split], user_U).view(np.uint64)
            chosen_U = candidates_U + (drawn_U % np.maximum(num_U, 1).astype(np.uint64)).astype(np.int64)
        return np.where(num_U > 0, chosen_U, -1)


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
