"""Jagged sequences: N tokens of B rows one after the other, with their offsets.

Everything pointwise (projections, feed-forward, losses) runs on the N real
tokens; only attention sees a padded view. Histories are short and of very
different lengths, so a padded batch would be mostly padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class JaggedLayout:
    """Where each of N tokens stands in a padded [B, T] rectangle, T the longest row."""

    num_rows: int
    longest: int
    row_N: Tensor
    place_N: Tensor
    """Place of each token in its row, from 0."""
    slot_N: Tensor
    """row_N * longest + place_N."""
    last_B: Tensor
    """Index of each row's last token; rows without tokens point at token 0."""

    @staticmethod
    def from_offsets(offsets_B1: np.ndarray, device: torch.device) -> JaggedLayout:
        lengths_B = np.diff(offsets_B1)
        num_rows, longest = len(lengths_B), int(lengths_B.max(initial=0))
        row_N = np.repeat(np.arange(num_rows), lengths_B)
        place_N = np.arange(offsets_B1[-1]) - np.repeat(offsets_B1[:-1], lengths_B)
        return JaggedLayout(
            num_rows,
            longest,
            torch.from_numpy(row_N).to(device),
            torch.from_numpy(place_N).to(device),
            torch.from_numpy(row_N * longest + place_N).to(device),
            torch.from_numpy(np.maximum(offsets_B1[1:] - 1, 0)).to(device),
        )

    def pad(self, x_ND: Tensor) -> Tensor:
        """[N, D] to [B, T, D], zeros after the end of each row."""
        width = x_ND.shape[1]
        padded = x_ND.new_zeros(self.num_rows * self.longest, width)
        return padded.index_copy(0, self.slot_N, x_ND).view(self.num_rows, self.longest, width)

    def unpad(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [N, D]; the inverse of `pad`."""
        return x_BTD.flatten(0, 1).index_select(0, self.slot_N)


def causal_attention(
    query_ND: Tensor, key_ND: Tensor, value_ND: Tensor, layout: JaggedLayout, num_heads: int
) -> Tensor:
    """Softmax attention of each token to itself and the earlier tokens of its row.

    Rows are padded on the right, so the causal mask alone keeps padding out of
    every real token's sight.

    Args:
        query_ND, key_ND, value_ND: [N, D]; D is split over `num_heads`.

    Returns:
        [N, D] attended values.
    """

    def heads(x_ND: Tensor) -> Tensor:
        x_BTD = layout.pad(x_ND)
        return x_BTD.view(layout.num_rows, layout.longest, num_heads, -1).transpose(1, 2)

    out_BHTC = functional.scaled_dot_product_attention(
        heads(query_ND), heads(key_ND), heads(value_ND), is_causal=True
    )
    return layout.unpad(out_BHTC.transpose(1, 2).flatten(2))
