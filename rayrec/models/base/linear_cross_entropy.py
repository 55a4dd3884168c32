"""Softmax cross-entropy over a whole catalog without ever holding all logits.

Plain autograd writes the [N, I] logits, their log-softmax and their gradient
to memory, several passes each; for short histories and large catalogs that
is most of a training step. Here a chunk of tokens goes through product,
softmax and both gradient products while its logits are still in the cache.
The idea is that of fused linear cross-entropy in Liger Kernel (Hsu et al.,
arXiv:2410.10989), in plain torch.

Why not `torch.nn.functional.linear_cross_entropy` of torch 2.13: in float32, with chunks of this size, it
is as fast (0.86 to 1.01 of our time), but under autocast it computes everything in float32, and given
bfloat16 it returns a bfloat16 loss and gives the items twice the error of their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20
"""Logits held at a time: 4 MiB of float32, which stays in a CPU's last-level cache."""


def linear_cross_entropy(context_ND: Tensor, items_ID: Tensor, targets_N: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(context · itemsᵀ)[target].

    Args:
        context_ND: [N, D].
        items_ID: [I, D], both of one floating type.
        targets_N: [N] int64 in [0, I).

    Under autocast the three products are of its dtype; softmax, sums and gradients stay those of the
    arguments, as they do in PyTorch's own losses.

    Returns:
        Scalar. Only first derivatives, with respect to the first two arguments.
    """
    device, dtype = context_ND.device.type, context_ND.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        context_ND, items_ID = context_ND.float(), items_ID.float()
    with torch.autocast(device, enabled=False):  # what it would choose in here is chosen already
        loss: Tensor = _LinearCrossEntropy.apply(context_ND, items_ID, targets_N, dtype)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context_ND: Tensor, items_ID: Tensor, targets_N: Tensor, dtype: torch.dtype
    ) -> Tensor:
        # Factors of the products; `to` copies nothing where the type is the right one.
        short_ND, short_ID = context_ND.to(dtype), items_ID.to(dtype)
        chunk = max(1, _CHUNK_ELEMENTS // len(items_ID))
        loss = context_ND.new_zeros(())
        context_grad_ND = torch.empty_like(context_ND)
        # A frozen matrix of a large vocabulary has no use for a product of its own size.
        items_grad_ID = torch.zeros_like(items_ID) if ctx.needs_input_grad[1] else None
        for start in range(0, len(context_ND), chunk):
            context_CD = short_ND[start : start + chunk]
            target_C1 = targets_N[start : start + chunk, None]
            logits_CI = (context_CD @ short_ID.T).to(context_ND.dtype)
            largest_C1 = logits_CI.amax(dim=1, keepdim=True)
            target_logit_C1 = logits_CI.gather(1, target_C1)
            # From here on the buffer of the logits holds their exponentials, then their gradient.
            exponentials_CI = logits_CI.sub_(largest_C1).exp_()
            sum_C1 = exponentials_CI.sum(dim=1, keepdim=True)
            loss += (sum_C1.log() + largest_C1 - target_logit_C1).sum()
            grad_CI = exponentials_CI.div_(sum_C1)
            grad_CI.scatter_add_(1, target_C1, -torch.ones_like(target_logit_C1))
            grad_CI = grad_CI.to(dtype)
            context_grad_ND[start : start + chunk] = grad_CI @ short_ID
            if items_grad_ID is None:
                continue
            if dtype == items_grad_ID.dtype:
                items_grad_ID.addmm_(grad_CI.T, context_CD)
            else:
                items_grad_ID += grad_CI.T @ context_CD
        ctx.save_for_backward(context_grad_ND, items_grad_ID)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (grad,) = grad_outputs
        context_grad_ND, items_grad_ID = ctx.saved_tensors
        items_grad_ID = None if items_grad_ID is None else items_grad_ID * grad
        return context_grad_ND * grad, items_grad_ID, None, None
