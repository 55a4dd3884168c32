"""Feature computation for models that read prompts: histories become rows of tokens.

    row ─► windows of its history ─► a prompt each: what was read, and the item that follows
        └► alignment tasks        ─► as many prompts as each task's weight says: of a window of the row and
                                     the item that follows, or of an item of the catalog

Which alignment prompts a row brings, and of which window or item they are, follows from a hash of the run's
seed, the step and the row. What they say of users comes from training rows alone; and of items without
training events, nothing is said unless the settings allow it.

Axes: as in `features`; R prompts of a batch, N tokens of all of them, T alignment tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.platform.shares import balanced_bounds
from rayrec.samples.base.batches import FeatureBatch, PromptTokens, SampleBatch
from rayrec.samples.base.jagged import concatenated_ranges, offsets_from_lengths
from rayrec.samples.features.features import SequenceFeatures, Windows, lookups_of
from rayrec.samples.text.prompts import Prompted, PromptWriter

_ALIGNMENT_STREAM = 5
"""Alignment prompts of a row come from hashes of (seed, 5, step, row, task, ...)."""
_COUNT, _ITEM, _WINDOW = range(3)


@dataclass(frozen=True)
class AlignmentPrompts:
    """Prompts of one task, and how often there are some."""

    writer: PromptWriter
    weight: float
    can_be_asked_I: BoolArray
    """Items of which all is known that its slots say."""
    items_I: Int64Array
    """Positions of those that it may be about where it has no history."""


@dataclass(frozen=True)
class _Asked:
    """Prompts to be written with one template."""

    row_R: Int64Array
    """Of the batch."""
    keys_R: Int64Array
    history_E: Int64Array
    """Catalog positions."""
    offsets_R1: Int64Array
    items_R: Int64Array
    """That the prompts are about."""


@dataclass(frozen=True)
class _Prompts:
    """Prompts of several templates."""

    keys_R: Int64Array
    tokens_N: Int64Array
    is_target_N: BoolArray
    offsets_R1: Int64Array
    id_N: dict[str, Int64Array]
    """By table, the row that a token stands for, where `is_place_N` has it."""
    is_place_N: dict[str, BoolArray]


class PromptFeatures(SequenceFeatures):
    """SampleBatch -> one FeatureBatch per trainer, whose rows are prompts.

    Windows are those of `SequenceFeatures`, each a prompt whose answer is its last item. A prompt that has no
    room for an event, or is too long without a history, is left out (`prompts_too_long`). Counts are those of
    the batch, in the first share.
    """

    def __init__(
        self,
        item_ids_I: Int64Array,
        *,
        writer: PromptWriter,
        num_codes: int,
        learn_history: bool = True,
        alignment: Sequence[AlignmentPrompts] = (),
        max_length: int,
        windows: int = 1,
        window_step: int = 1,
        seed: int = 0,
        num_trainers: int = 1,
    ) -> None:
        """
        Args:
            writer: of the prompt that recommendations are made by; its answer are the codes of an item.
            num_codes: L, of an item.
            learn_history: whether codes of histories are targets, too.
            max_length, windows, window_step, seed, num_trainers: as of `SequenceFeatures`.

        Raises:
            InputError: the prompt is too long even without a history.
        """
        super().__init__(
            item_ids_I,
            max_length=max_length,
            windows=windows,
            window_step=window_step,
            tables=(),
            seed=seed,
            num_trainers=num_trainers,
        )
        self._writer, self._num_codes = writer, num_codes
        self._learn_history = learn_history
        self._alignment = tuple(alignment)
        info = writer.tokenizer.info
        self._codes = (info.first_new, info.first_new + sum(info.code_sizes))
        nobody, nothing = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if writer(nobody, nothing, np.zeros(2, dtype=np.int64), reserved=num_codes).is_too_long_R.any():
            raise InputError(
                f"model.prompt has more than the {writer.max_tokens} tokens of model.max_tokens, even "
                "without a history; raise that"
            )

    def __call__(self, batch: SampleBatch) -> list[FeatureBatch]:
        known_N, offsets_B1, _ = self._known(batch)
        windows = self._windows(batch, offsets_B1)
        asked = _of_windows(known_N, windows)
        wanted = [(self._writer, asked, self._learn_history)]
        for number, task in enumerate(self._alignment):
            wanted.append((task.writer, self._aligned(number, task, batch, known_N, windows), False))
        written = [writer(*_arguments(batch, each)) for writer, each, _ in wanted]
        is_left_out = [_has_no_room(one, each) for one, (_, each, _) in zip(written, wanted, strict=True)]
        prompts = _joined(
            [
                (each, one, self._targets(one, learns), left_R)
                for (_, each, learns), one, left_R in zip(wanted, written, is_left_out, strict=True)
            ]
        )
        num_cut = len(asked.history_E) - int(written[0].num_events_R.sum())
        num_read = int(windows.num_targets_V.sum() + (np.diff(offsets_B1) > 0).sum()) - num_cut
        counts = {
            "rows": batch.num_rows,
            "events": len(batch.item_ids_N),
            "unknown_items": len(batch.item_ids_N) - len(known_N),
            "unread_events": len(known_N) - num_read,
            "rows_without_target": int((windows.num_targets_V == 0).sum()),
            "prompts_too_long": sum(int(left_R.sum()) for left_R in is_left_out),
        }
        return self._shares(batch.step, prompts, counts)

    def ranking(self, batch: SampleBatch) -> FeatureBatch:
        """The prompt that asks for the next item of each row; items are those that it has."""
        features = super().ranking(batch)
        made = self._writer(batch.user_ids_B, features.items_N, features.offsets_B1, reserved=self._num_codes)
        lengths_B = np.diff(features.offsets_B1)
        kept_N = concatenated_ranges(features.offsets_B1[1:] - made.num_events_R, made.num_events_R)
        left_out = int((lengths_B - made.num_events_R).sum())
        counts = features.counts | {"unread_events": features.counts["unread_events"] + left_out}
        nothing_N = np.zeros(len(made.tokens_N), dtype=np.bool_)
        return replace(
            features,
            items_N=features.items_N[kept_N],
            offsets_B1=offsets_from_lengths(made.num_events_R),
            lookups=lookups_of([made.ids_P])[0],
            prompts=PromptTokens(made.tokens_N, made.offsets_R1, nothing_N, dict(made.places_P)),
            counts=counts,
        )

    def _aligned(
        self, number: int, task: AlignmentPrompts, batch: SampleBatch, known_N: Int64Array, windows: Windows
    ) -> _Asked:
        """The prompts of a task that the rows of a batch bring."""
        of_step = (self._seed, _ALIGNMENT_STREAM, batch.step)
        bits_B = combine64(*of_step, batch.row_keys_B, number, _COUNT)
        unit_B = (bits_B >> np.uint64(11)).astype(np.float64) * 2.0**-53
        count_B = (int(task.weight) + (unit_B < task.weight % 1.0)).astype(np.int64)
        row_R = np.repeat(np.arange(batch.num_rows), count_B)
        nth_R = concatenated_ranges(np.zeros_like(count_B), count_B)
        keys_R = combine64(batch.row_keys_B[row_R], number + 1, nth_R).view(np.int64)
        if task.writer.template.event is None:
            bits_R = combine64(*of_step, batch.row_keys_B[row_R], number, _ITEM, nth_R)
            items_R = task.items_I[_below(bits_R, len(task.items_I))]
            nothing, none = np.zeros(0, dtype=np.int64), np.zeros(len(row_R) + 1, dtype=np.int64)
            return _Asked(row_R, keys_R, nothing, none, items_R)
        # Of the windows that have a target, those of a row one after the other.
        able_V = np.flatnonzero(windows.num_targets_V > 0)
        row_A = windows.row_V[able_V]
        num_B = np.bincount(row_A, minlength=batch.num_rows)
        first_B = np.searchsorted(row_A, np.arange(batch.num_rows))
        has_any_R = num_B[row_R] > 0
        row_R, keys_R, nth_R = row_R[has_any_R], keys_R[has_any_R], nth_R[has_any_R]
        of_row = (*of_step, batch.row_keys_B[row_R], number)
        window_R = able_V[first_B[row_R] + _below(combine64(*of_row, _WINDOW, nth_R), num_B[row_R])]
        length_R = 1 + _below(combine64(*of_row, _ITEM, nth_R), windows.num_targets_V[window_R])
        items_R = known_N[windows.starts_V[window_R] + length_R]
        can_R = task.can_be_asked_I[items_R]
        length_R = length_R[can_R]
        history_E = known_N[concatenated_ranges(windows.starts_V[window_R][can_R], length_R)]
        return _Asked(row_R[can_R], keys_R[can_R], history_E, offsets_from_lengths(length_R), items_R[can_R])

    def _targets(self, made: Prompted, learns_history: bool) -> BoolArray:
        """[N] whether a token is learned."""
        is_target_N = made.is_answer_N.copy()
        if learns_history:
            first, stop = self._codes
            is_target_N |= made.is_event_N & (made.tokens_N >= first) & (made.tokens_N < stop)
        begins_R = made.offsets_R1[:-1][np.diff(made.offsets_R1) > 0]
        is_target_N[begins_R] = False  # nothing is before it
        return is_target_N

    def _shares(self, step: int, prompts: _Prompts, counts: dict[str, int]) -> list[FeatureBatch]:
        offsets_R1 = prompts.offsets_R1
        bounds = balanced_bounds(np.diff(offsets_R1), self._num_trainers)
        rows = [slice(low, high) for low, high in pairwise(bounds)]
        tokens = [slice(offsets_R1[mine.start], offsets_R1[mine.stop]) for mine in rows]
        places = [
            {table: np.flatnonzero(is_place_N[held]) for table, is_place_N in prompts.is_place_N.items()}
            for held in tokens
        ]
        lookups = lookups_of(
            [
                {table: id_N[held][mine[table]] for table, id_N in prompts.id_N.items()}
                for held, mine in zip(tokens, places, strict=True)
            ]
        )
        num_targets = int(prompts.is_target_N.sum())
        return [
            FeatureBatch(
                step=step,
                row_keys_B=prompts.keys_R[mine],
                offsets_B1=np.zeros(mine.stop - mine.start + 1, dtype=np.int64),
                items_N=np.zeros(0, dtype=np.int64),
                targets_N=None,
                num_targets=num_targets,
                lookups=lookups[rank],
                prompts=PromptTokens(
                    prompts.tokens_N[held],
                    offsets_R1[mine.start : mine.stop + 1] - offsets_R1[mine.start],
                    prompts.is_target_N[held],
                    places[rank],
                ),
                counts=dict(counts) if rank == 0 else {},
            )
            for rank, (mine, held) in enumerate(zip(rows, tokens, strict=True))
        ]


def _below(bits_R: np.ndarray, limits_R: Int64Array | int) -> Int64Array:
    """Random numbers below limits."""
    found: Int64Array = (bits_R % np.asarray(limits_R).astype(np.uint64)).astype(np.int64)
    return found


def _of_windows(known_N: Int64Array, windows: Windows) -> _Asked:
    """A prompt for each window that has a target: what is before its last item, which is asked for."""
    chosen_R = np.flatnonzero(windows.num_targets_V > 0)
    starts_R, lengths_R = windows.starts_V[chosen_R], windows.num_targets_V[chosen_R]
    return _Asked(
        windows.row_V[chosen_R],
        windows.keys_V[chosen_R],
        known_N[concatenated_ranges(starts_R, lengths_R)],
        offsets_from_lengths(lengths_R),
        known_N[starts_R + lengths_R],
    )


def _arguments(batch: SampleBatch, asked: _Asked) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    return batch.user_ids_B[asked.row_R], asked.history_E, asked.offsets_R1, asked.items_R


def _has_no_room(made: Prompted, asked: _Asked) -> BoolArray:
    """[R] whether a prompt is too long, or has no room for the newest event of its history."""
    has_lost_all_R = (np.diff(asked.offsets_R1) > 0) & (made.num_events_R == 0)
    found: BoolArray = made.is_too_long_R | has_lost_all_R
    return found


def _joined(parts: Sequence[tuple[_Asked, Prompted, BoolArray, BoolArray]]) -> _Prompts:
    """Prompts of several templates, those of a row of the batch side by side.

    Args:
        parts: what was asked, the prompts, their targets, and which are left out.
    """
    row_R = np.concatenate([asked.row_R for asked, *_ in parts])
    is_left_R = np.concatenate([left_R for *_, left_R in parts])
    lengths_R = np.concatenate([np.diff(made.offsets_R1) for _, made, *_ in parts])
    starts_R = offsets_from_lengths(lengths_R)[:-1]
    order_R = np.argsort(row_R, kind="stable")
    order_R = order_R[~is_left_R[order_R]]
    at_N = concatenated_ranges(starts_R[order_R], lengths_R[order_R])
    tables = sorted({table for _, made, *_ in parts for table in made.places_P})
    id_N, is_place_N = {}, {}
    for table in tables:
        ids, marks = [], []
        for _, made, *_ in parts:
            of_part = np.zeros(len(made.tokens_N), dtype=np.int64)
            marked = np.zeros(len(made.tokens_N), dtype=np.bool_)
            if table in made.places_P:
                of_part[made.places_P[table]] = made.ids_P[table]
                marked[made.places_P[table]] = True
            ids.append(of_part)
            marks.append(marked)
        id_N[table], is_place_N[table] = np.concatenate(ids)[at_N], np.concatenate(marks)[at_N]
    return _Prompts(
        np.concatenate([asked.keys_R for asked, *_ in parts])[order_R],
        np.concatenate([made.tokens_N for _, made, *_ in parts])[at_N],
        np.concatenate([is_target_N for _, _, is_target_N, _ in parts])[at_N],
        offsets_from_lengths(lengths_R[order_R]),
        id_N,
        is_place_N,
    )
