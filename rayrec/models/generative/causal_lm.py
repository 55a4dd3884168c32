"""A causal language model of the package `transformers`, whose words are the codes of semantic IDs.

A history is one flat text: the codes of its items, oldest first, each (level, code) a token of its own. The
network learns to continue it, and an item is the continuation by one code of every level:

    item 3        item 7        item 1            ?
    a4 b0 c2      a4 b9 c1      a0 b3 c3   ──►   a. b. c.

Every level has its own slice of the output matrix: a position's softmax runs over the codes of the level that
comes next, never over other levels or words. For decoding, a row's keys and values are computed and held
once; beams have a small cache of their own codes (see `rayrec.models.language.attention`).

There is no dropout inside: that of `transformers` draws from the global random generator, and the same seed
would no longer give the same numbers for every split of a batch over trainers.

Axes: as in `backbone`; M tokens of all rows, T tokens of the longest, G key heads, C channels of a head.

Source: Rajput et al. (TIGER), arXiv:2305.05065, with a decoder alone as in OneRec-V2, arXiv:2508.20900.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.past import Grown, KeysAndValues, Past
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.backbone import GenerativeBackbone, summed_cross_entropy
from rayrec.models.generative.chunk_summaries import ChunkSummaries, SummarySettings
from rayrec.models.language.attention import Attending, Continuations, PackedRows
from rayrec.models.program.sharding import whole
from rayrec.models.sequence.tensor_batch import ChunkBatch, TensorBatch


@dataclass(frozen=True)
class KeyValueContext:
    """What a network's layers keep of each row's history."""

    keys: dict[int, Tensor]
    """By layer [B, G, T, C]."""
    values: dict[int, Tensor]
    bias_B1T: Tensor
    """-inf after the end of a row, else 0."""
    lengths_B: Tensor
    """Tokens of each row."""
    last_BD: Tensor
    """What the network's last layer says at the end of each row; without meaning for a row without tokens."""

    def __len__(self) -> int:
        return len(self.lengths_B)

    def some_rows(self, rows: slice) -> KeyValueContext:
        return KeyValueContext(
            {layer: keys[rows] for layer, keys in self.keys.items()},
            {layer: values[rows] for layer, values in self.values.items()},
            self.bias_B1T[rows],
            self.lengths_B[rows],
            self.last_BD[rows],
        )


class CausalLmBackbone(GenerativeBackbone[KeyValueContext]):
    """Codes to codes."""

    tokens_IL: Tensor

    def __init__(
        self,
        network: nn.Module,
        codes_IL: Tensor,
        level_sizes: tuple[int, ...],
        first_token: int,
        choice: Choice = AUTO,
        summaries: SummarySettings | None = None,
    ) -> None:
        """
        Args:
            network: a causal language model with our attention, of `rayrec.models.language.networks`.
            codes_IL: [I, L] codes of every item of the catalog.
            first_token: the vocabulary's number of code 0 of the first level; those of all levels follow.
            choice: who computes the attention of histories.
            summaries: of older events, whose tokens come before those of a row; None: it begins with its own.
        """
        super().__init__()
        self.choice = choice
        self.network: Any = network
        self.level_sizes = level_sizes
        self.tokens_per_event = len(level_sizes)
        sizes_L = torch.tensor(level_sizes, device=codes_IL.device)
        first_tokens_L = first_token + sizes_L.cumsum(0) - sizes_L
        self._first_tokens = tuple(first_tokens_L.tolist())
        self.register_buffer("tokens_IL", codes_IL.long() + first_tokens_L, persistent=False)
        self.summaries: ChunkSummaries | None = None
        if summaries is not None:
            self.summaries = ChunkSummaries(self._embeddings.weight.shape[1], summaries, 0, choice)

    def loss(self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None) -> Tensor:
        num_levels = len(self.level_sizes)
        tokens_NL = self.tokens_IL[batch.items_N]
        # Behind a row's last event come the codes of its target but for the last, which says nothing more.
        layout, starts_N = _token_layout(batch.layout, num_levels, num_levels - 1)
        levels_L = torch.arange(num_levels, device=tokens_NL.device)
        tokens_M = tokens_NL.new_full((len(layout.row_N),), self._first_tokens[0])
        for level in range(num_levels - 1):
            tokens_M[starts_N + num_levels + level] = codes_NL[:, level] + self._first_tokens[level]
        tokens_M[starts_N[:, None] + levels_L] = tokens_NL
        whole, vectors_MD = self._after_summaries(batch, layout, tokens_M)
        if whole is not layout:
            before_B = torch.from_numpy(whole.offsets_B1[1:] - layout.offsets_B1[1:]).to(starts_N.device)
            starts_N = starts_N + before_B[batch.layout.row_N]
        hidden_MD = self._hidden(vectors_MD[None], whole.place_N[None], PackedRows(whole, self.choice))[0]
        # An event's last code is followed by the first of the next item, that one by the second, and so on.
        hidden_NLD = hidden_MD[starts_N[:, None] + num_levels - 1 + levels_L]
        total = hidden_MD.new_zeros(())
        for level in range(num_levels):
            logits_NK = self._logits(hidden_NLD[:, level], level)
            total = total + summed_cross_entropy(logits_NK, codes_NL[:, level], weights_N)
        return total

    def encode_context(self, batch: TensorBatch) -> KeyValueContext:
        layout, _ = _token_layout(batch.layout, len(self.level_sizes), 0)
        tokens_M = self.tokens_IL[batch.items_N].flatten()
        layout, vectors_MD = self._after_summaries(batch, layout, tokens_M)
        rows = PackedRows(layout, self.choice, keep=True)
        hidden_MD = self._hidden(vectors_MD[None], layout.place_N[None], rows)[0]
        return self._context(layout, rows, layout.last(hidden_MD))

    def summarize(self, chunks: ChunkBatch) -> Tensor:
        assert self.summaries is not None, "of a model that reads them"
        return self.summaries.of(chunks, self._chunk_vectors)

    def _chunk_vectors(self, chunks: ChunkBatch) -> Tensor:
        return self._embed(self.tokens_IL[chunks.items_E]).sum(1)

    def _after_summaries(
        self, batch: TensorBatch, layout: JaggedLayout, tokens_M: Tensor
    ) -> tuple[JaggedLayout, Tensor]:
        """Rows of tokens as vectors, behind the summaries of older events, if the network has any."""
        vectors_MD = self._embed(tokens_M)
        if self.summaries is None:
            return layout, vectors_MD
        return self.summaries.before(batch, layout, vectors_MD, self._chunk_vectors)

    def _embed(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self._embeddings(tokens)
        return vectors

    @property
    def _embeddings(self) -> Any:
        return self.network.get_input_embeddings()

    def read_on(self, batch: TensorBatch, past: Past) -> tuple[KeyValueContext, Sequence[KeysAndValues]]:
        """As `prefix_cache.ReadsOn` has it."""
        layout, _ = _token_layout(batch.layout, len(self.level_sizes), 0)
        behind, places_M = layout.behind(past.lengths_B)
        grown = Grown(past, behind)
        rows = PackedRows(behind, self.choice, keep=True, grown=grown)
        tokens_M = self.tokens_IL[batch.items_N].flatten()[places_M]
        hidden_MD = self._hidden(self._embed(tokens_M)[None], grown.places_N[None], rows)[0]
        return self._context(layout, rows, behind.last(hidden_MD)), grown.layers

    def _context(self, tokens: JaggedLayout, rows: PackedRows, last_BD: Tensor) -> KeyValueContext:
        lengths_B = tokens.lengths_on_device_B()
        ended_BT = torch.arange(rows.num_tokens, device=lengths_B.device) >= lengths_B[:, None]
        bias_B1T = last_BD.new_zeros(1).expand_as(ended_BT).masked_fill(ended_BT, -torch.inf)[:, None]
        return KeyValueContext(rows.keys, rows.values, bias_B1T, lengths_B, last_BD)

    def step(self, context: KeyValueContext, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        if depth == 0:
            return self._logits(context.last_BD[:, None], 0)
        tokens_BW = codes_BWd[:, :, -1] + self._first_tokens[depth - 1]
        positions_BW = (context.lengths_B[:, None] + (depth - 1)).expand_as(tokens_BW)
        beams = Continuations(
            context.keys, context.values, context.bias_B1T, codes_BWd.shape[1], depth, cache
        )
        return self._logits(self._hidden(self._embed(tokens_BW), positions_BW, beams), depth)

    def sequence_logits(self, context: KeyValueContext, codes_BWL: Tensor) -> list[Tensor]:
        num_rows, num_sequences, num_levels = codes_BWL.shape
        logits = [self._logits(context.last_BD[:, None].expand(-1, num_sequences, -1), 0)]
        num_given = num_levels - 1  # the last code conditions nothing
        if not num_given:
            return logits
        levels_G = torch.arange(num_given, device=codes_BWL.device)
        tokens_BWG = codes_BWL[:, :, :-1] + codes_BWL.new_tensor(self._first_tokens[:-1])
        positions_BWG = (context.lengths_B[:, None, None] + levels_G).expand_as(tokens_BWG)
        sequences = Continuations(
            context.keys, context.values, context.bias_B1T, num_sequences, num_given, cache=None
        )
        hidden = self._hidden(self._embed(tokens_BWG.flatten(1)), positions_BWG.flatten(1), sequences)
        hidden_BWGD = hidden.view(num_rows, num_sequences, num_given, -1)
        return logits + [self._logits(hidden_BWGD[:, :, level - 1], level) for level in range(1, num_levels)]

    def _hidden(self, vectors: Tensor, positions: Tensor, attending: Attending) -> Tensor:
        """[batch, tokens, D] what the network's last layer says at every token, of the tokens' vectors."""
        hidden: Tensor = self.network.base_model(
            inputs_embeds=vectors, position_ids=positions, use_cache=False, attending=attending
        ).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor, level: int) -> Tensor:
        """[..., D] to [..., K] of the codes of a level."""
        head = self.network.get_output_embeddings()
        codes = slice(self._first_tokens[level], self._first_tokens[level] + self.level_sizes[level])
        # Heads of adapters have no `bias`. Those of split networks are DTensors, which do not mix with plain
        # tensors.
        bias = getattr(head, "bias", None)
        weight_KD = whole(head.weight)[codes]
        return functional.linear(hidden, weight_KD, None if bias is None else whole(bias)[codes])


def _token_layout(layout: JaggedLayout, num_levels: int, num_more: int) -> tuple[JaggedLayout, Tensor]:
    """(Layout of rows in which every event is `num_levels` tokens and the end `num_more`, [N] first token of
    each event)."""
    offsets_B1 = np.arange(layout.num_rows + 1) * num_more + layout.offsets_B1 * num_levels
    packed = JaggedLayout.from_offsets(offsets_B1, layout.device)
    begins_B = torch.from_numpy(offsets_B1[:-1]).to(layout.device)
    return packed, begins_B[layout.row_N] + num_levels * layout.place_N
