"""What happens to items that the codebooks cannot tell apart.

Axes: I items, L code levels, K codes of a level, D dimensions, G items of a
prefix (items that share all codes but the last).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.models.tokenizers.code_tuples import IntArray, tuple_groups
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans

CollisionPolicy = Callable[[Tensor, Tensor, ResidualKMeans], Tensor]
"""`policy(codes_IL, vectors_ID, kmeans)`: [I, L] or [I, L + 1] codes, no two rows the same."""


def add_extra_digit(codes_IL: Tensor, vectors_ID: Tensor, kmeans: ResidualKMeans) -> Tensor:
    """Add a level that numbers the items of each tuple from 0; it is always 0 when nobody collides.

    Items are numbered in catalogue order. That is the order of a hash of the
    item id: it says nothing about the item and does not depend on when the item
    arrived, so the same catalogue always gives the same digits.

    Source: TIGER, arXiv:2305.05065, section 3.1.
    """
    group_I, _ = tuple_groups(codes_IL.cpu().numpy())
    # A stable sort keeps catalogue order within a group; the digit is the place in it.
    order_I = np.argsort(group_I, kind="stable")
    sorted_I = group_I[order_I]
    digit_I = np.empty_like(group_I)
    digit_I[order_I] = np.arange(len(group_I)) - np.searchsorted(sorted_I, sorted_I)
    return torch.cat([codes_IL, torch.from_numpy(digit_I)[:, None].to(codes_IL)], dim=1)


def reassign_last_code(codes_IL: Tensor, vectors_ID: Tensor, kmeans: ResidualKMeans) -> Tensor:
    """Of items that share a tuple, let the nearest keep it and move the others to free last codes.

    Under each prefix the items to be moved choose in turn, the farthest from its
    centroid first (equally far ones in catalogue order): each takes the nearest
    last-level centroid whose tuple nobody has. So no level is added, and which
    item moves follows from the vectors.

    Raises:
        ValueError: a prefix has more items than the last level has codes.
    """
    codes = codes_IL.cpu().numpy().copy()
    prefix_I, num_items_of = tuple_groups(codes[:, :-1]) if codes.shape[1] > 1 else _one_prefix(len(codes))
    size = kmeans.codebook_size
    fullest = int(num_items_of.argmax())
    if num_items_of[fullest] > size:
        prefix = codes[np.argmax(prefix_I == fullest), :-1].tolist()
        raise ValueError(
            f"collision policy reassign: {num_items_of[fullest]} items share the prefix {prefix}, but the "
            f"last level has only {size} codes; choose a larger codebook_size, more levels, or the policy "
            "extra_digit"
        )
    residuals_ID = vectors_ID.to(torch.float32)
    if codes.shape[1] > 1:
        residuals_ID = residuals_ID - kmeans.decode(codes_IL[:, :-1])
    residuals = residuals_ID.cpu().numpy()
    centroids_KD = kmeans.codebooks_LKD[-1].cpu().numpy()

    group_I, group_sizes = tuple_groups(codes)
    crowded = np.unique(prefix_I[group_sizes[group_I] > 1])
    order_I = np.argsort(prefix_I, kind="stable")
    ends = np.cumsum(num_items_of)
    for prefix_number in crowded:
        members_G = order_I[ends[prefix_number] - num_items_of[prefix_number] : ends[prefix_number]]
        difference_GKD = residuals[members_G, None, :] - centroids_KD
        distances_GK = np.square(difference_GKD).sum(axis=2)
        codes[members_G, -1] = _spread(codes[members_G, -1], distances_GK)
    return torch.from_numpy(codes).to(codes_IL)


COLLISION_POLICIES: dict[str, CollisionPolicy] = {
    "extra_digit": add_extra_digit,
    "reassign": reassign_last_code,
}


def _one_prefix(num_items: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.zeros(num_items, dtype=np.int64), np.array([num_items])


def _spread(last_codes_G: IntArray, distances_GK: NDArray[np.float32]) -> IntArray:
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
