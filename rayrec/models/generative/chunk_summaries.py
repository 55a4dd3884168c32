"""Summaries of a long history's old events: a few vectors in the place of a chunk of them.

    oldest event ─► | chunk 0 | chunk 1 | ... | chunk n - 1 |  newest events  |
                        ▼         ▼                 ▼                ▼
                     K tokens  K tokens   ...    K tokens      a token or more each    what a decoder reads

Chunks are cut from the oldest event on. A full one never changes, and its tokens are a function of its events
and of the weights alone: they can be computed once and be kept. Only what tells how far back a chunk lies is
added when they are read. Training computes them in the same way, and the loss of what follows trains them.

A chunk is summarized by K learned queries: tokens that look at its events and at those before them, in layers
of the cross decoder. Nothing is computed of an event but its keys and values, so the work grows with events
alone.

Source: the idea of VISTA, arXiv:2510.22049, which keeps summary tokens of histories of up to a million
events; there they are of the history as a whole, and linear attention makes them. Queries that read a long
input into few tokens are those of Perceiver IO, arXiv:2107.14795.

Axes: X chunks, C events of each, E = X * C; K tokens of a chunk, D width of a vector, A distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.choice import Choice
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Full
from rayrec.models.attention.uni_attention import attend
from rayrec.models.base.keyed_random import KeyedDropout, level_keys
from rayrec.models.generative.cross_decoder import CrossDecoderLayer
from rayrec.models.sequence.backbones.transformer import INITIAL_STD
from rayrec.models.sequence.tensor_batch import ChunkBatch, TensorBatch

GROUP = 4
"""Chunks that are computed at once where nothing is trained. On a CPU more take as long each."""
NUM_DISTANCES = 64
"""Of chunks to what is read one by one, each with a vector of its own; beyond, the last one's."""

EventVectors = Callable[[ChunkBatch], Tensor]
"""[E, D] the vectors of chunks' events, without anything of their places."""


@dataclass(frozen=True)
class SummarySettings:
    chunk_events: int
    """C."""
    summary_tokens: int
    """K."""
    num_layers: int
    num_heads: int
    feedforward_dim: int
    dropout: float


class ChunkSummaries(nn.Module):
    """Chunks of events in, K tokens of each out."""

    def __init__(self, dim: int, settings: SummarySettings, first_dropout: int, choice: Choice) -> None:
        """
        Args:
            first_dropout: index of its first dropout; see `KeyedDropout`.
        """
        super().__init__()
        self.choice = choice
        self.positions_CD = nn.Parameter(torch.empty(settings.chunk_events, dim))
        self.queries_KD = nn.Parameter(torch.empty(settings.summary_tokens, dim))
        self.distances_AD = nn.Parameter(torch.empty(NUM_DISTANCES, dim))
        self.input_norm = nn.LayerNorm(dim)
        self.input_dropout = KeyedDropout(settings.dropout, first_dropout)
        self.layers = nn.ModuleList(
            CrossDecoderLayer(
                dim,
                settings.num_heads,
                settings.feedforward_dim,
                settings.dropout,
                first_dropout + 1 + 4 * layer,
                choice,
            )
            for layer in range(settings.num_layers)
        )
        self.final_norm = nn.LayerNorm(dim)
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)

    @property
    def _layers(self) -> list[CrossDecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]  # a ModuleList forgets what its modules are

    def before(
        self, batch: TensorBatch, tokens: JaggedLayout, tokens_MD: Tensor, vectors: EventVectors
    ) -> tuple[JaggedLayout, Tensor]:
        """The tokens of each row behind the summaries of its old chunks, oldest first.

        Args:
            tokens: of the rows of the batch that have any, in order.
        """
        assert batch.old_chunks is not None, "of a model that reads them"
        chunks = batch.old_chunks
        if not self.training and not len(chunks.ages_X):
            return tokens, tokens_MD
        summaries_XKD = self.of(chunks, vectors)
        distance_X = chunks.ages_X.clamp(max=NUM_DISTANCES - 1)
        summaries_XKD = summaries_XKD + functional.embedding(distance_X, self.distances_AD)[:, None]
        rows = chunks.layout
        if rows.num_rows != tokens.num_rows:  # rows without tokens have no chunks
            offsets_R1 = rows.offsets_B1[[*batch.layout.lengths_B.nonzero()[0], rows.num_rows]]
            rows = JaggedLayout.from_offsets(offsets_R1, tokens.device)
        layout, order_M = rows.repeated(summaries_XKD.shape[1]).followed_by(tokens)
        both_MD = torch.cat([summaries_XKD.flatten(0, 1).to(tokens_MD.dtype), tokens_MD])
        return layout, both_MD.index_select(0, order_M)

    def of(self, chunks: ChunkBatch, vectors: EventVectors) -> Tensor:
        """[X, K, D] the tokens of chunks; those that are known are taken as they are."""
        if self.training:
            return self(vectors(chunks), chunks.keys_E)
        if chunks.is_known_X is not None and chunks.is_known_X.all():
            assert chunks.known_XKD is not None, "as is said which"
            return chunks.known_XKD
        unknown, index_Y = chunks.unknown()
        if index_Y is None:
            return self._in_groups(vectors(unknown))
        assert chunks.known_XKD is not None, "as is said which"
        found_YKD = self._in_groups(vectors(unknown))
        return chunks.known_XKD.to(found_YKD.dtype).index_copy(0, index_Y, found_YKD)

    def _in_groups(self, vectors_ED: Tensor) -> Tensor:
        """[X, K, D] as `forward`, with the same bits whatever chunks are computed beside one.

        Products of matrices round by their shapes. So all are of one shape, and the last is filled up.
        """
        size = len(self.positions_CD)
        num_chunks = len(vectors_ED) // size
        filled_ED = functional.pad(vectors_ED, (0, 0, 0, -num_chunks % GROUP * size))
        groups = filled_ED.split(GROUP * size) if num_chunks else (vectors_ED,)
        return torch.cat([self(part_ED, None) for part_ED in groups])[:num_chunks]

    def forward(self, vectors_ED: Tensor, keys_E: Tensor | None) -> Tensor:
        """[X, K, D] the tokens of chunks.

        Args:
            keys_E: of dropout; only while training.
        """
        (size, dim), num_tokens = self.positions_CD.shape, len(self.queries_KD)
        vectors_XCD = self.input_norm(vectors_ED.view(-1, size, dim) + self.positions_CD)
        num_chunks, device = len(vectors_XCD), vectors_ED.device
        events_ED, keys_XK = vectors_XCD.flatten(0, 1), None
        if keys_E is not None:
            events_ED = self.input_dropout(events_ED, keys_E)
            keys_XK = level_keys(keys_E[::size], num_tokens)
        events = JaggedLayout.even(num_chunks, size, device)
        tokens = JaggedLayout.even(num_chunks, num_tokens, device)
        x_XKD = self.queries_KD.expand(num_chunks, -1, -1)
        keys_and_values = [layer.context_keys(events_ED) for layer in self._layers]

        def look(layer: int, query_XKHC: Tensor) -> Tensor:
            query_NHC, (keys, values) = query_XKHC.flatten(0, 1), keys_and_values[layer]
            seen = attend(query_NHC, keys, values, tokens, events, mask=Full(), choice=self.choice)
            return seen.view_as(query_XKHC)

        for index, layer in enumerate(self._layers):
            x_XKD, _ = layer(x_XKD, index, look, tokens, keys_XK)
        summaries_XKD: Tensor = self.final_norm(x_XKD)
        return summaries_XKD
