"""A lazy decoder-only model: nothing is computed of the context but its keys and values.

History events are not read by a network of their own: each layer of the decoder makes keys and values of
their vectors, and the few tokens of the next item's ID do all the looking. So a training step costs what its
targets cost, however long the histories, every event is a target beside the others, and beams share one
context. That is the idea of OneRec-V2's lazy decoder (Zhou et al., arXiv:2508.20900), without its sharing of
keys between layers, its grouped heads and its experts.

Axes: as in `backbone` and `cross_decoder`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import CausalGroups
from rayrec.models.attention.uni_attention import attend
from rayrec.models.backbones.transformer import INITIAL_STD
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.backbone import GenerativeBackbone
from rayrec.models.generative.cross_decoder import ContextKeys, CrossDecoder, Look
from rayrec.models.keyed_random import KeyedDropout, level_keys
from rayrec.models.tensor_batch import TensorBatch


class LazyDecoder(GenerativeBackbone[ContextKeys]):
    """Every event is the context of those after it and the place where the one after it is predicted."""

    codes_IL: Tensor

    def __init__(
        self,
        decoder: CrossDecoder,
        codes_IL: Tensor,
        max_length: int,
        dropout: float,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        dim = decoder.levels_LD.shape[1]
        self.decoder = decoder
        self.label_smoothing = label_smoothing
        self.positions_TD = nn.Parameter(torch.empty(max_length, dim).normal_(std=INITIAL_STD))
        self.input_norm = nn.LayerNorm(dim)
        self.input_dropout = KeyedDropout(dropout, decoder.num_dropouts)
        self.register_buffer("codes_IL", codes_IL, persistent=False)

    def embed_history(self, batch: TensorBatch) -> Tensor:
        """[N, D] vector of every history event, which is context and start of a sequence."""
        codes_NL = self.codes_IL[batch.items_N].long()
        x_ND = functional.embedding(batch.layout.place_N, self.positions_TD)
        for level in range(codes_NL.shape[1]):
            x_ND = x_ND + self.decoder.embed(level, codes_NL[:, level])
        if "user" in batch.rows:
            x_ND = x_ND + batch.users_of(batch.layout.row_N)
        return self.input_dropout(self.input_norm(x_ND), batch.keys_N)

    def loss(self, batch: TensorBatch, codes_NL: Tensor) -> Tensor:
        events_ND = self.embed_history(batch)
        keys_NL = level_keys(batch.keys_N, codes_NL.shape[1]) if self.training else None
        logits = self.decoder(events_ND, codes_NL, self._past_of(batch.layout, events_ND), keys_NL)
        return torch.stack(
            [
                functional.cross_entropy(
                    logits_NK.float(),
                    codes_NL[:, level],
                    reduction="sum",
                    label_smoothing=self.label_smoothing,
                )
                for level, logits_NK in enumerate(logits)
            ]
        ).sum()

    def _past_of(self, layout: JaggedLayout, events_ND: Tensor) -> Look:
        """Each event's sequence sees the events up to it."""
        layers = self.decoder.context_keys(events_ND)

        def look(layer: int, query_NLHC: Tensor) -> Tensor:
            num_levels = query_NLHC.shape[1]
            queries, mask = layout.repeated(num_levels), CausalGroups(num_levels)
            keys, values = layers[layer]
            query_NHC, choice = query_NLHC.flatten(0, 1), self.decoder.choice
            seen = attend(query_NHC, keys, values, queries, layout, mask=mask, choice=choice)
            return seen.view_as(query_NLHC)

        return look

    def encode_context(self, batch: TensorBatch) -> ContextKeys:
        events_ND = self.embed_history(batch)
        start_BD = events_ND.index_select(0, batch.layout.last_B)
        return ContextKeys(batch.layout, start_BD, self.decoder.context_keys(events_ND), self.decoder.choice)

    def step(self, context: ContextKeys, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        return self.decoder.step(context, cache, depth, codes_BWd)

    def sequence_logits(self, context: ContextKeys, codes_BWL: Tensor) -> list[Tensor]:
        return self.decoder.sequence_logits(context, codes_BWL)
