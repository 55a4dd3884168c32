"""HSTU: a reader of histories whose attention weighs events one by one and knows how long ago they were.

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", ICML 2024, arXiv:2402.17152, and its public code for small data sets.

Axes: N events of all rows, B rows, T the longest row, H heads, A width of a head's queries and keys, C of its
values, D width of an event, K buckets of time, P pairs of an event and one of its row not after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.keyed_random import KeyedDropout

INITIAL_STD = 0.02
"""Of projections, positions and biases, as in the public code."""


class TimePairs(NamedTuple):
    """How long before each event those of its past were, and it itself; real events only, of which a padded
    rectangle has few."""

    bucket_P: Tensor
    slot_P: Tensor
    """Place in [B, T, T], by query and key, flat."""


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
        since: TimePairs | None,
    ) -> Tensor:
        """
        Args:
            distance_TT: places from each query back to each key.
            since: the time between them; None for a layer that reads no times.
        """
        projected = functional.silu(self.uvqk(self.input_norm(x_ND)))
        gate, value, query, key = projected.split(self._widths, dim=1)
        bias = functional.embedding(distance_TT, self.distance_bias_T[:, None])[None, ..., 0]
        if self.time_bias_K is not None:
            assert since is not None, "a layer with a bias of time is given times"
            bias_P = functional.embedding(since.bucket_P, self.time_bias_K[:, None])[:, 0]
            shape = layout.num_rows, layout.longest, layout.longest
            bias = bias + bias_P.new_zeros(shape).view(-1).index_copy(0, since.slot_P, bias_P).view(shape)
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
        since = None
        if self.num_time_buckets:
            assert times_N is not None, "a network with a bias of time is given times"
            since = time_pairs(times_N, layout, self.num_time_buckets)
        x_ND = self.input_norm(x_ND + functional.embedding(layout.place_N, self.positions_TD))
        x_ND = self.input_dropout(x_ND, keys_N)
        for layer in self.layers:
            x_ND = layer(x_ND, layout, keys_N, distance_TT, since)
        return self.final_norm(x_ND)


def time_pairs(times_N: Tensor, layout: JaggedLayout, num_buckets: int) -> TimePairs:
    """Bucket 0 is of one time, bucket k of 2^(k - 1) to 2^k - 1 s between, the last one of all beyond.

    Args:
        times_N: int64, not falling within a row: what is said to be later than an event after it counts as of
            the same time.
    """
    num_keys_N = layout.place_N + 1
    query_P = torch.arange(len(times_N), device=times_N.device).repeat_interleave(num_keys_N)
    first_N = num_keys_N.cumsum(0) - num_keys_N
    place_P = torch.arange(len(query_P), device=times_N.device) - first_N.index_select(0, query_P)
    key_P = query_P - layout.place_N.index_select(0, query_P) + place_P
    bounds = 2 ** torch.arange(num_buckets - 1, device=times_N.device)
    bucket_P = torch.bucketize(times_N[query_P] - times_N[key_P], bounds, right=True)
    return TimePairs(bucket_P, layout.slot_N.index_select(0, query_P) * layout.longest + place_P)


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
