"""PyTorch's scaled_dot_product_attention on padded rows.

Axes as in `rayrec.models.attention.call`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.call import AttentionCall, Backend, Softmax
from rayrec.models.attention.masks import Causal, Full


def attend(call: AttentionCall) -> Tensor:
    query, key, value = call.padded()
    if isinstance(call.mask, Causal) and call.is_self and call.bias is None:
        # Rows are padded on the right, so the causal mask alone keeps padding out of every token's sight.
        out_BHTE = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=call.scale
        )
        return call.queries.unpad(out_BHTE.transpose(1, 2))
    if isinstance(call.mask, Full) and call.keys.is_even and call.bias is None:
        out_BHTE = functional.scaled_dot_product_attention(query, key, value, scale=call.scale)
        return call.queries.unpad(out_BHTE.transpose(1, 2))
    seen_BTS = call.spans.dense(call.queries, call.keys)
    blind_BT = ~seen_BTS.any(-1)
    # A softmax over nothing is NaN in some of the kernels: who sees nothing gets the first key for now.
    seen_BTS[..., 0] |= blind_BT
    mask = seen_BTS[:, None]
    if call.bias is not None:
        bias_BHTS = call.bias.dense(call.queries, call.keys).to(query.dtype)
        mask = bias_BHTS.masked_fill(~mask, torch.finfo(query.dtype).min)
    out_BHTE = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scale)
    out_BHTE = out_BHTE.masked_fill(blind_BT[:, None, :, None], 0.0)
    return call.queries.unpad(out_BHTE.transpose(1, 2))


def why_not(call: AttentionCall) -> str | None:
    return None if isinstance(call.scoring, Softmax) else "it has no scoring but the softmax"


BACKEND = Backend("sdpa", why_not, attend)
