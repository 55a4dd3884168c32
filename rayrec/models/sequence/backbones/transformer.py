"""Causal transformer over jagged histories, shared by every sequence model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Mask
from rayrec.models.attention.past import Grown
from rayrec.models.attention.uni_attention import CAUSAL, attend
from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.base.tensor_plan import INPUTS, TensorPlan, outputs

INITIAL_STD = 0.02
"""Of every weight matrix and the positions, as in GPT-2 and BERT."""


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input (Xiong et al., ICML 2020)."""

    compiled_methods = ("heads", "after_attention")
    norm_readers = (("attention_norm", ("qkv",)), ("feedforward_norm", ("up",)))

    def __init__(
        self,
        dim: int,
        num_heads: int,
        feedforward_dim: int,
        dropout: float,
        index: int,
        choice: Choice = AUTO,
        mask: Mask = CAUSAL,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.choice = choice
        self.mask = mask
        self.attention_norm = nn.LayerNorm(dim)
        # No bias: one on the keys cancels in the softmax, so that its gradient is rounding noise, which
        # Adam scales up to full steps; then no two runs would agree. One on the values repeats out's.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, feedforward_dim)
        self.down = nn.Linear(feedforward_dim, dim)
        # Index 0 belongs to the input's dropout.
        self.attention_dropout = KeyedDropout(dropout, 1 + 3 * index)
        self.hidden_dropout = KeyedDropout(dropout, 2 + 3 * index)
        self.feedforward_dropout = KeyedDropout(dropout, 3 + 3 * index)

    def tensor_plan(self) -> TensorPlan:
        """Each rank has some heads, and some of the inner width."""
        dim, inner = self.down.out_features, self.down.in_features
        return TensorPlan(
            sizes={"num_heads": self.num_heads, "feedforward_dim": inner},
            modules={"qkv": outputs(dim, dim, dim), "out": INPUTS, "up": outputs(inner), "down": INPUTS},
            counts=("num_heads",),
        )

    def forward(
        self, x_ND: Tensor, layout: JaggedLayout, keys_N: Tensor, grown: Grown | None = None
    ) -> Tensor:
        query_NHC, key_NHC, value_NHC = self.heads(x_ND)
        whole = layout
        if grown is not None:
            whole = grown.layout
            key_NHC, value_NHC = grown.grow(key_NHC, value_NHC)
        attended_NHC = attend(
            query_NHC, key_NHC, value_NHC, layout, whole, mask=self.mask, choice=self.choice
        )
        return self.after_attention(x_ND, attended_NHC, keys_N)

    def heads(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [N, H, C]."""
        qkv_N3HC = self.qkv(self.attention_norm(x_ND)).unflatten(1, (3, self.num_heads, -1))
        query_NHC, key_NHC, value_NHC = qkv_N3HC.unbind(1)
        return query_NHC, key_NHC, value_NHC

    def after_attention(self, x_ND: Tensor, attended_NHC: Tensor, keys_N: Tensor) -> Tensor:
        return self.feed_forward(
            x_ND + self.attention_dropout(self.out(attended_NHC.flatten(1)), keys_N), keys_N
        )

    def feed_forward(self, x_ND: Tensor, keys_N: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(self.feedforward_norm(x_ND)))
        hidden = self.down(self.hidden_dropout(hidden, keys_N))
        return x_ND + self.feedforward_dropout(hidden, keys_N)


class CausalTransformer(nn.Module):
    """[N, D] token vectors to [N, D] contexts, each knowing only its row's past."""

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        feedforward_dim: int,
        max_length: int,
        dropout: float,
        choice: Choice = AUTO,
    ) -> None:
        """
        Args:
            choice: who computes the attention; weights do not depend on it.
        """
        super().__init__()
        self.num_dropouts = 1 + 3 * num_layers
        """Indices taken by the dropouts in here; a head's own start after them."""
        self.positions_TD = nn.Parameter(torch.empty(max_length, dim))
        # Item rows begin small; without this norm the blocks' outputs drown them for the first epochs.
        self.input_norm = nn.LayerNorm(dim)
        self.input_dropout = KeyedDropout(dropout, 0)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, feedforward_dim, dropout, index, choice) for index in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(dim)
        self.initialize()

    def initialize(self) -> None:
        """Draw the first weights."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, x_ND: Tensor, layout: JaggedLayout, keys_N: Tensor, times_N: Tensor | None = None
    ) -> Tensor:
        """Encode the events of all histories.

        Args:
            times_N: not read: of time it knows the order.
        """
        return self._contexts(x_ND, layout, layout.place_N, keys_N, None)

    def read_on(self, x_ND: Tensor, grown: Grown, keys_N: Tensor) -> Tensor:
        """The same of the tokens behind those that were read before; `x_ND` and `keys_N` are of these."""
        return self._contexts(x_ND, grown.behind, grown.places_N, keys_N, grown)

    def _contexts(
        self, x_ND: Tensor, layout: JaggedLayout, place_N: Tensor, keys_N: Tensor, grown: Grown | None
    ) -> Tensor:
        x_ND = self.input_norm(x_ND + functional.embedding(place_N, self.positions_TD))
        x_ND = self.input_dropout(x_ND, keys_N)
        for block in self.blocks:
            x_ND = block(x_ND, layout, keys_N, grown)
        return self.final_norm(x_ND)
