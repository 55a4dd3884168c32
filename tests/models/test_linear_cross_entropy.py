"""The chunked loss and its gradients are those of the plain one."""

import pytest
import torch
from torch.nn import functional

from rayrec.models.base import linear_cross_entropy as module
from rayrec.models.base.linear_cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("chunk_elements", [1, 3 * 11, 1 << 20])
def test_loss_and_gradients_equal_plain_cross_entropy(monkeypatch, chunk_elements):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    items = torch.randn(11, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)

    plain = functional.cross_entropy(context @ items.T, targets, reduction="sum")
    expected = torch.autograd.grad(plain * 0.3, (context, items))
    loss = linear_cross_entropy(context, items, targets)
    found = torch.autograd.grad(loss * 0.3, (context, items))

    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found, expected)


def test_logits_beyond_the_range_of_exp_stay_finite():
    context = torch.tensor([[1000.0]], requires_grad=True)
    items = torch.tensor([[1.0], [0.0]], requires_grad=True)

    loss = linear_cross_entropy(context, items, torch.tensor([1]))

    assert loss.item() == 1000.0
