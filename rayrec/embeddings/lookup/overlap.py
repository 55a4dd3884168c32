"""What two batches that follow each other share, in one table.

Axes: M distinct ids of one trainer's share of a batch, K of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayrec.embeddings.base.distinct_ids import positions_among
from rayrec.embeddings.lookup.lookups import TableIds
from rayrec.platform.arrays import Int64Array

NO_POSITIONS = np.empty(0, dtype=np.int64)


class Overlap(NamedTuple):
    """Of a trainer's share; an only trainer's have the same ids, in the same order."""

    of_next: Int64Array = NO_POSITIONS
    """[K] positions among the next batch's ids of those that this one touches, ascending."""
    of_this: Int64Array = NO_POSITIONS
    """[K] positions among this batch's ids of those that the next one touches."""

    @classmethod
    def of_sole_trainer(cls, this_M: Int64Array, following_M: Int64Array) -> Overlap:
        """Of two batches' ids; they touch nothing else."""
        found_M = positions_among(following_M, this_M)
        of_next = np.flatnonzero(found_M >= 0)
        return cls(of_next, found_M[of_next])

    @classmethod
    def between(cls, this: TableIds, following: TableIds) -> Overlap:
        found_M = positions_among(following.ids_M, this.updated_ids)
        of_next = np.flatnonzero(found_M >= 0)
        return cls(of_next, np.flatnonzero(positions_among(this.ids_M, following.updated_ids) >= 0))


def all_but(num_ids: int, *positions: Int64Array) -> Int64Array:
    """The positions, of so many, that are not among these, ascending."""
    is_other_M = np.ones(num_ids, dtype=np.bool_)
    for some in positions:
        is_other_M[some] = False
    return np.flatnonzero(is_other_M)
