"""A decoding step's attention: of many short continuations of a row to its one context and their own codes.

`attend` would need the keys of context and codes in one tensor, which would copy the context for every code.

The context's keys and values exist once per row, however many sequences grow from it: all queries of a row
meet them in one matrix product. Only the few codes of a sequence are its own.

    query of a sequence ──┬──► context of the row   [T]   shared by the W sequences
                          └──► its own codes        [d]   causal among themselves

Axes: B rows, T tokens of a context, W sequences of a row, d codes of a sequence so far, of which the newest Q
are asked for; H query heads, G key heads, R = H / G query heads of a key head, C channels of a head.

Source: grouped-query attention, Ainslie et al., arXiv:2305.13245; the split softmax is that of bifurcated
attention, Athiwaratkun et al., arXiv:2403.08845.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shared_context_attention(
    query_BHSC: Tensor,
    context_key_BGTC: Tensor,
    context_value_BGTC: Tensor,
    bias_B1T: Tensor,
    own_key_BWdGC: Tensor,
    own_value_BWdGC: Tensor,
    scale: float,
) -> Tensor:
    """One softmax over the context and the sequence's own codes.

    Args:
        query_BHSC: S = W * Q queries of a row, those of a sequence side by side.
        bias_B1T: added to the scores of the context: -inf where a row has no token, else 0.
        scale: factor of the inner products.

    Returns:
        [B, S, H, C] attended values.
    """
    num_rows, num_heads, num_queries, num_channels = query_BHSC.shape
    num_sequences, num_codes, num_key_heads = own_key_BWdGC.shape[1:4]
    num_new, group = num_queries // num_sequences, num_heads // num_key_heads
    length, num_products = context_key_BGTC.shape[2], num_rows * num_key_heads

    # Rows and key heads are one axis of the products; the queries of a sequence stand together in another.
    split = query_BHSC.transpose(1, 2).reshape(
        num_rows, num_sequences, num_new, num_key_heads, group, num_channels
    )
    query = split.permute(0, 3, 1, 2, 4, 5).reshape(num_products, -1, num_channels)
    # Of one row, and a key head for each of the query, the products are a view that lies otherwise.
    own_query = query.reshape(num_products * num_sequences, num_new * group, num_channels)
    own_key = own_key_BWdGC.permute(0, 3, 1, 4, 2).reshape(-1, num_channels, num_codes)
    own_value = own_value_BWdGC.permute(0, 3, 1, 2, 4).reshape(-1, num_codes, num_channels)

    bias = bias_B1T[:, None].expand(-1, num_key_heads, -1, -1).reshape(-1, 1, length)
    context_scores = torch.baddbmm(bias, query, context_key_BGTC.flatten(0, 1).transpose(1, 2), alpha=scale)
    own_scores = torch.bmm(own_query, own_key) * scale
    if num_new > 1:
        later = _later(num_new, num_codes, query.device).repeat_interleave(group, dim=0)
        own_scores = own_scores.masked_fill(later, -torch.inf)

    scores = torch.cat((context_scores, own_scores.view(num_products, -1, num_codes)), dim=2)
    weights = scores.softmax(dim=2, dtype=torch.float32).to(query.dtype)
    context_weights, own_weights = weights.split((length, num_codes), dim=2)
    attended = torch.bmm(context_weights, context_value_BGTC.flatten(0, 1))
    own_weights = own_weights.reshape(*own_query.shape[:2], num_codes)
    attended = attended + torch.bmm(own_weights, own_value).view_as(attended)
    split = attended.view(num_rows, num_key_heads, num_sequences, num_new, group, num_channels)
    return split.permute(0, 2, 3, 1, 4, 5).reshape(num_rows, num_queries, num_heads, num_channels)


def own_codes_attention(query_BWHC: Tensor, key_BWdHC: Tensor, value_BWdHC: Tensor) -> Tensor:
    """[B, W, H, C] what the newest code of each sequence sees of its codes alone, itself included.

    There are so few of them that plain products are as fast as any kernel.
    """
    scores_BWdH = (query_BWHC[:, :, None] * key_BWdHC).sum(4) * query_BWHC.shape[3] ** -0.5
    return (scores_BWdH.softmax(2)[..., None] * value_BWdHC).sum(2)


def _later(num_new: int, num_codes: int, device: torch.device) -> Tensor:
    """[Q, d] whether a code comes after the one that asks."""
    newest = torch.ones(num_new, num_codes, dtype=torch.bool, device=device)
    return newest.triu(diagonal=num_codes - num_new + 1)
