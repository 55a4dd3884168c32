"""A causal language model of the package `transformers`, whose words are the codes of semantic IDs.

A history is one flat text: the codes of its items, oldest first, each (level, code) a token of its own. The
network learns to continue it, and an item is the continuation by one code of every level:

    item 3        item 7        item 1            ?
    a4 b0 c2      a4 b9 c1      a0 b3 c3   ──►   a. b. c.

Axes: as in `language_backbone`; M tokens of all rows.

Source: Rajput et al. (TIGER), arXiv:2305.05065, with a decoder alone as in OneRec-V2, arXiv:2508.20900.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.choice import AUTO, Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.past import Grown, KeysAndValues, Past
from rayrec.models.generative.backbone import weighted_sum
from rayrec.models.generative.chunk_summaries import ChunkSummaries, SummarySettings
from rayrec.models.generative.code_softmax import ALL_CODES, CodeSoftmax
from rayrec.models.generative.language_backbone import KeyValueContext, LanguageBackbone
from rayrec.models.language.attention import PackedRows
from rayrec.models.language.layer_dropout import add_dropout
from rayrec.models.sequence.tensor_batch import ChunkBatch, TensorBatch
from rayrec.platform.tensor_hashing import mix64

_SUMMARY_DROPOUTS = 1 << 10
"""Index of their first: behind those of the layers, however many there are."""


class CausalLmBackbone(LanguageBackbone):
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
        code_softmax: CodeSoftmax = ALL_CODES,
        dropout: float = 0.0,
    ) -> None:
        """
        Args:
            network: a causal language model with our attention, of `rayrec.models.language.networks`.
            codes_IL: [I, L] codes of every item of the catalog.
            first_token: the vocabulary's number of code 0 of the first level; those of all levels follow.
            choice: who computes the attention of histories.
            summaries: of older events, whose tokens come before those of a row; None: it begins with its own.
            dropout: probability, of vectors of tokens and of what layers add to them, in training.

        Raises:
            InputError: layers of the network on which dropout would fall are not found.
        """
        super().__init__(level_sizes, first_token, choice)
        self.network = network
        self.code_softmax = code_softmax
        self.tokens_per_event = len(level_sizes)
        first_tokens_L = torch.tensor(self._first_tokens, device=codes_IL.device)
        self.register_buffer("tokens_IL", codes_IL.long() + first_tokens_L, persistent=False)
        self.summaries: ChunkSummaries | None = None
        if summaries is not None:
            self.summaries = ChunkSummaries(
                self._embeddings.weight.shape[1], summaries, _SUMMARY_DROPOUTS, choice
            )
        self.input_dropout = add_dropout(network, dropout, "model.backbone.dropout")

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
        keys_M = self._token_keys(batch, whole)
        if keys_M is not None:
            vectors_MD = self.input_dropout(vectors_MD, keys_M)
        rows = PackedRows(whole, self.choice, token_keys_N=keys_M)
        hidden_MD = self._hidden(vectors_MD[None], whole.place_N[None], rows)[0]
        # An event's last code is followed by the first of the next item, that one by the second, and so on.
        hidden_NLD = hidden_MD[starts_N[:, None] + num_levels - 1 + levels_L]
        logits = (self._logits(hidden_NLD[:, level], level) for level in range(num_levels))
        return weighted_sum(self.code_softmax.losses(logits, codes_NL), weights_N)

    def encode_context(self, batch: TensorBatch) -> KeyValueContext:
        layout = batch.layout.repeated(len(self.level_sizes))
        tokens_M = self.tokens_IL[batch.items_N].flatten()
        layout, vectors_MD = self._after_summaries(batch, layout, tokens_M)
        rows = PackedRows(layout, self.choice, keep=True)
        hidden_MD = self._hidden(vectors_MD[None], layout.place_N[None], rows)[0]
        return self._context(layout, rows, layout.last(hidden_MD))

    def _token_keys(self, batch: TensorBatch, tokens: JaggedLayout) -> Tensor | None:
        """[M] of dropout, from the first event's of each row; None where there is none."""
        if not self.training or not self.input_dropout.probability:
            return None
        # Rows without events have the key of another row, or 0: they have no target, so no mask matters.
        firsts_B = torch.from_numpy(batch.layout.offsets_B1[:-1]).to(tokens.device)
        keys_B = functional.pad(batch.keys_N, (0, 1))[firsts_B]
        return mix64(keys_B[tokens.row_N] ^ mix64(tokens.place_N))

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

    def read_on(self, batch: TensorBatch, past: Past) -> tuple[KeyValueContext, Sequence[KeysAndValues]]:
        """As `prefix_cache.ReadsOn` has it."""
        layout = batch.layout.repeated(len(self.level_sizes))
        behind, places_M = layout.behind(past.lengths_B)
        grown = Grown(past, behind)
        rows = PackedRows(behind, self.choice, keep=True, grown=grown)
        tokens_M = self.tokens_IL[batch.items_N].flatten()[places_M]
        hidden_MD = self._hidden(self._embed(tokens_M)[None], grown.places_N[None], rows)[0]
        return self._context(layout, rows, behind.last(hidden_MD)), grown.layers


def _token_layout(layout: JaggedLayout, num_levels: int, num_more: int) -> tuple[JaggedLayout, Tensor]:
    """(Layout of rows in which every event is `num_levels` tokens and the end `num_more`, [N] first token of
    each event)."""
    offsets_B1 = np.arange(layout.num_rows + 1) * num_more + layout.offsets_B1 * num_levels
    packed = JaggedLayout.from_offsets(offsets_B1, layout.device)
    begins_B = torch.from_numpy(offsets_B1[:-1]).to(layout.device)
    return packed, begins_B[layout.row_N] + num_levels * layout.place_N
