"""One layer of a graph network: the row of an event's item, and those of its neighbors.

    rows of the neighbors ─► sum by weight ─► × gate ─┐
    row of the event's item ──────────────────────────┴─► + ─► what the backbone reads

No matrix and no nonlinearity, as in LightGCN (He et al., SIGIR 2020, arXiv:2002.02126), where they make
vectors of ids worse. The sum by importance is that of PinSage (Ying et al., KDD 2018, arXiv:1806.01973), with
counts of co-visits for visits of walks. GCE-GNN (Wang et al., SIGIR 2020, arXiv:2106.05081) reads sequences
with such neighbors of their items. An event without neighbors is read as elsewhere.

Axes: N events, J neighbors of each, M rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayrec.models.sequence.feature_lookups import pooled_bags


class NeighborPooling(nn.Module):
    """[N, D] rows of items to [N, D] vectors that know their neighbors."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # LightGCN weighs its layers alike.
        self.gate_D = nn.Parameter(torch.empty(dim).fill_(1.0))

    def forward(self, own_ND: Tensor, rows_MD: Tensor, neighbors_NJ: Tensor, weights_NJ: Tensor) -> Tensor:
        """
        Args:
            rows_MD: what neighbors are rows of.
            neighbors_NJ: indices of rows.
            weights_NJ: 0 where there is no neighbor.
        """
        return own_ND + self.gate_D * pooled_bags(rows_MD, neighbors_NJ, weights_NJ)
