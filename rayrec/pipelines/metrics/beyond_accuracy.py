"""What lists are like, whatever users did next: coverage, novelty, diversity of the first ten items.

All three are defined by training events alone, so that every model on every data set has them.

Axes: U users, K items of a list, I items of the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.proportions import Z_95
from rayrec.platform.arrays import Float64Array, Int64Array

if TYPE_CHECKING:
    from scipy.sparse import csr_array

FIRST = 10
"""Items of a list that are looked at."""
MOST_READ = 1 << 29
"""Training events of listed items that diversity reads at most; of more, it is that of the first users."""
_ROWS_AT_ONCE = 2048
_READ_AT_ONCE = 1 << 24
"""Training events of the lists whose vectors are in memory together: about 12 bytes each."""


@dataclass(frozen=True)
class ListMetrics:
    """Of one method's lists."""

    coverage: float
    novelty: Estimate | None
    """None where every list is empty."""
    diversity: Estimate | None
    """None where no list has two items."""
    num_diverse: int
    """Users whose lists diversity is of: those with two items, or a sample of them (`MOST_READ`)."""

    def to_json(self) -> dict[str, Any]:
        return {
            f"coverage@{FIRST}": self.coverage,
            f"novelty@{FIRST}": None if self.novelty is None else self.novelty._asdict(),
            f"diversity@{FIRST}": None if self.diversity is None else self.diversity._asdict(),
            "diversity_users": self.num_diverse,
        }


def list_metrics(items_UK: Int64Array, train_counts_I: Int64Array, users_of_items: csr_array) -> ListMetrics:
    """Coverage, novelty and diversity of lists.

    Coverage is the share of the catalog that is in any list; of more users it is larger (Ge,
    Delgado-Battenfeld and Jannach, RecSys 2010). Intervals of the others are 1.96 standard errors over users.

    Args:
        items_UK: catalog positions, -1 after the last.
        users_of_items: as `users_of_items` makes it.
    """
    shown = np.unique(items_UK[items_UK >= 0])
    diverse_V = diversity(items_UK, users_of_items)
    return ListMetrics(
        len(shown) / len(train_counts_I),
        _mean(novelty(items_UK, train_counts_I)),
        _mean(diverse_V),
        int(np.count_nonzero(~np.isnan(diverse_V))),
    )


def novelty(items_UK: Int64Array, train_counts_I: Int64Array) -> Float64Array:
    """[U] mean self-information of the items of each list in bits, NaN of an empty list.

    That of an item is -log2 of its share of the training events, with one more event for every item, so that
    items without one have a share.

    Source: Zhou et al., PNAS 107 (2010); Vargas and Castells, RecSys 2011.
    """
    share_I = (train_counts_I + 1.0) / (train_counts_I.sum() + len(train_counts_I))
    is_there_UK = items_UK >= 0
    bits_UK = np.where(is_there_UK, -np.log2(share_I)[items_UK], 0.0)
    return _divided(bits_UK.sum(axis=1), is_there_UK.sum(axis=1))


def diversity(items_UK: Int64Array, users_of_items: csr_array) -> Float64Array:
    """[V] mean distance of two items of each list, NaN of a list with fewer than two; V is U or less.

    The distance is 1 minus the cosine of the sets of users who have the items in training: 1 where no user
    has both. The mean over all pairs comes from the length of the sum of the items' unit vectors.

    Source: intra-list distance, Ziegler et al., WWW 2005, with distances between ratings as in Vargas and
    Castells, RecSys 2011.
    """
    found = [_distances(part, users_of_items) for part in _affordable(items_UK, users_of_items)]
    return np.concatenate(found) if found else np.zeros(0)


def users_of_items(users_E: Int64Array, items_E: Int64Array, num_items: int) -> csr_array:
    """[I, users] unit vectors of the sets of users of each item; a zero row for an item without any.

    Args:
        users_E: id of the user of each training event.
        items_E: catalog position of its item; -1 is left out.
    """
    from scipy.sparse import csr_array

    distinct, columns_E = np.unique(users_E, return_inverse=True)
    num_columns = max(len(distinct), 1)
    known_E = items_E >= 0
    # One number for item and user: numbers are sorted in a fraction of the memory and time of pairs.
    pairs = np.unique(items_E[known_E].astype(np.int64) * num_columns + columns_E[known_E])
    items, columns = np.divmod(pairs, num_columns)
    counts_I = np.bincount(items, minlength=num_items)
    values = 1.0 / np.sqrt(counts_I[items])
    offsets = np.concatenate(([0], np.cumsum(counts_I)))
    return csr_array((values, columns, offsets), shape=(num_items, num_columns))


def _affordable(items_UK: Int64Array, users_of_items: csr_array) -> Iterator[Int64Array]:
    """The lists of the first users, some at a time, until `MOST_READ` entries are read.

    Parts read `_READ_AT_ONCE` entries or fewer, or have one list.
    """
    sizes_I = np.diff(users_of_items.indptr).astype(np.int64)
    left = MOST_READ
    for first in range(0, len(items_UK), _ROWS_AT_ONCE):
        part = items_UK[first : first + _ROWS_AT_ONCE]
        read_B = np.cumsum(np.where(part >= 0, sizes_I[part], 0).sum(axis=1))
        kept = int(np.searchsorted(read_B, left, side="right"))
        if first == 0:
            kept = max(kept, 1)
        start = 0
        while start < kept:
            before = int(read_B[start - 1]) if start else 0
            stop = int(np.searchsorted(read_B[:kept], before + _READ_AT_ONCE, side="right"))
            stop = max(stop, start + 1)
            yield part[start:stop]
            start = stop
        if kept < len(part):
            return
        left -= int(read_B[-1])


def _distances(items_BK: Int64Array, users_of_items: csr_array) -> Float64Array:
    from scipy.sparse import csr_array

    is_there_BK = items_BK >= 0
    offsets_B1 = np.concatenate([[0], np.cumsum(is_there_BK.sum(axis=1))])
    listed = items_BK[is_there_BK]
    shape = (len(items_BK), users_of_items.shape[0])
    lists = csr_array((np.ones(len(listed)), listed, offsets_B1), shape=shape)
    sums = lists @ users_of_items
    # |sum of unit vectors|^2 is the number of vectors plus twice the sum of the cosines of all pairs.
    sums.data *= sums.data  # in place: a copy would double the memory
    squares_B = np.asarray(sums.sum(axis=1)).reshape(-1)
    num_B = np.diff(offsets_B1)
    known_B = np.asarray(lists @ (np.diff(users_of_items.indptr) > 0).astype(np.float64))
    return 1.0 - _divided(squares_B - known_B, num_B * (num_B - 1))


def _divided(sums_U: Float64Array, counts_U: Int64Array) -> Float64Array:
    out = np.full(len(sums_U), np.nan)
    return np.divide(sums_U, counts_U, out=out, where=counts_U > 0)


def _mean(values_U: Float64Array) -> Estimate | None:
    values_U = values_U[~np.isnan(values_U)]
    if not len(values_U):
        return None
    mean = float(values_U.mean())
    half = Z_95 * float(values_U.std(ddof=1)) / np.sqrt(len(values_U)) if len(values_U) > 1 else 0.0
    return Estimate(mean, mean - half, mean + half)
