"""LETTER's tokenizer: an RQ-VAE whose codes say who likes an item, too, and are used evenly.

Two losses beside those of the RQ-VAE:

    alignment   of a batch's items, what is quantized of one has the largest product with that item's own
                vector of interactions, by a softmax over the batch
    diversity   the centroid of an item's code is near another one of its cluster of centroids, and far from
                all others, so that centroids, and with them items, spread

Codes follow from an item's own vectors alone, so a new item, which nobody has met, has codes, too.

Source: Wang et al., "Learnable Item Tokenization for Generative Recommendation", CIKM 2024, arXiv:2405.07314,
section 3.2. As there, vectors of interactions have the width of the latent space. Other than there, they are
those of co-occurrence, where SASRec's are. They are centered and scaled to a variance of one, as item vectors
are, and the alignment weighs more, since the squared error is a mean over all components. Clusters
of centroids are made again at every epoch, by k-means with prices instead of constraints.

Axes: those of `rq_vae`, and N items of a batch that a loss counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.tokenizers.balanced_rq_kmeans import BalancedResidualKMeans
from rayrec.models.tokenizers.kmeans import is_used
from rayrec.models.tokenizers.rq_vae import Network, RqVae, RqVaeSettings


@dataclass(frozen=True)
class LetterSettings(RqVaeSettings):
    """Those of the RQ-VAE, and the weights of the two losses."""

    alignment: float = 0.5
    diversity: float = 1e-4
    num_clusters: int = 10
    """Of a level's centroids, at most."""


class Letter(RqVae):
    """An RQ-VAE with both losses; a `Quantizer` that vectors of interactions can be given to."""

    _name = "LETTER's RQ-VAE"
    settings_class = LetterSettings
    settings: LetterSettings

    def fit(
        self, vectors_ID: Tensor, may_leave_unused: bool = False, interactions_IZ: Tensor | None = None
    ) -> Self:
        """Train on the device of the vectors.

        Args:
            interactions_IZ: what is known of who met an item; NaN for one that nobody met, which is left out
                of the alignment. None: no alignment.

        Raises:
            ValueError: as of an RQ-VAE; or the interactions are of other items, or not as wide as the latent
                space.
        """
        expected = (len(vectors_ID), self.settings.latent_dim)
        if interactions_IZ is not None and tuple(interactions_IZ.shape) != expected:
            raise ValueError(
                f"vectors of interactions have the shape {tuple(interactions_IZ.shape)}; the items and the "
                f"latent space ask for {expected}"
            )
        self._interactions_IZ = None if interactions_IZ is None else _standardized(interactions_IZ)
        self._clusters: list[Tensor | None] = []
        self._draws = torch.Generator(vectors_ID.device).manual_seed(self.seed)
        try:
            return super().fit(vectors_ID, may_leave_unused)
        finally:
            self._interactions_IZ = None

    def _begin_epoch(self, network: Network, epoch: int) -> None:
        self._clusters = [self._clustered(centroids_KZ) for centroids_KZ in network.codebooks_LKZ.detach()]

    def _clustered(self, centroids_KZ: Tensor) -> Tensor | None:
        """[K] clusters of a level's centroids, -1 for unused ones; None where too few are distinct."""
        used_K = is_used(centroids_KZ)
        used_UZ = centroids_KZ[used_K]
        num_clusters = min(self.settings.num_clusters, len(used_UZ.unique(dim=0)) // 2)
        if self.settings.diversity == 0 or num_clusters < 2:
            return None
        clusters = BalancedResidualKMeans(1, num_clusters, self.seed, num_iterations=10).fit(used_UZ)
        clusters_K = torch.full_like(used_K, -1, dtype=torch.int64)
        clusters_K[used_K] = clusters.encode(used_UZ)[:, 0]
        return clusters_K

    def _further_loss(
        self, network: Network, items_B: Tensor, quantized_BZ: Tensor, codes_BL: Tensor
    ) -> Tensor:
        total = quantized_BZ.new_zeros(())
        if self._interactions_IZ is not None:
            wanted_BZ = self._interactions_IZ[items_B]
            total += self.settings.alignment * _alignment(quantized_BZ, wanted_BZ)
        for level, clusters_K in enumerate(self._clusters):
            if clusters_K is not None:
                codebook_KZ, codes_B = network.codebooks_LKZ[level], codes_BL[:, level]
                total += self.settings.diversity * _diversity(codebook_KZ, codes_B, clusters_K, self._draws)
        return total


def _standardized(vectors_IZ: Tensor) -> Tensor:
    """Vectors about their mean with a variance of one, on average over the components; NaN stays."""
    known_NZ = vectors_IZ[vectors_IZ.isfinite().all(dim=1)]
    mean_Z = known_NZ.mean(dim=0)
    return (vectors_IZ - mean_Z) / (known_NZ - mean_Z).square().mean().sqrt().clamp(min=1e-12)


def _alignment(quantized_BZ: Tensor, wanted_BZ: Tensor) -> Tensor:
    """Cross-entropy of each item's own vector among those of the batch; items without one are left out."""
    known_B = wanted_BZ.isfinite().all(dim=1)
    products_NN = quantized_BZ[known_B] @ wanted_BZ[known_B].T
    if not len(products_NN):
        return quantized_BZ.new_zeros(())
    return functional.cross_entropy(products_NN, torch.arange(len(products_NN), device=products_NN.device))


def _diversity(centroids_KZ: Tensor, codes_B: Tensor, clusters_K: Tensor, draws: torch.Generator) -> Tensor:
    """Cross-entropy of another centroid of the code's cluster, by products, among all used but the code's
    own."""
    others_BK = (clusters_K >= 0) & ~functional.one_hot(codes_B, len(centroids_KZ)).bool()
    neighbors_BK = (clusters_K[codes_B, None] == clusters_K) & others_BK
    has_some_B = neighbors_BK.any(dim=1)
    if not has_some_B.any():
        return centroids_KZ.new_zeros(())
    wanted_N = torch.multinomial(neighbors_BK[has_some_B].float(), 1, generator=draws)[:, 0]
    # Unused ones lie so far away that their products would swallow all others.
    reached_KZ = centroids_KZ.masked_fill((clusters_K < 0)[:, None], 0.0)
    products_NK = reached_KZ[codes_B[has_some_B]] @ reached_KZ.T
    return functional.cross_entropy(products_NK.masked_fill(~others_BK[has_some_B], -torch.inf), wanted_N)
