"""A vector of each item from what the catalog says of it: vectors of words and values, which items share.

    v(item) = Σ weight · row(bucket of a word of its text, or of a value of one of its columns)

What is learned of an item with few events reaches those that are described alike, and an item without any has
a vector. Attributes beside ids are what S3-Rec (Zhou et al., CIKM 2020, arXiv:2008.07873) and FDSA (Zhang et
al., IJCAI 2019) read.

Axes: I items, V buckets, P pairs of an item and a bucket, M distinct and K known items, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.sequence.backbones.transformer import INITIAL_STD
from rayrec.models.sequence.feature_lookups import pooled
from rayrec.platform.item_bags import ItemBags

_Bags = tuple[Tensor, Tensor, Tensor]
"""[P] members, offsets of the bags and [P] weights."""


class BagSums(nn.Module):
    """Weighted sums of rows, one for each bag."""

    offsets_I1: Tensor
    buckets_P: Tensor
    weights_P: Tensor
    offsets_V1: Tensor
    items_P: Tensor
    weights_of_items_P: Tensor

    def __init__(self, bags: ItemBags, num_buckets: int) -> None:
        super().__init__()
        turned = bags.transposed(num_buckets)
        arrays = {
            "offsets_I1": bags.offsets_I1,
            "buckets_P": bags.features_P,
            "weights_P": bags.weights_P,
            "offsets_V1": turned.offsets_I1,
            "items_P": turned.features_P,
            "weights_of_items_P": turned.weights_P,
        }
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(array), persistent=False)

    @property
    def has_features_I(self) -> Tensor:
        """[I] bool, whether a bag holds anything."""
        return self.offsets_I1.diff() > 0

    def forward(self, rows_VD: Tensor) -> Tensor:
        """[I, D] of all bags."""
        vectors_ID: Tensor = _Sums.apply(
            rows_VD,
            (self.buckets_P, self.offsets_I1, self.weights_P),
            (self.items_P, self.offsets_V1, self.weights_of_items_P),
        )
        return vectors_ID

    def of(self, rows_VD: Tensor, bags_M: Tensor) -> Tensor:
        """[M, D] of some bags."""
        first_M, count_M = self.offsets_I1[bags_M], self.offsets_I1.diff()[bags_M]
        offsets_M1 = torch.cat([count_M.new_zeros(1), count_M.cumsum(0)])
        pair_Q = torch.repeat_interleave(first_M - offsets_M1[:-1], count_M)
        pair_Q = pair_Q + torch.arange(len(pair_Q), device=bags_M.device)
        return pooled(rows_VD, self.buckets_P[pair_Q], offsets_M1, "sum", self.weights_P[pair_Q])


class ItemContent(nn.Module):
    """Vectors of items by what they are."""

    def __init__(self, bags: ItemBags, num_buckets: int, dim: int) -> None:
        """
        Args:
            bags: of the catalog; features are buckets.
        """
        super().__init__()
        self.rows_VD = nn.Parameter(torch.empty(num_buckets, dim).normal_(std=INITIAL_STD))
        self.sums = BagSums(bags, num_buckets)

    def added_to(self, rows_KD: Tensor, items_K: Tensor | None = None) -> Tensor:
        """[I, D] what is said of every item, with the item's own row if it has one.

        Args:
            items_K: catalog positions of those that have rows; None: all of them, in order.
        """
        said_ID = self.catalog()
        return rows_KD + said_ID if items_K is None else said_ID.index_add(0, items_K, rows_KD)

    def catalog(self) -> Tensor:
        """[I, D] of every item."""
        vectors_ID: Tensor = self.sums(self.rows_VD)
        return vectors_ID

    def forward(self, items: Tensor) -> Tensor:
        """[..., D] of catalog positions [...]; each item is put together once."""
        items_M, inverse = items.unique(return_inverse=True)
        return rows_of_ids(self.sums.of(self.rows_VD, items_M), inverse)


class _Sums(torch.autograd.Function):
    """Sums over the buckets of each item; back, over the items of each bucket, which takes less time than
    adding up pair by pair."""

    @staticmethod
    def forward(ctx: Any, rows_VD: Tensor, of_items: _Bags, of_buckets: _Bags) -> Tensor:
        ctx.of_buckets = of_buckets
        return _sums(rows_VD, of_items)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ID: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grad_ID.contiguous(), ctx.of_buckets), None, None


def _sums(rows: Tensor, bags: _Bags) -> Tensor:
    members_P, offsets, weights_P = bags
    return pooled(rows, members_P, offsets, "sum", weights_P.to(rows.dtype))
