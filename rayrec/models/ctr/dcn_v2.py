"""DCN-v2: layers that multiply an input with itself once more each, so that crosses of bounded degree are
explicit, beside or below an MLP.

    x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l        W_l whole, or U_l V_l of a low rank

    stacked: x_0 ─► cross layers ─► MLP ─► logits
    parallel: x_0 ─┬─► cross layers ─┬─► logits
                   └─► MLP ──────────┘

x_0 is all of an impression, one after the other: numbers as they are, rows of ids, means of lists. Numbers
of very different sizes are for the data to scale: the cross layers take powers of them.

Source: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to
Rank Systems", WWW 2021, arXiv:2008.13535: its cross layer, the low-rank form of it, and the two structures
of figure 1; without the mixture of low-rank experts.

Axes: B impressions, W width of x_0, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from rayrec.models.ctr.fields import concatenated
from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.ctr.mlp import Mlp
from rayrec.models.ctr.model import CtrModel
from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.platform.impression_schema import ImpressionSchema

Structure = Literal["stacked", "parallel"]


class DcnV2(CtrModel):
    """See above."""

    def __init__(
        self,
        schema: ImpressionSchema,
        label_loss: LabelLoss,
        dim: int,
        num_cross_layers: int,
        rank: int | None,
        structure: Structure,
        hidden_dims: Sequence[int],
        dropout: float,
    ) -> None:
        """
        Args:
            rank: of the cross layers' matrices; None for whole ones.
            dropout: of the MLP.
        """
        super().__init__(dim, label_loss)
        self._lists = tuple(schema.lists)
        self._is_stacked = structure == "stacked"
        width = len(schema.numbers) + (len(schema.ids) + len(schema.lists)) * dim
        self.crosses = nn.ModuleList(CrossLayer(width, rank) for _ in range(num_cross_layers))
        self.mlp = Mlp(width, hidden_dims, dropout)
        last_dim = self.mlp.out_dim if self._is_stacked else width + self.mlp.out_dim
        self.head = nn.Linear(last_dim, label_loss.num_tasks)

    def logits(self, batch: ImpressionTensors) -> Tensor:
        input_BW = concatenated(batch, self._lists)
        crossed_BW = input_BW
        for cross in self.crosses:
            crossed_BW = cross(input_BW, crossed_BW)
        deep_BH = self.mlp(crossed_BW if self._is_stacked else input_BW, batch.keys_B)
        last = deep_BH if self._is_stacked else torch.cat([crossed_BW, deep_BH], dim=1)
        logits_BT: Tensor = self.head(last)
        return logits_BT


class CrossLayer(nn.Module):
    """x_0 ⊙ (W x + b) + x."""

    compiled_methods = ("forward",)

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.down = nn.Identity() if rank is None else nn.Linear(width, rank, bias=False)
        self.linear = nn.Linear(width if rank is None else rank, width)

    def forward(self, input_BW: Tensor, x_BW: Tensor) -> Tensor:
        return torch.addcmul(x_BW, input_BW, self.linear(self.down(x_BW)))
