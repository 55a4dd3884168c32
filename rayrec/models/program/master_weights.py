"""Matrices that are computed with in bfloat16 and kept in float32.

    masters (float32) ──rounded──► the model's matrices (bfloat16) ──► forward, backward
        ▲ optimizer's step                                                 │ gradients, as they come
        └──────────────────── added up in float32 ◄────────────────────────┘

A step of the learning rate is often less than the 8 bits of a bfloat16 can tell, so that it is the masters
which are changed, saved and loaded; a run with them goes on from a snapshot of one without, and the other
way round. Vectors (norms, biases) and single numbers stay float32 in the model: they are few, and kernels for
norms want them so. It saves autocast the rounding of every matrix in every forward pass, and costs two bytes
for each weight.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class MasterWeights:
    """Of a model on its device, whose matrices it replaces. Begins wide."""

    def __init__(self, model: nn.Module) -> None:
        self.by_name: dict[str, Tensor] = {}
        """What the optimizer changes, float32, under the names of the model's parameters."""
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                self.by_name[name] = parameter
                continue
            master = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_hand_up, master))
            self._pairs.append((parameter, master))
            self.by_name[name] = master
        self._is_narrow = False

    def narrow(self) -> None:
        """Let the model compute with bfloat16 until `widen`."""
        if not self._is_narrow:
            for parameter, master in self._pairs:
                parameter.data = master.detach().to(torch.bfloat16)
        self._is_narrow = True

    def widen(self) -> None:
        """Let the model compute with the masters, as ranking does. Also after they were loaded."""
        for parameter, master in self._pairs:
            parameter.data = master.detach()
        self._is_narrow = False

    @torch.no_grad()
    def hand_down(self) -> None:
        """The masters have changed."""
        if self._is_narrow and self._pairs:
            narrow, masters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(narrow), list(masters))


def _hand_up(master: Tensor, parameter: Tensor) -> None:
    """As soon as it is there, so that pieces of a batch are added up in float32."""
    assert parameter.grad is not None
    gradient, parameter.grad = parameter.grad.float(), None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
