"""Backends on a GPU, held to the reference in float64; skipped, with the reason, where there is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rayrec.models.attention import flex, reference, sdpa, triton_backend
from rayrec.models.attention.call import AttentionCall, Silu, Softmax
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Mask
from rayrec.platform.devices import why_missing
from tests.models.attention.calls import CASES, SCORINGS, make_call, results

MISSING = why_missing("cuda")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no attention on a GPU: {MISSING}")
BACKENDS = {backend.name: backend for backend in (triton_backend.BACKEND, flex.BACKEND, sdpa.BACKEND)}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Products of float32 are not rounded to TF32 here, sums are of up to forty numbers."""


def on_gpu(call: AttentionCall) -> AttentionCall:
    """The same call, layouts and masks included."""
    device = torch.device("cuda")

    def moved(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.detach().to(device).requires_grad_(value.requires_grad)

    queries = JaggedLayout.from_offsets(call.queries.offsets_B1, device)
    keys = queries if call.is_self else JaggedLayout.from_offsets(call.keys.offsets_B1, device)
    bias = call.bias and dataclasses.replace(
        call.bias, **{f.name: moved(getattr(call.bias, f.name)) for f in dataclasses.fields(call.bias)}
    )
    query, key, value = map(moved, (call.query_NHC, call.key_MHC, call.value_MHE))
    return AttentionCall(
        query, key, value, queries, keys, call.scoring, mask_on(call.mask, device), bias, call.scale
    )


def mask_on(mask: Mask, device: torch.device) -> Mask:
    """With the numbers that a mask may hold by row or token."""
    held = {}
    for field in dataclasses.fields(mask):
        value = getattr(mask, field.name)
        if torch.is_tensor(value):
            held[field.name] = value.to(device)
        elif isinstance(value, Mask):
            held[field.name] = mask_on(value, device)
    return dataclasses.replace(mask, **held)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BACKENDS)
def test_values_and_gradients_are_those_of_the_reference(name, case, scoring, biased, dtype):
    # Widths that all kernels take; heads of keys and values as wide as each other, as FlexAttention wants.
    call = on_gpu(make_call(CASES[case], scoring, biased, dtype, width=16, value_width=16))
    if (lacks := BACKENDS[name].why_not(call)) is not None:
        assert name != "triton", lacks
        assert biased or scoring != Softmax(), lacks
        pytest.skip(f"{name}: {lacks}")
    exact = call.with_inputs([tensor.detach().double().requires_grad_() for tensor in call.inputs])

    found = results(BACKENDS[name], call)

    tolerance = TOLERANCES[dtype]
    for ours, theirs in zip(found, results(reference.BACKEND, exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scoring", [Softmax(), Silu(20.0)], ids=["softmax", "silu"])
def test_triton_without_gradients_is_the_same(scoring):
    call = on_gpu(make_call(CASES["causal"], scoring, dtype=torch.float32, width=16, value_width=16))
    (expected, *_) = results(triton_backend.BACKEND, call)

    with torch.inference_mode():
        found = triton_backend.BACKEND.attend(call)

    assert torch.equal(found.double(), expected)
