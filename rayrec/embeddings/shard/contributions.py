"""What trainers send of a step, and what of it has arrived.

A trainer's contribution to a step comes whole, or in two parts, so that what the next batch waits for need
not wait for the rest:

    HEAD   gradients of the rows that some trainer's next batch reads, with the ids of the rest
    REST   all other gradients

Which rows the next batch reads is known to all trainers alike, so an id is in the heads of all trainers that
have a gradient for it, or in none: as soon as every head is there, these rows can take the step.

Axes: M distinct ids of one table, D numbers of a row, K records, W words of a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from rayrec.embeddings.base.distinct_ids import add_part, sum_by_id
from rayrec.embeddings.storage.index import IdIndex
from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array
from rayrec.platform.deduplication import deduplicate

SparseUpdate = Mapping[str, tuple[Int64Array, Float32Array]]
"""(distinct ids [M], gradients [M, D]) by table."""
DirtyRows = Mapping[str, tuple[Int64Array, Int32Array]]
"""(distinct ids [K], whole records [K, W]) by table, as a trainer's cache has changed them."""


class Part(IntEnum):
    """How much of a trainer's contribution to a step a call brings."""

    WHOLE = 0
    HEAD = 1
    REST = 2


class UpdateTag(NamedTuple):
    """Identity of one part of a contribution; the same tag twice is the same part sent again."""

    incarnation: int
    """Raised by every recovery."""
    step: int
    rank: int
    """Rank of the trainer that sends it."""
    part: Part = Part.WHOLE
    newest_event: int | None = None
    """UNIX seconds of the newest event that the step's batch has, if tables go by it; alike in all tags of a
    step, and no part of what tells them apart."""


class Contribution(NamedTuple):
    """One part."""

    update: SparseUpdate
    dirty: DirtyRows
    rest: Mapping[str, Int64Array]
    """With a head: the ids of the part that follows it, by table."""


class StepContributions:
    """What has arrived of one step.

    Of several trainers, gradients are added to a running sum as soon as those of all lower ranks are in it,
    and given back. So what waits here is what has come before something of a lower rank: nothing, if they
    come in the order of the ranks; all but one, if the first rank comes last.
    """

    def __init__(self, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._arrived: set[tuple[int, Part]] = set()
        self._waiting: dict[tuple[int, Part], SparseUpdate] = {}
        """Those that are in no sum yet."""
        self._dirty: dict[int, DirtyRows] = {}
        self._heads, self._rest = _Sum(), _Sum()
        """Of all heads; and of everything else, with the heads where some trainer sends the step whole."""
        self._num_heads = self._num_rest = 0
        """Ranks, from the first on, that are in the sums."""
        self._has_whole = False
        """Whether the second sum has a contribution that came whole, and all heads before it."""
        self._announced: dict[str, list[Int64Array]] = {}
        """With the heads: ids of what will follow, by table."""
        self.waiting_bytes = 0
        """Of the gradients that are in no sum yet, and of their ids."""
        self.is_begun = False
        """Whether the heads are in the rows already."""
        self.newest_event: int | None = None
        """Of the step, as tags have it."""

    def add(self, tag: UpdateTag, contribution: Contribution) -> list[tuple[int, Part]]:
        """Take one part of a trainer's contribution.

        Returns:
            Parts, with the ranks of their trainers, whose gradients have gone into a sum.

        Raises:
            ValueError: the trainer has sent the step in another way.
        """
        others = (Part.HEAD, Part.REST) if tag.part is Part.WHOLE else (Part.WHOLE,)
        if any((tag.rank, part) in self._arrived for part in others):
            raise ValueError(f"trainer {tag.rank} sent step {tag.step} whole and in parts")
        self._arrived.add((tag.rank, tag.part))
        self._waiting[tag.rank, tag.part] = contribution.update
        self.waiting_bytes += bytes_of(contribution.update)
        if tag.part is not Part.HEAD and contribution.dirty:
            self._dirty[tag.rank] = contribution.dirty
        for name, ids_M in contribution.rest.items():
            self._announced.setdefault(name, []).append(ids_M)
        if tag.newest_event is not None:
            self.newest_event = max(tag.newest_event, self.newest_event or tag.newest_event)
        return self._sum_up()

    def has(self, tag: UpdateTag) -> bool:
        return (tag.rank, tag.part) in self._arrived

    @property
    def num_waiting(self) -> int:
        """Parts whose gradients are held, since something of a lower rank is not there yet."""
        return len(self._waiting)

    def missing(self) -> list[int]:
        """Sources that have not sent everything."""
        return [rank for rank in range(self._num_trainers) if not self._is_complete(rank)]

    def has_all_heads(self) -> bool:
        return self._num_heads == self._num_trainers

    def ids_of_all(self) -> dict[str, Int64Array]:
        """With all heads there: the distinct ids of the step by table."""
        found = {name: list(parts) for name, parts in self._announced.items()}
        for name, (ids_R, _) in self._heads.by_table().items():
            found.setdefault(name, []).append(ids_R)
        ids = {name: np.concatenate(parts) for name, parts in found.items()}
        if self._num_trainers == 1:
            return ids
        return {name: deduplicate(ids_N)[0] for name, ids_N in ids.items()}

    def heads(self) -> dict[str, tuple[Int64Array, Float32Array]]:
        """With all heads there: gradients by table, summed over the trainers in their order."""
        return self._heads.by_table()

    def begin(self) -> None:
        """The heads are in the rows: what is left is the rest."""
        self.is_begun = True
        # Lets a transport have the memory of the gradients back, which may be a block of shared memory.
        self._heads, self._announced = _Sum(), {}

    def left(self) -> dict[str, tuple[Int64Array, Float32Array]]:
        """With everything there: gradients by table of what is not in the rows, summed over the trainers."""
        self._fold_heads()
        return self._rest.by_table()

    def dirty(self) -> list[DirtyRows]:
        """In the order of the trainers."""
        return [self._dirty[rank] for rank in sorted(self._dirty)]

    def _is_complete(self, rank: int) -> bool:
        return (rank, Part.WHOLE) in self._arrived or (
            (rank, Part.HEAD) in self._arrived and (rank, Part.REST) in self._arrived
        )

    def is_next(self, rank: int, part: Part) -> bool:
        """Whether a part, or what its trainer still sends with it, goes into a sum as soon as it comes."""
        return rank == self._num_rest or (part is Part.HEAD and rank == self._num_heads)

    def _sum_up(self) -> list[tuple[int, Part]]:
        """Add what has come to the sums, as far as all lower ranks are in them; returns what it was."""
        added: list[tuple[int, Part]] = []
        while not self._has_whole and (head := (self._num_heads, Part.HEAD)) in self._waiting:
            self._add_waiting(head, self._heads, added)
            self._num_heads += 1
        while self._is_complete(rank := self._num_rest):
            if (whole := (rank, Part.WHOLE)) in self._waiting:
                # Ids of heads are in no rest, so that all lower ranks are in the sum of both.
                self._fold_heads()
                self._has_whole = True
                self._add_waiting(whole, self._rest, added)
            else:
                if (head := (rank, Part.HEAD)) in self._waiting:  # a lower rank has sent the step whole
                    self._add_waiting(head, self._rest, added)
                self._add_waiting((rank, Part.REST), self._rest, added)
            self._num_rest += 1
        return added

    def _add_waiting(self, key: tuple[int, Part], total: _Sum, added: list[tuple[int, Part]]) -> None:
        update = self._waiting.pop(key)
        self.waiting_bytes -= bytes_of(update)
        total.add(update, is_alone=self._num_trainers == 1)
        added.append(key)

    def _fold_heads(self) -> None:
        """Heads that were not applied by themselves are a part of everything else."""
        for name, (ids_R, sums_RD) in self._heads.by_table().items():
            self._rest.add({name: (ids_R, sums_RD)}, is_alone=self._num_trainers == 1)
        self._heads = _Sum()


def bytes_of(update: SparseUpdate) -> int:
    """Of its arrays."""
    return sum(ids_M.nbytes + grads_MD.nbytes for ids_M, grads_MD in update.values())


class _Sum:
    """Gradients by table and id, added up in the order in which they come."""

    def __init__(self) -> None:
        self._tables: dict[str, _TableSum | tuple[Int64Array, Float32Array]] = {}

    def add(self, update: SparseUpdate, is_alone: bool) -> None:
        """Args:
        is_alone: there is one trainer: its gradients are taken as they are.
        """
        for name, (ids_M, grads_MD) in update.items():
            known = self._tables.get(name)
            if is_alone and known is None:
                self._tables[name] = ids_M, grads_MD
            elif is_alone:
                assert isinstance(known, tuple)
                self._tables[name] = (
                    np.concatenate([known[0], ids_M]),
                    np.concatenate([known[1], grads_MD]),
                )
            else:
                if known is None:
                    known = self._tables[name] = _TableSum(grads_MD.shape[1])
                assert isinstance(known, _TableSum)
                known.add(ids_M, grads_MD)

    def by_table(self) -> dict[str, tuple[Int64Array, Float32Array]]:
        return {
            name: known if isinstance(known, tuple) else known.result()
            for name, known in self._tables.items()
        }


class _TableSum:
    """Of one table: the sum that `sum_by_id` gives of all parts at once, with the same bits."""

    def __init__(self, dim: int) -> None:
        self._index = IdIndex()
        self._ids: list[Int64Array] = []
        self._sums_CD = np.empty((0, dim), dtype=np.float32)
        """With room for more: what was never written takes no memory."""

    def add(self, ids_M: Int64Array, grads_MD: Float32Array) -> None:
        num_summed = len(self._index)
        numbers_M = self._index.find_or_add(ids_M)  # new ones get numbers in their order
        self._ids.append(ids_M[numbers_M >= num_summed])
        if len(self._index) > len(self._sums_CD):
            sums_CD = np.empty((2 * len(self._index), self._sums_CD.shape[1]), dtype=np.float32)
            sums_CD[:num_summed] = self._sums_CD[:num_summed]
            self._sums_CD = sums_CD
        add_part(self._sums_CD, num_summed, numbers_M, grads_MD)

    def result(self) -> tuple[Int64Array, Float32Array]:
        ids_R = np.concatenate([np.empty(0, dtype=np.int64), *self._ids])
        return ids_R, self._sums_CD[: len(ids_R)]


def summed(updates: Sequence[SparseUpdate]) -> dict[str, tuple[Int64Array, Float32Array]]:
    """Gradients by table and id, added up in the order of the trainers."""
    if len(updates) == 1:
        return dict(updates[0])
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: sum_by_id([update[name] for update in updates if name in update]) for name in names}
