"""HSTU: a reader of histories whose attention weighs events one by one and knows how long ago they were.

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", ICML 2024, arXiv:2402.17152, and its public code for small data sets.

Axes: N events of all rows, H heads, A width of a head's queries and keys, C of its values, D width of an
event, P buckets of distances, K buckets of time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.bias import RelativeBias
from rayrec.models.attention.call import Silu
from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.uni_attention import attend
from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.base.tensor_plan import INPUTS, NORM, Part, TensorPlan, outputs

INITIAL_STD = 0.02
"""Of projections, positions and biases, as in the public code."""


class HstuLayer(nn.Module):
    """Pointwise attention, then a gate; added to the input. There is no softmax and no feed-forward:

        U, V, Q, K = SiLU(projection(norm(X)))
        A = causal SiLU(Q Kᵀ + bias of distance + bias of time) / longest
        Y = out(dropout(norm(A V) * U)) + X

    Weights that need not sum to one keep how *much* of a history is alike, not only which part of it is most.
    The divisor is the longest history that the network takes, so that a row does not depend on others.
    """

    compiled_methods = ("heads", "after_attention")
    norm_readers = (("input_norm", ("uvqk",)), ("attended_norm", ("out",)))

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention_dim: int,
        value_dim: int,
        max_length: int,
        num_time_buckets: int,
        dropout: float,
        index: int,
        choice: Choice = AUTO,
    ) -> None:
        """
        Args:
            attention_dim, value_dim: A and C.
            num_time_buckets: K; 0 for a layer that reads no times.
            choice: who computes the attention.
        """
        super().__init__()
        self.num_heads = num_heads
        self.scoring = Silu(max_length)
        self.choice = choice
        self._head_widths = (value_dim, value_dim, attention_dim, attention_dim)
        self.input_norm = nn.LayerNorm(dim)
        self.uvqk = nn.Linear(dim, sum(self._widths), bias=False)
        # Tables of each head's own, where the public code has one for all; half of the distances are of keys
        # after the query, which no query sees.
        self.place_bias_HP = nn.Parameter(torch.empty(num_heads, 2 * max_length - 1))
        self.time_bias_HK = (
            nn.Parameter(torch.empty(num_heads, num_time_buckets)) if num_time_buckets else None
        )
        self.attended_norm = nn.LayerNorm(num_heads * value_dim)
        # Index 0 belongs to the input's dropout.
        self.dropout = KeyedDropout(dropout, 1 + index)
        self.out = nn.Linear(num_heads * value_dim, dim)

    @property
    def _widths(self) -> list[int]:
        """Of gates, values, queries and keys."""
        return [self.num_heads * width for width in self._head_widths]

    def tensor_plan(self) -> TensorPlan:
        """Each rank has some heads."""
        return TensorPlan(
            sizes={"num_heads": self.num_heads},
            modules={"uvqk": outputs(*self._widths), "attended_norm": NORM, "out": INPUTS},
            own=Part({"place_bias_HP": 0, "time_bias_HK": 0}),
            counts=("num_heads",),
        )

    def forward(
        self, x_ND: Tensor, layout: JaggedLayout, keys_N: Tensor, times_N: Tensor | None = None
    ) -> Tensor:
        gate_ND, query, key, value = self.heads(x_ND)
        bias = RelativeBias(self.place_bias_HP)
        if self.time_bias_HK is not None:
            assert times_N is not None, "a layer with a bias of time is given times"
            bias = RelativeBias(self.place_bias_HP, self.time_bias_HK, times_N, times_N)
        attended = attend(
            query, key, value, layout, scoring=self.scoring, bias=bias, scale=1.0, choice=self.choice
        )
        return self.after_attention(x_ND, attended, gate_ND, keys_N)

    def heads(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gates [N, H C], queries and keys [N, H, A], values [N, H, C]."""
        projected = functional.silu(self.uvqk(self.input_norm(x_ND)))
        gate_ND, *value_query_key = projected.split(self._widths, dim=1)
        value, query, key = (part.unflatten(1, (self.num_heads, -1)) for part in value_query_key)
        return gate_ND, query, key, value

    def after_attention(self, x_ND: Tensor, attended_NHC: Tensor, gate_ND: Tensor, keys_N: Tensor) -> Tensor:
        gated_ND = self.attended_norm(attended_NHC.flatten(1)) * gate_ND
        return x_ND + self.out(self.dropout(gated_ND, keys_N))


class Hstu(nn.Module):
    """[N, D] event vectors to [N, D] contexts, each knowing only its row's past.

    For the bias of time, the present of a query is the time of its own event: times of events that are yet to
    come are in no batch. (The public code takes the time of the event to be predicted, which nobody knows who
    asks what comes next.)
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        max_length: int,
        dropout: float,
        attention_dim: int | None = None,
        value_dim: int | None = None,
        num_time_buckets: int = 0,
        choice: Choice = AUTO,
    ) -> None:
        """
        Args:
            attention_dim, value_dim: A and C, of each head; None is D / H.
            num_time_buckets: K; 0 for a network that reads no times.
            choice: who computes the attention; weights do not depend on it.
        """
        super().__init__()
        self.num_dropouts = 1 + num_layers
        """Indices taken by the dropouts in here; a head's own start after them."""
        self.positions_TD = nn.Parameter(torch.empty(max_length, dim))
        # The public code scales item rows by the root of their width, to the same end: they begin small, and
        # without it the layers' outputs drown them. The norm does so for rows that grow, too.
        self.input_norm = nn.LayerNorm(dim)
        self.input_dropout = KeyedDropout(dropout, 0)
        self.layers = nn.ModuleList(
            HstuLayer(
                dim,
                num_heads,
                attention_dim or dim // num_heads,
                value_dim or dim // num_heads,
                max_length,
                num_time_buckets,
                dropout,
                index,
                choice,
            )
            for index in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(dim)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("out.bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=INITIAL_STD)

    def forward(
        self, x_ND: Tensor, layout: JaggedLayout, keys_N: Tensor, times_N: Tensor | None = None
    ) -> Tensor:
        """Encode the events of all histories.

        Args:
            times_N: UNIX seconds of each event; needed with `num_time_buckets`.
        """
        x_ND = self.input_norm(x_ND + functional.embedding(layout.place_N, self.positions_TD))
        x_ND = self.input_dropout(x_ND, keys_N)
        for layer in self.layers:
            x_ND = layer(x_ND, layout, keys_N, times_N)
        return self.final_norm(x_ND)
