"""What travels between the stages: rows read, then rows turned into features.

Axes: B samples of a batch, N tokens (history events of all samples, one after
the other), M distinct ids of one table, L code levels, S negatives of a batch, K of a
token, J neighbors of a token, 1 an extra element (offsets_B1 has B + 1 entries). "Position" of an item is its
index in the catalog (`Dataset.items`), which is ordered by a hash of the id so that the number itself carries
no information.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Float32Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import Label, Part
from rayrec.platform.hashing import combine64
from rayrec.samples.base.event_labels import LABEL_COLUMNS
from rayrec.samples.base.event_times import TIMES, seconds
from rayrec.samples.base.intervals import Intervals
from rayrec.samples.base.jagged import take_rows


@dataclass(frozen=True)
class RowBatch:
    """Rows as they were read, still Arrow."""

    row_keys_B: Int64Array
    """Identity of each row; random numbers for a row are derived from it."""
    rows: pa.RecordBatch
    """[B] the columns asked for. Buffers of its own: it travels between processes."""
    cursor: Intervals = field(default_factory=Intervals)
    """Where the rows were read."""
    unreadable: Intervals = field(default_factory=Intervals)
    """Rows that were planned, cannot be decoded, and are left out because the settings allow it."""

    @property
    def num_rows(self) -> int:
        return len(self.row_keys_B)

    @staticmethod
    def concatenate(parts: Sequence[RowBatch]) -> RowBatch:
        """The rows of one step, which may come of several windows."""
        if len(parts) == 1:
            return parts[0]
        return RowBatch(
            np.concatenate([part.row_keys_B for part in parts]),
            pa.concat_batches([part.rows for part in parts]),
            Intervals.joined(part.cursor for part in parts),
            Intervals.joined(part.unreadable for part in parts),
        )


@dataclass(frozen=True)
class SampleBatch:
    """Rows of the data set as they were read; one row is one user's sequence."""

    step: int
    """Global training step, from 0; for evaluation, the number of the batch."""
    row_keys_B: Int64Array
    """Identity of each row; random numbers for a row are derived from it."""
    user_ids_B: Int64Array
    item_ids_N: Int64Array
    """History of every row, oldest event first, concatenated."""
    offsets_B1: Int64Array
    """Row b owns item_ids_N[offsets_B1[b]:offsets_B1[b + 1]]."""
    targets_B: Int64Array | None = None
    """Evaluation only: id of the item that came next."""
    times_N: Int64Array | None = None
    """UNIX seconds of every event of the history, for models that need them; None for others."""
    labels: Mapping[Label, Int64Array] = field(default_factory=dict)
    """[N] codes of every event of the history, -1 where unknown, of the labels that the model needs."""
    instruction: Mapping[Part, Int64Array] = field(default_factory=dict)
    """[B] to rank for: what is wanted of the next item, -1 where nothing is. The codes of labels, and the
    catalog position of the item that triggers the request."""

    @property
    def num_rows(self) -> int:
        return len(self.user_ids_B)

    @classmethod
    def of(cls, step: int, batch: RowBatch) -> SampleBatch:
        """From the columns `user_id` (integers), `item_ids` (lists of integers, null for none) and, if they
        are there, `timestamps` (lists as long as those, of seconds or of dates and times), `behaviors` and
        `scenarios` (lists as long as those, of codes).

        Raises:
            InputError: a user is null, or an item, time or code in a list; a row has more or fewer times or
                codes than items, or times that are no seconds.
        """
        users, items = batch.rows["user_id"], batch.rows["item_ids"]
        of_events = [name for name in (TIMES, *LABEL_COLUMNS.values()) if name in batch.rows.schema.names]
        rows = f"the rows of step {step}" + (
            f", which begin with row {batch.cursor[0].start} of {batch.cursor[0].file}"
            if batch.cursor
            else ""
        )
        events = items.flatten()
        columns = {"user_id": users, "item_ids": events}
        columns |= {name: batch.rows[name].flatten() for name in of_events}
        for column, values in columns.items():
            if values.null_count:
                raise InputError(
                    f"the column {column!r} has {values.null_count} nulls in {rows}"
                    "; give them a value (op: fill) or leave such rows out (data.filters)"
                )
        lengths_B = _lengths(items)
        for name in of_events:
            if not np.array_equal(found_B := _lengths(batch.rows[name]), lengths_B):
                row = int(np.argmax(found_B != lengths_B))
                raise InputError(
                    f"a row has {lengths_B[row]} item_ids and {found_B[row]} {name}: number {row + 1} of "
                    f"{rows}; every event needs one: operations that change one have to change both"
                )
        times = columns.get(TIMES)
        return cls(
            step=step,
            row_keys_B=batch.row_keys_B,
            user_ids_B=_integers(users),
            item_ids_N=_integers(events),
            offsets_B1=np.concatenate([[0], np.cumsum(lengths_B, dtype=np.int64)]),
            times_N=None if times is None else seconds(times, f"the column {TIMES!r} in {rows}"),
            labels={
                label: _integers(columns[name]) for label, name in LABEL_COLUMNS.items() if name in of_events
            },
        )

    def some(self, rows_B: Int64Array) -> SampleBatch:
        """Select rows, in the given order."""
        item_ids_N, offsets_B1 = take_rows(self.item_ids_N, self.offsets_B1, rows_B)

        def events(values_N: Int64Array) -> Int64Array:
            return take_rows(values_N, self.offsets_B1, rows_B)[0]

        return SampleBatch(
            step=self.step,
            row_keys_B=self.row_keys_B[rows_B],
            user_ids_B=self.user_ids_B[rows_B],
            item_ids_N=item_ids_N,
            offsets_B1=offsets_B1,
            targets_B=None if self.targets_B is None else self.targets_B[rows_B],
            times_N=None if self.times_N is None else events(self.times_N),
            labels={label: events(codes_N) for label, codes_N in self.labels.items()},
            instruction={part: codes_B[rows_B] for part, codes_B in self.instruction.items()},
        )

    def instructed(self, instruction: Mapping[Part, int]) -> SampleBatch:
        """The same rows, for each of which the same is wanted."""
        wanted = {part: np.full(self.num_rows, value) for part, value in instruction.items()}
        return replace(self, instruction=wanted)


def _integers(values: pa.Array) -> Int64Array:
    return values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def _lengths(lists: pa.ListArray) -> Int64Array:
    return lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class TableLookup:
    """The ids of one embedding table that a batch reads, deduplicated once."""

    ids_M: Int64Array
    """Distinct ids."""
    inverse: Int64Array
    """Any shape; ids_M[inverse] restores the ids as the model wants them."""
    updated_ids: Int64Array
    """Distinct ids that the whole global batch touches, over all trainers.

    Equal to ids_M with one trainer. A later batch may read ahead every id that
    is not in here.
    """


class BatchShare(Protocol):
    """One trainer's share of a global batch, of whatever kind of rows: what stages that compute nothing of it
    know."""

    @property
    def step(self) -> int: ...
    @property
    def num_targets(self) -> int:
        """In the *global* batch: the divisor of the summed loss."""

    @property
    def num_tokens(self) -> int:
        """How much of the work the share is."""

    @property
    def lookups(self) -> dict[str, TableLookup]: ...
    @property
    def counts(self) -> dict[str, int]:
        """Dropped work, by reason."""

    @property
    def newest_event(self) -> int | None:
        """As `FeatureBatch` has it; None of rows without events."""


class TrainingFeatures(Protocol):
    """What feature workers do to rows."""

    def training(self, step: int, rows: RowBatch) -> Sequence[BatchShare]:
        """One share per trainer."""


@dataclass(frozen=True)
class OldChunks:
    """What histories have before the events that are read one by one, of models that read summaries of it.

    Chunks of C events each, counted from a history's oldest event: X of all rows, the oldest of a row first.
    """

    offsets_B1: Int64Array
    """Row b has the chunks `offsets_B1[b]` to `offsets_B1[b + 1]` (exclusive)."""
    items_XC: Int64Array
    """Catalog positions."""
    labels: dict[Label, Int64Array]
    """[X, C] codes, -1 where unknown, of the labels that the model reads."""
    ages_X: Int64Array
    """Chunks of the row behind it: 0 of the newest."""
    is_known_X: BoolArray | None = None
    """Whose summaries were computed before; None: of none."""
    known_XKD: Float32Array | None = None
    """Those summaries, K vectors of a chunk; without meaning of the others."""

    @property
    def hashes_X(self) -> NDArray[np.uint64]:
        """Of each chunk's events, their order and labels: equal for equal chunks of one catalog."""
        places_C = np.arange(self.items_XC.shape[1])
        codes = [self.labels[label] for label in sorted(self.labels)]
        hashes_X: NDArray[np.uint64] = combine64(places_C, self.items_XC, *codes).sum(1, dtype=np.uint64)
        return hashes_X

    def some_rows(self, rows: slice) -> OldChunks:
        """Those of neighboring rows; start and stop are given."""
        offsets_R1 = self.offsets_B1[rows.start : rows.stop + 1]
        mine = np.arange(offsets_R1[0], offsets_R1[-1])
        return replace(self.some(mine), offsets_B1=offsets_R1 - offsets_R1[0])

    def some(self, chosen: NDArray[np.integer]) -> OldChunks:
        """Some chunks, by index, ascending."""
        num_before_X1 = np.searchsorted(chosen, np.arange(len(self.ages_X) + 1))
        return OldChunks(
            num_before_X1[self.offsets_B1],
            self.items_XC[chosen],
            {label: codes_XC[chosen] for label, codes_XC in self.labels.items()},
            self.ages_X[chosen],
            None if self.is_known_X is None else self.is_known_X[chosen],
            None if self.known_XKD is None else self.known_XKD[chosen],
        )


@dataclass(frozen=True)
class PathLevel:
    """Prefixes of one length between which a loss tells those of targets apart: candidates C, of P parents.

    Alternatives come first, those of each parent side by side, then prefixes of targets that are not among
    them.
    """

    codes_C: Int64Array
    """The last code of each candidate."""
    offsets_P1: Int64Array
    """Parent p has the alternatives `offsets_P1[p]` to `offsets_P1[p + 1]` (exclusive)."""
    log_shares_P: Float32Array
    """Log of the share of a parent's children that its alternatives are: 0 where they are all of them."""
    parents_N: Int64Array
    """The parent of each target's prefix."""
    targets_N: Int64Array
    """Which candidate each target's prefix is."""


@dataclass(frozen=True)
class PromptTokens:
    """Rows of tokens, of models that read prompts: N tokens of all rows."""

    tokens_N: Int64Array
    offsets_B1: Int64Array
    """Row b has the tokens `offsets_B1[b]` to `offsets_B1[b + 1]` (exclusive)."""
    is_target_N: BoolArray
    """Training: whether a token is to be predicted from those before it; never a row's first."""
    filled_P: dict[str, Int64Array]
    """By table, which tokens stand for a row of it, ascending. Element p of the table's `inverse` is the row
    of place p."""


@dataclass(frozen=True)
class FeatureBatch:
    """One trainer's share of a global batch, ready for lookup and dense compute."""

    step: int
    row_keys_B: Int64Array
    offsets_B1: Int64Array
    items_N: Int64Array
    """Catalog position of every input token."""
    targets_N: Int64Array | None
    """Training: catalog position of the item that follows each token."""
    num_targets: int
    """Targets in the *global* batch: the divisor of the summed loss."""
    lookups: dict[str, TableLookup]
    negatives_S: Int64Array | None = None
    """Catalog positions of sampled negatives, distinct and ascending; the same for every trainer."""
    negatives_NK: Int64Array | None = None
    """Catalog positions of the negatives of each target, none of which is an item of its row."""
    times_N: Int64Array | None = None
    """UNIX seconds of every input token, for models that need them. Those of targets are in no batch: when
    they will come is not known yet when they are to be predicted."""
    labels: dict[Label, Int64Array] = field(default_factory=dict)
    """[N] codes of every input token, -1 where unknown, of the labels that the model needs."""
    target_labels: dict[Label, Int64Array] = field(default_factory=dict)
    """Training: [N] those of the event that follows each token."""
    instruction: dict[Part, Int64Array] = field(default_factory=dict)
    """Ranking: [B] what is wanted; see `SampleBatch.instruction`."""
    neighbors_NJ: Int64Array | None = None
    """Catalog positions of the neighbors of each input token, for models that read them. A place without one
    has the token's own item, and no weight."""
    neighbor_weights_NJ: Float32Array | None = None
    """Their shares: of a token with neighbors, they add up to 1."""
    old_chunks: OldChunks | None = None
    """Of models that read summaries of them."""
    paths: tuple[PathLevel, ...] = ()
    """Training: the prefixes of targets by length, of models whose vectors of prefixes are rows of a
    table."""
    prompts: PromptTokens | None = None
    """Of models that read prompts: what their rows are. Training has no items then, and tokens for targets;
    ranking says which items a prompt has."""
    counts: dict[str, int] = field(default_factory=dict)
    """Dropped work, by reason (`unknown_items`, `rows_without_target`, ...)."""
    newest_event: int | None = None
    """Training: UNIX seconds of the newest event of the middle row of the *global* batch, where tables go by
    it."""

    @property
    def num_rows(self) -> int:
        return len(self.row_keys_B)

    @property
    def num_tokens(self) -> int:
        return len(self.items_N if self.prompts is None else self.prompts.tokens_N)
