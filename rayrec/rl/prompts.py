"""Prompts: user histories, each with the event that was logged after it.

    training rows ─ truncated before an event ─┐
    validation rows ───────────────────────────┴─► Prompts of a step ─► chunks, each sampled on one worker

The prompts of a step depend on settings, seed and files alone, so a resumed run gets the same ones. Users
that are held out are in no prompt: the policy is evaluated on them.

Axes: U users, E items of a history, N events of all histories.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import LABELS, Label
from rayrec.platform.hashing import combine64
from rayrec.rl.config import PromptsConfig
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.event_labels import HISTORY_LABELS, LABEL_COLUMNS, TARGET_LABELS
from rayrec.samples.base.event_times import HISTORY_TIMES, TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import EVALUATION_FILES
from rayrec.samples.reading.read_plan import ReadPlan, ReadPosition
from rayrec.samples.reading.reader import SampleReader

HOLD_OUT_SALT = 0x52_4C
"""Hashed with user ids, so that this choice is independent of other choices by hash."""


@dataclass(frozen=True)
class Prompts:
    """Some users of a step."""

    samples: SampleBatch
    """`targets_B` are ids of items, as in evaluation."""
    targets_U: Int64Array
    """Catalog positions of the logged events; -1 where the catalog lacks the item."""
    chunk: int = 0
    """Index within the step."""
    target_labels: dict[Label, Int64Array] = field(default_factory=dict)
    """[U] codes of the logged events, of the labels that the data set has."""

    def __len__(self) -> int:
        return len(self.targets_U)

    @property
    def step(self) -> int:
        return self.samples.step

    def chunks(self, num_users: int, multiple_of: int = 1) -> list[Prompts]:
        """Split into chunks of neighboring users, of equal size give or take one.

        Args:
            num_users: largest size of a chunk.
            multiple_of: the number of chunks is a multiple of this; with fewer users, each is a chunk.
        """
        wanted = multiple_of * math.ceil(len(self) / (multiple_of * num_users))
        rows_U = np.arange(len(self))
        return [
            replace(self.some(some_U), chunk=chunk)
            for chunk, some_U in enumerate(np.array_split(rows_U, min(wanted, len(self))))
        ]

    def some(self, rows_U: Int64Array) -> Prompts:
        """Select users, in the given order."""
        return Prompts(
            samples=self.samples.some(rows_U),
            targets_U=self.targets_U[rows_U],
            chunk=self.chunk,
            target_labels={label: codes_U[rows_U] for label, codes_U in self.target_labels.items()},
        )


def is_held_out(user_ids_U: Int64Array, share: float) -> np.ndarray:
    """[U] bool: users that are in no prompt, a share of all users by a hash of their ids."""
    bound = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    held: np.ndarray = combine64(HOLD_OUT_SALT, user_ids_U) < bound
    return held


class PromptStream:
    """The prompts of every step, in an order that depends on seed and files alone."""

    def __init__(self, dataset: Dataset, config: PromptsConfig, seed: int) -> None:
        """
        Raises:
            InputError: there are no such rows.
        """
        self._dataset, self._config, self._seed = dataset, config, seed
        files = dataset.train_files if config.split == "train" else [EVALUATION_FILES[config.split]]
        self.plan = ReadPlan.of_files(dataset.root, files, config.users_per_step, seed)
        self._reader = SampleReader(self.plan.spec)
        self._columns = _Columns.of(config.split, self.plan.spec.schema.names)

    def step(self, step: int) -> Prompts:
        """Read the prompts of a step, counted from 0, where every step takes one read.

        Raises:
            InputError: no step has any users left.
        """
        return self.read_on(step, step)[0]

    def read_on(self, step: int, read: int) -> tuple[Prompts, int]:
        """Read prompts from a position on, in reads of `users_per_step` rows.

        They have fewer users than rows are read where some are held out or have a single event; where none is
        left, the next read is used.

        Args:
            step: that they are for.
            read: the position, counted in reads.

        Returns:
            prompts, and the position after them.

        Raises:
            InputError: no read has any users left.
        """
        for each in range(read, read + self.plan.steps_per_epoch):
            if len(prompts := self._read(step, each)):
                return prompts, each + 1
        raise InputError(
            f"{self._dataset.root}: there are no users to sample for: all users of the split "
            f"{self._config.split!r} are held out (prompts.held_out_share), or have one event"
        )

    def _read(self, step: int, read: int) -> Prompts:
        rows = self._reader.read_batch(self.plan.batch(read))
        samples, labels = self._columns.samples(step, rows.row_keys_B, rows.rows)
        if self._config.split == "train":
            prompts = self._before_an_event(samples, labels, read)
        else:
            prompts = _as_they_are(samples, labels)
        is_used_U = ~is_held_out(prompts.samples.user_ids_B, self._config.held_out_share)
        # A history without events is no prompt.
        is_used_U &= np.diff(prompts.samples.offsets_B1) > 0
        prompts = prompts.some(np.flatnonzero(is_used_U))
        assert prompts.samples.targets_B is not None, "both ways of making prompts set them"
        return replace(prompts, targets_U=self._dataset.item_positions(prompts.samples.targets_B))

    def close(self) -> None:
        """Read nothing any more, see `SampleReader.close`."""
        self._reader.close()

    def __enter__(self) -> PromptStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def position(self, read: int) -> ReadPosition:
        """Return the position in the files before a read."""
        return self.plan.position(read)

    def _before_an_event(self, samples: SampleBatch, labels: dict[Label, Int64Array], read: int) -> Prompts:
        """Truncate histories before one of their events, the target; `labels` are of all events."""
        lengths_B = np.diff(samples.offsets_B1)
        rows_B = np.flatnonzero(lengths_B > 1)
        lengths_B = lengths_B[rows_B]
        if self._config.event == "last":
            kept_B = lengths_B - 1
        else:  # any but the first, random by row and read
            random_B = combine64(self._seed, read, samples.row_keys_B[rows_B]) >> np.uint64(33)
            kept_B = 1 + (random_B.astype(np.int64) % (lengths_B - 1))
        starts_B = samples.offsets_B1[rows_B]
        targets_B = starts_B + kept_B
        offsets_B2 = np.stack([starts_B, targets_B], axis=1)
        kept_N = np.concatenate([np.arange(start, stop) for start, stop in offsets_B2] or [rows_B])
        truncated = SampleBatch(
            step=samples.step,
            row_keys_B=samples.row_keys_B[rows_B],
            user_ids_B=samples.user_ids_B[rows_B],
            item_ids_N=samples.item_ids_N[kept_N],
            offsets_B1=np.concatenate([[0], np.cumsum(kept_B)]),
            targets_B=samples.item_ids_N[targets_B],
            times_N=None if samples.times_N is None else samples.times_N[kept_N],
            labels={label: codes_N[kept_N] for label, codes_N in labels.items()},
        )
        of_targets = {label: codes_N[targets_B] for label, codes_N in labels.items()}
        return Prompts(truncated, np.zeros(len(rows_B), dtype=np.int64), target_labels=of_targets)


def _as_they_are(samples: SampleBatch, labels: dict[Label, Int64Array]) -> Prompts:
    """Use rows that name their target; `labels` are of the targets."""
    return Prompts(samples, np.zeros(samples.num_rows, dtype=np.int64), target_labels=labels)


@dataclass(frozen=True)
class _Columns:
    """Names of the columns that are read."""

    items: str
    times: str
    labels: dict[Label, str]
    target: str | None
    target_labels: dict[Label, str]

    @classmethod
    def of(cls, split: str, names: Sequence[str]) -> _Columns:
        if split == "train":
            labels = {label: name for label, name in LABEL_COLUMNS.items() if name in names}
            return cls("item_ids", TIMES, labels, None, labels)
        return cls(
            "history",
            HISTORY_TIMES,
            {label: name for label, name in HISTORY_LABELS.items() if name in names},
            "target",
            {label: name for label, name in TARGET_LABELS.items() if name in names},
        )

    def samples(
        self, step: int, row_keys_B: Int64Array, rows: pa.RecordBatch
    ) -> tuple[SampleBatch, dict[Label, Int64Array]]:
        """Histories, and labels: of the targets where rows name them, else of all events."""

        def lists(name: str) -> tuple[Int64Array, Int64Array]:
            return list_values(pa.chunked_array([rows[name]]))

        def integers(name: str) -> Int64Array:
            return rows[name].to_numpy(zero_copy_only=False).astype(np.int64, copy=False)

        item_ids_N, offsets_B1 = lists(self.items)
        labels = {label: lists(name)[0] for label, name in self.labels.items()}
        samples = SampleBatch(
            step=step,
            row_keys_B=row_keys_B,
            user_ids_B=integers("user_id"),
            item_ids_N=item_ids_N,
            offsets_B1=offsets_B1,
            targets_B=None if self.target is None else integers(self.target),
            times_N=lists(self.times)[0] if self.times in rows.schema.names else None,
            labels=labels,
        )
        if self.target is None:
            return samples, labels
        return samples, {label: integers(name) for label, name in self.target_labels.items()}


def evaluation_prompts(
    dataset: Dataset, samples: Iterator[SampleBatch], target_labels: dict[Label, Int64Array]
) -> Iterator[Prompts]:
    """Make prompts of an evaluation split, batch by batch.

    Args:
        target_labels: of all users of the split, in their order.
    """
    done = 0
    for batch in samples:
        assert batch.targets_B is not None, "they are of an evaluation split"
        some = slice(done, done + batch.num_rows)
        done += batch.num_rows
        yield Prompts(
            batch,
            dataset.item_positions(batch.targets_B),
            batch.step,
            {label: codes_B[some] for label, codes_B in target_labels.items()},
        )


def labels_of(dataset: Dataset) -> tuple[Label, ...]:
    """Labels of events that the data set has."""
    return tuple(label for label in LABELS if dataset.has_label(label))
