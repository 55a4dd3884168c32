"""UniAttention: the one call for every attention in the project, but for the steps of a decoder, whose keys
lie in two places (`rayrec.models.attention.shared_context`).

    attend(query, key, value, layout)                                     a causal transformer
    attend(..., scoring=Silu(max_length), bias=RelativeBias(...))         HSTU
    attend(..., mask=CausalGroups(num_levels))                            several codes after each event
    attend(..., key_layout=contexts, mask=Full())                         a decoder on a context

What is computed is said by data: layouts, a mask, a bias, a scoring. Who computes it is said by a choice
(`rayrec.models.attention.choice`); all backends compute the same up to rounding.

Axes as in `rayrec.models.attention.call`.
"""

from __future__ import annotations

from torch import Tensor

from rayrec.models.attention.bias import RelativeBias
from rayrec.models.attention.call import AttentionCall, Scoring, Softmax
from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.counting import stand_in
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Causal, Mask

CAUSAL = Causal()
SOFTMAX = Softmax()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: JaggedLayout,
    key_layout: JaggedLayout | None = None,
    *,
    scoring: Scoring = SOFTMAX,
    mask: Mask = CAUSAL,
    bias: RelativeBias | None = None,
    scale: float | None = None,
    choice: Choice = AUTO,
) -> Tensor:
    """Attention of each row's queries to its keys.

    Args:
        query: [N, H, C], the tokens of all rows one after the other; or padded, [B, T, H, C].
        key: [M, G, C] or [B, S, G, C], as the query; of G heads, of which H is a multiple, and each is there
            for H / G neighboring heads of the query (Ainslie et al., arXiv:2305.13245).
        value: [M, G, E] or [B, S, G, E].
        layout: rows of the queries, and of the keys where `key_layout` is None.
        key_layout: rows of the keys, as many as the queries have; theirs may have other lengths.
        scale: factor of query . key; None is 1 / sqrt(C).
        choice: who computes it.

    Returns:
        [N, H, E], or [B, T, H, E] with zeros in the padding where the query was padded.

    Raises:
        ValueError: shapes or mask do not fit the layouts, or the choice names a backend which cannot
            compute this.
    """
    keys = layout if key_layout is None else key_layout
    query_NHC = _tokens("query", query, layout)
    call = AttentionCall(
        query_NHC,
        *_for_heads(query_NHC, _tokens("key", key, keys), _tokens("value", value, keys)),
        layout,
        keys,
        scoring,
        mask,
        bias,
        query.shape[-1] ** -0.5 if scale is None else scale,
    )
    _check(call)
    if layout.num_tokens and keys.num_tokens:
        out_NHE = (stand_in() or choice(call).attend)(call)
    else:
        zero = sum(tensor.sum() * 0 for tensor in call.inputs)  # keeps the graph: gradients are zeros then
        out_NHE = query.new_zeros(layout.num_tokens, query.shape[-2], value.shape[-1]) + zero
    if query.ndim == 3:
        return out_NHE
    padded = out_NHE.new_zeros(query.shape[0] * query.shape[1], *out_NHE.shape[1:])
    padded = padded.index_copy(0, _slots(layout, query.shape[1]), out_NHE)
    return padded.view(*query.shape[:2], *out_NHE.shape[1:])


def _tokens(name: str, x: Tensor, layout: JaggedLayout) -> Tensor:
    """[N, H, C] of jagged or padded values."""
    if x.ndim == 3 and len(x) == layout.num_tokens:
        return x
    if x.ndim == 4 and len(x) == layout.num_rows and x.shape[1] >= layout.longest:
        return x.flatten(0, 1).index_select(0, _slots(layout, x.shape[1]))
    raise ValueError(
        f"{name} must be jagged, [{layout.num_tokens}, heads, width], or padded, [{layout.num_rows}, "
        f"{layout.longest} or more, heads, width], to fit its layout; got {tuple(x.shape)}"
    )


def _for_heads(query_NHC: Tensor, key_MGC: Tensor, value_MGE: Tensor) -> tuple[Tensor, Tensor]:
    """([M, H, C], [M, H, E]) each head once for every head of the query that it is there for."""
    (num_heads, width), num_key_heads = query_NHC.shape[1:], key_MGC.shape[1]
    if key_MGC.shape[2] != width or value_MGE.shape[1] != num_key_heads or num_heads % num_key_heads:
        raise ValueError(
            "query and key must agree in width, key and value in heads, and the query's heads be a multiple "
            f"of those; got {tuple(query_NHC.shape)}, {tuple(key_MGC.shape)} and {tuple(value_MGE.shape)}"
        )
    times = num_heads // num_key_heads
    if times == 1:
        return key_MGC, value_MGE
    return key_MGC.repeat_interleave(times, dim=1), value_MGE.repeat_interleave(times, dim=1)


def _slots(layout: JaggedLayout, length: int) -> Tensor:
    return layout.row_N * length + layout.place_N


def _check(call: AttentionCall) -> None:
    query, key, value = call.query_NHC, call.key_MHC, call.value_MHE
    if call.queries.num_rows != call.keys.num_rows:
        raise ValueError(
            f"queries have {call.queries.num_rows} rows and keys {call.keys.num_rows}: row b of the queries "
            "looks at row b of the keys"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    if call.bias is None:
        return
    for table_HK in call.bias.tables:
        if len(table_HK) != query.shape[1]:
            raise ValueError(
                f"bias tables must have {query.shape[1]} heads, got shape {tuple(table_HK.shape)}"
            )
    for name, times, layout in (
        ("query_time_N", call.bias.query_time_N, call.queries),
        ("key_time_M", call.bias.key_time_M, call.keys),
    ):
        if times is not None and times.shape != (layout.num_tokens,):
            raise ValueError(
                f"RelativeBias.{name} must have {layout.num_tokens} times, got {tuple(times.shape)}"
            )
