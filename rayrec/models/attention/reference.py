"""What attention is: padded, all scores in memory, nothing fused. The other backends are held to it.

Axes as in `rayrec.models.attention.call`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.call import HIDDEN, AttentionCall, Backend, Softmax
from rayrec.platform.devices import without_autocast


def attend(call: AttentionCall) -> Tensor:
    with without_autocast(call.query_NHC.device):
        return _attend(call)


def _attend(call: AttentionCall) -> Tensor:
    value_BSHE = call.keys.pad(call.value_MHE)
    # Scores and weights at least in float32, as bias tables are whatever the others come in.
    exact = torch.promote_types(call.query_NHC.dtype, torch.float32)
    query_BTHC, key_BSHC = call.queries.pad(call.query_NHC).to(exact), call.keys.pad(call.key_MHC).to(exact)
    scores_BHTS = call.scale * torch.einsum("bthc,bshc->bhts", query_BTHC, key_BSHC)
    if call.bias is not None:
        scores_BHTS = scores_BHTS + call.bias.dense(call.queries, call.keys)
    hidden_B1TS = ~call.spans.dense(call.queries, call.keys)[:, None]
    if isinstance(call.scoring, Softmax):
        weights_BHTS = functional.softmax(scores_BHTS.masked_fill(hidden_B1TS, HIDDEN), dim=-1)
    else:
        weights_BHTS = functional.silu(scores_BHTS) / call.scoring.length
    weights_BHTS = weights_BHTS.masked_fill(hidden_B1TS, 0.0)
    out_BTHE = torch.einsum("bhts,bshe->bthe", weights_BHTS.to(value_BSHE.dtype), value_BSHE)
    return call.queries.unpad(out_BTHE)


BACKEND = Backend("reference", lambda call: None, attend)
