"""A transformer decoder over the few codes of an ID, which looks at a long context through cross-attention.

Its sequences are short (a start token and the codes so far) and there are many of them per row: targets in
training, beams while decoding. The context's keys and values are made once per row and layer and shared.

    token d of a sequence ─► attends to the context ─► to tokens 0..d of its sequence ─► feed-forward
    token d                ─► logits of code d

Axes: B rows, M context tokens of all rows, S sequences (of each row W, where rows have equally many),
L code levels, that is tokens of a sequence, K codes of a level, D width, H heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Full
from rayrec.models.attention.uni_attention import attend
from rayrec.models.backbones.transformer import INITIAL_STD
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.keyed_random import KeyedDropout

FULL = Full()

Look = Callable[[int, Tensor], Tensor]
"""`look(layer, query_SLHC)`: [S, L, H, C] what each token sees of its row's context."""


@dataclass(frozen=True)
class ContextKeys:
    """What all sequences of a row attend to."""

    layout: JaggedLayout
    start_BD: Tensor
    """First token of each row's sequences."""
    layers: tuple[tuple[Tensor, Tensor], ...]
    """Per layer ([M, H, C] keys, [M, H, C] values)."""
    choice: Choice
    """Who computes the attention."""

    def __len__(self) -> int:
        return self.layout.num_rows

    def some_rows(self, rows: slice) -> ContextKeys:
        layout, tokens = self.layout.some_rows(rows)
        layers = tuple((keys[tokens], values[tokens]) for keys, values in self.layers)
        return ContextKeys(layout, self.start_BD[rows], layers, self.choice)

    def look(self, layer: int, query_SLHC: Tensor) -> Tensor:
        """At all of a row's context, for equally many sequences of each row; see `Look`."""
        query_NHC, num_rows = query_SLHC.flatten(0, 1), len(self)
        length = len(query_NHC) // max(num_rows, 1)
        queries = self.layout.derived(
            ("queries", length), lambda: JaggedLayout.even(num_rows, length, query_NHC.device)
        )
        keys, values = self.layers[layer]
        seen_NHC = attend(query_NHC, keys, values, queries, self.layout, mask=FULL, choice=self.choice)
        return seen_NHC.view_as(query_SLHC)


class CrossDecoderLayer(nn.Module):
    """Pre-norm cross-attention, self-attention and feed-forward, each added to its input."""

    def __init__(
        self, dim: int, num_heads: int, feedforward_dim: int, dropout: float, index: int, choice: Choice
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.choice = choice
        self.cross_norm = nn.LayerNorm(dim)
        self.cross_query = nn.Linear(dim, dim, bias=False)
        self.context_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.cross_out = nn.Linear(dim, dim)
        self.self_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.self_out = nn.Linear(dim, dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, feedforward_dim)
        self.down = nn.Linear(feedforward_dim, dim)
        self.dropouts = nn.ModuleList(KeyedDropout(dropout, index + part) for part in range(4))

    def context_keys(self, context_MD: Tensor) -> tuple[Tensor, Tensor]:
        """([M, H, C], [M, H, C]) keys and values."""
        keys, values = self.context_kv(context_MD).unflatten(1, (2, self.num_heads, -1)).unbind(1)
        return keys, values

    def across(self, x_SLD: Tensor, layer: int, look: Look, dropout: _Dropout) -> Tensor:
        query_SLD = self.cross_query(self.cross_norm(x_SLD))
        seen_SLHC = look(layer, query_SLD.unflatten(2, (self.num_heads, -1)))
        return x_SLD + dropout(self.dropouts[0], self.cross_out(seen_SLHC.flatten(2)))

    def along(self, x_SLD: Tensor, sequences: JaggedLayout, dropout: _Dropout) -> Tensor:
        """Whole sequences: each token sees those before it."""
        qkv_N3HC = self.qkv(self.self_norm(x_SLD)).flatten(0, 1).unflatten(1, (3, self.num_heads, -1))
        query_NHC, key_NHC, value_NHC = qkv_N3HC.unbind(1)
        seen_NHC = attend(query_NHC, key_NHC, value_NHC, sequences, choice=self.choice)
        return x_SLD + dropout(self.dropouts[1], self.self_out(seen_NHC.flatten(1).view_as(x_SLD)))

    def along_cached(self, x_BWD: Tensor, layer: int, cache: BeamCache) -> Tensor:
        """The newest token of each sequence, which sees those in the cache."""
        qkv_BW3HC = self.qkv(self.self_norm(x_BWD)).unflatten(2, (3, self.num_heads, -1))
        query_BWHC, key_BWHC, value_BWHC = qkv_BW3HC.unbind(2)
        seen_BWHC = cache.attend(layer, query_BWHC, key_BWHC, value_BWHC)
        return x_BWD + self.self_out(seen_BWHC.flatten(2))

    def feedforward(self, x: Tensor, dropout: _Dropout) -> Tensor:
        hidden = dropout(self.dropouts[2], functional.gelu(self.up(self.feedforward_norm(x))))
        return x + dropout(self.dropouts[3], self.down(hidden))


class _Dropout:
    """Applies a keyed dropout to tensors of any shape [..., D]; without keys it does nothing."""

    def __init__(self, keys: Tensor | None) -> None:
        self._keys = keys

    def __call__(self, dropout: nn.Module, x: Tensor) -> Tensor:
        if self._keys is None:
            return x
        dropped: Tensor = dropout(x.flatten(0, -2), self._keys.flatten())
        return dropped.view_as(x)


class CrossDecoder(nn.Module):
    """Tokens of codes in, logits of codes out; a level's code vectors are tied between the two."""

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        feedforward_dim: int,
        level_sizes: Sequence[int],
        dropout: float,
        choice: Choice = AUTO,
    ) -> None:
        """
        Args:
            choice: who computes the attention; weights do not depend on it.
        """
        super().__init__()
        self.choice = choice
        self.codes_KD = nn.ParameterList(nn.Parameter(torch.empty(size, dim)) for size in level_sizes)
        self.levels_LD = nn.Parameter(torch.empty(len(level_sizes), dim))
        self.input_dropout = KeyedDropout(dropout, 0)
        self.layers = nn.ModuleList(
            CrossDecoderLayer(dim, num_heads, feedforward_dim, dropout, 1 + 4 * layer, choice)
            for layer in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(dim)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def num_dropouts(self) -> int:
        """Indices taken by the dropouts in here."""
        return 1 + 4 * len(self.layers)

    @property
    def _layers(self) -> list[CrossDecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]  # a ModuleList forgets what its modules are

    def context_keys(self, context_MD: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of every layer, of the context tokens of all rows."""
        return tuple(layer.context_keys(context_MD) for layer in self._layers)

    def forward(
        self, start_SD: Tensor, codes_SL: Tensor, look: Look, dropout_keys_SL: Tensor | None = None
    ) -> list[Tensor]:
        """Known sequences, all tokens at once.

        Args:
            start_SD: first token of each sequence.
            codes_SL: its codes; the last one is not read.
            dropout_keys_SL: only while training.

        Returns:
            Per level [S, K] logits.
        """
        num_levels = codes_SL.shape[1]
        tokens = [start_SD, *(self.embed(d, codes_SL[:, d]) for d in range(num_levels - 1))]
        dropout = _Dropout(dropout_keys_SL)
        x_SLD = dropout(self.input_dropout, torch.stack(tokens, dim=1) + self.levels_LD)
        sequences = JaggedLayout.even(len(codes_SL), num_levels, codes_SL.device)
        for index, layer in enumerate(self._layers):
            x_SLD = layer.along(layer.across(x_SLD, index, look, dropout), sequences, dropout)
            x_SLD = layer.feedforward(x_SLD, dropout)
        return [self.logits(d, x_SLD[:, d]) for d in range(num_levels)]

    def step(self, context: ContextKeys, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        """[B, W, K] logits of the next code of each sequence; the tokens before are in the cache."""
        if depth == 0:
            token_BWD = context.start_BD[:, None].expand(-1, codes_BWd.shape[1], -1)
        else:
            token_BWD = self.embed(depth - 1, codes_BWd[:, :, depth - 1])
        x_BWD, none = token_BWD + self.levels_LD[depth], _Dropout(None)
        for index, layer in enumerate(self._layers):
            x_BWD = layer.across(x_BWD, index, context.look, none)
            x_BWD = layer.feedforward(layer.along_cached(x_BWD, index, cache), none)
        return self.logits(depth, x_BWD)

    def sequence_logits(self, context: ContextKeys, codes_BWL: Tensor) -> list[Tensor]:
        """Per level [B, W, K] logits of known sequences."""
        num_rows, num_sequences, _ = codes_BWL.shape
        start_SD = context.start_BD.repeat_interleave(num_sequences, dim=0)
        logits = self(start_SD, codes_BWL.flatten(0, 1), context.look)
        return [logits_SK.view(num_rows, num_sequences, -1) for logits_SK in logits]

    def embed(self, level: int, codes: Tensor) -> Tensor:
        """[..., D] vectors of codes [...] of a level."""
        return functional.embedding(codes, self.codes_KD[level])

    def logits(self, level: int, x: Tensor) -> Tensor:
        """[..., D] tokens to [..., K]."""
        logits: Tensor = self.final_norm(x) @ self.codes_KD[level].T
        return logits
