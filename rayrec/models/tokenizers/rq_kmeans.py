"""Residual k-means: an item vector becomes one code per level, coarse to fine.

Level 0 clusters the vectors, every later level what the levels before it left
over; an item's vector is close to the sum of the centroids it was given.

Source: residual quantisation, Chen, Guan and Wang, "Approximate Nearest Neighbor
Search by Residual Vector Quantization", Sensors 2010; as an item tokenizer, RQ
with k-means in place of a trained RQ-VAE (TIGER, arXiv:2305.05065).

Axes: I items, L levels, K codes of a level, D dimensions, P points of a chunk,
T trial centroids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of the largest intermediate, a [P, K] block of distances: 16 MiB of float32.
_CHUNK_ELEMENTS = 1 << 22


class ResidualKMeans:
    """Codebooks of residual k-means; runs on the device of the vectors it is given.

    The same vectors, seed and kind of device give the same codebooks.
    """

    def __init__(
        self, num_levels: int = 3, codebook_size: int = 256, seed: int = 0, num_iterations: int = 25
    ) -> None:
        """
        Args:
            num_levels: Codes of an item, L.
            codebook_size: Codes of a level, K.
            seed: Decides the starting centroids.
            num_iterations: Most rounds of Lloyd's algorithm per level; a level that no longer changes stops.
        """
        for name, value in (
            ("num_levels", num_levels),
            ("codebook_size", codebook_size),
            ("num_iterations", num_iterations),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_levels = num_levels
        self.codebook_size = codebook_size
        self.seed = seed
        self.num_iterations = num_iterations
        self._codebooks_LKD: Tensor | None = None

    @property
    def codebooks_LKD(self) -> Tensor:
        """[L, K, D] float32 centroids. Raises ValueError before `fit`."""
        if self._codebooks_LKD is None:
            raise ValueError("the residual k-means has no codebooks yet: call fit, or from_codebooks, first")
        return self._codebooks_LKD

    def fit(self, vectors_ID: Tensor) -> ResidualKMeans:
        """Learn the codebooks of all levels.

        Raises:
            ValueError: a vector holds NaN or infinity, or a level has fewer
                distinct vectors to cluster than `codebook_size`.
        """
        residuals_ID = _checked(vectors_ID).clone()
        generator = torch.Generator().manual_seed(self.seed)
        codebooks = []
        for level in range(self.num_levels):
            centroids_KD = self._starting_centroids(residuals_ID, level, generator)
            centroids_KD = _lloyd(residuals_ID, centroids_KD, self.num_iterations)
            codes_I, _ = nearest_centroids(residuals_ID, centroids_KD)
            residuals_ID -= centroids_KD[codes_I]
            codebooks.append(centroids_KD)
        self._codebooks_LKD = torch.stack(codebooks)
        return self

    def encode(self, vectors_ID: Tensor) -> Tensor:
        """[I, L] int64 codes: at every level the centroid nearest to what is left of the vector."""
        codebooks_LKD = self.codebooks_LKD.to(vectors_ID.device)
        dim = codebooks_LKD.shape[2]
        residuals_ID = _checked(vectors_ID).clone()
        if residuals_ID.shape[1] != dim:
            raise ValueError(
                f"the codebooks are for vectors of {dim} dimensions, got {residuals_ID.shape[1]}"
            )
        codes = []
        for centroids_KD in codebooks_LKD:
            codes_I, _ = nearest_centroids(residuals_ID, centroids_KD)
            residuals_ID -= centroids_KD[codes_I]
            codes.append(codes_I)
        return torch.stack(codes, dim=1)

    def decode(self, codes_IL: Tensor) -> Tensor:
        """[I, D] sums of the centroids; fewer columns than levels give the coarser approximation."""
        codebooks_LKD = self.codebooks_LKD.to(codes_IL.device)
        num_levels = codes_IL.shape[1]
        if not 1 <= num_levels <= len(codebooks_LKD):
            raise ValueError(f"expected 1 to {len(codebooks_LKD)} codes per item, got {num_levels}")
        vectors_ID = codebooks_LKD[0][codes_IL[:, 0]]
        for level in range(1, num_levels):
            vectors_ID = vectors_ID + codebooks_LKD[level][codes_IL[:, level]]
        return vectors_ID

    @classmethod
    def from_codebooks(cls, codebooks_LKD: Tensor) -> ResidualKMeans:
        """One that encodes and decodes with codebooks fitted before, such as those of a registry."""
        restored = cls(num_levels=codebooks_LKD.shape[0], codebook_size=codebooks_LKD.shape[1])
        restored._codebooks_LKD = codebooks_LKD.to(torch.float32)
        return restored

    def _starting_centroids(self, points_ID: Tensor, level: int, generator: torch.Generator) -> Tensor:
        """Greedy k-means++: of a few points drawn by squared distance, keep the one that helps most.

        Source: Arthur and Vassilvitskii, SODA 2007, with the 2 + ln K trials of
        their section 5.
        """
        num_trials = 2 + int(math.log(self.codebook_size))
        chosen = [int(torch.randint(len(points_ID), (1,), generator=generator))]
        squares_I = _squared_distances(points_ID, points_ID[chosen])[:, 0]
        while len(chosen) < self.codebook_size:
            # The running sum is taken on the CPU in double: on a GPU its order of additions may vary.
            mass_I = squares_I.cpu().double().cumsum(0)
            if float(mass_I[-1]) <= 0.0:
                raise ValueError(self._too_few_vectors(level, len(chosen), len(points_ID)))
            draws_T = torch.rand(num_trials, generator=generator, dtype=torch.float64) * mass_I[-1]
            # A draw equal to the total would fall behind the last point.
            trials_T = torch.searchsorted(mass_I, draws_T, right=True).clamp(max=len(points_ID) - 1)
            trials_T = trials_T.to(points_ID.device)
            after_IT = torch.minimum(_squared_distances(points_ID, points_ID[trials_T]), squares_I[:, None])
            best = int(after_IT.sum(0).argmin())
            chosen.append(int(trials_T[best]))
            squares_I = after_IT[:, best]
        return points_ID[chosen].clone()

    def _too_few_vectors(self, level: int, num_distinct: int, num_items: int) -> str:
        if level == 0 and num_distinct == 1:
            return (
                f"all {num_items} item vectors are identical: nothing tells the items apart, "
                "so they cannot be given semantic IDs"
            )
        what = "item vectors" if level == 0 else f"residuals left for level {level}"
        return (
            f"codebook_size is {self.codebook_size}, but the {num_items} {what} have only "
            f"{num_distinct} distinct values; choose a smaller codebook_size"
            + (" or fewer levels" if level else "")
        )


def nearest_centroids(points_ID: Tensor, centroids_KD: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest centroid of each point, in chunks so that memory stays bounded.

    Returns:
        [I] int64 codes and [I] squared distances (clamped at zero).
    """
    squares_K = centroids_KD.square().sum(1)
    codes, distances = [], []
    for chunk_PD in _chunks(points_ID, len(centroids_KD)):
        # |x - c|^2 without |x|^2, which is the same for every centroid.
        partial_PK = torch.addmm(squares_K, chunk_PD, centroids_KD.T, alpha=-2.0)
        nearest = partial_PK.min(dim=1)
        codes.append(nearest.indices)
        distances.append((nearest.values + chunk_PD.square().sum(1)).clamp_(min=0.0))
    return torch.cat(codes), torch.cat(distances)


def _lloyd(points_ID: Tensor, centroids_KD: Tensor, num_iterations: int) -> Tensor:
    """Lloyd's algorithm; a centroid that lost its points moves to a point farthest from its own."""
    before_I = None
    for _ in range(num_iterations):
        codes_I, distances_I = nearest_centroids(points_ID, centroids_KD)
        sums_KD, counts_K = _cluster_sums(points_ID, codes_I, len(centroids_KD))
        centroids_KD = sums_KD / counts_K.clamp(min=1.0)[:, None]
        empty_E = torch.nonzero(counts_K == 0)[:, 0]
        if len(empty_E):
            # There are at least as many points as centroids, hence as empty ones.
            centroids_KD[empty_E] = points_ID[distances_I.topk(len(empty_E)).indices]
        elif before_I is not None and torch.equal(codes_I, before_I):
            break
        before_I = codes_I
    return centroids_KD


def _cluster_sums(points_ID: Tensor, codes_I: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """[K, D] sums and [K] counts of the points of each cluster.

    A product with one-hot rows, because `index_add_` adds in any order on a GPU.
    """
    sums_KD = points_ID.new_zeros(num_clusters, points_ID.shape[1])
    start = 0
    for chunk_PD in _chunks(points_ID, num_clusters):
        codes_P = codes_I[start : start + len(chunk_PD)]
        one_hot_PK = chunk_PD.new_zeros(len(chunk_PD), num_clusters).scatter_(1, codes_P[:, None], 1.0)
        sums_KD.addmm_(one_hot_PK.T, chunk_PD)
        start += len(chunk_PD)
    return sums_KD, torch.bincount(codes_I, minlength=num_clusters).to(points_ID.dtype)


def _squared_distances(points_ID: Tensor, centroids_TD: Tensor) -> Tensor:
    """[I, T] from differences, not products: a point that equals a centroid is at exactly zero."""
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(points_ID, centroids_TD, compute_mode=exact).square_()


def _chunks(points_ID: Tensor, width: int) -> Iterator[Tensor]:
    yield from points_ID.split(max(1, _CHUNK_ELEMENTS // width))


def _checked(vectors_ID: Tensor) -> Tensor:
    if vectors_ID.ndim != 2 or not len(vectors_ID):
        raise ValueError(f"expected item vectors of shape [items, dim], got {tuple(vectors_ID.shape)}")
    bad_I = ~torch.isfinite(vectors_ID).all(dim=1)
    num_bad = int(bad_I.sum())
    if num_bad:
        raise ValueError(
            f"{num_bad} of {len(vectors_ID)} item vectors hold NaN or infinity, the first at position "
            f"{int(bad_I.nonzero()[0])}; give every item a vector first"
        )
    return vectors_ID.to(torch.float32)
