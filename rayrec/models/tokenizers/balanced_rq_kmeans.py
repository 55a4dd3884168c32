"""Residual k-means whose clusters have nearly equal size, so that no code of a level is rare or crowded.

Every centroid has a price, added to the squared distances to it. Prices rise where a cluster has more than
its share of the points and fall where it has less, until the sizes are nearly equal: they are the dual
variables of an assignment with capacities, and the cells are those of a power diagram. As a code follows from
the vector and the prices alone, an item that was not fitted has one too, which an assignment with hard
capacities cannot say. Equal vectors share a code whatever the prices are; many of them make a level uneven.

Source: balanced k-means of OneRec, arXiv:2502.18965, section 3.1, which fills clusters greedily one after the
other; prices as in Aurenhammer, Hoffmann and Aronov, "Minkowski-Type Theorems and Least-Squares Clustering",
Algorithmica 1998, found by Sinkhorn's rounds with falling softness (Cuturi, arXiv:1306.0895).

Axes: I items, L levels, K codes of a level, D dimensions, P points of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rayrec.models.tokenizers.kmeans import chunks, cluster_sums, nearest_centroids
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from rayrec.platform.arrays import Float32Array

_ROUNDS_WHILE_MOVING, _ROUNDS_AT_THE_END = 2, 32
"""Changes of all prices before each move of the centroids, and after the last."""
_MOST_POINTS_OF_A_CENTROID = 128
"""Centroids move by a sample of so many points each; by all points in the last fifth of the iterations."""
_SOFTEST, _MOVING, _HARDEST = 2.0, 0.15, 0.02
"""Softness of the clusters at first, while centroids move, and in the end, in mean squared distances to the
nearest centroid. Prices change by no more than a few times the softness in a round: clusters that are far
apart come to terms only while it is high."""
_OVER_RELAXATION = 1.5
"""Prices change by more than a round says, which takes fewer rounds; from 2 on they would not settle."""


class BalancedResidualKMeans(ResidualKMeans):
    """Codebooks and prices; a `Quantizer`."""

    _name = "balanced residual k-means"

    def __init__(
        self, num_levels: int = 3, codebook_size: int = 256, seed: int = 0, num_iterations: int | None = None
    ) -> None:
        super().__init__(num_levels, codebook_size, seed, num_iterations)
        self._prices: list[Tensor] = []

    def fit(self, vectors_ID: Tensor, may_leave_unused: bool = False) -> Self:
        self._prices = []
        return super().fit(vectors_ID, may_leave_unused)

    def arrays(self) -> dict[str, Float32Array]:
        return super().arrays() | {"prices_LK": torch.stack(self._prices).cpu().numpy()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> Self:
        super().restore(arrays)
        if arrays["prices_LK"].shape != (self.num_levels, self.codebook_size):
            raise ValueError(f"prices of shape {arrays['prices_LK'].shape} do not fit the codebooks")
        self._prices = list(torch.tensor(arrays["prices_LK"], dtype=torch.float32))
        return self

    def _clustered(self, points_ID: Tensor, centroids_KD: Tensor) -> tuple[Tensor, Tensor]:
        sample_ID = _sample(points_ID, len(centroids_KD), self.seed)
        prices_K = points_ID.new_zeros(len(centroids_KD))
        unit = float(nearest_centroids(sample_ID, centroids_KD)[1].mean()) or 1.0
        for iteration in range(self.num_iterations):
            fall = (_MOVING / _SOFTEST) ** min(1.0, 2.0 * iteration / self.num_iterations)
            softness = unit * _SOFTEST * fall
            some_ID = sample_ID if iteration < 0.8 * self.num_iterations else points_ID
            for _ in range(_ROUNDS_WHILE_MOVING):
                prices_K = _evened(some_ID, centroids_KD, prices_K, softness)
            centroids_KD = _moved(some_ID, centroids_KD, prices_K)
        prices_K = _most_even(points_ID, centroids_KD, prices_K, unit)
        self._prices.append(functional.pad(prices_K, (0, self.codebook_size - len(prices_K))))
        return centroids_KD, nearest_centroids(points_ID, centroids_KD, prices_K)[0]

    def _penalties_K(self, level: int) -> Tensor | None:
        return self._prices[level]


def _sample(points_ID: Tensor, num_centroids: int, seed: int) -> Tensor:
    """As many points as it takes to place centroids well."""
    size = num_centroids * _MOST_POINTS_OF_A_CENTROID
    if len(points_ID) <= size:
        return points_ID
    order_I = torch.randperm(len(points_ID), generator=torch.Generator().manual_seed(seed))
    return points_ID[order_I[:size].sort().values.to(points_ID.device)]


def _evened(points_ID: Tensor, centroids_KD: Tensor, prices_K: Tensor, softness: float) -> Tensor:
    """[K] prices after one round: each rises by the logarithm of its cluster's size over the fair size.

    Sizes are those of soft clusters, in which a point has the share softmax(-(distance + price) / softness).
    """
    sizes_K = torch.zeros_like(prices_K)
    squares_K = centroids_KD.square().sum(1) + prices_K
    for chunk_PD in chunks(points_ID, len(centroids_KD)):
        costs_PK = torch.addmm(squares_K, chunk_PD, centroids_KD.T, alpha=-2.0)
        sizes_K += costs_PK.div_(-softness).softmax(dim=1).sum(dim=0)
    fair_size = len(points_ID) / len(centroids_KD)
    return prices_K + _OVER_RELAXATION * softness * (sizes_K / fair_size).clamp(min=1e-3).log()


def _moved(points_ID: Tensor, centroids_KD: Tensor, prices_K: Tensor) -> Tensor:
    """[K, D] means of the clusters; one without points stays: its price falls until it has some."""
    codes_I, _ = nearest_centroids(points_ID, centroids_KD, prices_K)
    sums_KD, counts_K = cluster_sums(points_ID, codes_I, len(centroids_KD))
    return torch.where(counts_K[:, None] > 0, sums_KD / counts_K.clamp(min=1.0)[:, None], centroids_KD)


def _most_even(points_ID: Tensor, centroids_KD: Tensor, prices_K: Tensor, unit: float) -> Tensor:
    """Of the prices of several rounds, those with the least squared deviation from equal sizes."""
    best_K, least = prices_K, float("inf")
    for round_number in range(_ROUNDS_AT_THE_END):
        codes_I, _ = nearest_centroids(points_ID, centroids_KD, prices_K)
        sizes_K = torch.bincount(codes_I, minlength=len(centroids_KD)).double()
        deviation = float((sizes_K - sizes_K.mean()).square().sum())
        if deviation < least:
            best_K, least = prices_K, deviation
        fall = (_HARDEST / _MOVING) ** (round_number / _ROUNDS_AT_THE_END)
        prices_K = _evened(points_ID, centroids_KD, prices_K, unit * _MOVING * fall)
    return best_K
