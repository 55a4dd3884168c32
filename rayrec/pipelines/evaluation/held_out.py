"""Events that recommenders are judged on: those that a split of a data set holds out.

Axis: U users of the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

import numpy as np

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.tasks.next_item import check_split
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import Label
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.reading.reader import evaluation_batches


@dataclass(frozen=True)
class HeldOut:
    """The users of a split, each with a history and the event that comes next."""

    dataset: Dataset
    split: Split
    max_users: int | None = None
    """The first so many, in the order of a hash of their ids: a sample, and the same one for every model. No
    others are read."""
    after: int | None = None
    """UNIX seconds: users whose target is no later are left out; None: nobody is."""

    def check(self) -> None:
        """Refuse to judge on nobody.

        Raises:
            InputError: the split has no users, or all are left out.
        """
        check_split(self.dataset, self.split)
        if not self.num_users:
            assert self.after is not None, "else nobody is left out"
            newest = datetime.fromtimestamp(self.after, UTC).isoformat()
            raise InputError(
                f"{self.dataset.root}: of {self.num_left_out:,} events that the split {self.split!r} holds "
                f"out, none is later than the newest event of the run's own data set ({newest}); prepare a "
                "log that goes on after it"
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
        return self._times_U[self._is_kept_U]

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

    @cached_property
    def _times_U(self) -> Int64Array:
        return self.dataset.target_times(self.split, self.max_users)

    @cached_property
    def _is_kept_U(self) -> BoolArray:
        if self.after is None:
            return np.ones(len(self._times_U), dtype=np.bool_)
        return self._times_U > self.after


def model_batches(recommender: Recommender, held_out: HeldOut, batch_size: int) -> Iterator[SampleBatch]:
    """All users, with what a model reads to be evaluated."""
    batches = held_out.batches(batch_size, recommender.needs_times, recommender.needs_labels)
    return (samples.instructed(recommender.evaluation_instruction) for samples in batches)
