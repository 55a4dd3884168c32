"""Dice, an activation that lets a unit's values through by how they stand to what is usual for it.

    f(s) = p(s) s + (1 - p(s)) α s        p(s) = sigmoid((s - c) k)

In the paper c and 1 / k are mean and standard deviation of s: of the mini-batch in training, of moving
averages in serving. Here both are learned, like α. What is served is the same function then; and training
does not depend on how a batch is cut, nor are there statistics to sum over trainers and to keep in
snapshots. They begin at 0 and 1, where f is the SiLU.

Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, arXiv:1706.06978,
section 5.2.

Axes: N vectors, H their width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dice(nn.Module):
    """[N, H] to [N, H]."""

    compiled_methods = ("forward",)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.center_H = nn.Parameter(torch.zeros(dim))
        self.slope_H = nn.Parameter(torch.ones(dim))
        self.alpha_H = nn.Parameter(torch.zeros(dim))

    def forward(self, x_NH: Tensor) -> Tensor:
        share_NH = ((x_NH - self.center_H) * self.slope_H).sigmoid()
        return x_NH * torch.lerp(self.alpha_H, torch.ones_like(self.alpha_H), share_NH)
