"""From the distinct rows of a batch to the vectors of a feature: one for each id, or one for each bag.

Rows are looked up once per distinct id; `inverse_N` says which row each id of the feature has. Gradients
of the vectors add up in the rows.

Axes: M distinct rows, N ids of a feature, B bags, D numbers of a row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.base.distinct_rows import rows_of_ids

Pooling = Literal["sum", "mean"]


def sequence(rows_MD: Tensor, inverse_N: Tensor) -> Tensor:
    """[N, D] the row of every id."""
    return rows_of_ids(rows_MD, inverse_N)


def pooled(
    rows_MD: Tensor,
    inverse_N: Tensor,
    offsets_B1: Tensor,
    pooling: Pooling,
    weights_N: Tensor | None = None,
) -> Tensor:
    """[B, D] sum or mean of the rows of each bag; zeros for an empty one.

    Args:
        offsets_B1: bag b has the ids `offsets_B1[b]` to `offsets_B1[b + 1]` (exclusive).
        weights_N: each row's factor. A mean divides by the number of ids, not by the sum of these.
    """
    if pooling == "mean" and weights_N is not None:
        # torch weighs sums only; a bag's mean is its sum over its size.
        sums_BD = pooled(rows_MD, inverse_N, offsets_B1, "sum", weights_N)
        return sums_BD / offsets_B1.diff().clamp(min=1).unsqueeze(1)
    return functional.embedding_bag(
        inverse_N,
        rows_MD,
        offsets_B1.to(torch.int64),
        mode=pooling,
        per_sample_weights=weights_N,
        include_last_offset=True,
    )


def pooled_bags(rows_MD: Tensor, inverse_NJ: Tensor, weights_NJ: Tensor) -> Tensor:
    """[N, D] weighted sum of the rows of bags that all have J ids."""
    weights_NJ = weights_NJ.to(rows_MD.dtype)  # which autocast may have chosen
    return functional.embedding_bag(inverse_NJ, rows_MD, mode="sum", per_sample_weights=weights_NJ)
