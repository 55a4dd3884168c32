import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rayrec.models.attention import triton_backend
from rayrec.models.attention.masks import Causal
from tests.models.attention.calls import CASES, Case, SlidingWindow, TargetAware, make_call

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install '.[dev]'"
)


@pytest.mark.slow
@needs_triton
def test_the_kernels_equal_the_reference_under_the_interpreter():
    tests = "tests/models/attention/triton_under_interpreter.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environment = os.environ | {"TRITON_INTERPRET": "1"}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_for_a_gpu():
    """The interpreter takes more than the compiler does; this needs no GPU."""
    command = [sys.executable, "-m", "tests.models.attention.compile_triton"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_on_a_cpu_the_kernels_are_for_tests_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    assert "CUDA alone" in triton_backend.BACKEND.why_not(make_call(CASES["causal"]))


def test_whoever_sees_a_block_of_keys_is_among_those_it_is_said_to_be_seen_by():
    size = 4
    for make_mask in (Causal, lambda: SlidingWindow(3), lambda: TargetAware(torch.tensor([2, 0, 9, 0, 1]))):
        call = make_call(Case(make_mask, (5, 0, 30, 1, 13)))
        blocks = triton_backend._blocks(call.keys, size)
        from_K, to_K = triton_backend.seen_by(call.queries, call.keys, call.spans, blocks, size)
        dense_BTS = call.spans.dense(call.queries, call.keys)

        for row, start, first, stop in zip(blocks.row_K, blocks.start_K, from_K, to_K, strict=True):
            seen_T = dense_BTS[row, :, start : start + size].any(1)
            assert seen_T.nonzero().min() >= first
            assert seen_T.nonzero().max() < stop
            if make_mask is Causal:
                assert seen_T[first:stop].all()


def test_blocks_cover_every_token_once_long_rows_first():
    call = make_call(Case(Causal, (3, 9, 0, 1)))

    blocks = triton_backend._blocks(call.queries, 4)

    assert list(zip(blocks.row_K.tolist(), blocks.start_K.tolist(), strict=True)) == [
        (1, 0),
        (1, 4),
        (1, 8),
        (0, 0),
        (3, 0),
    ]


def test_sums_in_fixed_point_cannot_overflow():
    call = make_call(Case(Causal, (40, 7)), biased=True)
    launch = triton_backend._Launch(call, list(call.inputs[:3]), None, None)
    grad_NHE = 1e9 * torch.ones_like(call.value_MHE)

    units = launch.units(grad_NHE, call.value_MHE.detach())

    longest = grad_NHE.norm(dim=-1).max() * call.value_MHE.norm(dim=-1).max()
    assert 2**59 < 2 * longest * units * (40**2 + 7**2) < 2**62
    assert units.log2().frac().item() == 0.0
