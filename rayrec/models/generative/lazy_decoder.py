"""A lazy decoder-only model: nothing is computed of the context but its keys and values.

History events are not read by a network of their own: each layer of the decoder makes keys and values of
their vectors, and the few tokens of the next item's ID do all the looking. So every event is a target beside
the others, a request costs little for its history, and beams share one context. That is the idea of
OneRec-V2's lazy decoder (Zhou et al., arXiv:2508.20900), without its sharing of keys between layers, its
grouped heads.

Axes: as in `backbone` and `cross_decoder`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.masks import CausalGroups
from rayrec.models.attention.uni_attention import attend
from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.generative.backbone import weighted_sum
from rayrec.models.generative.chunk_summaries import ChunkSummaries, SummarySettings
from rayrec.models.generative.code_softmax import ALL_CODES, CodeSoftmax
from rayrec.models.generative.cross_backbone import CrossBackbone
from rayrec.models.generative.cross_decoder import ContextKeys, CrossDecoder, Look
from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
from rayrec.models.sequence.backbones.transformer import INITIAL_STD
from rayrec.models.sequence.item_content import ItemContent
from rayrec.models.sequence.tensor_batch import TensorBatch


class LazyDecoder(CrossBackbone):
    """Every event is the context of those after it and the place where the one after it is predicted."""

    def __init__(
        self,
        decoder: CrossDecoder,
        codes_IL: Tensor,
        max_length: int,
        dropout: float,
        code_softmax: CodeSoftmax = ALL_CODES,
        instruction: InstructionPrefix | None = None,
        event_labels: EventLabels | None = None,
        summaries: SummarySettings | None = None,
        content: ItemContent | None = None,
    ) -> None:
        super().__init__(decoder, codes_IL, code_softmax, instruction, event_labels, content)
        dim = decoder.levels_LD.shape[1]
        self.positions_TD = nn.Parameter(torch.empty(max_length, dim).normal_(std=INITIAL_STD))
        self.input_norm = nn.LayerNorm(dim)
        self.input_dropout = KeyedDropout(dropout, decoder.num_dropouts)
        if summaries is not None:
            self.summaries = ChunkSummaries(dim, summaries, decoder.num_dropouts + 1, decoder.choice)

    def embed_history(self, batch: TensorBatch) -> Tensor:
        """[N, D] vector of every history event, which is context and start of a sequence."""
        codes_NL = self.codes_IL[batch.items_N].long()
        x_ND = functional.embedding(batch.layout.place_N, self.positions_TD)
        for level in range(codes_NL.shape[1]):
            x_ND = x_ND + self.decoder.embed(level, codes_NL[:, level])
        if "user" in batch.rows:
            x_ND = x_ND + batch.users_of(batch.layout.row_N)
        x_ND = self.added_to(x_ND, batch.items_N, batch.labels)
        return self.input_dropout(self.input_norm(x_ND), batch.keys_N)

    def loss(self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None) -> Tensor:
        events_ND = self.embed_history(batch)
        keys_N = batch.keys_N if self.training else None
        prefix_NPD = self.prefix_of_targets(batch, torch.arange(len(events_ND), device=events_ND.device))
        look = self._past_of(batch, events_ND)
        return weighted_sum(
            self.sequence_losses(events_ND, codes_NL, look, keys_N, batch.layout, prefix_NPD), weights_N
        )

    def _past_of(self, batch: TensorBatch, events_ND: Tensor) -> Look:
        """Each event's sequence sees the events up to it, and the summaries of older ones."""
        layout = batch.layout
        context, context_MD = self.after_summaries(batch, layout, events_ND)
        layers = self.decoder.context_keys(context_MD)

        def look(layer: int, query_NLHC: Tensor) -> Tensor:
            num_levels = query_NLHC.shape[1]
            queries, mask = layout.repeated(num_levels), CausalGroups(num_levels)
            keys, values = layers[layer]
            query_NHC, choice = query_NLHC.flatten(0, 1), self.decoder.choice
            seen = attend(query_NHC, keys, values, queries, context, mask=mask, choice=choice)
            return seen.view_as(query_NLHC)

        return look

    def encode_context(self, batch: TensorBatch) -> ContextKeys:
        events_ND = self.embed_history(batch)
        start_BD = batch.layout.last(events_ND)
        context, context_MD = self.after_summaries(batch, batch.layout, events_ND)
        keys, prefix_BPD = self.decoder.context_keys(context_MD), self.prefix_of_requests(batch)
        return ContextKeys(context, start_BD, keys, self.decoder.choice, prefix_BPD)
