"""From a batch to the fields of a network: one vector for each feature of an impression.

A column of ids is a field, and so is the mean of each column of lists.

Axes: B impressions, K fields, D width of a row, N elements of a column of lists, W all numbers of an
impression, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.models.sequence.feature_lookups import pooled


def stacked(batch: ImpressionTensors, lists: Sequence[str], others: Sequence[Tensor] = ()) -> Tensor:
    """[B, K, D] of further fields, the columns of ids, then the means of lists.

    Args:
        lists: which columns of lists, and in which order.
        others: [B, ., D] each; they come first.
    """
    parts = [*others, *_id_rows(batch), *(batch.pool_list(column).unsqueeze(1) for column in lists)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def concatenated(batch: ImpressionTensors, lists: Sequence[str], others: Sequence[Tensor] = ()) -> Tensor:
    """[B, W] of the numbers, the rows of the columns of ids, the means of lists, then further vectors.

    Args:
        lists: which columns of lists, and in which order.
        others: [B, .] each.
    """
    numbers = [batch.numbers_BF] if batch.numbers_BF.shape[1] else []
    ids = [ids_BCD.flatten(1) for ids_BCD in _id_rows(batch)]
    parts = [*numbers, *ids, *(batch.pool_list(column) for column in lists), *others]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def weighted_sum(batch: ImpressionTensors, column: str, weights_N: Tensor) -> Tensor:
    """[B, D] sum of the rows of each list, each row times its weight; 0 for an empty list."""
    ids, rows_MD = batch.lists[column], batch.rows_MD
    layout = ids.layout
    offsets_B1 = layout.derived("offsets", lambda: torch.from_numpy(layout.offsets_B1).to(layout.device))
    return pooled(rows_MD, ids.inverse_N, offsets_B1, "sum", weights_N.to(rows_MD.dtype))


def _id_rows(batch: ImpressionTensors) -> list[Tensor]:
    """[B, C, D], or nothing where no column has ids: then there may be no table, either."""
    return [batch.embed_ids()] if batch.inverse_BC.shape[1] else []
