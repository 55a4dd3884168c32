"""Generates the next item's semantic ID, code by code.

A history event enters as the sum of its code embeddings (and, if asked for,
its item embedding), all rows of the sparse stage. A causal transformer reads
the events; at every position a light decoder then predicts the codes of the
next item one level after the other. The context is computed once and shared by
all levels and beams, as in OneRec-V2's lazy decoder (arXiv:2508.20900), here
reduced to feed-forward layers, so that all positions and levels train at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.prefixes import Step
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.keyed_random import KeyedDropout
from rayrec.models.sequence_model import Ranking, SequenceModel
from rayrec.models.tensor_batch import TensorBatch

MIN_EXTRA_BEAMS = 16
"""Fewest beams beside the configured ones, of rows that exclude items: short histories share a width."""
MAX_BEAMS = 1 << 16
"""Most beams decoded at once, over all rows: bounds the logits to 64 MiB for 256 codes a level."""


class CodeDecoder(nn.Module):
    """Logits of one level's codes from a context and the codes chosen before it."""

    def __init__(
        self, dim: int, level_sizes: tuple[int, ...], feedforward_dim: int, dropout: float, dropout_index: int
    ) -> None:
        super().__init__()
        # The last level's code conditions nothing.
        self.chosen_KD = nn.ParameterList(
            nn.Parameter(torch.empty(size, dim).normal_(std=0.02)) for size in level_sizes[:-1]
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in level_sizes)
        self.up = nn.ModuleList(nn.Linear(dim, feedforward_dim) for _ in level_sizes)
        self.down = nn.ModuleList(nn.Linear(feedforward_dim, dim) for _ in level_sizes)
        self.output_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in level_sizes)
        self.heads = nn.ModuleList(nn.Linear(dim, size) for size in level_sizes)
        self.dropouts = nn.ModuleList(
            KeyedDropout(dropout, dropout_index + level) for level in range(len(level_sizes))
        )

    def condition(self, state: Tensor, level: int, codes: Tensor) -> Tensor:
        """[..., D] state after choosing `codes` [...] at `level`."""
        return state + functional.embedding(codes, self.chosen_KD[level])

    def logits(self, state: Tensor, level: int, keys_N: Tensor | None = None) -> Tensor:
        """[..., D] state to [..., K] logits; `keys_N` only while training."""
        hidden = functional.gelu(self.up[level](self.norms[level](state)))
        if keys_N is not None:
            hidden = self.dropouts[level](hidden, keys_N)
        return self.heads[level](self.output_norms[level](state + self.down[level](hidden)))


class GenerativeRecommender(SequenceModel):
    """Semantic IDs in, semantic IDs out; items appear only as paths of the trie.

    Where the codes have one level more than the decoder, that level lists the items which share a tuple:
    nothing is learned of it, and decoding is uniform over it.
    """

    codes_IL: Tensor

    def __init__(
        self,
        backbone: CausalTransformer,
        decoder: CodeDecoder,
        codes_IL: Tensor,
        beam_width: int,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(backbone)
        self.decoder = decoder
        self.register_buffer("codes_IL", codes_IL, persistent=False)
        self.trie = CodeTrie.from_codes(codes_IL)
        self.num_learned_levels = len(decoder.heads)
        self._num_codes_of_last = int(codes_IL[:, -1].max()) + 1
        self.beam_width = beam_width
        self.label_smoothing = label_smoothing

    def embed_history(self, batch: TensorBatch) -> Tensor:
        x_ND = batch.embed("code").sum(1)
        return x_ND + batch.embed("item") if "item" in batch.rows else x_ND

    def loss(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        codes_NL = self.codes_IL[batch.targets_N, : self.num_learned_levels].long()
        state_ND = self.contexts(batch)
        total = state_ND.new_zeros(())
        for level in range(codes_NL.shape[1]):
            logits_NK = self.decoder.logits(state_ND, level, batch.keys_N if self.training else None)
            total = total + functional.cross_entropy(
                logits_NK, codes_NL[:, level], reduction="sum", label_smoothing=self.label_smoothing
            )
            if level + 1 < codes_NL.shape[1]:
                state_ND = self.decoder.condition(state_ND, level, codes_NL[:, level])
        return total

    def rank(self, batch: TensorBatch, k: int, excluded_BE: Tensor | None) -> Ranking:
        context_BD = self.last_contexts(batch)
        if self.trie.device != context_BD.device:  # the trie is no buffer that Module.to() would move
            self.trie = self.trie.to(context_BD.device)
        items_BK = torch.full((len(context_BD), k), -1, device=context_BD.device)
        scores_BK = torch.full((len(context_BD), k), -torch.inf, device=context_BD.device)
        for rows_R, width, excluded_RE in self._groups(len(context_BD), max(self.beam_width, k), excluded_BE):
            step = self._decoding_step(context_BD[rows_R])
            found = beam_search(step, self.trie, width, len(rows_R), excluded_RE)
            size = min(k, width)
            items_BK[rows_R, :size] = found.items_BW[:, :size]
            scores_BK[rows_R, :size] = found.log_probs_BW[:, :size]
        return Ranking(items_BK, scores_BK)

    def _decoding_step(self, context_RD: Tensor) -> Step:
        def next_logits(depth: int, codes_RWd: Tensor, parent_RW: Tensor | None) -> Tensor:
            if depth == self.num_learned_levels:  # items that share a tuple: equally probable
                return context_RD.new_zeros(1).expand(*codes_RWd.shape[:2], self._num_codes_of_last)
            state_RWD = context_RD[:, None, :]
            for level in range(depth):
                state_RWD = self.decoder.condition(state_RWD, level, codes_RWd[:, :, level])
            return self.decoder.logits(state_RWD, depth)

        return next_logits

    def _groups(
        self, num_rows: int, base_width: int, excluded_BE: Tensor | None
    ) -> Iterator[tuple[Tensor, int, Tensor | None]]:
        """Rows to decode together, the width of their beams and what they exclude.

        Excluded items take part until the last level, where each may keep another one from the beam; so a
        beam is wider by their number, rounded up to a power of two. A row's beam does not depend on the
        rows beside it: one long history makes no other request slower, nor answer it differently.
        """
        if excluded_BE is None:
            extra_B = torch.zeros(num_rows, dtype=torch.int64)
        else:
            counts_B = (excluded_BE >= 0).sum(1).cpu()
            extra_B = 2 ** counts_B.clamp(min=MIN_EXTRA_BEAMS).double().log2().ceil().long()
        for extra in extra_B.unique().tolist():
            width = min(base_width + extra, self.trie.num_items)
            for rows_R in (extra_B == extra).nonzero()[:, 0].split(max(1, MAX_BEAMS // width)):
                rows_R = rows_R.to(self.trie.device)
                if excluded_BE is None:
                    yield rows_R, width, None
                else:
                    excluded_RE = excluded_BE[rows_R]
                    yield rows_R, width, excluded_RE[:, (excluded_RE >= 0).any(0)]
