"""Model FLOPs: operations that a step's products of matrices stand for, in forward and backward.

What is computed twice to save memory, padding, and everything pointwise do not count, as is usual for MFU
(Chowdhery et al., "PaLM", JMLR 2023, appendix B). Attention counts by the pairs that its mask shows
(`rayrec.models.attention.counting`), everything else as PyTorch dispatches it, also inside of custom autograd
functions.

Counted is a hollow copy of the model, whose weights are one number each, seen in the shape of the weight: it
takes no memory, and nothing that is trained comes near it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rayrec.models.attention.counting import counted
from rayrec.models.sequence_model import SequenceModel
from rayrec.models.shape_classes import power_of_two
from rayrec.models.tensor_batch import Features, TensorBatch

ShapeClass = tuple[int, int]
"""Powers of two of rows and tokens."""


class ModelFlops:
    """Says of each batch what it takes; counts on the first batch of every class of shapes.

    Within a class, the number is taken to grow with the tokens.
    """

    def __init__(self, model: SequenceModel, device: torch.device) -> None:
        """
        Args:
            model: before it is compiled or split; it is not kept.
        """
        self._model = _hollow(model, device)
        self._device = device
        self._per_token: dict[ShapeClass, float] = {}

    def of(self, features: Features, dims: Mapping[str, int]) -> float:
        """Of forward and backward of one trainer's share.

        Args:
            dims: width of the rows of each table that the share looks up.
        """
        num_tokens = len(features.items_N)
        if not num_tokens:
            return 0.0
        key = (power_of_two(len(features.offsets_B1) - 1), power_of_two(num_tokens))
        if key not in self._per_token:
            self._per_token[key] = self._count(features, dims) / num_tokens
        return self._per_token[key] * num_tokens

    def _count(self, features: Features, dims: Mapping[str, int]) -> int:
        rows = {
            name: np.zeros((len(lookup.ids_M), dims[name]), dtype=np.float32)
            for name, lookup in features.lookups.items()
        }
        batch = TensorBatch.build(features, rows, seed=0, device=self._device, training=True)
        self._model.train()
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})
        with torch.enable_grad(), counted() as attention, counter:
            self._model.loss(batch).backward()
        return int(counter.get_total_flops()) + attention.total


def _hollow(model: SequenceModel, device: torch.device) -> SequenceModel:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _hollow_weight(parameter, device)
    for buffer in model.buffers():  # those are codes and rates of items, which data-dependent parts read
        memo[id(buffer)] = buffer.to(device)
    return copy.deepcopy(model, memo).to(device)


def _hollow_weight(parameter: Tensor, device: torch.device) -> nn.Parameter:
    seen = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    hollow = nn.Parameter(seen, requires_grad=parameter.requires_grad)
    if hollow.requires_grad:
        hollow.register_post_accumulate_grad_hook(_forget_gradient)
    return hollow


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _addmm_flops(_: Sequence[int], left: Sequence[int], right: Sequence[int], **others: Any) -> int:
    """Of the product that is added in place, by the factors' shapes; PyTorch knows the one with a result."""
    return 2 * left[0] * left[1] * right[1]
