"""Semantic IDs in, items out: a generative backbone, the trie of the catalogue, and the ways of decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.prefixes import ItemDistribution
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.backbone import Context, GenerativeBackbone
from rayrec.models.sequence_model import Ranking, SequenceModel
from rayrec.models.tensor_batch import TensorBatch

MIN_EXTRA_BEAMS = 16
"""Fewest beams beside the configured ones, of rows that exclude items: short histories share a width."""
MAX_BEAMS = 1 << 16
"""Most beams decoded at once, over all rows: bounds the logits to 64 MiB for 256 codes a level."""


class GenerativeRecommender(SequenceModel):
    """Items appear only as paths of the trie."""

    codes_IL: Tensor

    def __init__(self, backbone: GenerativeBackbone, codes_IL: Tensor, beam_width: int) -> None:
        """
        Args:
            codes_IL: [I, L] codes of every item of the catalogue.
            beam_width: beams of `rank`; never fewer than the items asked for.
        """
        super().__init__()
        self.backbone = backbone
        self.register_buffer("codes_IL", codes_IL, persistent=False)
        self._trie = CodeTrie.from_codes(codes_IL)
        self.beam_width = beam_width

    @property
    def trie(self) -> CodeTrie:
        """Of the catalogue, on the device of the network."""
        if self._trie.device != self.codes_IL.device:  # it is no buffer that Module.to() would move
            self._trie = self._trie.to(self.codes_IL.device)
        return self._trie

    def loss(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        return self.backbone.loss(batch, self.codes_IL[batch.targets_N].long())

    def distribution(
        self, context: Context, leaf_filter: LeafFilter | None = None, temperature: float = 1.0
    ) -> ItemDistribution:
        """What is said of the items of each row; to be decoded once, since its caches grow with it."""
        return ItemDistribution(
            self.backbone.start(context), self.trie, len(context), leaf_filter, temperature
        )

    def rank(self, batch: TensorBatch, k: int, excluded_BE: Tensor | None) -> Ranking:
        context = self.backbone.encode_context(batch)
        items_BK = torch.full((len(context), k), -1, device=self.trie.device)
        scores_BK = torch.full((len(context), k), -torch.inf, device=self.trie.device)
        for rows_R, width, excluded_RE in self._groups(len(context), max(self.beam_width, k), excluded_BE):
            step = self.backbone.start(context.select(rows_R))
            found = beam_search(step, self.trie, width, len(rows_R), excluded_RE)
            size = min(k, width)
            items_BK[rows_R, :size] = found.items_BW[:, :size]
            scores_BK[rows_R, :size] = found.log_probs_BW[:, :size].to(scores_BK.dtype)
        return Ranking(items_BK, scores_BK)

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
