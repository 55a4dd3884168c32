"""BSARec: a causal transformer whose layers also rescale the frequencies of a history.

Self-attention is a low-pass filter: layer by layer, events become alike. Beside it, each layer takes its
input apart into slow and fast changes along the history, and gives the fast ones a weight of their own.

Source: Shin et al., "An Attentive Inductive Bias for Sequential Recommendation beyond the Self-Attention",
AAAI 2024, arXiv:2312.10325. There only the last event of a history is trained; here every event is, so each
knows the transform of the history up to itself, padded to the longest one with zeros. Layers are those of the
transformer beside it: norms come first.

Axes: N events of all rows, T the longest row, D width of an event.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.past import Grown
from rayrec.models.attention.uni_attention import attend
from rayrec.models.sequence.backbones.transformer import Block, CausalTransformer


class FrequencyBlock(Block):
    """Block whose attention is mixed with rescaled frequencies:

    X + dropout(share * (low + gain * (F - low)) + (1 - share) * attention(X)),  F = norm(X),

    `low` being the slowest frequencies of F, and `gain` the square of a weight of each dimension. The weight
    is 1 and what is learned, so that decay brings it to 1 and not to 0.
    """

    compiled_methods = ("heads", "feed_forward")
    low_pass_TT: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        feedforward_dim: int,
        dropout: float,
        index: int,
        choice: Choice,
        share: float,
        low_pass_TT: Tensor,
    ) -> None:
        super().__init__(dim, num_heads, feedforward_dim, dropout, index, choice)
        self.share = share
        self.frequency_norm = nn.LayerNorm(dim)
        self.root_gain_offset_D = nn.Parameter(torch.empty(dim).zero_())
        self.register_buffer("low_pass_TT", low_pass_TT, persistent=False)

    def forward(
        self, x_ND: Tensor, layout: JaggedLayout, keys_N: Tensor, grown: Grown | None = None
    ) -> Tensor:
        assert grown is None, "what is low in a history changes with every event: nothing of it is kept"
        query_NHC, key_NHC, value_NHC = self.heads(x_ND)
        attended_NHC = attend(query_NHC, key_NHC, value_NHC, layout, mask=self.mask, choice=self.choice)
        attended_ND = self.out(attended_NHC.flatten(1))
        mixed_ND = self.share * self.rescaled(x_ND, layout) + (1 - self.share) * attended_ND
        return self.feed_forward(x_ND + self.attention_dropout(mixed_ND, keys_N), keys_N)

    def rescaled(self, x_ND: Tensor, layout: JaggedLayout) -> Tensor:
        """[N, D] the normed input, its fast changes times the gain."""
        normed_ND = self.frequency_norm(x_ND)
        longest = layout.longest
        low_pass_TT = self.low_pass_TT[:longest, :longest].to(normed_ND.dtype)
        low_ND = layout.unpad(low_pass_TT @ layout.pad(normed_ND))
        return low_ND + (1 + self.root_gain_offset_D).square() * (normed_ND - low_ND)


class BsaRec(CausalTransformer):
    """`CausalTransformer` of `FrequencyBlock`s."""

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        feedforward_dim: int,
        max_length: int,
        dropout: float,
        num_low: int,
        share: float,
        choice: Choice = AUTO,
    ) -> None:
        """
        Args:
            num_low: slowest frequencies that count as low, the mean among them.
            share: of the frequencies; attention has the rest.
        """
        super().__init__(dim, 0, num_heads, feedforward_dim, max_length, dropout, choice)
        low_pass_TT = torch.tensor(low_pass(max_length, num_low), dtype=torch.float32)
        self.num_dropouts = 1 + 3 * num_layers
        self.blocks.extend(
            FrequencyBlock(dim, num_heads, feedforward_dim, dropout, index, choice, share, low_pass_TT)
            for index in range(num_layers)
        )
        self.initialize()


def low_pass(longest: int, num_low: int) -> np.ndarray:
    """[T, T] what makes of a history, at each of its events t, the low part of the events up to t.

    The real discrete Fourier transform of T events, the last of them event t and those before the first one
    zeros; all but the `num_low` slowest of its frequencies set to 0; transformed back, at its end. So what is
    slow is so by its period in events, however long a history is.
    """
    frequencies_K = np.arange(min(num_low, longest // 2 + 1))
    weight_K = np.where((frequencies_K == 0) | (2 * frequencies_K == longest), 1.0, 2.0)
    ago_T = np.arange(longest)
    weight_T = weight_K @ np.cos(2 * np.pi * frequencies_K[:, None] * ago_T / longest) / longest
    ago_TT = ago_T[:, None] - ago_T
    return np.where(ago_TT >= 0, weight_T[np.abs(ago_TT)], 0.0)
