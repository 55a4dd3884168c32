"""Residual k-means: an item vector becomes one code per level, coarse to fine.

Level 0 clusters the vectors, every later level what the levels before it left
over; an item's vector is close to the sum of the centroids it was given.

Source: residual quantization, Chen, Guan and Wang, "Approximate Nearest Neighbor
Search by Residual Vector Quantization", Sensors 2010; as an item tokenizer, RQ
with k-means in place of a trained RQ-VAE (TIGER, arXiv:2305.05065).

Axes: I items, L levels, K codes of a level, D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.models.tokenizers.kmeans import (
    check_counts,
    checked_vectors,
    lloyd,
    nearest_centroids,
    squared_distances,
    starting_centroids,
    with_unused,
)
from rayrec.platform.arrays import Float32Array


class ResidualKMeans:
    """Codebooks of residual k-means; a `Quantizer`."""

    _usual_num_iterations = 25
    _name = "residual k-means"

    def __init__(
        self,
        num_levels: int = 3,
        codebook_size: int = 256,
        seed: int = 0,
        num_iterations: int | None = None,
    ) -> None:
        """
        Args:
            num_levels: Codes of an item, L.
            codebook_size: Codes of a level, K.
            seed: Decides the starting centroids.
            num_iterations: Most rounds of Lloyd's algorithm per level (25 unless given); a level that no
                longer changes stops.
        """
        if num_iterations is None:
            num_iterations = self._usual_num_iterations
        check_counts(num_levels=num_levels, codebook_size=codebook_size, num_iterations=num_iterations)
        self.num_levels = num_levels
        self.codebook_size = codebook_size
        self.seed = seed
        self.num_iterations = num_iterations
        self._codebooks_LKD: Tensor | None = None

    @property
    def codebooks_LKD(self) -> Tensor:
        """[L, K, D] float32 centroids. Raises ValueError before `fit`."""
        if self._codebooks_LKD is None:
            raise ValueError(f"the {self._name} has no codebooks yet: call fit, or restore, first")
        return self._codebooks_LKD

    @property
    def description(self) -> str:
        return (
            f"{self._name}: {self.num_levels} levels of {self.codebook_size} codes, seed {self.seed}, "
            f"at most {self.num_iterations} iterations"
        )

    def fit(self, vectors_ID: Tensor, may_leave_unused: bool = False) -> Self:
        """Learn the codebooks of all levels.

        Raises:
            ValueError: a vector holds NaN or infinity, or a level has fewer
                distinct vectors to cluster than `codebook_size`.
        """
        residuals_ID = checked_vectors(vectors_ID).clone()
        generator = torch.Generator().manual_seed(self.seed)
        codebooks = []
        for level in range(self.num_levels):
            what = "item vectors" if level == 0 else f"residuals left for level {level}"
            centroids_KD = starting_centroids(
                residuals_ID, self.codebook_size, generator, what, may_leave_unused and level > 0
            )
            centroids_KD, codes_I = self._clustered(residuals_ID, centroids_KD)
            residuals_ID -= centroids_KD[codes_I]
            codebooks.append(with_unused(centroids_KD, self.codebook_size))
        self._codebooks_LKD = torch.stack(codebooks)
        return self

    def encode(self, vectors_ID: Tensor) -> Tensor:
        """[I, L] int64 codes: at every level the centroid nearest to what is left of the vector."""
        codebooks_LKD = self.codebooks_LKD.to(vectors_ID.device)
        residuals_ID = checked_vectors(vectors_ID, codebooks_LKD.shape[2]).clone()
        codes = []
        for level, centroids_KD in enumerate(codebooks_LKD):
            codes_I, _ = nearest_centroids(residuals_ID, centroids_KD, self._penalties_K(level))
            residuals_ID -= centroids_KD[codes_I]
            codes.append(codes_I)
        return torch.stack(codes, dim=1)

    def decode(self, codes_IL: Tensor) -> Tensor:
        """[I, D] sums of the centroids; fewer columns than levels give the coarser approximation."""
        return sum_of_centroids(self.codebooks_LKD.to(codes_IL.device), codes_IL)

    def last_level_distances(self, vectors_ID: Tensor, codes_IL: Tensor) -> Tensor:
        """[I, K] squared distances from what the levels before the last leave over to the last centroids."""
        residuals_ID = checked_vectors(vectors_ID)
        if codes_IL.shape[1] > 1:
            residuals_ID = residuals_ID - self.decode(codes_IL[:, :-1])
        distances_IK = squared_distances(residuals_ID, self.codebooks_LKD[-1].to(vectors_ID.device))
        penalties_K = self._penalties_K(self.num_levels - 1)
        return distances_IK if penalties_K is None else distances_IK + penalties_K.to(distances_IK)

    def arrays(self) -> dict[str, Float32Array]:
        return {"codebooks_LKD": self.codebooks_LKD.cpu().numpy()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Encode and decode with codebooks fitted before."""
        codebooks_LKD = torch.tensor(arrays["codebooks_LKD"], dtype=torch.float32)
        if codebooks_LKD.ndim != 3 or codebooks_LKD.shape[:2] != (self.num_levels, self.codebook_size):
            raise ValueError(
                f"codebooks of shape {tuple(codebooks_LKD.shape)} for {self.num_levels} levels of "
                f"{self.codebook_size} codes"
            )
        self._codebooks_LKD = codebooks_LKD
        return self

    def _clustered(self, points_ID: Tensor, centroids_KD: Tensor) -> tuple[Tensor, Tensor]:
        """The next level's [K, D] centroids, and [I] the code of each point."""
        centroids_KD = lloyd(points_ID, centroids_KD, self.num_iterations)
        return centroids_KD, nearest_centroids(points_ID, centroids_KD)[0]

    def _penalties_K(self, level: int) -> Tensor | None:
        """Added to the squared distances of a level's codes."""
        return None


def sum_of_centroids(codebooks_LKD: Tensor, codes_IL: Tensor) -> Tensor:
    """[I, D] the centroids of a tuple's codes, or of its first ones, added up."""
    num_levels = codes_IL.shape[1]
    if not 1 <= num_levels <= len(codebooks_LKD):
        raise ValueError(f"expected 1 to {len(codebooks_LKD)} codes per item, got {num_levels}")
    vectors_ID = codebooks_LKD[0][codes_IL[:, 0]]
    for level in range(1, num_levels):
        vectors_ID = vectors_ID + codebooks_LKD[level][codes_IL[:, level]]
    return vectors_ID
