"""Attention on Ascend NPUs: their fused kernel for jagged rows.

`torch_npu` is imported when a tensor on an NPU is attended over, and not before: without its driver it
breaks `import torch`.

Axes as in `rayrec.models.attention.call`.

Source: torch_npu.npu_fusion_attention in the Ascend extension for PyTorch: layout TND, cumulative lengths,
sparse modes 3 (causal, aligned at the end) and 4 (band), which take the upper triangle of a 2048 x 2048 mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayrec.models.attention.call import AttentionCall, Backend, Softmax
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Causal, Full
from rayrec.platform.devices import ascend_fusion_attention, device_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROWS = 1024
"""Lengths that the kernel takes in one call of layout TND."""
TRIANGLE = 2048


def attend(call: AttentionCall) -> Tensor:
    out = ascend_fusion_attention()(
        call.query_NHC.contiguous(),
        call.key_MHC.contiguous(),
        call.value_MHE.contiguous(),
        head_num=call.query_NHC.shape[1],
        input_layout="TND",
        scale=call.scale,
        actual_seq_qlen=_ends(call.queries),
        actual_seq_kvlen=_ends(call.keys),
        **_sparsity(call),
    )
    return out[0]


def why_not(call: AttentionCall) -> str | None:
    query, value = call.query_NHC, call.value_MHE
    if "ascend" not in device_of(query.device).attention_backends:
        return "it is for NPUs alone"
    if not isinstance(call.scoring, Softmax):
        return "it has no scoring but the softmax"
    if call.bias is not None:
        return "it has no relative bias"
    if not isinstance(call.mask, (Causal, Full)):
        return f"it has no {call.mask.kind} mask"
    if query.dtype not in DTYPES:
        return f"it has no {query.dtype}"
    if query.shape[2] != value.shape[2]:
        return "its keys and values must have one width"
    if call.queries.num_rows > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows"
    if (call.queries.lengths_B > call.keys.lengths_B).any():
        return "its queries must not be more than the keys of their row"
    return None


def _ends(layout: JaggedLayout) -> list[int]:
    return layout.offsets_B1[1:].tolist()


def _sparsity(call: AttentionCall) -> dict[str, Any]:
    if isinstance(call.mask, Full):
        return {"sparse_mode": 0}
    hidden = call.queries.derived("triangle", lambda: _triangle(call.queries.device))
    return {"sparse_mode": 3, "atten_mask": hidden}


def _triangle(device: torch.device) -> Tensor:
    """True where a pair is hidden."""
    return torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device).triu(1)


BACKEND = Backend("ascend", why_not, attend)
