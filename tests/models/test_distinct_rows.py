"""Rows of ids, and gradients of distinct rows, have the bits of torch's own embedding."""

import pytest
import torch
from torch.nn import functional

from rayrec.models.base import distinct_rows
from rayrec.models.base.distinct_rows import rows_of_ids


@pytest.mark.parametrize("shape", [(500,), (50, 10), (0,)])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_rows_and_gradients_have_the_bits_of_an_embedding(shape, dim):
    random = torch.Generator().manual_seed(0)
    inverse = torch.randint(0, 40, shape, generator=random)
    grads = torch.randn(*shape, dim, generator=random)
    ours = torch.randn(45, dim, generator=random).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()

    found, expected = rows_of_ids(ours, inverse), functional.embedding(inverse, theirs)
    found.backward(grads)
    expected.backward(grads)

    assert torch.equal(found, expected)
    assert ours.grad.numpy().tobytes() == theirs.grad.numpy().tobytes()


def test_a_gradient_that_is_one_number_for_all_adds_up():
    rows_MD, inverse_N = torch.ones(2, 3, requires_grad=True), torch.tensor([1, 1, 0, 1])

    rows_of_ids(rows_MD, inverse_N).sum().backward()

    assert rows_MD.grad.tolist() == [[1.0] * 3, [3.0] * 3]


def test_a_second_use_of_rows_adds_to_the_first():
    rows_MD = torch.ones(2, 3, requires_grad=True)

    (
        rows_of_ids(rows_MD, torch.tensor([0])).sum() + 2 * rows_of_ids(rows_MD, torch.tensor([0, 1])).sum()
    ).backward()

    assert rows_MD.grad.tolist() == [[3.0] * 3, [2.0] * 3]


def test_without_a_compiler_torch_adds_the_gradients(monkeypatch):
    monkeypatch.setattr(distinct_rows, "_sum_by_inverse", lambda: None)
    rows_MD = torch.ones(2, 3, requires_grad=True)

    rows_of_ids(rows_MD, torch.tensor([1, 1])).sum().backward()

    assert rows_MD.grad.tolist() == [[0.0] * 3, [2.0] * 3]
