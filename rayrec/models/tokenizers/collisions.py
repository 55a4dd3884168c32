"""What happens to items that the codebooks cannot tell apart. Needs numpy alone.

    extra_digit   one more level numbers the items of a tuple; a model learns it as it does any level
    reassign      all but one item of a tuple move to free ones, at the last level
    share         the items keep one tuple and are equally probable: one more level lists them, which no model
                  learns, and over which decoding is uniform

With every policy an item has a path of its own in the trie, so that decoding returns items with exact
probabilities; under `share` an item's is its tuple's, divided by the items that share it.

Axes: I items, L code levels, K codes of a level, G items of a prefix (items that share all codes but the
last).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayrec.models.tokenizers.code_tuples import IntArray, tuple_groups
from rayrec.platform.arrays import Float32Array, Int64Array

LastLevelDistances = Callable[[Int64Array], Float32Array]
"""`distances(items_G)`: [G, K] squared distance from what the last level has to encode of an item, its other
codes given, to each of its codes. Items by their row."""


@dataclass(frozen=True)
class Evidence:
    """What a policy may go by, besides the codes."""

    num_last_codes: int
    """Codes of the last level, K."""
    last_level_distances: LastLevelDistances | None = None
    """None where the codebooks or the vectors are not known."""
    popularity_I: Int64Array | None = None
    """Training events of each item."""


@dataclass(frozen=True)
class CollisionPolicy:
    """One way to tell items of a tuple apart."""

    resolve: Callable[[IntArray, Evidence], IntArray]
    """`resolve(codes_IL, evidence)`: [I, L] or [I, L + 1] codes, no two rows the same."""
    digit: Literal["none", "learned", "uniform"]
    """The level that is added."""


def add_extra_digit(codes_IL: IntArray, evidence: Evidence) -> IntArray:
    """Add a level that numbers the items of each tuple from 0; it is always 0 when nobody collides.

    Items are numbered in catalog order. That is the order of a hash of the
    item id: it says nothing about the item and does not depend on when the item
    arrived, so the same catalog always gives the same digits.

    Source: TIGER, arXiv:2305.05065, section 3.1.
    """
    return _numbered(codes_IL, np.zeros(len(codes_IL), dtype=np.int64))


def share_tuple(codes_IL: IntArray, evidence: Evidence) -> IntArray:
    """Add a level that lists the items of each tuple, those with most training events first.

    Of equally probable items decoding returns the first in this list; equally popular ones stand in catalog
    order, as all do where popularity is not known.
    """
    popularity_I = evidence.popularity_I
    rank_I = np.zeros(len(codes_IL), dtype=np.int64) if popularity_I is None else -popularity_I
    return _numbered(codes_IL, rank_I)


def reassign_last_code(codes_IL: IntArray, evidence: Evidence) -> IntArray:
    """Of items that share a tuple, let the nearest keep it and move the others to free last codes.

    Under each prefix the items to be moved choose in turn, the farthest from its
    centroid first (equally far ones in catalog order): each takes the nearest
    last-level centroid whose tuple nobody has. So no level is added, and which
    item moves follows from the vectors.

    Raises:
        ValueError: a prefix has more items than the last level has codes, or distances are not known.
    """
    if evidence.last_level_distances is None:
        raise ValueError(
            "collision policy reassign moves items by their distance to other codes, and these codes came "
            "without codebooks; choose the policy extra_digit or share"
        )
    codes = codes_IL.copy()
    prefix_I, num_items_of = tuple_groups(codes[:, :-1]) if codes.shape[1] > 1 else _one_prefix(len(codes))
    fullest = int(num_items_of.argmax())
    if num_items_of[fullest] > evidence.num_last_codes:
        prefix = codes[np.argmax(prefix_I == fullest), :-1].tolist()
        raise ValueError(
            f"collision policy reassign: {num_items_of[fullest]} items share the prefix {prefix}, but the "
            f"last level has only {evidence.num_last_codes} codes; choose a larger codebook_size, more "
            "levels, or the policy extra_digit or share"
        )
    group_I, group_sizes = tuple_groups(codes)
    crowded = np.unique(prefix_I[group_sizes[group_I] > 1])
    order_I = np.argsort(prefix_I, kind="stable")
    ends = np.cumsum(num_items_of)
    for prefix_number in crowded:
        members_G = order_I[ends[prefix_number] - num_items_of[prefix_number] : ends[prefix_number]]
        codes[members_G, -1] = _spread(codes[members_G, -1], evidence.last_level_distances(members_G))
    return codes


COLLISION_POLICIES: dict[str, CollisionPolicy] = {
    "extra_digit": CollisionPolicy(add_extra_digit, digit="learned"),
    "reassign": CollisionPolicy(reassign_last_code, digit="none"),
    "share": CollisionPolicy(share_tuple, digit="uniform"),
}


def policy_named(name: str) -> CollisionPolicy:
    """Raises ValueError for a name that is not in `COLLISION_POLICIES`."""
    if name not in COLLISION_POLICIES:
        raise ValueError(f"there is no collision policy {name!r}; known: {', '.join(COLLISION_POLICIES)}")
    return COLLISION_POLICIES[name]


def _numbered(codes_IL: IntArray, rank_I: Int64Array) -> IntArray:
    """A last column that counts the items of each tuple from 0, by rank and then in catalog order."""
    group_I, _ = tuple_groups(codes_IL)
    order_I = np.lexsort((rank_I, group_I))  # which is stable
    sorted_I = group_I[order_I]
    digit_I = np.empty_like(group_I)
    digit_I[order_I] = np.arange(len(group_I)) - np.searchsorted(sorted_I, sorted_I)
    # There may be more items in a tuple than codes in a level.
    wide_enough = np.promote_types(codes_IL.dtype, np.min_scalar_type(-int(digit_I.max()) - 1))
    return np.concatenate([codes_IL, digit_I[:, None]], axis=1, dtype=wide_enough, casting="same_kind")


def _one_prefix(num_items: int) -> tuple[Int64Array, Int64Array]:
    return np.zeros(num_items, dtype=np.int64), np.array([num_items])


def _spread(last_codes_G: IntArray, distances_GK: Float32Array) -> IntArray:
    """Last codes of one prefix's items, made distinct; needs G <= K."""
    own_G = distances_GK[np.arange(len(last_codes_G)), last_codes_G]
    nearest_first_G = np.argsort(own_G, kind="stable")
    # np.unique reports the first of equals: of each code, the item nearest to the centroid.
    taken, keeper = np.unique(last_codes_G[nearest_first_G], return_index=True)
    moves_G = np.ones(len(last_codes_G), dtype=bool)
    moves_G[nearest_first_G[keeper]] = False
    free_distances_GK = distances_GK.copy()
    free_distances_GK[:, taken] = np.inf
    spread_G = last_codes_G.copy()
    for item in np.argsort(-own_G, kind="stable"):
        if moves_G[item]:
            spread_G[item] = free_distances_GK[item].argmin()
            free_distances_GK[:, spread_G[item]] = np.inf
    return spread_G
