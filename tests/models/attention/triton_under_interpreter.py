"""Our Triton kernels under Triton's interpreter, run by `test_triton_backend.py` in a process of its own.

TRITON_INTERPRET must be set before triton is imported, and would change triton for every other test.
"""

import pytest
import torch

from rayrec.models.attention import reference, triton_backend
from rayrec.models.attention.call import Silu, Softmax
from rayrec.models.attention.masks import Causal
from tests.models.attention.calls import (
    CASES,
    SCORINGS,
    Case,
    SlidingWindow,
    assert_equal_results,
    make_call,
    results,
)

BACKEND, REFERENCE = triton_backend.BACKEND, reference.BACKEND


@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
@pytest.mark.parametrize("case", CASES)
def test_triton_equals_the_reference(case, scoring):
    assert_equal_results(BACKEND, REFERENCE, make_call(CASES[case], scoring), 1e-12)


@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
@pytest.mark.parametrize("case", ["causal, across", "window", "targets"])
def test_triton_equals_the_reference_with_a_bias(case, scoring):
    # The tables' gradients are sums in fixed point.
    assert_equal_results(BACKEND, REFERENCE, make_call(CASES[case], scoring, biased=True), 1e-10)


@pytest.mark.parametrize("make_mask", [Causal, lambda: SlidingWindow(20)], ids=["causal", "window"])
def test_triton_equals_the_reference_over_several_blocks(make_mask):
    call = make_call(Case(make_mask, (70, 3, 33)), biased=True, width=16, value_width=20)

    assert_equal_results(BACKEND, REFERENCE, call, 1e-10)


def test_triton_takes_float32_and_strided_inputs():
    call = make_call(CASES["causal"], dtype=torch.float32, width=6, value_width=6)
    together_N3HC = torch.stack([tensor.detach() for tensor in call.inputs], dim=1)
    strided = [tensor.requires_grad_() for tensor in together_N3HC.clone().unbind(1)]
    exact = call.with_inputs([tensor.detach().double().requires_grad_() for tensor in call.inputs])

    ours, theirs = results(BACKEND, call.with_inputs(strided)), results(REFERENCE, exact)

    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_tables_do_not_depend_on_the_order_of_the_blocks(monkeypatch):
    call = make_call(CASES["causal"], Silu(3.0), biased=True, dtype=torch.float32)
    before = results(BACKEND, call)
    again = make_call(CASES["causal"], Silu(3.0), biased=True, dtype=torch.float32)
    blocks = triton_backend._blocks

    def backwards(layout, size):
        made = blocks(layout, size)
        return triton_backend.Blocks(made.row_K.flip(0), made.start_K.flip(0))

    monkeypatch.setattr(triton_backend, "_blocks", backwards)

    for first, second in zip(before, results(BACKEND, again), strict=True):
        assert torch.equal(first, second)


def test_a_gradient_that_is_not_finite_stays_visible():
    call = make_call(CASES["causal, rows of one"], Softmax(), biased=True)

    out_NHE = BACKEND.attend(call)
    gradients = torch.autograd.grad(out_NHE, call.inputs, torch.full_like(out_NHE, torch.inf))

    assert all(not gradient.isfinite().all() for gradient in gradients[3:])
