"""Vectors of prefixes by what the catalog says of the items below them.

    v(c1..cd) += gate_d · Σ weight · row(bucket of a word or value of an item with these first codes)

So a prefix is told from its siblings by what its items are, and no weight belongs to one item or prefix.

Axes: I items, L levels, V buckets, P prefixes of a depth, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.sequence.backbones.transformer import INITIAL_STD
from rayrec.models.sequence.item_content import BagSums
from rayrec.platform.item_bags import ItemBags


class PrefixContent(nn.Module):
    """Of every depth; rows are shared by all."""

    def __init__(
        self, bags: ItemBags, nodes_IL: np.ndarray, sizes: Sequence[int], num_buckets: int, dim: int
    ) -> None:
        """
        Args:
            bags: of the catalog; features are buckets.
            nodes_IL: number of each item's prefix of every depth; -1: of none.
            sizes: prefixes of every depth.
        """
        super().__init__()
        self.rows_VD = nn.Parameter(torch.empty(num_buckets, dim).normal_(std=INITIAL_STD))
        self.gates_LD = nn.Parameter(torch.ones(len(sizes), dim))
        self.sums = nn.ModuleList(
            BagSums(bags.of_groups(nodes_IL[:, depth], size), num_buckets) for depth, size in enumerate(sizes)
        )

    def forward(self, depth: int) -> Tensor:
        """[P, D] of the prefixes of `depth` + 1 codes."""
        vectors_PD: Tensor = self.gates_LD[depth] * self.sums[depth](self.rows_VD)
        return vectors_PD
