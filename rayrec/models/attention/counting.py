"""Floating point operations of attention by what it means, whichever backend computes it.

While a model's operations are counted, `attend` computes nothing: it adds the products that its visible pairs
stand for to a counter, and returns a tensor of the right shape that depends on its inputs. So the number is
the same for a padded kernel, a jagged one and one that PyTorch knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from rayrec.models.attention.call import AttentionCall


class AttentionFlops:
    """What the attentions inside of `counted` have asked for."""

    def __init__(self) -> None:
        self.total = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """[N, H, E] of no meaning."""
        spans = call.spans
        num_pairs = int((spans.stop_WN - spans.first_WN).clamp(min=0).sum())
        _, num_heads, key_width = call.query_NHC.shape
        value_width = call.value_MHE.shape[-1]
        # Two products, scores and values, of two operations a number; backward, two for each of them.
        forward = 2 * num_pairs * num_heads * (key_width + value_width)
        self.total += 3 * forward if call.needs_gradients else forward
        out_NHE = call.query_NHC.new_zeros(len(call.query_NHC), num_heads, value_width)
        return out_NHE + 0.0 * sum(tensor.sum() for tensor in call.inputs)


_flops: ContextVar[AttentionFlops | None] = ContextVar("attention_flops", default=None)


def stand_in() -> Callable[[AttentionCall], Tensor] | None:
    """What takes the place of a backend, while operations are counted."""
    flops = _flops.get()
    return None if flops is None else flops.attend


@contextmanager
def counted() -> Iterator[AttentionFlops]:
    """Inside, attention is counted instead of computed."""
    token = _flops.set(AttentionFlops())
    try:
        flops = _flops.get()
        assert flops is not None
        yield flops
    finally:
        _flops.reset(token)
