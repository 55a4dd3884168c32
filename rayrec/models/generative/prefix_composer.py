"""Vectors of prefixes that are made of their codes, in place of one of each prefix's own.

    own(c1..cd) = down_d · gelu(up_d1[c1] + ... + up_dd[cd])

What a code means under a prefix is computed, so nothing that is trained belongs to one item, and weights do
not grow with the catalog.

Axes: K codes of a level, H inner width, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.sequence.backbones.transformer import INITIAL_STD

INNER_STD = 0.5
"""Of `up`: sums of these bend in `gelu` from the start, so that pairs of codes differ by more than a sum."""


class PrefixComposer(nn.Module):
    """Of every depth; a prefix of one code is that code, and has nothing of its own."""

    def __init__(self, level_sizes: Sequence[int], inner_dim: int, dim: int) -> None:
        super().__init__()
        depths = range(1, len(level_sizes))
        self.up = nn.ModuleList(
            nn.ParameterList(
                nn.Parameter(torch.empty(size, inner_dim).normal_(std=INNER_STD))
                for size in level_sizes[: depth + 1]
            )
            for depth in depths
        )
        self.down = nn.ParameterList(
            nn.Parameter(torch.empty(inner_dim, dim).normal_(std=2 * INITIAL_STD / inner_dim**0.5))
            for _ in depths
        )

    def forward(self, codes: Tensor) -> Tensor:
        """[..., D] vectors of prefixes [..., d]."""
        depth = codes.shape[-1] - 1
        if depth == 0:
            return self.down[0].new_zeros(*codes.shape[:-1], self.down[0].shape[1])
        ups: Iterable[Tensor] = cast(nn.ParameterList, self.up[depth - 1])
        inner = torch.stack([rows_of_ids(up_KH, codes[..., level]) for level, up_KH in enumerate(ups)]).sum(0)
        vectors: Tensor = functional.gelu(inner) @ self.down[depth - 1]
        return vectors
