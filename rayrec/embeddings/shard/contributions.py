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

from rayrec.embeddings.base.distinct_ids import sum_by_id
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
    """What has arrived of one step."""

    def __init__(self, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._parts: dict[tuple[int, Part], Contribution] = {}
        self.is_begun = False
        """Whether the heads are in the rows already."""
        self.newest_event: int | None = None
        """Of the step, as tags have it."""

    def add(self, tag: UpdateTag, contribution: Contribution) -> None:
        """Store one part of a trainer's contribution.

        Raises:
            ValueError: the trainer has sent the step in another way.
        """
        others = (Part.HEAD, Part.REST) if tag.part is Part.WHOLE else (Part.WHOLE,)
        if any((tag.rank, part) in self._parts for part in others):
            raise ValueError(f"trainer {tag.rank} sent step {tag.step} whole and in parts")
        self._parts[tag.rank, tag.part] = contribution
        if tag.newest_event is not None:
            self.newest_event = max(tag.newest_event, self.newest_event or tag.newest_event)

    def has(self, tag: UpdateTag) -> bool:
        return (tag.rank, tag.part) in self._parts

    def missing(self) -> list[int]:
        """Sources that have not sent everything."""
        return [rank for rank in range(self._num_trainers) if not self._is_complete(rank)]

    def has_all_heads(self) -> bool:
        return all((rank, Part.HEAD) in self._parts for rank in range(self._num_trainers))

    def ids_of_all(self) -> dict[str, Int64Array]:
        """With all heads there: the distinct ids of the step by table."""
        found: dict[str, list[Int64Array]] = {}
        for rank in range(self._num_trainers):
            head = self._parts[rank, Part.HEAD]
            for name, (ids_M, _) in head.update.items():
                found.setdefault(name, []).append(ids_M)
            for name, ids_M in head.rest.items():
                found.setdefault(name, []).append(ids_M)
        ids = {name: np.concatenate(parts) for name, parts in found.items()}
        if self._num_trainers == 1:
            return ids
        return {name: deduplicate(ids_N)[0] for name, ids_N in ids.items()}

    def heads(self) -> dict[str, tuple[Int64Array, Float32Array]]:
        """Gradients by table, summed over the trainers in their order."""
        return summed([self._parts[rank, Part.HEAD].update for rank in range(self._num_trainers)])

    def begin(self) -> None:
        """The heads are in the rows: what is left is the rest."""
        self.is_begun = True
        for rank in range(self._num_trainers):
            # Lets a transport have the memory of the gradients back, which may be a block of shared memory.
            self._parts[rank, Part.HEAD] = Contribution({}, {}, {})

    def left(self) -> dict[str, tuple[Int64Array, Float32Array]]:
        """With everything there: gradients by table of what is not in the rows, summed over the trainers."""
        return summed([self._of(rank) for rank in range(self._num_trainers)])

    def dirty(self) -> list[DirtyRows]:
        """In the order of the trainers."""
        return [
            contribution.dirty
            for (_, part), contribution in sorted(self._parts.items(), key=lambda item: item[0])
            if part is not Part.HEAD
        ]

    def _is_complete(self, rank: int) -> bool:
        return (rank, Part.WHOLE) in self._parts or (
            (rank, Part.HEAD) in self._parts and (rank, Part.REST) in self._parts
        )

    def _of(self, rank: int) -> SparseUpdate:
        """Everything of one trainer that is not in the rows yet."""
        if (rank, Part.WHOLE) in self._parts:
            return self._parts[rank, Part.WHOLE].update
        head, rest = self._parts[rank, Part.HEAD].update, self._parts[rank, Part.REST].update
        joined = dict(rest)
        for name, (ids_M, grads_MD) in head.items():
            if name in rest:
                joined[name] = (
                    np.concatenate([ids_M, rest[name][0]]),
                    np.concatenate([grads_MD, rest[name][1]]),
                )
            else:
                joined[name] = ids_M, grads_MD
        return joined


def summed(updates: Sequence[SparseUpdate]) -> dict[str, tuple[Int64Array, Float32Array]]:
    """Gradients by table and id, added up in the order of the trainers."""
    if len(updates) == 1:
        return dict(updates[0])
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: sum_by_id([update[name] for update in updates if name in update]) for name in names}
