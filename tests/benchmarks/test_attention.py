"""Programs that measure on a GPU, as far as they go without one: that they run when there is one at last."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import attention
from rayrec.models.attention import sdpa, triton_backend
from rayrec.models.attention.call import Silu, Softmax
from rayrec.platform.checkout import CHECKOUT


def test_decoding_by_a_language_model_is_measured():
    """By its path, as it is run on a machine that has torch, numpy and transformers alone."""
    pytest.importorskip("transformers")
    command = [sys.executable, "benchmarks/decode_cuda.py", "--device", "cpu", "--small"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}

    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"context of {tokens} tokens, 256 beams, 3 codes" for tokens in (99, 498)
    ]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The processor in its place: clocks for its events, and no memory that could be asked about."""

    def seconds(work, repeats=1):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    monkeypatch.setattr(attention, "gpu_seconds", seconds)
    monkeypatch.setattr(attention, "_peak_mb", lambda backend, call: 0.0)


@pytest.mark.parametrize(("scoring", "biased"), [(Softmax(), False), (Silu(20.0), False), (Silu(20.0), True)])
def test_a_case_of_attention_says_what_it_took(as_on_a_gpu, scoring, biased):
    batches = attention.Batches(4, 20, scoring, 2, 16, "cpu", torch.bfloat16, biased)
    backend = attention.BACKENDS["grouped" if scoring != Softmax() else "sdpa"]

    case = attention._gpu_case(backend, batches.call(), matrix_rate=1e12)

    assert case["tokens"] == batches.call().queries.num_tokens
    assert case["ms"] > 0
    assert case["ms_with_new_lengths"] > 0
    assert case["share_of_matrix_rate"] == pytest.approx(case["tflops"])


def test_a_case_that_a_backend_lacks_is_no_figure(as_on_a_gpu):
    call = attention.Batches(4, 20, Silu(20.0), 2, 16).call()
    with pytest.raises(ValueError, match="softmax"):
        attention._gpu_case(sdpa.BACKEND, call, 1e12)
    with pytest.raises(ValueError, match="CUDA"):
        attention._gpu_case(triton_backend.BACKEND, call, 1e12)


def test_what_is_found_of_a_gpu_has_each_backend_or_why_not(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a processor")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(attention, "matrix_products_per_s", lambda: 1e12)
    batches = attention.Batches
    monkeypatch.setattr(
        attention,
        "Batches",
        lambda rows, longest, scoring, heads, width, device, *rest: batches(
            rows, longest, scoring, heads, width, "cpu", *rest
        ),
    )

    found = attention.on_gpu([(3, 12, 2, 16)])

    by_name = {case["what"]: case for case in found["cases"]}
    assert found["bf16_matrix_tflops"] == 1.0
    assert by_name["Softmax sdpa"]["ms"] > 0
    assert "CUDA" in by_name["Softmax triton"]["error"]
