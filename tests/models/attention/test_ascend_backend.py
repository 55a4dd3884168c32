"""What the fused kernel of Ascend NPUs is called with; the kernel itself is not here to be run."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from rayrec.models.attention import ascend
from rayrec.models.attention.call import Silu
from rayrec.models.attention.masks import Causal, Full
from tests.models.attention.calls import CASES, Case, make_call


@pytest.fixture
def kernel(monkeypatch):
    """Stands in for torch_npu.npu_fusion_attention; its first output is the attention."""
    fake = Mock(side_effect=lambda query, key, value, **options: (query + 1, "maxima", "sums"))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fusion_attention=fake))
    return fake


def on_npu(call):
    """The call as it would look there: tensors of another device cannot be made here."""
    device = SimpleNamespace(type="npu")
    query = SimpleNamespace(device=device, dtype=torch.bfloat16, shape=call.query_NHC.shape)
    return SimpleNamespace(**{**vars(call), "query_NHC": query})


def call_of(make_mask, lengths=(3, 0, 2), key_lengths=None, **options):
    return make_call(Case(make_mask, lengths, key_lengths), value_width=5, **options)


def test_causal_attention_is_jagged_with_cumulative_lengths(kernel):
    call = call_of(Causal, key_lengths=(4, 1, 2))

    out_NHC = ascend.BACKEND.attend(call)

    assert torch.equal(out_NHC, call.query_NHC + 1)
    options = kernel.call_args.kwargs
    hidden = options.pop("atten_mask")
    assert options == {
        "head_num": 2,
        "input_layout": "TND",
        "scale": call.scale,
        "actual_seq_qlen": [3, 3, 5],
        "actual_seq_kvlen": [4, 5, 7],
        "sparse_mode": 3,
    }
    assert hidden.shape == (2048, 2048)
    assert hidden[:3, :3].tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_full_attention_has_no_mask(kernel):
    ascend.BACKEND.attend(call_of(Full))

    assert kernel.call_args.kwargs["sparse_mode"] == 0
    assert "atten_mask" not in kernel.call_args.kwargs


def test_the_kernel_is_for_npus_and_for_what_it_has():
    assert ascend.BACKEND.why_not(on_npu(call_of(Causal))) is None
    assert "NPUs alone" in ascend.BACKEND.why_not(call_of(Causal))
    assert "softmax" in ascend.BACKEND.why_not(on_npu(call_of(Causal, scoring=Silu(1.0))))
    assert "bias" in ascend.BACKEND.why_not(on_npu(call_of(Causal, biased=True)))
    assert "TargetAware" in ascend.BACKEND.why_not(on_npu(make_call(CASES["targets"])))
    assert "one width" in ascend.BACKEND.why_not(on_npu(make_call(CASES["causal"])))
    assert "more than the keys" in ascend.BACKEND.why_not(on_npu(call_of(Full, (2,), (1,))))
    assert "rows" in ascend.BACKEND.why_not(on_npu(call_of(Causal, (1,) * 1025)))
