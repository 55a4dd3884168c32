"""RQ-VAE: an encoder, residual quantization of what it makes of an item, and a decoder, trained together.

Left to itself such a model tends to give all items one code: vectors of small scale leave the commitment loss
nothing but the shortest way to zero, codebooks that start at random lie where no item is, and codes that
nobody chooses get no gradient. Three measures, each of which can be left out to see that:

    standardize         vectors are centered and scaled to a variance of one per dimension, on average
    start_at_items      codebooks start as k-means clusters of what the encoder makes of the items
    revive_dead_codes   after an epoch, codes without items move to items far from their own

Sources: Rajput et al., TIGER, arXiv:2305.05065, section 3.1 (RQ-VAE over item vectors, k-means start);
Zeghidour et al., SoundStream, arXiv:2107.03312, section III-C (residual quantization, dead codes replaced);
van den Oord et al., arXiv:1711.00937 (straight-through gradient, commitment loss).

Axes: I items, L levels, K codes of a level, D dimensions of a vector, Z of the latent space, B a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.tokenizers.kmeans import (
    check_counts,
    checked_vectors,
    lloyd,
    nearest_centroids,
    squared_distances,
    starting_centroids,
    with_unused,
)
from rayrec.models.tokenizers.rq_kmeans import sum_of_centroids
from rayrec.platform.arrays import Float32Array


@dataclass(frozen=True)
class RqVaeSettings:
    """Shape and training of the network."""

    hidden_dims: tuple[int, ...] = (256, 128)
    latent_dim: int = 32
    batch_size: int = 1024
    """At most; of few items a smaller part, so that an epoch has several steps."""
    learning_rate: float = 1e-3
    commitment: float = 0.25
    """Weight of the pull on the encoder towards its codes."""
    standardize: bool = True
    start_at_items: bool = True
    revive_dead_codes: bool = True


class RqVae:
    """Encoder, codebooks and decoder; a `Quantizer`."""

    _name: ClassVar[str] = "RQ-VAE"
    settings_class: ClassVar[type[RqVaeSettings]] = RqVaeSettings

    def __init__(
        self,
        num_levels: int = 3,
        codebook_size: int = 256,
        seed: int = 0,
        num_iterations: int | None = None,
        settings: RqVaeSettings | None = None,
    ) -> None:
        """
        Args:
            num_levels: Codes of an item, L.
            codebook_size: Codes of a level, K.
            seed: Of the initial weights, the batches and the codebooks' start.
            num_iterations: Epochs; 100 unless given.
        """
        num_iterations = 100 if num_iterations is None else num_iterations
        check_counts(num_levels=num_levels, codebook_size=codebook_size, num_iterations=num_iterations)
        self.num_levels = num_levels
        self.codebook_size = codebook_size
        self.seed = seed
        self.num_iterations = num_iterations
        self.settings = settings or self.settings_class()
        self._network: Network | None = None

    @property
    def codebooks_LKD(self) -> Tensor:
        """[L, K, Z] float32 centroids of the latent space. Raises ValueError before `fit`."""
        return self._fitted.codebooks_LKZ.detach()

    @property
    def description(self) -> str:
        return (
            f"{self._name}: {self.num_levels} levels of {self.codebook_size} codes, seed {self.seed}, "
            f"{self.num_iterations} epochs"
        )

    def fit(self, vectors_ID: Tensor, may_leave_unused: bool = False) -> Self:
        """Train on the device of the vectors.

        Raises:
            ValueError: a vector holds NaN or infinity, or there are fewer distinct ones than `codebook_size`.
        """
        vectors_ID = checked_vectors(vectors_ID)
        generator = torch.Generator().manual_seed(self.seed)
        starting_centroids(vectors_ID, self.codebook_size, generator, "item vectors")  # or it refuses them
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = Network(vectors_ID.shape[1], self.num_levels, self.codebook_size, self.settings)
        network = network.to(vectors_ID.device)
        if self.settings.standardize:
            network.standardize(vectors_ID)
        if self.settings.start_at_items:
            network.start_at_items(vectors_ID, generator, may_leave_unused)
        self._train(network, vectors_ID, generator)
        self._network = network.eval().requires_grad_(False)
        return self

    def encode(self, vectors_ID: Tensor) -> Tensor:
        """[I, L] int64 codes: at every level the centroid nearest to what is left of the latent vector."""
        network = self._fitted.to(vectors_ID.device)
        with torch.inference_mode():
            codes_IL, _ = network.quantize(network.latents(checked_vectors(vectors_ID, network.dim)))
        return codes_IL.clone()

    def decode(self, codes_IL: Tensor) -> Tensor:
        """[I, D] what the decoder makes of the sum of the centroids, or of the first ones."""
        network = self._fitted.to(codes_IL.device)
        return network.vectors(sum_of_centroids(network.codebooks_LKZ, codes_IL))

    def last_level_distances(self, vectors_ID: Tensor, codes_IL: Tensor) -> Tensor:
        """[I, K] squared distances in the latent space."""
        network = self._fitted.to(vectors_ID.device)
        residuals_IZ = network.latents(checked_vectors(vectors_ID, network.dim))
        if codes_IL.shape[1] > 1:
            residuals_IZ = residuals_IZ - sum_of_centroids(network.codebooks_LKZ, codes_IL[:, :-1])
        return squared_distances(residuals_IZ, network.codebooks_LKZ[-1])

    def arrays(self) -> dict[str, Float32Array]:
        return {name: value.cpu().numpy() for name, value in self._fitted.state_dict().items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Encode and decode with what was trained before."""
        weights = {name: torch.tensor(array, dtype=torch.float32) for name, array in arrays.items()}
        network = Network(len(weights["mean_D"]), self.num_levels, self.codebook_size, self.settings)
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:  # torch's word for other names and shapes
            raise ValueError(f"weights of another RQ-VAE: {error}") from error
        self._network = network.eval().requires_grad_(False)
        return self

    @property
    def _fitted(self) -> Network:
        if self._network is None:
            raise ValueError("the RQ-VAE has no codebooks yet: call fit, or restore, first")
        return self._network

    def _train(self, network: Network, vectors_ID: Tensor, generator: torch.Generator) -> None:
        settings = self.settings
        optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        batch_size = min(settings.batch_size, max(32, len(vectors_ID) // 8))
        num_batches = -(-len(vectors_ID) // batch_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.num_iterations * num_batches)
        for epoch in range(self.num_iterations):
            self._begin_epoch(network, epoch)
            order_I = torch.randperm(len(vectors_ID), generator=generator).to(vectors_ID.device)
            for batch_B in order_I.split(batch_size):
                loss, quantized_BZ, codes_BL = network.loss(vectors_ID[batch_B])
                loss = loss + self._further_loss(network, batch_B, quantized_BZ, codes_BL)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            # Not after the last ones: what was moved has to be trained.
            if settings.revive_dead_codes and epoch < 0.8 * self.num_iterations:
                network.revive_dead_codes(vectors_ID)

    def _begin_epoch(self, network: Network, epoch: int) -> None:
        """For variants: before the batches of an epoch."""

    def _further_loss(
        self, network: Network, items_B: Tensor, quantized_BZ: Tensor, codes_BL: Tensor
    ) -> Tensor | float:
        """For variants: what is added to the loss of a batch.

        Args:
            quantized_BZ: sums of the centroids, with the gradient of the latents.
        """
        return 0.0


class Network(nn.Module):
    """Encoder, codebooks and decoder of the vectors of items."""

    mean_D: Tensor
    scale: Tensor

    def __init__(self, dim: int, num_levels: int, codebook_size: int, settings: RqVaeSettings) -> None:
        super().__init__()
        self.dim = dim
        self.commitment = settings.commitment
        self.register_buffer("mean_D", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(()))
        dims = (dim, *settings.hidden_dims, settings.latent_dim)
        self.encoder = _layers(dims)
        self.decoder = _layers(dims[::-1])
        # As in VQ-VAE, where they do not start at items.
        start = torch.empty(num_levels, codebook_size, settings.latent_dim).uniform_(-1, 1) / codebook_size
        self.codebooks_LKZ = nn.Parameter(start)

    def latents(self, vectors_ID: Tensor) -> Tensor:
        return self.encoder((vectors_ID - self.mean_D) / self.scale)

    def vectors(self, latents_IZ: Tensor) -> Tensor:
        return self.decoder(latents_IZ) * self.scale + self.mean_D

    def quantize(self, latents_IZ: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[I, L] codes, and per level the [I, Z] residual that the level encodes."""
        residuals_IZ, codes, residuals = latents_IZ.detach(), [], []
        for centroids_KZ in self.codebooks_LKZ.detach():
            codes_I, _ = nearest_centroids(residuals_IZ, centroids_KZ)
            codes.append(codes_I)
            residuals.append(residuals_IZ)
            residuals_IZ = residuals_IZ - centroids_KZ[codes_I]
        return torch.stack(codes, dim=1), residuals

    def loss(self, vectors_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean squared error of standardized vectors; codes towards latents, and latents towards codes.

        Returns:
            The sum, the [B, Z] quantized latents with the gradient of the latents, and the [B, L] codes.
        """
        latents_BZ = self.latents(vectors_BD)
        codes_BL, residuals = self.quantize(latents_BZ)
        total = latents_BZ.new_zeros(())
        quantized_BZ = torch.zeros_like(latents_BZ)
        for level, residuals_BZ in enumerate(residuals):
            centroids_BZ = functional.embedding(codes_BL[:, level], self.codebooks_LKZ[level])
            total = total + functional.mse_loss(centroids_BZ, residuals_BZ)
            quantized_BZ = quantized_BZ + centroids_BZ.detach()
            total = total + self.commitment * functional.mse_loss(latents_BZ, quantized_BZ)
        through_BZ = latents_BZ + (quantized_BZ - latents_BZ).detach()
        wanted_BD = (vectors_BD - self.mean_D) / self.scale
        return total + functional.mse_loss(self.decoder(through_BZ), wanted_BD), through_BZ, codes_BL

    @torch.no_grad()
    def standardize(self, vectors_ID: Tensor) -> None:
        """One scale for all dimensions: components of little variance are mostly noise, and stay small."""
        self.mean_D.copy_(vectors_ID.mean(0))
        self.scale.copy_((vectors_ID - self.mean_D).square().mean().sqrt())

    @torch.no_grad()
    def start_at_items(self, vectors_ID: Tensor, generator: torch.Generator, may_leave_unused: bool) -> None:
        residuals_IZ = self.latents(vectors_ID)
        num_codes = self.codebooks_LKZ.shape[1]
        for level, centroids_KZ in enumerate(self.codebooks_LKZ):
            what = "item vectors" if level == 0 else f"residuals left for level {level}"
            start_KZ = starting_centroids(residuals_IZ, num_codes, generator, what, may_leave_unused)
            centroids_KZ.copy_(with_unused(lloyd(residuals_IZ, start_KZ, 10), num_codes))
            residuals_IZ = residuals_IZ - centroids_KZ[nearest_centroids(residuals_IZ, centroids_KZ)[0]]

    @torch.no_grad()
    def revive_dead_codes(self, vectors_ID: Tensor) -> None:
        """Move codes without items to the residuals that are farthest from theirs."""
        residuals_IZ = self.latents(vectors_ID)
        for centroids_KZ in self.codebooks_LKZ:
            codes_I, squares_I = nearest_centroids(residuals_IZ, centroids_KZ)
            dead_E = torch.nonzero(torch.bincount(codes_I, minlength=len(centroids_KZ)) == 0)[:, 0]
            centroids_KZ[dead_E] = residuals_IZ[squares_I.topk(len(dead_E)).indices]
            residuals_IZ = residuals_IZ - centroids_KZ[nearest_centroids(residuals_IZ, centroids_KZ)[0]]


def _layers(dims: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(dims):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
