"""From item vectors to a registry of semantic IDs.

Axes: I items, L code levels, D dimensions of an item vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.models.tokenizers.code_tuples import tuple_groups
from rayrec.models.tokenizers.collisions import COLLISION_POLICIES
from rayrec.models.tokenizers.registry import SemanticIdRegistry, smallest_code_dtype
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans


def fit_registry(
    vectors_ID: NDArray[np.floating] | Tensor,
    item_ids_I: NDArray[np.int64],
    dataset_fingerprint: str,
    num_levels: int = 3,
    codebook_size: int = 256,
    collision_policy: str = "extra_digit",
    seed: int = 0,
    num_iterations: int = 25,
    vectors_from: str = "item vectors",
) -> tuple[SemanticIdRegistry, dict[str, Any]]:
    """Cluster the vectors, resolve collisions, and report how well it went.

    Args:
        vectors_ID: A finite vector of every item; a tensor is clustered on its
            device.
        item_ids_I: Ids in catalogue order.
        dataset_fingerprint: Of the data set the catalogue belongs to.
        num_levels, codebook_size, seed, num_iterations: See `ResidualKMeans`.
        collision_policy: A name of `COLLISION_POLICIES`.
        vectors_from: Where the vectors come from, for the description.

    Returns:
        The registry, and its `report()`.

    Raises:
        ValueError: unknown policy, as many vectors as items are not given,
            vectors that cannot be clustered, or collisions that the policy
            cannot resolve.
    """
    if collision_policy not in COLLISION_POLICIES:
        raise ValueError(
            f"there is no collision policy {collision_policy!r}; known: {', '.join(COLLISION_POLICIES)}"
        )
    if len(vectors_ID) != len(item_ids_I):
        raise ValueError(f"expected a vector for each of {len(item_ids_I)} items, got {len(vectors_ID)}")
    vectors = torch.as_tensor(vectors_ID).to(torch.float32)
    kmeans = ResidualKMeans(num_levels, codebook_size, seed, num_iterations).fit(vectors)
    raw_codes_IL = kmeans.encode(vectors)
    codes_IL = COLLISION_POLICIES[collision_policy](raw_codes_IL, vectors, kmeans)

    level_sizes = (codebook_size,) * num_levels
    if codes_IL.shape[1] > num_levels:
        level_sizes += (int(codes_IL[:, -1].max()) + 1,)
    registry = SemanticIdRegistry(
        item_ids_I=np.ascontiguousarray(item_ids_I, dtype=np.int64),
        codes_IL=codes_IL.cpu().numpy().astype(smallest_code_dtype(level_sizes)),
        level_sizes=level_sizes,
        num_codebooks=num_levels,
        collision_policy=collision_policy,
        method=(
            f"residual k-means over {vectors_from}: {num_levels} levels of {codebook_size} codes, "
            f"seed {seed}, at most {num_iterations} iterations"
        ),
        dataset_fingerprint=dataset_fingerprint,
        codebooks_CKD=kmeans.codebooks_LKD.cpu().numpy(),
        fit_report={
            "collisions": _collisions(raw_codes_IL.cpu().numpy()),
            "reconstruction_error": _reconstruction_errors(vectors, raw_codes_IL, kmeans),
        },
    )
    return registry, registry.report()


def _collisions(codes_IL: NDArray[np.int64]) -> dict[str, int]:
    """Items that the codebooks alone cannot tell from another, before the policy acts."""
    _, sizes = tuple_groups(codes_IL)
    shared = sizes[sizes > 1]
    return {
        "items": int(shared.sum()),
        "groups": len(shared),
        "largest_group": int(sizes.max()),
    }


def _reconstruction_errors(vectors_ID: Tensor, codes_IL: Tensor, kmeans: ResidualKMeans) -> list[float]:
    """Squared error of the first level, the first two, ... relative to the vectors' variance."""
    spread = (vectors_ID - vectors_ID.mean(dim=0)).square().sum()
    errors = []
    for depth in range(1, codes_IL.shape[1] + 1):
        difference_ID = vectors_ID - kmeans.decode(codes_IL[:, :depth])
        errors.append(float(difference_ID.square().sum() / spread))
    return errors
