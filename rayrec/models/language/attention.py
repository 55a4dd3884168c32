"""How a network of the package `transformers` is made to attend as RayRec wants it to.

Its layers ask `transformers.AttentionInterface` for the attention function that their configuration names,
and hand on to it what the forward pass was given. Ours is registered there; what it does with queries, keys
and values of a layer is up to the `Attending` of the forward pass:

    PackedRows        histories one after the other in one long row: causal attention within each of them,
                      of all their tokens, or of those behind what was read before
    Continuations     new codes of beams or samples, which share the context of their row

Nothing of a network's own cache or masks takes part. Positions are given to the forward pass, so that
rotary (or learned) positions are right in both cases.

Axes: N tokens that are read, M tokens of whole rows, B rows, T tokens of the longest row, W sequences of a
row, S new codes of a row's sequences, d codes of a sequence; H query heads, G key heads, C channels of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.past import Grown
from rayrec.models.attention.shared_context import shared_context_attention
from rayrec.models.attention.uni_attention import attend
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.platform.errors import InputError

ATTENTION = "rayrec"
"""Name of our attention function among those of `transformers`."""


class Attending(Protocol):
    """What the attention of one forward pass is."""

    num_tokens: int
    """Tokens that the newest query may see, itself included."""
    token_keys_N: Tensor | None
    """Of dropout in the layers; None: there is none."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[batch, query, H, C] attended values, of [batch, heads, query, C] each."""


class PackedRows:
    """Causal attention within rows that stand one after the other; [1, H, N, C] queries."""

    def __init__(
        self,
        layout: JaggedLayout,
        choice: Choice = AUTO,
        keep: bool = False,
        grown: Grown | None = None,
        token_keys_N: Tensor | None = None,
    ) -> None:
        """
        Args:
            layout: of the tokens that are read.
            choice: who computes it.
            keep: whether keys and values of the layers will be asked for.
            grown: what they stand behind; None: rows begin with them.
            token_keys_N: of the tokens, for dropout in the layers; None: there is none.
        """
        self._layout, self._grown = layout, grown
        self._whole = layout if grown is None else grown.layout
        self.num_tokens = self._whole.longest
        self.token_keys_N = token_keys_N
        self._choice = choice
        self._keep = keep
        self.keys: dict[int, Tensor] = {}
        """By layer [B, G, T, C], zeros after the end of a row."""
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query_NHC, key_MGC, value_MGC = (packed[0].transpose(0, 1) for packed in (query, key, value))
        if self._grown is not None:
            key_MGC, value_MGC = self._grown.grow(key_MGC, value_MGC)
        if self._keep:
            self.keys[layer], self.values[layer] = self._padded(key_MGC), self._padded(value_MGC)
        return attend(
            query_NHC, key_MGC, value_MGC, self._layout, self._whole, scale=scale, choice=self._choice
        )[None]

    def _padded(self, packed_MGC: Tensor) -> Tensor:
        """[B, G, T, C], each head's tokens neighbors, as all later products want them."""
        if self._whole.num_rows == 1:
            return packed_MGC.transpose(0, 1)[None].contiguous()
        return self._whole.pad(packed_MGC).transpose(1, 2).contiguous()


class Continuations:
    """Attention of the newest codes of W sequences to their row's context and to their own codes.

    [B, H, S, C] queries: of the newest code of each sequence, with a cache of those before it; or, without
    one, of all their codes at once.
    """

    def __init__(
        self,
        keys: Mapping[int, Tensor],
        values: Mapping[int, Tensor],
        bias_B1T: Tensor,
        num_sequences: int,
        num_codes: int,
        cache: BeamCache | None,
    ) -> None:
        """
        Args:
            keys, values: [B, G, T, C] by layer.
            bias_B1T: -inf where a row has no token, else 0.
            num_codes: d, of each sequence, the new ones included.
        """
        self.num_tokens = bias_B1T.shape[2] + num_codes
        self.token_keys_N: Tensor | None = None
        self._keys, self._values, self._bias_B1T = keys, values, bias_B1T
        self._num_sequences = num_sequences
        self._cache = cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        own_key, own_value = key.transpose(1, 2), value.transpose(1, 2)
        if self._cache is None:
            # [B, S, G, C] to [B, W, d, G, C]
            own_key = own_key.unflatten(1, (self._num_sequences, -1))
            own_value = own_value.unflatten(1, (self._num_sequences, -1))
        else:
            own_key, own_value = self._cache.append(layer, own_key[:, :, None], own_value[:, :, None])
        return shared_context_attention(
            query, self._keys[layer], self._values[layer], self._bias_B1T, own_key, own_value, scale
        )


def register() -> None:
    """Make our attention known to `transformers`; again is the same as once."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attending: Attending | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `transformers` calls it. Its dropout is off: see `layer_dropout`."""
    if attending is None:
        raise InputError(
            f"{type(module).__name__} does not hand on to its attention what the forward pass was given; "
            "networks of this kind cannot read packed rows"
        )
    if sliding_window is not None and attending.num_tokens > sliding_window:
        raise InputError(
            f"a layer of the network sees {sliding_window} tokens, and a history has "
            f"{attending.num_tokens}: lower model.backbone.max_length or widen sliding_window"
        )
    if softcap is not None:
        raise InputError(f"{type(module).__name__} caps its attention scores, which ours does not")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    # Rotary positions widen what autocast has made narrow; fused kernels take one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return attending(module.layer_idx, query, key, value, scale), None
