"""Feature computation: rows as read become jagged item positions and deduplicated table lookups.

Axes beyond those of `batches`: I items of the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayrec.platform.arrays import Float32Array, Float64Array, Int64Array
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import UNKNOWN, Label
from rayrec.platform.hashing import combine64
from rayrec.platform.shares import balanced_bounds
from rayrec.samples.base.batches import FeatureBatch, OldChunks, PathLevel, SampleBatch, TableLookup
from rayrec.samples.base.jagged import concatenated_ranges, offsets_from_lengths
from rayrec.samples.features.neighbors import NO_TIME, NeighborFinder
from rayrec.samples.features.prefix_paths import PrefixPaths

READ = ("rows", "events")
"""Counts of a batch that say what was read; the others say what was dropped of it."""
NegativeDistribution = Literal["uniform", "popularity"]
_T = TypeVar("_T", bound=np.generic)

_NEGATIVES_STREAM = 2
"""Negatives of a step come from `default_rng([seed, 2, step])`: part of what makes a run repeatable."""
_EVENT_NEGATIVES_STREAM = 3
"""Those of one event from the hash of (seed, 3, step, row, index of the event in its row, number)."""
_WINDOWS_STREAM = 4
"""Of rows that have more windows than a step reads, those from the hash of (seed, 4, step, row) on."""


@dataclass(frozen=True)
class _Share:
    """One trainer's rows, as far as a table may ask for them."""

    user_ids_B: Int64Array
    items_N: Int64Array
    targets_N: Int64Array | None
    negatives: Int64Array | None
    """Of either kind, one after the other."""
    neighbors_NJ: Int64Array | None = None
    candidate_ids: Int64Array | None = None
    """Of the prefixes that those of targets are told apart from, level after level."""


@dataclass(frozen=True)
class Windows:
    """What is read of the rows of a batch: V windows, those of a row one after the other."""

    row_V: Int64Array
    is_first_V: NDArray[np.bool_]
    """Of its row."""
    keys_V: Int64Array
    """The row's, of its newest window; others have keys of their own."""
    starts_V: Int64Array
    num_targets_V: Int64Array
    begins_V: Int64Array
    """Of its row."""


class SequenceFeatures:
    """SampleBatch -> one FeatureBatch per trainer, with about as many tokens each; needs nothing but arrays.

    Training reads the newest `max_length + 1` known items s of a row: inputs are s[:-1], targets
    s[1:]. Older ones are read in windows of their own, which stand in the batch as rows, the newest first,
    and share an item with the next: each item but the row's first is a target once. Of a row with more than
    `windows`, every step reads others; what it leaves is counted (`unread_events`). With a `window_step`, all
    windows begin at multiples of it, counted from the oldest event, so that the newest of a longer row has up
    to that many items fewer: it begins where it began for the events before. With `chunk_events`, which is
    the step then, what is before a window goes with it as chunks (`OldChunks`). Ids that are not in the
    catalog are skipped (`unknown_items`); a row with fewer than two known items stays in the batch without
    tokens (`rows_without_target`).

    The tables, by name, and the shape of their `inverse`:

    * `item`: [N] ids of the input items. With sampled negatives [2N + S] or [2N + N K]: the input
      items, then the targets, then the negatives, so that the output vectors come from the same lookup.
      Neighbors come last: [.. + N J].
    * `user`: [B] ids of the users.
    * `code`: [N, L] codes of the input items; code c of level l has the id `l << 32 | c`.
    * `prefix`: the prefixes of the input items' codes, [N L]; in training [N L + C], then the candidates of
      each level of `FeatureBatch.paths`, one level after the other (`PrefixPaths`). With sampled negatives
      [N L + S L + C]: those of the negatives stand between. Targets are among the candidates.

    Negatives of a batch are sampled once for the global one, from `(seed, step)`: every trainer sees the
    same. Negatives of an event are uniform among the items that its row has nowhere, and depend on
    `(seed, step)`, the row and the event's index alone.

    Times and labels go where their items go. Where a batch has none, nor have its features.
    """

    def __init__(
        self,
        item_ids_I: Int64Array,
        *,
        max_length: int,
        windows: int = 1,
        window_step: int = 1,
        chunk_events: int = 0,
        max_chunks: int = 0,
        tables: Sequence[str] = ("item",),
        codes_IL: NDArray[np.integer] | None = None,
        num_negatives: int = 0,
        negatives_per_event: int = 0,
        negatives: NegativeDistribution = "uniform",
        train_counts_I: Int64Array | None = None,
        label_sizes: Mapping[Label, int] | None = None,
        neighbors: NeighborFinder | None = None,
        paths: PrefixPaths | None = None,
        seed: int = 0,
        num_trainers: int = 1,
    ) -> None:
        """
        Args:
            item_ids_I: the catalog, `Dataset.items.ids_I`.
            max_length: most input items of a window.
            windows: most windows of a row that a training step reads; 1 reads the newest.
            window_step: items by which windows move, at most `max_length`.
            chunk_events: C, items of a chunk of what is before a window, and the `window_step`; 0: that is
                not read.
            max_chunks: most chunks of a window, the newest.
            tables: names of the embedding tables that the model reads.
            codes_IL: semantic codes per catalog position; needed for the table `code`.
            num_negatives: drawn for a batch, with replacement; 0 for none. A batch has the distinct ones.
            negatives_per_event: K, sampled for every target; 0 for none.
            negatives: those of a batch: every item alike, or in proportion to its training events.
            train_counts_I: `Dataset.items.train_counts_I`; needed for popularity.
            label_sizes: number of codes of each label that batches may have.
            neighbors: finds what others met beside each input item, before its event; batches need times.
            paths: finds the prefixes of codes that batches read; needed for the table `prefix`.
        """
        self._item_ids_I = np.asarray(item_ids_I, dtype=np.int64)
        self._index = pd.Index(self._item_ids_I)
        if not self._index.is_unique:
            raise ValueError("item_ids_I holds an id twice; every item has one catalog position")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}: a row needs an input item")
        if window_step > max_length:
            raise ValueError(f"window_step {window_step} is more than max_length {max_length}")
        if chunk_events and chunk_events != window_step:
            raise ValueError(f"windows move by {window_step} items, and chunks have {chunk_events}")
        if num_trainers < 1:
            raise ValueError(f"num_trainers must be at least 1, got {num_trainers}")
        if num_negatives and negatives_per_event:
            raise ValueError("num_negatives and negatives_per_event are of two losses; set one of them to 0")
        self._max_length = max_length
        self._max_windows = windows
        self._window_step = window_step
        self._chunk_events, self._max_chunks = chunk_events, max_chunks
        self._num_negatives = num_negatives
        self._negatives_per_event = negatives_per_event
        self._cumulative_I = _cumulative(negatives, len(self._item_ids_I), train_counts_I)
        self._label_sizes = label_sizes or {}
        self._neighbors = neighbors
        self.paths = paths
        self._seed = seed
        self._num_trainers = num_trainers
        self._code_ids_IL = None if codes_IL is None else self._code_ids(codes_IL)
        known: Mapping[str, Callable[[_Share], Int64Array]] = {
            "item": self._item_table,
            "user": self._user_table,
            "code": self._code_table,
            "prefix": self._prefix_table,
        }
        unknown = sorted(set(tables) - set(known))
        if unknown:
            raise ValueError(f"there is no table {unknown[0]!r}; known tables: {', '.join(known)}")
        if "code" in tables and codes_IL is None:
            raise ValueError("the table 'code' needs codes_IL, the semantic codes of the items")
        if "prefix" in tables and paths is None:
            raise ValueError("the table 'prefix' needs paths, which find the prefixes of the items' codes")
        self._tables = {name: known[name] for name in tables}

    def __call__(self, batch: SampleBatch) -> list[FeatureBatch]:
        """Training features; trainer r gets the r-th contiguous share of the rows.

        `counts` of the shares add up to those of the batch: the rows and events that were read (`READ`), and
        what was dropped of them.

        Raises:
            InputError: a row has every item of the catalog, so that no negative is left for its events.
        """
        known_N, offsets_B1, indices_N = self._known(batch)
        windows = self._windows(batch, offsets_B1)
        num_targets_V = windows.num_targets_V
        input_at_N = concatenated_ranges(windows.starts_V, num_targets_V)
        items_N, targets_N = known_N[input_at_N], known_N[input_at_N + 1]
        negatives_NK = self._draw_event_negatives(batch, known_N, offsets_B1, windows)
        # A row's first window speaks for it in what is counted.
        rows_V, first_V = windows.row_V, windows.is_first_V
        events_V = np.where(first_V, np.diff(batch.offsets_B1)[rows_V], 0)
        known_V = np.where(first_V, np.diff(offsets_B1)[rows_V], 0)
        unread_V = known_V - num_targets_V - (first_V & (known_V > 0))
        chunks = self._old_chunks(batch, known_N, indices_N, windows.begins_V, windows.starts_V)
        if chunks is not None:
            in_chunks_V = self._chunk_events * np.diff(chunks.offsets_B1)
            unread_V = _uncovered(windows, np.diff(offsets_B1), in_chunks_V)
        inputs_N, targets_at_N = indices_N[input_at_N], indices_N[input_at_N + 1]
        user_ids_V = batch.user_ids_B[rows_V]
        offsets_V1 = offsets_from_lengths(num_targets_V)
        negatives_S = self._draw_negatives(batch.step)
        labels = self.check_labels(batch)
        times_N = None if batch.times_N is None else batch.times_N[inputs_N]
        neighbors_NJ, neighbor_weights_NJ = self._neighbors_of(items_N, times_N)

        bounds = balanced_bounds(num_targets_V, self._num_trainers)
        rows = [slice(low, high) for low, high in pairwise(bounds)]
        tokens = [slice(offsets_V1[mine.start], offsets_V1[mine.stop]) for mine in rows]
        paths = [self._paths_of(batch.step, targets_N[held]) for held in tokens]
        lookups = self._lookups(
            [
                _Share(
                    user_ids_V[mine],
                    items_N[held],
                    targets_N[held],
                    negatives_S if negatives_NK is None else negatives_NK[held].reshape(-1),
                    _part(neighbors_NJ, held),
                    candidate_ids,
                )
                for mine, held, (_, candidate_ids) in zip(rows, tokens, paths, strict=True)
            ]
        )
        return [
            FeatureBatch(
                step=batch.step,
                row_keys_B=windows.keys_V[mine],
                offsets_B1=offsets_V1[mine.start : mine.stop + 1] - offsets_V1[mine.start],
                items_N=items_N[held],
                targets_N=targets_N[held],
                num_targets=len(targets_N),
                lookups=lookups[rank],
                negatives_S=negatives_S,
                negatives_NK=None if negatives_NK is None else negatives_NK[held],
                times_N=None if times_N is None else times_N[held],
                labels=_at(labels, inputs_N[held]),
                target_labels=_at(labels, targets_at_N[held]),
                neighbors_NJ=_part(neighbors_NJ, held),
                neighbor_weights_NJ=_part(neighbor_weights_NJ, held),
                old_chunks=None if chunks is None else chunks.some_rows(mine),
                paths=paths[rank][0],
                counts={
                    "rows": int(first_V[mine].sum()),
                    "events": int(events_V[mine].sum()),
                    "unknown_items": int((events_V - known_V)[mine].sum()),
                    "unread_events": int(unread_V[mine].sum()),
                    "rows_without_target": int((num_targets_V[mine] == 0).sum()),
                },
            )
            for rank, (mine, held) in enumerate(zip(rows, tokens, strict=True))
        ]

    def ranking(self, batch: SampleBatch) -> FeatureBatch:
        """Features to rank what comes next: the newest window of the known items of the history.

        There are no targets and no negatives, so the table `item` is [N].
        """
        known_N, offsets_B1, indices_N = self._known(batch)
        events_B = np.diff(batch.offsets_B1)
        unknown_B = events_B - np.diff(offsets_B1)
        skipped_B = self._num_before_newest(np.diff(offsets_B1))
        starts_B, lengths_B = offsets_B1[:-1] + skipped_B, np.diff(offsets_B1) - skipped_B
        held_N = concatenated_ranges(starts_B, lengths_B)
        items_N = known_N[held_N]
        times_N = None if batch.times_N is None else batch.times_N[indices_N[held_N]]
        neighbors_NJ, neighbor_weights_NJ = self._neighbors_of(items_N, times_N, NO_TIME)
        if times_N is not None:  # for models, they are all alike
            times_N = np.where(times_N == NO_TIME, 0, times_N)
        (lookups,) = self._lookups([_Share(batch.user_ids_B, items_N, None, None, neighbors_NJ)])
        chunks = self._old_chunks(batch, known_N, indices_N, offsets_B1[:-1], starts_B)
        num_in_chunks = 0 if chunks is None else chunks.items_XC.size
        return FeatureBatch(
            step=batch.step,
            row_keys_B=batch.row_keys_B,
            offsets_B1=offsets_from_lengths(lengths_B),
            items_N=items_N,
            targets_N=None,
            num_targets=0,
            lookups=lookups,
            times_N=times_N,
            labels=_at(self.check_labels(batch), indices_N[held_N]),
            instruction=dict(batch.instruction),
            neighbors_NJ=neighbors_NJ,
            neighbor_weights_NJ=neighbor_weights_NJ,
            old_chunks=chunks,
            counts={
                "unknown_items": int(unknown_B.sum()),
                "unread_events": len(known_N) - len(held_N) - num_in_chunks,
                "rows_without_history": int((lengths_B == 0).sum()),
            },
        )

    def with_triggers(self, batch: SampleBatch) -> SampleBatch:
        """With the trigger of each row's instruction as its newest event, as it is in training.

        It happens when the newest event did, or at `NO_TIME` without one, and no label is known of it. Where
        it is the newest event already, it is not said twice.
        """
        if "trigger_item" not in batch.instruction:
            return batch
        position_B = batch.instruction["trigger_item"]
        lengths_B = np.diff(batch.offsets_B1)
        newest_B = np.where(lengths_B > 0, batch.offsets_B1[1:] - 1, -1)
        padded_N1 = np.append(batch.item_ids_N, 0)  # at -1, of rows without events
        ids_B = self._item_ids_I[np.maximum(position_B, 0)]
        is_new_B = (position_B >= 0) & ((lengths_B == 0) | (padded_N1[newest_B] != ids_B))
        at_T = batch.offsets_B1[1:][is_new_B]
        times_N = batch.times_N
        if times_N is not None:
            times_N = np.insert(times_N, at_T, np.append(times_N, NO_TIME)[newest_B[is_new_B]])
        return replace(
            batch,
            item_ids_N=np.insert(batch.item_ids_N, at_T, ids_B[is_new_B]),
            offsets_B1=offsets_from_lengths(lengths_B + is_new_B),
            times_N=times_N,
            labels={label: np.insert(codes_N, at_T, UNKNOWN) for label, codes_N in batch.labels.items()},
        )

    def seen(self, batch: SampleBatch) -> Int64Array:
        """[B, E] catalog positions of every known item of each history, padded with -1.

        All of the history, not only the newest `max_length` items that the model reads.
        """
        known_N, offsets_B1, _ = self._known(batch)
        lengths_B = np.diff(offsets_B1)
        seen_BE = np.full((batch.num_rows, lengths_B.max(initial=0)), -1, dtype=np.int64)
        index_N = concatenated_ranges(np.zeros_like(lengths_B), lengths_B)
        seen_BE[np.repeat(np.arange(batch.num_rows), lengths_B), index_N] = known_N
        return seen_BE

    def negative_log_q_I(self) -> Float64Array:
        """[I] log-probability of each item in one sampled negative; -inf if it is never sampled."""
        probabilities_I = np.diff(self._cumulative_I, prepend=0) / self._cumulative_I[-1]
        with np.errstate(divide="ignore"):
            return np.log(probabilities_I)

    def check_labels(self, batch: SampleBatch) -> Mapping[Label, Int64Array]:
        """The labels of the batch.

        Raises:
            InputError: a code that has no name.
        """
        for label, codes_N in batch.labels.items():
            size = self._label_sizes[label]
            if len(codes_N) and not UNKNOWN <= codes_N.min() <= codes_N.max() < size:
                wrong = int(codes_N[(codes_N < UNKNOWN) | (codes_N >= size)][0])
                raise InputError(
                    f"an event has the {label} {wrong}, and the data set has names for {size}, from 0 on "
                    f"({UNKNOWN} for unknown); give rows the codes of its dataset.json"
                )
        return batch.labels

    def _neighbors_of(
        self, items_N: Int64Array, times_N: Int64Array | None, now: int | None = None
    ) -> tuple[Int64Array | None, Float32Array | None]:
        """Catalog positions of the neighbors of each item before its time, and their shares.

        Args:
            now: what stands for a time that is not known: all that the graph has is before it.
        """
        if self._neighbors is None:
            return None, None
        assert times_N is not None, "a model with neighbors reads times"
        neighbors_NJ, weights_NJ = self._neighbors.find(
            self._item_ids_I[items_N], times_N, now, self._positions
        )
        weights_NJ /= np.maximum(weights_NJ.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return np.where(weights_NJ > 0, neighbors_NJ, items_N[:, None]), weights_NJ.astype(np.float32)

    def _known(self, batch: SampleBatch) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(catalog positions of the known items, their offsets_B1, their indices among all items)."""
        positions_N = self._positions(batch.item_ids_N)
        known_N = positions_N >= 0
        # Known items before each index: its differences at the old offsets are the new lengths.
        known_before_N1 = offsets_from_lengths(known_N)
        return positions_N[known_N], known_before_N1[batch.offsets_B1], np.flatnonzero(known_N)

    def _positions(self, item_ids: Int64Array) -> Int64Array:
        return self._index.get_indexer(pd.Index(item_ids)).astype(np.int64, copy=False)

    def _windows(self, batch: SampleBatch, offsets_B1: Int64Array) -> Windows:
        """What a step reads of its rows.

        Args:
            offsets_B1: of their known items.
        """
        # Older windows begin at multiples of the step, too.
        length = self._max_length // self._window_step * self._window_step
        newest_B = self._num_before_newest(np.diff(offsets_B1) - 1)
        num_B = 1 - (-newest_B // length)
        read_B = np.minimum(num_B, self._max_windows)
        row_V = np.repeat(np.arange(batch.num_rows), read_B)
        nth_V = concatenated_ranges(np.zeros_like(read_B), read_B)
        if self._max_windows > 1 and (num_B > read_B).any():
            drawn_B = combine64(self._seed, _WINDOWS_STREAM, batch.step, batch.row_keys_B) % num_B.astype(
                np.uint64
            )
            first_B = np.where(num_B > read_B, drawn_B.astype(np.int64), 0)
            nth_V = (first_B[row_V] + nth_V) % num_B[row_V]
        begins_V, ends_V = offsets_B1[:-1][row_V], offsets_B1[1:][row_V]
        starts_V = begins_V + np.maximum(newest_B[row_V] - nth_V * length, 0)
        # An older window ends with the first item of the next: that is a target here, and an input there.
        stops_V = np.where(nth_V == 0, ends_V, begins_V + newest_B[row_V] - (nth_V - 1) * length + 1)
        keys_V = batch.row_keys_B[row_V]
        older_V = nth_V > 0
        keys_V[older_V] = combine64(keys_V[older_V], nth_V[older_V]).view(np.int64)
        is_first_V = np.diff(row_V, prepend=-1) > 0
        num_targets_V = np.maximum(stops_V - starts_V - 1, 0)
        return Windows(row_V, is_first_V, keys_V, starts_V, num_targets_V, begins_V)

    def _old_chunks(
        self,
        batch: SampleBatch,
        known_N: Int64Array,
        indices_N: Int64Array,
        begins_V: Int64Array,
        starts_V: Int64Array,
    ) -> OldChunks | None:
        """The newest full chunks before windows.

        Args:
            indices_N: of the known items among all.
            begins_V: first known item of each window's row.
            starts_V: first known item of each window.
        """
        if not self._chunk_events:
            return None
        size = self._chunk_events
        num_V = np.minimum((starts_V - begins_V) // size, self._max_chunks)
        ages_X = np.repeat(num_V, num_V) - 1 - concatenated_ranges(np.zeros_like(num_V), num_V)
        first_X = np.repeat(starts_V, num_V) - (1 + ages_X) * size
        at_XC = first_X[:, None] + np.arange(size)
        labels = _at(self.check_labels(batch), indices_N[at_XC])
        return OldChunks(offsets_from_lengths(num_V), known_N[at_XC], labels, ages_X)

    def _num_before_newest(self, lengths_B: Int64Array) -> Int64Array:
        """Input items of each row that are older than its newest window."""
        step = self._window_step
        return -(-np.maximum(lengths_B - self._max_length, 0) // step) * step

    def _draw_negatives(self, step: int) -> Int64Array | None:
        if not self._num_negatives:
            return None
        random = np.random.default_rng([self._seed, _NEGATIVES_STREAM, step])
        draws = random.integers(self._cumulative_I[-1], size=self._num_negatives)
        return np.unique(np.searchsorted(self._cumulative_I, draws, side="right"))

    def _draw_event_negatives(
        self, batch: SampleBatch, known_N: Int64Array, offsets_B1: Int64Array, windows: Windows
    ) -> Int64Array | None:
        """[targets, K] negatives.

        Args:
            known_N: all known items of the rows, with their offsets_B1; none of them is sampled for its row.
        """
        if not self._negatives_per_event:
            return None
        num_items = len(self._item_ids_I)
        num_targets_V = windows.num_targets_V
        row_N = np.repeat(windows.row_V, num_targets_V)
        index_N = concatenated_ranges(np.zeros_like(num_targets_V), num_targets_V)
        bits_NK = combine64(
            self._seed,
            _EVENT_NEGATIVES_STREAM,
            batch.step,
            np.repeat(windows.keys_V, num_targets_V)[:, None],
            index_N[:, None],
            np.arange(self._negatives_per_event)[None, :],
        )
        # Distinct items of each row, sorted, as row * num_items + item.
        had_H = np.unique(np.repeat(np.arange(batch.num_rows), np.diff(offsets_B1)) * num_items + known_N)
        had_row_H = had_H // num_items
        first_B = np.searchsorted(had_row_H, np.arange(batch.num_rows))
        num_left_B = num_items - np.bincount(had_row_H, minlength=batch.num_rows)
        num_targets_B = np.bincount(row_N, minlength=batch.num_rows)
        if (without_B := (num_left_B == 0) & (num_targets_B > 0)).any():
            raise InputError(
                f"user {batch.user_ids_B[np.argmax(without_B)]} has all {num_items} items of the catalog "
                f"in a row of step {batch.step}, so that no negative is left to sample; leave such rows out "
                "(data.filters), or take a softmax (model.loss)"
            )
        # The r-th item that a row lacks is r plus the items it has below that one, and as many items are
        # below its j-th item, from 0, as lie j before it.
        rank_NK = (bits_NK % num_left_B[row_N][:, None].astype(np.uint64)).astype(np.int64)
        lacks_below_H = had_H - (np.arange(len(had_H)) - first_B[had_row_H])
        wanted_NK = (row_N * num_items)[:, None] + rank_NK
        return rank_NK + np.searchsorted(lacks_below_H, wanted_NK, side="right") - first_B[row_N][:, None]

    def _paths_of(self, step: int, targets_N: Int64Array) -> tuple[tuple[PathLevel, ...], Int64Array | None]:
        if self.paths is None or "prefix" not in self._tables:
            return (), None
        return self.paths.levels(step, targets_N)

    def _lookups(self, shares: list[_Share]) -> list[dict[str, TableLookup]]:
        return lookups_of(
            [{name: ids_of(share) for name, ids_of in self._tables.items()} for share in shares]
        )

    def _item_table(self, share: _Share) -> Int64Array:
        positions = [share.items_N]
        if share.targets_N is not None and share.negatives is not None:
            positions += [share.targets_N, share.negatives]
        if share.neighbors_NJ is not None:
            positions.append(share.neighbors_NJ.reshape(-1))
        return self._item_ids_I[np.concatenate(positions)]

    def _user_table(self, share: _Share) -> Int64Array:
        return share.user_ids_B

    def _code_table(self, share: _Share) -> Int64Array:
        assert self._code_ids_IL is not None, "checked in the constructor"
        return self._code_ids_IL[share.items_N]

    def _prefix_table(self, share: _Share) -> Int64Array:
        assert self.paths is not None, "checked in the constructor"
        ids = [self.paths.ids_of(share.items_N).reshape(-1)]
        if share.candidate_ids is not None:
            if share.negatives is not None:
                ids.append(self.paths.ids_of(share.negatives).reshape(-1))
            ids.append(share.candidate_ids)
        return np.concatenate(ids)

    def _code_ids(self, codes_IL: NDArray[np.integer]) -> Int64Array:
        if codes_IL.ndim != 2 or len(codes_IL) != len(self._item_ids_I):
            raise ValueError(
                f"codes_IL has shape {codes_IL.shape}, expected one row of codes for each of the "
                f"{len(self._item_ids_I)} items"
            )
        if codes_IL.size and codes_IL.min() < 0:
            position = int(np.argwhere(codes_IL < 0)[0, 0])
            raise ValueError(f"codes_IL has a negative code at position {position}; every item needs codes")
        return code_ids(codes_IL)


def lookups_of(shares: Sequence[Mapping[str, Int64Array]]) -> list[dict[str, TableLookup]]:
    """For each share: table name -> lookup; `updated_ids` is common to all of them.

    Args:
        shares: by table, the ids that a share reads, in any shape.
    """
    lookups: list[dict[str, TableLookup]] = [{} for _ in shares]
    for name in shares[0]:
        deduplicated = [deduplicate(share[name]) for share in shares]
        updated_ids = deduplicated[0][0]
        if len(shares) > 1:
            updated_ids, _ = deduplicate(np.concatenate([ids_M for ids_M, _ in deduplicated]))
        for mine, (ids_M, inverse) in zip(lookups, deduplicated, strict=True):
            mine[name] = TableLookup(ids_M, inverse, updated_ids)
    return lookups


def code_ids(codes_IL: NDArray[np.integer]) -> Int64Array:
    """[I, L] ids of codes in the table `code`: `level << 32 | code`, levels from 0."""
    levels_L = np.arange(codes_IL.shape[1], dtype=np.int64) << 32
    return codes_IL.astype(np.int64) | levels_L


def _uncovered(windows: Windows, known_B: Int64Array, in_chunks_V: Int64Array) -> Int64Array:
    """[V] at a row's first window, its known items that are in none of the windows that are read of it, nor
    in the chunks before them.

    Args:
        known_B: known items of each row.
        in_chunks_V: items of the chunks of each window.
    """
    starts_V = windows.starts_V - in_chunks_V
    stops_V = windows.starts_V + windows.num_targets_V + (known_B[windows.row_V] > 0)
    # Rows lie one behind the other, so that one pass from the oldest item finds what is covered for the first
    # time: what is behind all that was covered before.
    order_V = np.lexsort((starts_V, windows.row_V))
    covered_to_V = np.maximum.accumulate(stops_V[order_V])
    before_V = np.concatenate([np.zeros(min(len(order_V), 1), np.int64), covered_to_V[:-1]])
    new_V = np.maximum(stops_V[order_V] - np.maximum(starts_V[order_V], before_V), 0)
    covered_B = np.bincount(windows.row_V[order_V], new_V, len(known_B)).astype(np.int64)
    left_V = np.zeros_like(starts_V)
    left_V[windows.is_first_V] = known_B - covered_B
    return left_V


def _part(values: NDArray[_T] | None, held: slice) -> NDArray[_T] | None:
    return None if values is None else values[held]


def _at(labels: Mapping[Label, Int64Array], indices_N: Int64Array) -> dict[Label, Int64Array]:
    return {label: codes_N[indices_N] for label, codes_N in labels.items()}


def _cumulative(
    negatives: NegativeDistribution, num_items: int, train_counts_I: Int64Array | None
) -> Int64Array:
    """[I] cumulated weights of the distribution of negatives."""
    if negatives == "uniform":
        return np.arange(1, num_items + 1)
    if train_counts_I is None or len(train_counts_I) != num_items or not train_counts_I.sum():
        raise ValueError(
            f"negatives by popularity need train_counts_I, the training events of the {num_items} items"
        )
    return np.cumsum(train_counts_I)
