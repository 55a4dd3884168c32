"""UniAttention: the one call for every attention in the project.

    attend(query, key, value, layout)                                     a causal transformer
    attend(..., scoring=Silu(max_length), bias=RelativeBias(...))         HSTU
    attend(..., mask=TargetAware(num_targets))                            ranking candidates
    attend(..., key_layout=contexts, mask=SharedContextBeams(1, codes))   a step of beam search

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
        key: [M, H, C] or [B, S, H, C], as the query.
        value: [M, H, E] or [B, S, H, E].
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
    call = AttentionCall(
        _tokens("query", query, layout),
        _tokens("key", key, keys),
        _tokens("value", value, keys),
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


def _slots(layout: JaggedLayout, length: int) -> Tensor:
    return layout.row_N * length + layout.place_N


def _check(call: AttentionCall) -> None:
    query, key, value = call.query_NHC, call.key_MHC, call.value_MHE
    if call.queries.num_rows != call.keys.num_rows:
        raise ValueError(
            f"queries have {call.queries.num_rows} rows and keys {call.keys.num_rows}: row b of the queries "
            "looks at row b of the keys"
        )
    if query.shape[1:] != key.shape[1:] or key.shape[1] != value.shape[1]:
        raise ValueError(
            "query and key must agree in heads and width, value in heads; got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
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
