"""Semantic IDs in, items out: a generative backbone, the trie of the catalog, and the ways of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.decoding.beam import BeamResult, beam_search, beams_for, searches_of
from rayrec.models.decoding.beam_policy import Beams, widest
from rayrec.models.decoding.leaf_filter import ItemSets, LeafFilter
from rayrec.models.decoding.prefixes import ItemDistribution, JaggedStep, Step, item_log_probs
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.backbone import Context, GenerativeBackbone
from rayrec.models.generative.prefix_cache import PrefixCache, ReadsOn
from rayrec.models.sequence.sequence_model import ReadRows, SequenceModel, TopItems
from rayrec.models.sequence.tensor_batch import ChunkBatch, TensorBatch
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import values_may_decide
from rayrec.platform.event_labels import UNKNOWN

MAX_LOGITS = 1 << 24
"""Most logits at once, over the beams of all rows: 64 MiB of float32."""


class GenerativeRecommender(SequenceModel):
    """Items appear only as paths of the trie.

    Where the catalog's codes have one level more than the backbone's, that level lists the items which
    share a tuple: nothing is learned of it, and the distribution is uniform over it.
    """

    ranks_as_it_generates = True
    """Whether `recommend` ranks by the probabilities that items are generated with, and by nothing else."""
    codes_IL: Tensor
    behavior_weights: Tensor | None
    prefix_cache: PrefixCache[Any] | None = None

    def __init__(
        self,
        backbone: GenerativeBackbone[Any],
        codes_IL: Tensor,
        beam_width: int,
        num_learned_levels: int,
        behavior_weights: Tensor | None = None,
        trie: CodeTrie | None = None,
    ) -> None:
        """
        Args:
            codes_IL: [I, L] codes of every item of the catalog.
            num_learned_levels: levels that the backbone scores: all, or all but the last.
            beam_width: beams of `recommend`; never fewer than the items asked for.
            behavior_weights: how much a target counts in the loss, of each behavior's code; None: all alike.
            trie: of these codes; None: it is made.
        """
        super().__init__()
        self.backbone = backbone
        self.register_buffer("codes_IL", codes_IL, persistent=False)
        self.register_buffer("behavior_weights", behavior_weights, persistent=False)
        self._trie = CodeTrie.from_codes(codes_IL) if trie is None else trie
        self.beam_width = beam_width
        self._num_learned_levels = num_learned_levels
        self._num_codes_of_last = self._trie.num_codes[-1]
        self.table_of_catalog = backbone.table_of_catalog

    @property
    def catalog_ID(self) -> Tensor | None:
        return self.backbone.catalog_VD

    @catalog_ID.setter
    def catalog_ID(self, rows_VD: Tensor | None) -> None:
        self.backbone.catalog_VD = rows_VD

    def row_ids(self, item_ids_I: Int64Array) -> dict[str, Int64Array]:
        return {f"backbone.{name}": ids_V for name, ids_V in self.backbone.row_ids().items()}

    def catalog_ids(self, item_ids_I: Int64Array) -> Int64Array:
        return self.backbone.catalog_ids()

    def set_catalog(self, rows_ID: Tensor) -> None:
        self.backbone.catalog_VD = rows_ID

    def set_row_reader(self, read_rows: ReadRows) -> None:
        self.backbone.read_rows = read_rows

    @property
    def reads_rows(self) -> bool:
        return self.backbone.reads_rows

    @property
    def trie(self) -> CodeTrie:
        """Of the catalog, on the device of the network."""
        return self._trie.to(self.codes_IL.device)

    def loss(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        return self.backbone.loss(batch, self._learned_codes(batch.targets_N), self._weights(batch))

    def _weights(self, batch: TensorBatch) -> Tensor | None:
        """[N] of the targets; one whose behavior is unknown counts once."""
        if self.behavior_weights is None:
            return None
        codes_N = batch.target_labels["behavior"]
        weights_N = self.behavior_weights[codes_N.clamp(min=0)]
        return torch.where(codes_N == UNKNOWN, 1.0, weights_N)

    def distribution(
        self,
        context: Context,
        leaf_filter: LeafFilter | None = None,
        temperature: float = 1.0,
        renormalized: bool = True,
    ) -> ItemDistribution:
        """What is said of the items of each row."""
        step, jagged_step = self._start(context)
        return ItemDistribution(
            step, self.trie, len(context), leaf_filter, temperature, renormalized, jagged_step
        )

    def _learned_codes(self, items_N: Tensor) -> Tensor:
        return self.codes_IL[items_N, : self._num_learned_levels].long()

    def _start(self, context: Context) -> tuple[Step, JaggedStep | None]:
        learned, learned_jagged = self.backbone.start_jagged(context)

        def equal(codes: Tensor) -> Tensor:
            return torch.zeros(1, device=codes.device).expand(*codes.shape[:-1], self._num_codes_of_last)

        def step(depth: int, codes_BWd: Tensor, parent_BW: Tensor | None) -> Tensor:
            is_learned = depth < self._num_learned_levels
            return learned(depth, codes_BWd, parent_BW) if is_learned else equal(codes_BWd)

        def jagged(depth: int, codes_Nd: Tensor, parent_N: Tensor, counts_B: Int64Array) -> Tensor:
            assert learned_jagged is not None, "else there is no such step"
            is_learned = depth < self._num_learned_levels
            return learned_jagged(depth, codes_Nd, parent_N, counts_B) if is_learned else equal(codes_Nd)

        return step, None if learned_jagged is None else jagged

    def recommend(
        self,
        batch: TensorBatch,
        k: int,
        excluded_BE: Tensor | None,
        beams_B: Sequence[Beams] | None = None,
        allowed: ItemSets | None = None,
    ) -> TopItems:
        context = self._context(batch)
        of_rows_B: Sequence[Beams] = [self.num_beams(k)] * len(context) if beams_B is None else beams_B
        # Reranking looks at all that were found.
        num_found = k if self.ranks_as_it_generates else max([k, *map(widest, of_rows_B)])
        leaf_filter = None
        if allowed is not None and excluded_BE is None:
            excluded_BE = torch.full_like(allowed.set_B[:, None], -1)
        if excluded_BE is not None:
            leaf_filter = LeafFilter.excluding(self.trie, excluded_BE, allowed)
        found = []
        # Elsewhere their number would have to be waited for, see `Prefixes`.
        is_jagged = self.backbone.has_jagged_step and values_may_decide(self.codes_IL.device)
        for search, width in searches_of(of_rows_B, is_jagged):
            # A row is decoded alike whatever the rows beside it, which do not mix.
            size = max(1, MAX_LOGITS // (width * max(self._trie.num_codes)))
            for first in range(search.start, search.stop, size):
                rows = slice(first, min(first + size, search.stop))
                filtered = None if leaf_filter is None else leaf_filter.some_rows(rows)
                result = self._search(context.some_rows(rows), of_rows_B[rows], filtered)
                # Of its own rows' beams: in a part of a search, none may have as many as the first row.
                missing = (0, max(num_found - result.items_BW.shape[1], 0))
                found.append(
                    TopItems(
                        functional.pad(result.items_BW[:, :num_found], missing, value=-1),
                        functional.pad(result.log_probs_BW[:, :num_found], missing, value=-torch.inf),
                    )
                )
        return self._ranked(context, TopItems(*(torch.cat(parts) for parts in zip(*found, strict=True))), k)

    def _ranked(self, context: Context, found: TopItems, k: int) -> TopItems:
        """The k best of the items that were found, which stand by falling probability."""
        return found

    def item_log_probs(self, batch: TensorBatch, items_BW: Tensor) -> Tensor:
        return item_log_probs(self.distribution(self._context(batch)), items_BW)

    def first_log_probs(self, batch: TensorBatch) -> Tensor:
        context = self._context(batch)
        step, _ = self._start(context)
        no_codes = torch.zeros(len(context), 1, 0, dtype=torch.int64, device=self.codes_IL.device)
        logits_BK = step(0, no_codes, None)[:, 0, self.trie.child_codes[0]]
        return logits_BK.log_softmax(1)

    def _context(self, batch: TensorBatch) -> Context:
        # Rows of tables change beside the weights, and what is kept would not know; nor would it know of
        # what is before these events. It looks at histories, of which a padded batch says nothing to the
        # host.
        is_kept = self.prefix_cache is not None and not batch.rows and batch.old_chunks is None
        if not is_kept or batch.layout.is_padded:
            return self.backbone.encode_context(batch)
        assert self.prefix_cache is not None, "looked at above"
        return self.prefix_cache.of(batch)

    def use_prefix_cache(self, sizes: CacheSizes) -> PrefixCache[Any] | None:
        if isinstance(self.backbone, ReadsOn):
            self.prefix_cache = PrefixCache(self.backbone, sizes)
        return self.prefix_cache

    def summarize(self, chunks: ChunkBatch) -> Tensor:
        return self.backbone.summarize(chunks)

    def num_beams(self, k: int, max_beams: int | None = None) -> int:
        return beams_for(k, self.beam_width, max_beams)

    def _search(
        self, context: Context, beams_B: Sequence[Beams], leaf_filter: LeafFilter | None
    ) -> BeamResult:
        distribution = self.distribution(context, leaf_filter, renormalized=False)
        width = max(map(widest, beams_B))
        if all(each == width for each in beams_B):
            return beam_search(distribution, width)
        return beam_search(distribution, width, beams_B)
