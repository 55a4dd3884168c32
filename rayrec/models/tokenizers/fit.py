"""From item vectors to a registry of semantic IDs.

Axes: I items, G some of them, L code levels, K codes of a level, D dimensions of an item vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.models.tokenizers.code_tuples import IntArray
from rayrec.models.tokenizers.collisions import Evidence, LastLevelDistances, policy_named
from rayrec.models.tokenizers.item_tokenizer import fitted_quantizer
from rayrec.models.tokenizers.quantizer import Quantizer
from rayrec.models.tokenizers.registry import SemanticIdRegistry, smallest_code_dtype
from rayrec.models.tokenizers.report import collision_counts
from rayrec.platform.arrays import Float32Array, Int64Array

VARIANCE = "vectors_variance"
"""Key of a registry's fit report: what errors of items that come later are relative to."""


def fit_registry(
    vectors_ID: NDArray[np.floating] | Tensor,
    item_ids_I: Int64Array,
    dataset_fingerprint: str,
    num_levels: int = 3,
    codebook_size: int = 256,
    collision_policy: str = "extra_digit",
    seed: int = 0,
    num_iterations: int | None = None,
    vectors_from: str = "item vectors",
    tokenizer: str = "rq_kmeans",
    popularity_I: Int64Array | None = None,
) -> tuple[SemanticIdRegistry, dict[str, Any]]:
    """Quantize the vectors, resolve collisions, and report how well it went.

    Args:
        vectors_ID: A finite vector of every item; a tensor is quantized on its
            device.
        item_ids_I: Ids in catalog order.
        dataset_fingerprint: Of the data set the catalog belongs to.
        num_levels, codebook_size, seed, num_iterations: See `Quantizer`.
        collision_policy: A name of `COLLISION_POLICIES`.
        vectors_from: Where the vectors come from, for the description.
        tokenizer: A name of `TOKENIZERS`.
        popularity_I: Training events of each item, for the policy `share`.

    Returns:
        The registry, and its `report()`.

    Raises:
        ValueError: unknown policy or tokenizer, as many vectors as items are not given,
            vectors that cannot be quantized, or collisions that the policy
            cannot resolve.
    """
    policy_named(collision_policy)
    _check_number(vectors_ID, item_ids_I)
    vectors = torch.as_tensor(vectors_ID).to(torch.float32)
    quantizer = fitted_quantizer(tokenizer, vectors, num_levels, codebook_size, seed, num_iterations)
    registry = quantized_registry(
        quantizer,
        vectors,
        item_ids_I,
        dataset_fingerprint,
        collision_policy,
        vectors_from=vectors_from,
        popularity_I=popularity_I,
    )
    return registry, registry.report()


def quantized_registry(
    quantizer: Quantizer,
    vectors_ID: Tensor,
    item_ids_I: Int64Array,
    dataset_fingerprint: str,
    collision_policy: str,
    vectors_from: str = "item vectors",
    popularity_I: Int64Array | None = None,
    tokenizer_version: str | None = None,
) -> SemanticIdRegistry:
    """The registry that a fitted quantizer makes of these items; arguments and errors as `fit_registry`."""
    _check_number(vectors_ID, item_ids_I)
    raw_codes_IL = quantizer.encode(vectors_ID)

    def last_level_distances(items_G: Int64Array) -> Float32Array:
        rows_G = torch.from_numpy(items_G).to(vectors_ID.device)
        return quantizer.last_level_distances(vectors_ID[rows_G], raw_codes_IL[rows_G]).cpu().numpy()

    variance = vectors_variance(vectors_ID)
    return registry_of_codes(
        quantizer,
        raw_codes_IL.cpu().numpy(),
        item_ids_I,
        dataset_fingerprint,
        collision_policy,
        last_level_distances,
        {
            "reconstruction_error": reconstruction_errors(vectors_ID, raw_codes_IL, quantizer, variance),
            VARIANCE: variance,
        },
        vectors_from,
        popularity_I,
        tokenizer_version,
    )


def registry_of_codes(
    quantizer: Quantizer,
    raw_codes_IL: IntArray,
    item_ids_I: Int64Array,
    dataset_fingerprint: str,
    collision_policy: str,
    last_level_distances: LastLevelDistances,
    measured: Mapping[str, Any],
    vectors_from: str = "item vectors",
    popularity_I: Int64Array | None = None,
    tokenizer_version: str | None = None,
) -> SemanticIdRegistry:
    """The registry of codes that a quantizer has made; other arguments and errors as `fit_registry`.

    Args:
        measured: what the fit report has besides the collisions.
    """
    policy = policy_named(collision_policy)
    evidence = Evidence(quantizer.codebook_size, last_level_distances, popularity_I)
    codes_IL = policy.resolve(raw_codes_IL, evidence)
    level_sizes = (quantizer.codebook_size,) * quantizer.num_levels
    if policy.digit != "none":
        level_sizes += (int(codes_IL[:, -1].max()) + 1,)
    return SemanticIdRegistry(
        item_ids_I=np.ascontiguousarray(item_ids_I, dtype=np.int64),
        codes_IL=codes_IL.astype(smallest_code_dtype(level_sizes)),
        level_sizes=level_sizes,
        num_codebooks=quantizer.num_levels,
        collision_policy=collision_policy,
        method=f"{quantizer.description}, of {vectors_from}",
        dataset_fingerprint=dataset_fingerprint,
        codebooks_CKD=quantizer.codebooks_LKD.cpu().numpy(),
        fit_report={"collisions": collision_counts(raw_codes_IL), **measured},
        uniform_digit=policy.digit == "uniform",
        tokenizer_version=tokenizer_version,
    )


def vectors_variance(vectors_ID: Tensor) -> float:
    """Mean squared distance from the mean."""
    return float((vectors_ID - vectors_ID.mean(dim=0)).square().sum(dim=1).mean())


def reconstruction_errors(
    vectors_ID: Tensor, codes_IL: Tensor, quantizer: Quantizer, variance: float | None
) -> list[float] | None:
    """Mean squared error of the first level, the first two, ... relative to a variance; None without one.

    Args:
        variance: of the vectors that the quantizer was fitted on. A few others may have none of their own.
    """
    if not variance:
        return None
    errors = []
    for depth in range(1, codes_IL.shape[1] + 1):
        difference_ID = vectors_ID - quantizer.decode(codes_IL[:, :depth])
        errors.append(float(difference_ID.square().sum(dim=1).mean()) / variance)
    return errors


def _check_number(vectors_ID: NDArray[np.floating] | Tensor, item_ids_I: Int64Array) -> None:
    if len(vectors_ID) != len(item_ids_I):
        raise ValueError(f"expected a vector for each of {len(item_ids_I)} items, got {len(vectors_ID)}")
