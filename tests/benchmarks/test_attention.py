"""The benchmark of attention on a GPU, on the CPU instead."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention
from rayrec.models.attention import sdpa, triton_backend
from rayrec.models.attention.call import Silu, Softmax


@pytest.mark.parametrize(("scoring", "biased"), [(Softmax(), False), (Silu(20.0), False), (Silu(20.0), True)])
def test_a_case_of_attention_says_what_it_took(scoring, biased):
    batches = attention.Batches(4, 20, scoring, 2, 16, "cpu", torch.bfloat16, biased)
    backend = attention.BACKENDS["grouped" if scoring != Softmax() else "sdpa"]

    case = attention._gpu_case(backend, batches.call(), matrix_rate=1e12)

    assert case["tokens"] == batches.call().queries.num_tokens
    assert case["ms"] > 0
    assert case["ms_with_new_lengths"] > 0
    assert case["share_of_matrix_rate"] == pytest.approx(case["tflops"])


def test_a_case_that_a_backend_lacks_is_no_figure():
    call = attention.Batches(4, 20, Silu(20.0), 2, 16).call()
    with pytest.raises(ValueError, match="softmax"):
        attention._gpu_case(sdpa.BACKEND, call, 1e12)
    with pytest.raises(ValueError, match="CUDA"):
        attention._gpu_case(triton_backend.BACKEND, call, 1e12)


def test_without_a_gpu_each_backend_has_figures_or_says_why_not():
    found = attention.on_gpu(attention.CPU_CASES, "cpu")

    by_name = {case["what"]: case for case in found["cases"]}
    assert found["bf16_matrix_tflops"] > 0
    assert by_name["Softmax sdpa"]["ms"] > 0
    assert "CUDA" in by_name["Softmax triton"]["error"]
