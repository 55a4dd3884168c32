"""HSTU: a reader of histories whose attention weighs events one by one and knows how long ago they were.

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", ICML 2024, arXiv:2402.17152, and its public code for small data sets.

Axes: N events of all rows, B rows, T the longest row, H heads, A width of a head's queries and keys, C of its
values, D width of an event, K buckets of time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.keyed_random import KeyedDropout

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
    ) -> None:
        """
        Args:
            attention_dim, value_dim: A and C.
            num_time_buckets: 0 for a layer that reads no times.
        """
        super().__init__()
        self.num_heads = num_heads
        self.max_length = max_length
        self._widths = [num_heads * value_dim] * 2 + [num_heads * attention_dim] * 2
        self.input_norm = nn.LayerNorm(dim)
        self.uvqk = nn.Linear(dim, sum(self._widths), bias=False)
        # One table for all heads, as in the public code.
        self.distance_bias_T = nn.Parameter(torch.empty(max_length))
        self.time_bias_K = nn.Parameter(torch.empty(num_time_buckets)) if num_time_buckets else None
        self.attended_norm = nn.LayerNorm(num_heads * value_dim)
        # Index 0 belongs to the input's dropout.
        self.dropout = KeyedDropout(dropout, 1 + index)
        self.out = nn.Linear(num_heads * value_dim, dim)

    def forward(
        self,
        x_ND: Tensor,
        layout: JaggedLayout,
        keys_N: Tensor,
        distance_TT: Tensor,
        bucket_BTT: Tensor | None,
    ) -> Tensor:
        """
        Args:
            distance_TT: places from each query back to each key.
            bucket_BTT: of the time between them; None for a layer that reads no times.
        """
        projected = functional.silu(self.uvqk(self.input_norm(x_ND)))
        gate, value, query, key = projected.split(self._widths, dim=1)
        bias = functional.embedding(distance_TT, self.distance_bias_T[:, None])[None, ..., 0]
        if self.time_bias_K is not None:
            assert bucket_BTT is not None, "a layer with a bias of time is given times"
            bias = bias + functional.embedding(bucket_BTT, self.time_bias_K[:, None])[..., 0]
        attended = _pointwise_attention(query, key, value, bias, layout, self.num_heads, self.max_length)
        return x_ND + self.out(self.dropout(self.attended_norm(attended) * gate, keys_N))


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
    ) -> None:
        """
        Args:
            attention_dim, value_dim: A and C, of each head; None is D / H.
            num_time_buckets: K; 0 for a network that reads no times.
        """
        super().__init__()
        self.num_dropouts = 1 + num_layers
        """Indices taken by the dropouts in here; a head's own start after them."""
        self.num_time_buckets = num_time_buckets
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
        """
        Args:
            times_N: UNIX seconds of each event; needed with `num_time_buckets`.
        """
        place_T = torch.arange(layout.longest, device=x_ND.device)
        distance_TT = (place_T[:, None] - place_T[None, :]).clamp(min=0)
        bucket_BTT = None
        if self.num_time_buckets:
            assert times_N is not None, "a network with a bias of time is given times"
            bucket_BTT = time_buckets(times_N, layout, self.num_time_buckets)
        x_ND = self.input_norm(x_ND + functional.embedding(layout.place_N, self.positions_TD))
        x_ND = self.input_dropout(x_ND, keys_N)
        for layer in self.layers:
            x_ND = layer(x_ND, layout, keys_N, distance_TT, bucket_BTT)
        return self.final_norm(x_ND)


def time_buckets(times_N: Tensor, layout: JaggedLayout, num_buckets: int) -> Tensor:
    """[B, T, T] bucket of the time from each key to each query of its row; 0 for later keys and equal times.

    Bucket k holds differences from 2^(k - 1) to 2^k - 1 s, the last one all beyond it too.

    Args:
        times_N: int64.
    """
    times_BT = layout.pad(times_N[:, None])[..., 0]
    since_BTT = times_BT[:, :, None] - times_BT[:, None, :]
    bounds = 2 ** torch.arange(num_buckets - 1, device=times_N.device)
    return torch.bucketize(since_BTT, bounds, right=True).tril()


def _pointwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    layout: JaggedLayout,
    num_heads: int,
    divisor: float,
) -> Tensor:
    """Sum of the values of each event's past and its own, each by SiLU(query · key + bias) / divisor.

    Rows are padded on the right, so the causal mask alone keeps padding out of every real event's sight.

    Args:
        query, key: [N, H A]. value: [N, H C].
        bias: [B or 1, T, T], by query and key.

    Returns:
        [N, H C]
    """

    def heads(x: Tensor) -> Tensor:
        return layout.pad(x).view(layout.num_rows, layout.longest, num_heads, -1).transpose(1, 2)

    scores_BHTT = heads(query) @ heads(key).transpose(2, 3) + bias[:, None]
    weights_BHTT = functional.silu(scores_BHTT).tril() / divisor
    return layout.unpad((weights_BHTT @ heads(value)).transpose(1, 2).flatten(2))
