"""The prefix decoder with a prefix's own vector as a row of the table `prefix`: catalogs of any size.

    v(c1..cd) = shared_d[cd] + row(c1..cd)

A training step reads the rows of its items' prefixes and those that its targets' prefixes compete with
(`rayrec.samples.features.prefix_paths`), so no trainer holds what grows with the catalog. The loss of a level
is the softmax over a parent's children, or over the target and a sample of them whose logits are corrected by
the log of the share that was sampled (Bengio & Senécal, IEEE TNN 2008).

Where items are generated, rows of the shortest prefixes are held, as most beams ask for them; those of longer
ones are read as beams reach them, where there are more than may be held.

Axes: as in `prefix_decoder`; A alternatives of a level, C candidates, M targets that are not certain, Q pairs
of one and an alternative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.past import KeysAndValues, Past
from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.decoding.children import Children, log_softmax_of_groups
from rayrec.models.generative.backbone import VectorContext, weighted_sum
from rayrec.models.generative.prefix_decoder import PrefixBackbone, products
from rayrec.models.sequence.backbones.history import contexts, last_contexts, read_on
from rayrec.models.sequence.backbones.transformer import CausalTransformer
from rayrec.models.sequence.sequence_model import ReadRows
from rayrec.models.sequence.tensor_batch import PathBatch, TensorBatch
from rayrec.platform.arrays import Int64Array
from rayrec.platform.code_tree import num_levels_within

MAX_READ = 1 << 19
"""Prefixes that are looked at between two reads, at most: with 64 numbers each, 128 MiB."""
MAX_EMPTY = 8
"""Logits stand in a matrix unless so many times more of it would be empty than full."""


class SparsePrefixDecoder(PrefixBackbone[VectorContext]):
    """Vectors of prefixes are rows of the table `prefix`."""

    table_of_catalog = "prefix"

    def __init__(
        self,
        backbone: CausalTransformer,
        codes_IL: Tensor,
        level_sizes: Sequence[int],
        known_I: Tensor | None = None,
        max_held: int = 0,
    ) -> None:
        """
        Args:
            max_held: rows that may be held to generate items, of the shortest prefixes, whole levels alone.
        """
        super().__init__(backbone, codes_IL, level_sizes, known_I)
        sizes = [self._trie.num_nodes(depth + 1) for depth in range(self._trie.depth)]
        self._held_sizes = sizes[: num_levels_within(sizes, max_held)]
        self.catalog_VD: Tensor | None = None
        self.read_rows: ReadRows | None = None
        self._ids: dict[int, Int64Array] = {}

    @property
    def reads_rows(self) -> bool:
        return len(self._held_sizes) < self._trie.depth

    def catalog_ids(self) -> Int64Array:
        held = [self.ids_of_level(depth) for depth in range(len(self._held_sizes))]
        return np.concatenate([np.empty(0, dtype=np.int64), *held])

    def embed_history(self, batch: TensorBatch) -> Tensor:
        return self.sums(batch, batch.items_N, batch.prefix_inverse().inputs_NL)

    def sums(self, batch: TensorBatch, items_N: Tensor, inverse_NL: Tensor) -> Tensor:
        """[N, D] sums of the vectors of the prefixes of items, whose rows are those of the inverse."""
        codes_NL = self.codes_IL[items_N].long()
        shared = [
            functional.embedding(codes_NL[:, d], shared_KD) for d, shared_KD in enumerate(self.shared_KD)
        ]
        return torch.stack(shared).sum(0) + rows_of_ids(batch.rows["prefix"], inverse_NL).sum(1)

    def parts_of_loss(
        self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None
    ) -> tuple[Tensor, PrefixRowSums, Tensor]:
        events_ND = self.embed_history(batch)
        context_ND = contexts(self.backbone, events_ND, batch)
        total = context_ND.new_zeros(())
        candidates = batch.prefix_inverse().candidates
        for depth, (level, inverse_C) in enumerate(zip(batch.paths, candidates, strict=True)):
            vectors_CD = functional.embedding(level.codes_C, self.shared_KD[depth])
            vectors_CD = vectors_CD + rows_of_ids(batch.rows["prefix"], inverse_C)
            losses_N = level_losses(context_ND, vectors_CD, level, is_first=depth == 0)
            total = total + weighted_sum(losses_N, weights_N)
        return context_ND, PrefixRowSums(self, events_ND), total

    def encode_context(self, batch: TensorBatch) -> VectorContext:
        return VectorContext(last_contexts(self.backbone, self.embed_history(batch), batch))

    def read_on(self, batch: TensorBatch, past: Past) -> tuple[VectorContext, Sequence[KeysAndValues]]:
        """As `prefix_cache.ReadsOn` has it."""
        last_BD, layers = read_on(self.backbone, self.embed_history(batch), batch, past)
        return VectorContext(last_BD), layers

    def own_products(self, context: VectorContext, depth: int, children: Children) -> Tensor:
        nodes_BRS = children.nodes_BRS
        if depth >= len(self._held_sizes):  # one node in place of what is no child, or it would be read, too
            nodes_BRS = nodes_BRS.masked_fill(~children.is_child_BRS, 0)
        return self.node_products(context, depth, nodes_BRS)

    def node_products(self, context: VectorContext, depth: int, nodes_BRS: Tensor) -> Tensor:
        context_BD = context.vectors_BD
        if depth < len(self._held_sizes):
            assert self.catalog_VD is not None, "set_catalog() comes before items are generated"
            return products(context_BD, self.catalog_VD.split(self._held_sizes)[depth], nodes_BRS)
        size = max(1, MAX_READ // nodes_BRS[0].numel())
        parts = zip(context_BD.split(size), nodes_BRS.split(size), strict=True)
        return torch.cat([products(part_BD, *self._read(depth, part_BRS)) for part_BD, part_BRS in parts])

    def _read(self, depth: int, nodes_BRS: Tensor) -> tuple[Tensor, Tensor]:
        """([M, D] rows of distinct nodes below a depth, [B, R, S] which of them each node is)."""
        assert self.read_rows is not None, "set_row_reader() comes before items are generated"
        if depth not in self._ids:
            self._ids[depth] = self.ids_of_level(depth)
        nodes_M, inverse_BRS = nodes_BRS.unique(return_inverse=True)
        rows_MD = self.read_rows(self._ids[depth][nodes_M.cpu().numpy()])
        return torch.from_numpy(rows_MD).to(nodes_BRS.device), inverse_BRS


class PrefixRowSums:
    """Items by the sums of their prefixes' vectors, of which a batch has the rows; an `ItemVectors`."""

    def __init__(self, decoder: SparsePrefixDecoder, events_ND: Tensor) -> None:
        """`events_ND`: `SparsePrefixDecoder.embed_history` of the batch."""
        self._decoder, self._events_ND = decoder, events_ND

    def inputs(self, batch: TensorBatch) -> Tensor:
        return self._events_ND

    def targets(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        candidates = batch.prefix_inverse().candidates
        parts = [inverse_C[level.targets_N] for level, inverse_C in zip(batch.paths, candidates, strict=True)]
        return self._decoder.sums(batch, batch.targets_N, torch.stack(parts, dim=1))

    def negatives(self, batch: TensorBatch) -> Tensor:
        assert batch.negatives_S is not None
        return self._decoder.sums(batch, batch.negatives_S, batch.prefix_inverse().negatives_SL)

    def catalog(self) -> Tensor:
        raise AssertionError("a batch has some rows of the catalog: the loss is one of negatives")


def level_losses(context_ND: Tensor, vectors_CD: Tensor, level: PathBatch, is_first: bool) -> Tensor:
    """[N] cross-entropy of each target's prefix against the alternatives of its parent; in float32.

    Args:
        vectors_CD: of the candidates.
        is_first: whether it is the first level, where all targets have one parent.
    """
    target_logit_N = (context_ND * functional.embedding(level.targets_N, vectors_CD)).sum(1).float()
    if is_first:
        logits_NA = context_ND @ vectors_CD[: level.num_alternatives].T
        logits_NA = logits_NA.float() - level.log_shares_P
        place_A = torch.arange(level.num_alternatives, device=logits_NA.device)
        logits_NA = logits_NA.masked_fill(place_A == level.targets_N[:, None], -torch.inf)
        return torch.cat([target_logit_N[:, None], logits_NA], dim=1).logsumexp(1) - target_logit_N
    first_N, stop_N = level.offsets_P1[level.parents_N], level.offsets_P1[level.parents_N + 1]
    # An only child is certain.
    chosen_M = ((stop_N - first_N != 1) | (first_N != level.targets_N)).nonzero()[:, 0]
    first_M, count_M = first_N[chosen_M], (stop_N - first_N)[chosen_M]
    target_Q = torch.repeat_interleave(torch.arange(len(chosen_M), device=count_M.device), count_M)
    place_Q = torch.arange(len(target_Q), device=count_M.device) - (count_M.cumsum(0) - count_M)[target_Q]
    candidate_Q = first_M[target_Q] + place_Q
    # Not index_select, whose gradient adds row by row.
    context_QD = functional.embedding(chosen_M[target_Q], context_ND)
    logits_Q = (context_QD * functional.embedding(candidate_Q, vectors_CD)).sum(1).float()
    logits_Q = logits_Q - level.log_shares_P[level.parents_N[chosen_M]][target_Q]
    # One that is the target itself would be counted twice.
    logits_Q = logits_Q.masked_fill(candidate_Q == level.targets_N[chosen_M][target_Q], -torch.inf)
    target_logit_M = target_logit_N[chosen_M]
    if len(chosen_M) * level.most_alternatives > MAX_EMPTY * (len(target_Q) + 1):
        logits = torch.cat([target_logit_M, logits_Q])
        group = torch.cat([torch.arange(len(chosen_M), device=target_Q.device), target_Q])
        losses_M = -log_softmax_of_groups(logits[None], group[None])[0, : len(chosen_M)]
    else:
        logits_MA = logits_Q.new_full((len(chosen_M), level.most_alternatives), -torch.inf)
        logits_MA = logits_MA.index_put((target_Q, place_Q), logits_Q)
        losses_M = torch.cat([target_logit_M[:, None], logits_MA], dim=1).logsumexp(1) - target_logit_M
    return torch.zeros_like(target_logit_N).index_put((chosen_M,), losses_M)
