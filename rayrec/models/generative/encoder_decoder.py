"""An encoder-decoder in the manner of TIGER: a history is a sequence of codes that see each other both ways.

Every code of every event is a token of the encoder, so what an event means to another is decided code by
code. As no token of the encoder may see what is to be predicted, an encoded history serves one target: in
training, each row is cut at a place that its key draws, and the item behind the cut is the target. A row
counts as often as it has places to cut, so that on average the loss is that over all events. One target
then carries the weight of all the others of its row, which makes gradients of long rows noisy: a larger batch
or a smaller rate is the price.

With retrieval (`retrieval.py`), a row may have more events than the encoder reads: it gets the newest before
the cut and those of the others that fit what is wanted, in order of time, and positions count what it gets.

Source: Rajput et al., "Recommender Systems with Generative Retrieval", NeurIPS 2023, arXiv:2305.05065.
Different from there: pre-norm layers with learned positions instead of T5's, and an optional row of the user
in place of a token of it.

Axes: as in `backbone` and `cross_decoder`; R rows that are read, E events and M = E * L code tokens of them,
P most events of a row that are encoded, J newest events of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Full
from rayrec.models.base.keyed_random import KeyedDropout, level_keys
from rayrec.models.generative.backbone import weighted_sum
from rayrec.models.generative.chunk_summaries import ChunkSummaries, SummarySettings
from rayrec.models.generative.code_softmax import ALL_CODES, CodeSoftmax
from rayrec.models.generative.cross_backbone import CrossBackbone
from rayrec.models.generative.cross_decoder import ContextKeys, CrossDecoder
from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
from rayrec.models.generative.retrieval import HistoryRetrieval
from rayrec.models.sequence.backbones.transformer import INITIAL_STD, Block
from rayrec.models.sequence.item_content import ItemContent
from rayrec.models.sequence.tensor_batch import TensorBatch


class EncoderDecoder(CrossBackbone):
    """Codes of the history in both directions, codes of the next item one after the other."""

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
        code_softmax: CodeSoftmax = ALL_CODES,
        instruction: InstructionPrefix | None = None,
        event_labels: EventLabels | None = None,
        retrieval: HistoryRetrieval | None = None,
        summaries: SummarySettings | None = None,
        content: ItemContent | None = None,
    ) -> None:
        """
        Args:
            decoder: its code vectors are those of the encoder's tokens, too.
            num_layers: of the encoder, as are the following.
            max_length: P.
            retrieval: chooses the events that are encoded; None: rows have no more than P.
            summaries: of older events, which the decoder looks at beside what is encoded.
        """
        super().__init__(decoder, codes_IL, code_softmax, instruction, event_labels, content)
        self.retrieval = retrieval
        dim = decoder.levels_LD.shape[1]
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
        for parameter in (self.positions_PD, self.levels_LD, self.start_D):
            nn.init.normal_(parameter, std=INITIAL_STD)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if summaries is not None:
            after_blocks = 1 + 3 * (first + num_layers)
            self.summaries = ChunkSummaries(dim, summaries, after_blocks, decoder.choice)

    def loss(self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None) -> Tensor:
        layout = batch.layout
        rows_R = np.flatnonzero(layout.lengths_B)
        if not len(rows_R):
            return self.start_D.sum() * 0.0
        num_places_R = torch.from_numpy(layout.lengths_B[rows_R]).to(layout.device)
        last_R = layout.last_B[torch.from_numpy(rows_R).to(layout.device)]
        places_R = batch.keys_N[last_R].remainder(num_places_R)
        cut_R = last_R - num_places_R + 1 + places_R
        prefix_RPD = self.prefix_of_targets(batch, cut_R)
        seen = _Seen.first(batch, rows_R, places_R.cpu().numpy() + 1)
        asked_R = self._asked(batch, seen, prefix_RPD)
        context = self._encode(batch, self._chosen(batch, seen, asked_R), prefix_RPD)
        targets_RL = codes_NL[cut_R]
        keys_R = batch.keys_N[cut_R] if self.training else None
        rows = JaggedLayout.even(len(rows_R), 1, layout.device)
        losses_R = self.sequence_losses(context.start_BD, targets_RL, context.look, keys_R, rows, prefix_RPD)
        if self.retrieval is not None and asked_R is not None and self.retrieval.settings.q2i_weight:
            losses_R = losses_R + self.retrieval.settings.q2i_weight * self._q2i_losses(batch, cut_R, asked_R)
        return weighted_sum(losses_R * num_places_R, None if weights_N is None else weights_N[cut_R])

    def encode_context(self, batch: TensorBatch) -> ContextKeys:
        prefix_BPD = self.prefix_of_requests(batch)
        seen = _Seen.first(batch, np.arange(batch.layout.num_rows), batch.layout.lengths_B)
        chosen = self._chosen(batch, seen, self._asked(batch, seen, prefix_BPD))
        return self._encode(batch, chosen, prefix_BPD)

    def _asked(self, batch: TensorBatch, seen: _Seen, prefix_RPD: Tensor | None) -> Tensor | None:
        """What events are chosen by; None where all are encoded."""
        if self.retrieval is None:
            return None
        ages_J = torch.arange(self.retrieval.settings.num_recent, device=seen.events.device)
        place_RJ = seen.events.lengths_on_device_B()[:, None] - 1 - ages_J
        stop_R1 = torch.from_numpy(seen.events.offsets_B1[1:, None]).to(place_RJ.device)
        if not seen.events.num_tokens:  # nothing to point at
            recent_RJD = self.start_D.new_zeros(*place_RJ.shape, len(self.start_D))
        else:
            recent_RJ = seen.event_E[(stop_R1 - 1 - ages_J).clamp(min=0)]
            vectors_ND = self.item_vectors(batch.items_N[recent_RJ.flatten()])
            recent_RJD = vectors_ND.unflatten(0, recent_RJ.shape)
        return self.retrieval.asked(recent_RJD, place_RJ >= 0, prefix_RPD)

    def _chosen(self, batch: TensorBatch, seen: _Seen, asked_R: Tensor | None) -> _Seen:
        """The events to encode."""
        if self.retrieval is None or asked_R is None:
            return seen
        with torch.no_grad():
            vectors_ED = self.item_vectors(batch.items_N[seen.event_E])
        chosen_C, lengths_R = self.retrieval.choose(asked_R, vectors_ED, seen.events)
        return _Seen(_layout(lengths_R, seen.events.device), seen.event_E[chosen_C])

    def _q2i_losses(self, batch: TensorBatch, cut_R: Tensor, asked_R: Tensor) -> Tensor:
        assert self.retrieval is not None, "asked for where there is one"
        assert batch.targets_N is not None, "of training"
        assert batch.negatives_S is not None, "the settings say how many"
        with torch.no_grad():
            targets_R = batch.targets_N[cut_R]
            vectors_RD, vectors_SD = self.item_vectors(targets_R), self.item_vectors(batch.negatives_S)
        return self.retrieval.q2i_losses(asked_R, targets_R, batch.negatives_S, vectors_RD, vectors_SD)

    def _encode(self, batch: TensorBatch, seen: _Seen, prefix_RPD: Tensor | None) -> ContextKeys:
        events, event_E = seen.events, seen.event_E
        codes_EL = self.codes_IL[batch.items_N[event_E]].long()
        num_levels = codes_EL.shape[1]
        vectors = [self.decoder.embed(level, codes_EL[:, level]) for level in range(num_levels)]
        # Positions count from the newest event: what is recent matters most, and rows differ in length.
        age_E = events.lengths_on_device_B()[events.row_N] - 1 - events.place_N
        place_ED = functional.embedding(age_E, self.positions_PD)
        if "user" in batch.rows:
            place_ED = place_ED + batch.users_of(batch.layout.row_N[event_E])
        labels_E = {label: codes_N[event_E] for label, codes_N in batch.labels.items()}
        place_ED = self.added_to(place_ED, batch.items_N[event_E], labels_E)
        x_MD = (torch.stack(vectors, dim=1) + self.levels_LD + place_ED[:, None]).flatten(0, 1)
        keys_M = level_keys(batch.keys_N[event_E], num_levels).flatten()
        x_MD, tokens = self.input_dropout(self.input_norm(x_MD), keys_M), events.repeated(num_levels)
        for block in self.blocks:
            x_MD = block(x_MD, tokens, keys_M)
        start_RD = self.start_D.expand(events.num_rows, -1)
        context, context_MD = self.after_summaries(batch, tokens, self.final_norm(x_MD))
        keys = self.decoder.context_keys(context_MD)
        return ContextKeys(context, start_RD, keys, self.decoder.choice, prefix_RPD)


@dataclass(frozen=True)
class _Seen:
    """Events of some rows of a batch that a network may look at."""

    events: JaggedLayout
    event_E: Tensor
    """Their indices in the batch, row after row in order of time."""

    @staticmethod
    def first(batch: TensorBatch, rows_R: np.ndarray, lengths_R: np.ndarray) -> _Seen:
        """The first events of some rows, as many of each as its length says."""
        events = _layout(lengths_R, batch.layout.device)
        first_R = torch.from_numpy(batch.layout.offsets_B1[rows_R]).to(events.device)
        return _Seen(events, first_R[events.row_N] + events.place_N)


def _layout(lengths_R: np.ndarray, device: torch.device) -> JaggedLayout:
    return JaggedLayout.from_offsets(np.concatenate([[0], lengths_R.cumsum()]), device)
