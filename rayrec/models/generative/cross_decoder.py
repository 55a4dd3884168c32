"""A transformer decoder over the few codes of an ID, which looks at a long context through cross-attention.

Its sequences are short (a start token and the codes so far) and there are many of them per row: targets in
training, beams while decoding. The context's keys and values are made once per row and layer and shared.

    token d of a sequence ─► attends to the context ─► to tokens 0..d of its sequence ─► feed-forward
    token d                ─► logits of code d

Before the start token there may be a prefix, an instruction (`instruction.py`): it is read like the other
tokens, and nothing is predicted at it. The feed-forward may be a mixture of experts (`experts.py`).

Axes: B rows, M context tokens of all rows, S sequences (of each row W, where rows have equally many),
L code levels, P tokens of a prefix, Q = P + L tokens of a sequence, K codes of a level, D width, H heads,
C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Full
from rayrec.models.attention.shared_context import own_codes_attention
from rayrec.models.attention.uni_attention import attend
from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.base.tensor_plan import INPUTS, Part, TensorPlan, outputs
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.experts import Experts, ExpertSettings, Gates
from rayrec.models.sequence.backbones.transformer import INITIAL_STD
from rayrec.platform.arrays import Int64Array

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
    prefix_BPD: Tensor | None = None
    """Tokens before the first one, if there are any."""
    queries: JaggedLayout | None = None
    """Sequences of each row, which all ask in one; None: rows have equally many."""

    def __len__(self) -> int:
        return self.layout.num_rows

    def some_rows(self, rows: slice) -> ContextKeys:
        layout, tokens = self.layout.some_rows(rows)
        layers = tuple((keys[tokens], values[tokens]) for keys, values in self.layers)
        prefix_BPD = None if self.prefix_BPD is None else self.prefix_BPD[rows]
        return ContextKeys(layout, self.start_BD[rows], layers, self.choice, prefix_BPD)

    def asked_by(self, counts_B: Int64Array) -> ContextKeys:
        """The same, looked at by so many sequences of each row, one token each, one after the other."""
        offsets_B1 = np.concatenate([[0], np.cumsum(counts_B)])
        return replace(self, queries=JaggedLayout.from_offsets(offsets_B1, self.start_BD.device))

    def look(self, layer: int, query_SLHC: Tensor) -> Tensor:
        """At all of a row's context; see `Look`."""
        query_NHC, num_rows, queries = query_SLHC.flatten(0, 1), len(self), self.queries
        if queries is None:
            length = len(query_NHC) // max(num_rows, 1)
            queries = self.layout.derived(
                ("queries", length), lambda: JaggedLayout.even(num_rows, length, query_NHC.device)
            )
        keys, values = self.layers[layer]
        seen_NHC = attend(query_NHC, keys, values, queries, self.layout, mask=FULL, choice=self.choice)
        return seen_NHC.view_as(query_SLHC)


class CrossDecoderLayer(nn.Module):
    """Pre-norm cross-attention, self-attention and feed-forward, each added to its input."""

    compiled_methods = ("queries", "after_looking", "heads", "after_attention")
    sharded_methods = ("context_keys", "begin", "step")
    norm_readers = (
        ("cross_norm", ("cross_query",)),
        ("self_norm", ("qkv",)),
        ("feedforward_norm", ("up",)),
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        feedforward_dim: int,
        dropout: float,
        index: int,
        choice: Choice,
        experts: ExpertSettings | None = None,
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
        if experts is None:
            self.up = nn.Linear(dim, feedforward_dim)
            self.down = nn.Linear(feedforward_dim, dim)
        else:
            self.experts = Experts(dim, feedforward_dim, experts)
        self.dropouts = nn.ModuleList(KeyedDropout(dropout, index + part) for part in range(4))

    def tensor_plan(self) -> TensorPlan:
        """Each rank has some heads, and some of the inner width."""
        dim = self.qkv.in_features
        attentions = {
            "cross_query": outputs(dim),
            "context_kv": outputs(dim, dim),
            "cross_out": INPUTS,
            "qkv": outputs(dim, dim, dim),
            "self_out": INPUTS,
        }
        inner, feedforward = self._feedforward_plan()
        return TensorPlan(
            sizes={"num_heads": self.num_heads, "feedforward_dim": inner},
            modules=attentions | feedforward,
            counts=("num_heads",),
        )

    def _feedforward_plan(self) -> tuple[int, dict[str, Part]]:
        """(Its inner width, parts of what it consists of)."""
        inner = self.down.in_features
        return inner, {"up": outputs(inner), "down": INPUTS}

    def context_keys(self, context_MD: Tensor) -> tuple[Tensor, Tensor]:
        """([M, H, C], [M, H, C]) keys and values."""
        keys, values = self.context_kv(context_MD).unflatten(1, (2, self.num_heads, -1)).unbind(1)
        return keys, values

    def forward(
        self, x_SLD: Tensor, layer: int, look: Look, sequences: JaggedLayout, keys_SL: Tensor | None
    ) -> tuple[Tensor, Gates | None]:
        """Whole sequences: each token sees the context and the tokens before it.

        Args:
            keys_SL: of dropout; only while training.

        Returns:
            The tokens, and what they made of experts, if there are any.
        """
        x_SLD = self.after_looking(x_SLD, look(layer, self.queries(x_SLD)), keys_SL)
        seen_SLHC, _, _ = self._self_attention(x_SLD, sequences)
        return self.gated(x_SLD, seen_SLHC, keys_SL)

    def begin(
        self, x_SLD: Tensor, layer: int, look: Look, sequences: JaggedLayout, cache: BeamCache, num_rows: int
    ) -> Tensor:
        """The tokens of each sequence before its first code, of which the cache keeps what later ones see."""
        x_SLD = self.after_looking(x_SLD, look(layer, self.queries(x_SLD)), None)
        seen_SLHC, *own = self._self_attention(x_SLD, sequences)
        cache.append(layer, *(part_SLHC.unflatten(0, (num_rows, -1)) for part_SLHC in own))
        return self.after_attention(x_SLD, seen_SLHC, None)

    def _self_attention(self, x_SLD: Tensor, sequences: JaggedLayout) -> tuple[Tensor, Tensor, Tensor]:
        """What each token sees of those before it in its sequence, and keys and values: each [S, L, H, C]."""
        query, key, value = self.heads(x_SLD)
        seen_NHC = attend(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), sequences, choice=self.choice
        )
        return seen_NHC.view(*x_SLD.shape[:2], *seen_NHC.shape[1:]), key, value

    def step(self, x_BWD: Tensor, layer: int, look: Look, cache: BeamCache) -> Tensor:
        """The newest token of each sequence, which sees the context and those in the cache."""
        x_BWD = self.after_looking(x_BWD, look(layer, self.queries(x_BWD)), None)
        query_BWHC, key_BWHC, value_BWHC = self.heads(x_BWD)
        own = cache.append(layer, key_BWHC[:, :, None], value_BWHC[:, :, None])
        return self.after_attention(x_BWD, own_codes_attention(query_BWHC, *own), None)

    def queries(self, x_SLD: Tensor) -> Tensor:
        """[S, L, H, C] what asks the context."""
        queries: Tensor = self.cross_query(self.cross_norm(x_SLD)).unflatten(2, (self.num_heads, -1))
        return queries

    def after_looking(self, x_SLD: Tensor, seen_SLHC: Tensor, keys_SL: Tensor | None) -> Tensor:
        return x_SLD + _dropped(self.dropouts[0], self.cross_out(seen_SLHC.flatten(2)), keys_SL)

    def heads(self, x_SLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the sequences themselves, each [S, L, H, C]."""
        qkv_SL3HC = self.qkv(self.self_norm(x_SLD)).unflatten(2, (3, self.num_heads, -1))
        query_SLHC, key_SLHC, value_SLHC = qkv_SL3HC.unbind(2)
        return query_SLHC, key_SLHC, value_SLHC

    def gated(self, x_SLD: Tensor, seen_SLHC: Tensor, keys_SL: Tensor | None) -> tuple[Tensor, Gates | None]:
        """`after_attention`, and what the tokens made of experts."""
        return self.after_attention(x_SLD, seen_SLHC, keys_SL), None

    def after_attention(self, x_SLD: Tensor, seen_SLHC: Tensor, keys_SL: Tensor | None) -> Tensor:
        x_SLD = self.with_own(x_SLD, seen_SLHC, keys_SL)
        hidden = functional.gelu(self.up(self.feedforward_norm(x_SLD)))
        hidden = self.down(_dropped(self.dropouts[2], hidden, keys_SL))
        return x_SLD + _dropped(self.dropouts[3], hidden, keys_SL)

    def with_own(self, x_SLD: Tensor, seen_SLHC: Tensor, keys_SL: Tensor | None) -> Tensor:
        return x_SLD + _dropped(self.dropouts[1], self.self_out(seen_SLHC.flatten(2)), keys_SL)


class ExpertLayer(CrossDecoderLayer):
    """The same with a mixture of experts, whose sizes hang on the data: that much less is compiled."""

    compiled_methods = ("queries", "after_looking", "heads", "with_own")

    def _feedforward_plan(self) -> tuple[int, dict[str, Part]]:
        return self.experts.up_EFD.shape[1], {"experts": self.experts.part}

    def gated(self, x_SLD: Tensor, seen_SLHC: Tensor, keys_SL: Tensor | None) -> tuple[Tensor, Gates | None]:
        x_SLD = self.with_own(x_SLD, seen_SLHC, keys_SL)
        keys_N = None if keys_SL is None else keys_SL.flatten()
        hidden_ND, gates = self.experts(self.feedforward_norm(x_SLD).flatten(0, 1), self.dropouts[2], keys_N)
        return x_SLD + _dropped(self.dropouts[3], hidden_ND.view_as(x_SLD), keys_SL), gates

    def after_attention(self, x_SLD: Tensor, seen_SLHC: Tensor, keys_SL: Tensor | None) -> Tensor:
        return self.gated(x_SLD, seen_SLHC, keys_SL)[0]


def _dropped(dropout: nn.Module, x_SLD: Tensor, keys_SL: Tensor | None) -> Tensor:
    """With keyed dropout; without keys as it is."""
    if keys_SL is None:
        return x_SLD
    dropped: Tensor = dropout(x_SLD.flatten(0, 1), keys_SL.flatten())
    return dropped.view_as(x_SLD)


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
        experts: ExpertSettings | None = None,
    ) -> None:
        """
        Args:
            choice: who computes the attention; weights do not depend on it.
            experts: in the place of each layer's feed-forward; None is one for all tokens.
        """
        super().__init__()
        self.choice = choice
        self.balance_weight = 0.0 if experts is None else experts.balance_weight
        self.codes_KD = nn.ParameterList(nn.Parameter(torch.empty(size, dim)) for size in level_sizes)
        self.levels_LD = nn.Parameter(torch.empty(len(level_sizes), dim))
        self.input_dropout = KeyedDropout(dropout, 0)
        self.layers = nn.ModuleList(
            (CrossDecoderLayer if experts is None else ExpertLayer)(
                dim, num_heads, feedforward_dim, dropout, 1 + 4 * layer, choice, experts
            )
            for layer in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(dim)
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)

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
        self,
        start_SD: Tensor,
        codes_SL: Tensor,
        look: Look,
        dropout_keys_SQ: Tensor | None = None,
        prefix_SPD: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Gates]]:
        """Known sequences, all tokens at once.

        Args:
            start_SD: first token of each sequence.
            codes_SL: its codes; the last one is not read.
            dropout_keys_SQ: only while training.
            prefix_SPD: tokens before the first one.

        Returns:
            Per level [S, K] logits; of each layer with experts, what the S * Q tokens made of them.
        """
        num_levels = codes_SL.shape[1]
        tokens = [start_SD, *(self.embed(d, codes_SL[:, d]) for d in range(num_levels - 1))]
        x_SQD = torch.stack(tokens, dim=1) + self.levels_LD
        if prefix_SPD is not None:
            x_SQD = torch.cat((prefix_SPD, x_SQD), dim=1)
        x_SQD = _dropped(self.input_dropout, x_SQD, dropout_keys_SQ)
        sequences = JaggedLayout.even(len(codes_SL), x_SQD.shape[1], codes_SL.device)
        all_gates = []
        for index, layer in enumerate(self._layers):
            x_SQD, gates = layer(x_SQD, index, look, sequences, dropout_keys_SQ)
            if gates is not None:
                all_gates.append(gates)
        first = x_SQD.shape[1] - num_levels
        return [self.logits(d, x_SQD[:, first + d]) for d in range(num_levels)], all_gates

    def step(self, context: ContextKeys, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        """[B, W, K] logits of the next code of each sequence; the tokens before are in the cache."""
        if depth == 0 and context.prefix_BPD is not None:
            return self._begin(context, context.prefix_BPD, cache, codes_BWd.shape[1])
        if depth == 0:
            token_BWD = context.start_BD[:, None].expand(-1, codes_BWd.shape[1], -1)
        else:
            token_BWD = self.embed(depth - 1, codes_BWd[:, :, depth - 1])
        x_BWD = token_BWD + self.levels_LD[depth]
        for index, layer in enumerate(self._layers):
            x_BWD = layer.step(x_BWD, index, context.look, cache)
        return self.logits(depth, x_BWD)

    def _begin(
        self, context: ContextKeys, prefix_BPD: Tensor, cache: BeamCache, num_sequences: int
    ) -> Tensor:
        """The first step with a prefix: all of its tokens and the first one at once."""
        start_B1D = (context.start_BD + self.levels_LD[0])[:, None]
        x_SQD = torch.cat((prefix_BPD, start_B1D), dim=1).repeat_interleave(num_sequences, dim=0)
        sequences = JaggedLayout.even(len(x_SQD), x_SQD.shape[1], x_SQD.device)
        for index, layer in enumerate(self._layers):
            x_SQD = layer.begin(x_SQD, index, context.look, sequences, cache, len(context))
        return self.logits(0, x_SQD[:, -1].unflatten(0, (len(context), num_sequences)))

    def sequence_logits(self, context: ContextKeys, codes_BWL: Tensor) -> list[Tensor]:
        """Per level [B, W, K] logits of known sequences."""
        num_rows, num_sequences, _ = codes_BWL.shape
        start_SD = context.start_BD.repeat_interleave(num_sequences, dim=0)
        prefix = context.prefix_BPD
        prefix_SPD = None if prefix is None else prefix.repeat_interleave(num_sequences, dim=0)
        logits, _ = self(start_SD, codes_BWL.flatten(0, 1), context.look, prefix_SPD=prefix_SPD)
        return [logits_SK.view(num_rows, num_sequences, -1) for logits_SK in logits]

    def item_vectors(self, codes_SL: Tensor) -> Tensor:
        """[S, D] sums of the vectors of items' codes."""
        return torch.stack([self.embed(d, codes_SL[:, d]) for d in range(codes_SL.shape[1])]).sum(0)

    def embed(self, level: int, codes: Tensor) -> Tensor:
        """[..., D] vectors of codes [...] of a level."""
        return functional.embedding(codes, self.codes_KD[level])

    def logits(self, level: int, x: Tensor) -> Tensor:
        """[..., D] tokens to [..., K]."""
        logits: Tensor = self.final_norm(x) @ self.codes_KD[level].T
        return logits
