"""An encoder-decoder in the manner of TIGER: a history is a sequence of codes that see each other both ways.

Every code of every event is a token of the encoder, so what an event means to another is decided code by
code. As no token of the encoder may see what is to be predicted, an encoded history serves one target: in
training, each row is cut at a place that its key draws, and the item behind the cut is the target. A row
counts as often as it has places to cut, so that on average the loss is that over all events.

Source: Rajput et al., "Recommender Systems with Generative Retrieval", NeurIPS 2023, arXiv:2305.05065.
Different from there: pre-norm layers with learned positions instead of T5's, and an optional row of the user
in place of a token of it.

Axes: as in `backbone` and `cross_decoder`; R rows that are read, E events and M = E * L code tokens of them,
P most events of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Full
from rayrec.models.backbones.transformer import INITIAL_STD, Block
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.backbone import GenerativeBackbone
from rayrec.models.generative.cross_decoder import ContextKeys, CrossDecoder
from rayrec.models.keyed_random import KeyedDropout, level_keys
from rayrec.models.tensor_batch import TensorBatch


class EncoderDecoder(GenerativeBackbone[ContextKeys]):
    """Codes of the history in both directions, codes of the next item one after the other."""

    codes_IL: Tensor

    def __init__(
        self,
        decoder: CrossDecoder,
        codes_IL: Tensor,
        *,
        num_layers: int,
        num_heads: int,
        feedforward_dim: int,
        max_length: int,
        dropout: float,
        label_smoothing: float = 0.0,
    ) -> None:
        """
        Args:
            decoder: its code vectors are those of the encoder's tokens, too.
            num_layers: of the encoder, as are the following.
            max_length: P.
        """
        super().__init__()
        dim = decoder.levels_LD.shape[1]
        self.decoder = decoder
        self.label_smoothing = label_smoothing
        self.positions_PD = nn.Parameter(torch.empty(max_length, dim))
        self.levels_LD = nn.Parameter(torch.empty(codes_IL.shape[1], dim))
        self.start_D = nn.Parameter(torch.empty(dim))
        self.input_norm = nn.LayerNorm(dim)
        first = decoder.num_dropouts
        self.input_dropout = KeyedDropout(dropout, first)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, feedforward_dim, dropout, first + index, decoder.choice, Full())
            for index in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(dim)
        self.register_buffer("codes_IL", codes_IL, persistent=False)
        for parameter in (self.positions_PD, self.levels_LD, self.start_D):
            nn.init.normal_(parameter, std=INITIAL_STD)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def loss(self, batch: TensorBatch, codes_NL: Tensor) -> Tensor:
        layout = batch.layout
        rows_R = np.flatnonzero(layout.lengths_B)
        if not len(rows_R):
            return self.start_D.sum() * 0.0
        num_places_R = torch.from_numpy(layout.lengths_B[rows_R]).to(layout.device)
        last_R = layout.last_B[torch.from_numpy(rows_R).to(layout.device)]
        places_R = batch.keys_N[last_R].remainder(num_places_R)
        context = self._encode(batch, rows_R, places_R.cpu().numpy() + 1)
        cut_R = last_R - num_places_R + 1 + places_R
        targets_RL = codes_NL[cut_R]
        keys_RL = level_keys(batch.keys_N[cut_R], targets_RL.shape[1]) if self.training else None
        logits = self.decoder(context.start_BD, targets_RL, context.look, keys_RL)
        losses = [
            functional.cross_entropy(
                logits_RK.float(),
                targets_RL[:, level],
                reduction="none",
                label_smoothing=self.label_smoothing,
            )
            for level, logits_RK in enumerate(logits)
        ]
        return (torch.stack(losses).sum(0) * num_places_R).sum()

    def encode_context(self, batch: TensorBatch) -> ContextKeys:
        return self._encode(batch, np.arange(batch.layout.num_rows), batch.layout.lengths_B)

    def _encode(self, batch: TensorBatch, rows_R: np.ndarray, lengths_R: np.ndarray) -> ContextKeys:
        """The first events of some rows, as many of each as its length says."""
        events = JaggedLayout.from_offsets(np.concatenate([[0], lengths_R.cumsum()]), batch.layout.device)
        first_R = torch.from_numpy(batch.layout.offsets_B1[rows_R]).to(events.device)
        event_E = first_R[events.row_N] + events.place_N
        codes_EL = self.codes_IL[batch.items_N[event_E]].long()
        num_levels = codes_EL.shape[1]
        vectors = [self.decoder.embed(level, codes_EL[:, level]) for level in range(num_levels)]
        # Positions count from the newest event: what is recent matters most, and rows differ in length.
        age_E = events.lengths_on_device_B()[events.row_N] - 1 - events.place_N
        place_ED = functional.embedding(age_E, self.positions_PD)
        if "user" in batch.rows:
            place_ED = place_ED + batch.users_of(batch.layout.row_N[event_E])
        x_MD = (torch.stack(vectors, dim=1) + self.levels_LD + place_ED[:, None]).flatten(0, 1)
        keys_M = level_keys(batch.keys_N[event_E], num_levels).flatten()
        x_MD, tokens = self.input_dropout(self.input_norm(x_MD), keys_M), events.repeated(num_levels)
        for block in self.blocks:
            x_MD = block(x_MD, tokens, keys_M)
        start_RD = self.start_D.expand(len(rows_R), -1)
        keys = self.decoder.context_keys(self.final_norm(x_MD))
        return ContextKeys(tokens, start_RD, keys, self.decoder.choice)

    def step(self, context: ContextKeys, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        return self.decoder.step(context, cache, depth, codes_BWd)

    def sequence_logits(self, context: ContextKeys, codes_BWL: Tensor) -> list[Tensor]:
        return self.decoder.sequence_logits(context, codes_BWL)
