"""Model FLOPs: operations that a step's products of matrices stand for, in forward and backward.

What is computed twice to save memory, padding, and everything pointwise do not count, as is usual for MFU
(Chowdhery et al., "PaLM", JMLR 2023, appendix B). Attention counts by the pairs that its mask shows
(`rayrec.models.attention.counting`), everything else as PyTorch dispatches it, also inside of custom autograd
functions.

A copy of the model is counted. Each of its weights is one number, expanded to the shape of the weight: the
copy takes no memory, and nothing that is trained is touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rayrec.models.attention.counting import counted
from rayrec.models.base.shape_classes import power_of_two

ShapeClass = tuple[int, int]
"""Powers of two of rows and tokens."""


class ModelFlops:
    """Says of each batch what it takes; counts on the first batch of every class of shapes.

    Within a class, the number is taken to grow with the tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        build: Callable[[Any, Mapping[str, np.ndarray | Tensor], bool], Any],
        size_of: Callable[[Any], tuple[int, int]],
        parts: Callable[[Any], Iterable[Any]] = lambda batch: (batch,),
    ) -> None:
        """
        Args:
            model: with a `loss`, before it is compiled or split; it is not kept.
            build: (features, rows, training) -> the batch that the loss is of.
            size_of: features -> (rows, tokens).
            parts: of a batch, that are computed one after the other while they are counted: what a model pads
                to one length is counted row by row, without the padding.
        """
        self._model = _stand_in(model, device)
        self._build = build
        self._size_of = size_of
        self._parts = parts
        self._per_token: dict[ShapeClass, float] = {}

    def of(self, features: Any, dims: Mapping[str, int]) -> float:
        """Of forward and backward of one trainer's share.

        Args:
            dims: width of the rows of each table that the share looks up.
        """
        num_rows, num_tokens = self._size_of(features)
        if not num_tokens:
            return 0.0
        key = (power_of_two(num_rows), power_of_two(num_tokens))
        if key not in self._per_token:
            self._per_token[key] = self._count(features, dims) / num_tokens
        return self._per_token[key] * num_tokens

    def _count(self, features: Any, dims: Mapping[str, int]) -> int:
        rows = {
            name: np.zeros((len(lookup.ids_M), dims[name]), dtype=np.float32)
            for name, lookup in features.lookups.items()
        }
        batch = self._build(features, rows, True)
        self._model.train()
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})
        with torch.enable_grad(), counted() as attention, counter:
            for part in self._parts(batch):
                loss: Tensor = self._model.loss(part)  # type: ignore[operator]
                loss.backward()
        return int(counter.get_total_flops()) + attention.total


def _stand_in(model: nn.Module, device: torch.device) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _weight_stand_in(parameter, device)
    for buffer in model.buffers():  # those are codes and rates of items, which data-dependent parts read
        memo[id(buffer)] = buffer.to(device)
    return copy.deepcopy(model, memo).to(device)


def _weight_stand_in(parameter: Tensor, device: torch.device) -> nn.Parameter:
    seen = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    weight = nn.Parameter(seen, requires_grad=parameter.requires_grad)
    if weight.requires_grad:
        weight.register_post_accumulate_grad_hook(_forget_gradient)
    return weight


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _addmm_flops(_: Sequence[int], left: Sequence[int], right: Sequence[int], **others: Any) -> int:
    """Of the product that is added in place, by the factors' shapes; PyTorch knows the one with a result."""
    return 2 * left[0] * left[1] * right[1]
