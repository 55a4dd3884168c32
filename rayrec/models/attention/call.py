"""One attention to be computed, as every backend receives it.

Axes: N queries, M keys, H heads, C width of a query or key head, E width of a value head, B rows, T and S
the longest row of queries and of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayrec.models.attention.bias import RelativeBias
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Mask, Spans

HIDDEN = -1e30
"""Score of a pair that is not seen. Finite, for the softmax of nothing but hidden pairs must not be NaN, and
SiLU of it and SiLU's gradient are exactly 0; fits in float32 and bfloat16."""


@dataclass(frozen=True)
class Softmax:
    """Weights are the softmax of a query's scores; a query that sees no key gets zeros."""


@dataclass(frozen=True)
class Silu:
    """Weights are silu(score) / length: each pair by itself, so that how much was there still shows.

    Source: HSTU, Zhai et al., ICML 2024, arXiv:2402.17152, section 3.1.
    """

    length: float
    """What the sum is divided by. A model's maximum length: with the longest row of the batch, an output
    would depend on which other rows it was computed with."""

    def __post_init__(self) -> None:
        if not self.length > 0:
            raise ValueError(f"Silu.length must be positive, got {self.length}: the sum is divided by it")


Scoring = Softmax | Silu


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Score of query n and key m: scale * query_n . key_m + bias(n, m), where the mask lets n see m."""

    query_NHC: Tensor
    key_MHC: Tensor
    value_MHE: Tensor
    queries: JaggedLayout
    keys: JaggedLayout
    scoring: Scoring
    mask: Mask
    bias: RelativeBias | None
    scale: float

    @property
    def spans(self) -> Spans:
        make = lambda: self.mask.spans(self.queries, self.keys)  # noqa: E731
        return self.queries.derived(("spans", self.mask, self.keys), make)

    @property
    def is_self(self) -> bool:
        """Whether queries and keys have one layout."""
        return self.queries is self.keys

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that may take gradients."""
        tables = () if self.bias is None else self.bias.tables
        return (self.query_NHC, self.key_MHC, self.value_MHE, *tables)

    def with_inputs(self, inputs: Sequence[Tensor]) -> AttentionCall:
        """The same with other values, in the order of `inputs`."""
        query_NHC, key_MHC, value_MHE, *tables = inputs
        bias = self.bias
        if bias is not None:
            place_HP = tables.pop(0) if bias.place_HP is not None else None
            bias = replace(bias, place_HP=place_HP, time_HD=tables.pop(0) if tables else None)
        return replace(self, query_NHC=query_NHC, key_MHC=key_MHC, value_MHE=value_MHE, bias=bias)

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, T, C] queries, [B, H, S, C] keys and [B, H, S, E] values, zeros behind each row."""
        query_BTHC, key_BSHC = self.queries.pad(self.query_NHC), self.keys.pad(self.key_MHC)
        value_BSHE = self.keys.pad(self.value_MHE)
        return query_BTHC.transpose(1, 2), key_BSHC.transpose(1, 2), value_BSHE.transpose(1, 2)

    @property
    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)


@dataclass(frozen=True)
class Backend:
    """A way to compute attention."""

    name: str
    why_not: Callable[[AttentionCall], str | None]
    """None where it can compute the call, else what it lacks: such a call must not be given to it."""
    attend: Callable[[AttentionCall], Tensor]
    """[N, H, E]."""
