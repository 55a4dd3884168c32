"""k-means, the part that the tokenizers share: starting points, distances in bounded memory, Lloyd's rounds.

Why not `faiss`: on Amazon Beauty (12,101 items, 3 levels of 256 codes) its codes lose more: a
reconstruction error of 0.339 against 0.329 to 0.332, 1,420 to 1,440 items that share a tuple against 1,290
to 1,320. It starts from random points where this starts from k-means++. And this runs on the device of the
vectors.

Axes: I items, K centroids, D dimensions, P points of a chunk, T trial centroids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

# Elements of the largest intermediate, a [P, K] block of distances: 16 MiB of float32.
_CHUNK_ELEMENTS = 1 << 22
_FAR = 1e15
"""Coordinate of a centroid that nothing is near to; sums of its squares fit into float32."""
_VECTORS_PER_CODE = 4


def usual_codebook_size(vectors_ID: Tensor, most: int) -> int:
    """A power of two, or `most` if that is less, that leaves four distinct vectors to a code on average:
    clusters of one leave nothing to code."""
    num_distinct = len(vectors_ID.unique(dim=0))
    return max(2, min(most, 2 ** int(math.log2(max(num_distinct, 8) / _VECTORS_PER_CODE))))


def with_unused(centroids_KD: Tensor, size: int) -> Tensor:
    """As many centroids as `size`: those behind the given ones are near to nothing."""
    return functional.pad(centroids_KD, (0, 0, 0, size - len(centroids_KD)), value=_FAR)


def is_used(centroids_KD: Tensor) -> Tensor:
    """[K] whether a centroid is one of those that were given to `with_unused`."""
    return centroids_KD.abs().amax(dim=1) < _FAR / 2


def starting_centroids(
    points_ID: Tensor, size: int, generator: torch.Generator, what: str, may_be_fewer: bool = False
) -> Tensor:
    """[K, D] greedy k-means++: of a few points drawn by squared distance, keep the one that helps most.

    Args:
        what: The points are, for the error.
        may_be_fewer: Have no more centroids than there are distinct points, instead of raising.

    Raises:
        ValueError: fewer distinct points than `size`.

    Source: Arthur and Vassilvitskii, SODA 2007, with the 2 + ln K trials of
    their section 5.
    """
    num_trials = 2 + int(math.log(size))
    chosen = [int(torch.randint(len(points_ID), (1,), generator=generator))]
    squares_I = squared_distances(points_ID, points_ID[chosen])[:, 0]
    while len(chosen) < size:
        # The running sum is taken on the CPU in double: on a GPU its order of additions may vary.
        mass_I = squares_I.cpu().double().cumsum(0)
        if float(mass_I[-1]) <= 0.0:
            if may_be_fewer:
                break
            raise ValueError(_too_few(size, len(chosen), len(points_ID), what))
        draws_T = torch.rand(num_trials, generator=generator, dtype=torch.float64) * mass_I[-1]
        # A draw equal to the total would fall behind the last point.
        trials_T = torch.searchsorted(mass_I, draws_T, right=True).clamp(max=len(points_ID) - 1)
        trials_T = trials_T.to(points_ID.device)
        after_IT = torch.minimum(squared_distances(points_ID, points_ID[trials_T]), squares_I[:, None])
        best = int(after_IT.sum(0).argmin())
        chosen.append(int(trials_T[best]))
        squares_I = after_IT[:, best]
    return points_ID[chosen].clone()


def _too_few(size: int, num_distinct: int, num_items: int, what: str) -> str:
    if what == "item vectors" and num_distinct == 1:
        return (
            f"all {num_items} item vectors are identical: nothing tells the items apart, "
            "so they cannot be given semantic IDs"
        )
    return (
        f"codebook_size is {size}, but the {num_items} {what} have only "
        f"{num_distinct} distinct values; choose a smaller codebook_size"
        + ("" if what == "item vectors" else " or fewer levels")
    )


def nearest_centroids(
    points_ID: Tensor, centroids_KD: Tensor, penalties_K: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Nearest centroid of each point, in chunks so that memory stays bounded.

    Args:
        penalties_K: Added to the squared distances, in the choice alone.

    Returns:
        [I] int64 codes and [I] squared distances (clamped at zero).
    """
    squares_K = centroids_KD.square().sum(1)
    if penalties_K is not None:
        penalties_K = penalties_K.to(squares_K)
        squares_K = squares_K + penalties_K
    codes, distances = [], []
    for chunk_PD in chunks(points_ID, len(centroids_KD)):
        # |x - c|^2 without |x|^2, which is the same for every centroid.
        partial_PK = torch.addmm(squares_K, chunk_PD, centroids_KD.T, alpha=-2.0)
        nearest = partial_PK.min(dim=1)
        codes.append(nearest.indices)
        squares_P = nearest.values + chunk_PD.square().sum(1)
        if penalties_K is not None:
            squares_P = squares_P - penalties_K[nearest.indices]
        distances.append(squares_P.clamp_(min=0.0))
    return torch.cat(codes), torch.cat(distances)


def lloyd(points_ID: Tensor, centroids_KD: Tensor, num_iterations: int) -> Tensor:
    """Lloyd's algorithm; a centroid that lost its points moves to a point farthest from its own."""
    before_I = None
    for _ in range(num_iterations):
        codes_I, distances_I = nearest_centroids(points_ID, centroids_KD)
        sums_KD, counts_K = cluster_sums(points_ID, codes_I, len(centroids_KD))
        centroids_KD = sums_KD / counts_K.clamp(min=1.0)[:, None]
        empty_E = torch.nonzero(counts_K == 0)[:, 0]
        if len(empty_E):
            # There are at least as many points as centroids, hence as empty ones.
            centroids_KD[empty_E] = points_ID[distances_I.topk(len(empty_E)).indices]
        elif before_I is not None and torch.equal(codes_I, before_I):
            break
        before_I = codes_I
    return centroids_KD


def cluster_sums(points_ID: Tensor, codes_I: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """[K, D] sums and [K] counts of the points of each cluster.

    A product with one-hot rows, because `index_add_` adds in any order on a GPU.
    """
    sums_KD = points_ID.new_zeros(num_clusters, points_ID.shape[1])
    start = 0
    for chunk_PD in chunks(points_ID, num_clusters):
        codes_P = codes_I[start : start + len(chunk_PD)]
        one_hot_PK = chunk_PD.new_zeros(len(chunk_PD), num_clusters).scatter_(1, codes_P[:, None], 1.0)
        sums_KD.addmm_(one_hot_PK.T, chunk_PD)
        start += len(chunk_PD)
    return sums_KD, torch.bincount(codes_I, minlength=num_clusters).to(points_ID.dtype)


def squared_distances(points_ID: Tensor, centroids_TD: Tensor) -> Tensor:
    """[I, T] from differences, not products: a point that equals a centroid is at exactly zero."""
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(points_ID, centroids_TD, compute_mode=exact).square_()


def chunks(points_ID: Tensor, width: int) -> Iterator[Tensor]:
    """[P, D] points, so few at a time that `width` numbers for each are not much."""
    yield from points_ID.split(max(1, _CHUNK_ELEMENTS // width))


def check_counts(**counts: int) -> None:
    """Raises ValueError for a count below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def checked_vectors(vectors_ID: Tensor, dim: int | None = None) -> Tensor:
    """[I, D] as float32.

    Raises:
        ValueError: another shape, or NaN or infinity in it.
    """
    if vectors_ID.ndim != 2 or not len(vectors_ID):
        raise ValueError(f"expected item vectors of shape [items, dim], got {tuple(vectors_ID.shape)}")
    if dim is not None and vectors_ID.shape[1] != dim:
        raise ValueError(f"the codebooks are for vectors of {dim} dimensions, got {vectors_ID.shape[1]}")
    bad_I = ~torch.isfinite(vectors_ID).all(dim=1)
    num_bad = int(bad_I.sum())
    if num_bad:
        raise ValueError(
            f"{num_bad} of {len(vectors_ID)} item vectors hold NaN or infinity, the first at position "
            f"{int(bad_I.nonzero()[0])}; give every item a vector first"
        )
    return vectors_ID.to(torch.float32)
