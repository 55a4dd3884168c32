"""Events that recommenders are judged on: those that a split of a data set holds out.

Axes: U users of the split, E training events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.pipelines.tasks.next_item import check_split
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import Label
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.event_times import TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import EVALUATION_FILES, Split
from rayrec.samples.reading.reader import evaluation_batches


@dataclass(frozen=True)
class HeldOut:
    """The users of a split, each with a history and the event that comes next."""

    dataset: Dataset
    split: Split
    max_users: int | None = None
    """The first so many, in the order of a hash of their ids: a sample, and the same one for every model. No
    others are read."""
    learned: Dataset | None = None
    """What was trained on, where that is another data set. Users are left out of whose events the target or
    later ones were."""

    def check(self) -> None:
        """Refuse to judge on nobody.

        Raises:
            InputError: the split has no users, or all are left out.
        """
        check_split(self.dataset, self.split)
        if not self.num_users:
            raise InputError(
                f"{self.dataset.root}: of all {self.num_left_out:,} users of the split {self.split!r} the "
                f"target or later events were trained on ({self._learned.root}); prepare a later log"
            )

    @property
    def num_users(self) -> int:
        return int(self._is_kept_U.sum())

    @property
    def num_left_out(self) -> int:
        return len(self._is_kept_U) - self.num_users

    @property
    def target_times_U(self) -> Int64Array:
        """UNIX seconds, in the order of `batches`."""
        return self.dataset.target_times(self.split, self.max_users)[self._is_kept_U]

    def target_labels(self, label: Label) -> Int64Array | None:
        """[U] codes, in the order of `batches`; None where the source has no such labels."""
        codes_U = self.dataset.target_labels(self.split, label, self.max_users)
        return None if codes_U is None else codes_U[self._is_kept_U]

    def batches(
        self, batch_size: int, with_times: bool = False, labels: Sequence[Label] = ()
    ) -> Iterator[SampleBatch]:
        """All users, as `evaluation_batches` gives them; batches of which some are left out are smaller."""
        done = 0
        for samples in evaluation_batches(
            self.dataset, self.split, batch_size, self.max_users, with_times, labels
        ):
            kept = np.flatnonzero(self._is_kept_U[done : done + samples.num_rows])
            done += samples.num_rows
            if len(kept) == samples.num_rows:
                yield samples
            elif len(kept):
                yield samples.some(kept)

    @property
    def _learned(self) -> Dataset:
        assert self.learned is not None, "asked where users are left out"
        return self.learned

    @cached_property
    def _is_kept_U(self) -> BoolArray:
        times_U = self.dataset.target_times(self.split, self.max_users)
        if self.learned is None:
            return np.ones(len(times_U), dtype=np.bool_)
        table = self.dataset.read(EVALUATION_FILES[self.split], ["user_id", "target"])[: len(times_U)]
        users_U, targets_U = table["user_id"].to_numpy(), table["target"].to_numpy()
        users_E, items_E, times_E = _trained_events(self.learned, users_U)
        targets = pd.MultiIndex.from_arrays([users_U, targets_U])
        events = pd.MultiIndex.from_arrays([users_E, items_E])
        if times_E is None or self.dataset.has_order_alone():
            return ~targets.isin(events)
        # The same item may be met again: then the target is another event, unless the times agree.
        newest = pd.Series(times_E).groupby(users_E).max()
        newest_U = newest.reindex(users_U, fill_value=np.iinfo(np.int64).min).to_numpy()
        is_of_newest_E = times_E == newest.reindex(users_E).to_numpy()
        return (times_U > newest_U) | ((times_U == newest_U) & ~targets.isin(events[is_of_newest_E]))


def _trained_events(
    dataset: Dataset, user_ids_U: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array | None]:
    """[E] users, items and UNIX seconds of the training events of some users; no seconds without times."""
    has_times = dataset.has_times() and not dataset.has_order_alone()
    tables = []
    for name in dataset.train_files:
        table = dataset.read(name, ["user_id", "item_ids", *([TIMES] if has_times else [])])
        tables.append(table.filter(pa.array(np.isin(table["user_id"].to_numpy(), user_ids_U))))
    table = pa.concat_tables(tables)
    items_E, offsets_B1 = list_values(table["item_ids"])
    users_E = np.repeat(table["user_id"].to_numpy(), np.diff(offsets_B1))
    return users_E, items_E, list_values(table[TIMES])[0] if has_times else None
