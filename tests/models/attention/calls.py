"""Attention calls for tests: every mask, on rows of very different lengths, with fixed random inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.bias import RelativeBias
from rayrec.models.attention.call import AttentionCall, Backend, Scoring, Silu, Softmax
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Causal, CausalGroups, Full, Mask, Spans, own_places_N, spans_of

SCORINGS: tuple[Scoring, ...] = (Softmax(), Silu(20.0))
LENGTHS = (3, 0, 1, 40, 7, 22)
"""An empty row, one of a single token, lengths far apart."""
OTHER_LENGTHS = (5, 2, 1, 41, 0, 22)
"""Of keys: none for a row that has queries, keys for a row that has none, fewer keys than queries."""
COUNTS = torch.tensor([2, 0, 1, 9, 3, 1])
PLACES, TIMES = 9, 20
"""Buckets of the bias tables."""


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """The query's own key and the `size - 1` before it: a mask as another package may bring it."""

    size: int

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        own_N = own_places_N(queries, keys)
        return spans_of(queries, keys, (own_N + 1 - self.size, own_N + 1))


@dataclass(frozen=True, eq=False)
class TargetAware(Mask):
    """A history and, at the end of the row, candidates, which see the history and themselves: two spans."""

    num_targets_B: Tensor

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        own_N = own_places_N(queries, keys)
        history_N = (keys.lengths_on_device_B() - self.num_targets_B).index_select(0, queries.row_N)
        is_target_N = own_N >= history_N
        return spans_of(
            queries,
            keys,
            (torch.zeros_like(own_N), torch.where(is_target_N, history_N, own_N + 1)),
            (own_N, own_N + is_target_N),
        )


@dataclass(frozen=True)
class Case:
    """A mask and the rows it is for."""

    make_mask: Callable[[], Mask]
    lengths: Sequence[int] = LENGTHS
    key_lengths: Sequence[int] | None = None
    """None for self attention."""


CASES = {
    "full": Case(Full),
    "full, across": Case(Full, key_lengths=OTHER_LENGTHS),
    "causal": Case(Causal),
    "causal, across": Case(Causal, key_lengths=OTHER_LENGTHS),
    "causal, rows of one": Case(Causal, lengths=(1, 1, 1)),
    "window": Case(lambda: SlidingWindow(3)),
    "groups": Case(lambda: CausalGroups(2), lengths=(6, 0, 2, 80), key_lengths=(3, 0, 1, 40)),
    "groups behind": Case(lambda: CausalGroups(2), lengths=(6, 0, 2, 80), key_lengths=(8, 0, 1, 43)),
    "targets": Case(lambda: TargetAware(COUNTS)),
}


def layout(lengths: Sequence[int]) -> JaggedLayout:
    return JaggedLayout.from_offsets(np.cumsum([0, *lengths]), torch.device("cpu"))


def make_call(
    case: Case,
    scoring: Scoring = SCORINGS[0],
    biased: bool = False,
    dtype: torch.dtype = torch.float64,
    gradients: bool = True,
    width: int = 5,
    value_width: int = 7,
) -> AttentionCall:
    queries = layout(case.lengths)
    keys = queries if case.key_lengths is None else layout(case.key_lengths)
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=random, dtype=torch.float64)
        return values.to(dtype).requires_grad_(gradients)

    def times(count: int) -> Tensor:
        return torch.randint(0, 300, (count,), generator=random)

    query_NHC = normal(queries.num_tokens, 2, width)
    key_MHC, value_MHE = normal(keys.num_tokens, 2, width), normal(keys.num_tokens, 2, value_width)
    bias = None
    if biased:
        tables = normal(2, PLACES), normal(2, TIMES)
        bias = RelativeBias(*tables, times(queries.num_tokens), times(keys.num_tokens))
    mask, scale = case.make_mask(), width**-0.5
    return AttentionCall(query_NHC, key_MHC, value_MHE, queries, keys, scoring, mask, bias, scale)


def results(backend: Backend, call: AttentionCall) -> list[Tensor]:
    """Output and, where the call needs them, the gradients of all inputs, in float64."""
    out_NHE = backend.attend(call)
    if not call.needs_gradients:
        return [out_NHE.double()]
    random = torch.Generator().manual_seed(2)
    weights_NHE = torch.randn(out_NHE.shape, generator=random, dtype=torch.float64).to(out_NHE)
    gradients = torch.autograd.grad(out_NHE, call.inputs, weights_NHE)
    return [tensor.detach().double() for tensor in (out_NHE, *gradients)]


def assert_equal_results(backend: Backend, other: Backend, call: AttentionCall, tolerance: float) -> None:
    for ours, theirs in zip(results(backend, call), results(other, call), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
