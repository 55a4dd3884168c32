"""A vector per prefix of a semantic ID, tied between input and output: codes that know their context.

Residual codebooks give a code another meaning under every prefix. So each prefix of an ID (its first code,
its first two, ..., the whole tuple) has a vector of its own besides that of its last code, which other
prefixes share:

    v(c1..cd) = shared_d[cd] + own_d[c1..cd]

An event enters as the sum of v over all prefixes of its item, and a prefix's next code is scored by the inner
product of the context with v of the longer prefix, normalized over the codes that lead to an item. That is a
hierarchical softmax along the trie (Morin & Bengio, AISTATS 2005; Mnih & Hinton, NeurIPS 2008) whose inner
nodes share parameters by their codes. Rows for prefixes instead of single codes as inputs are described by
Singh et al., "Better Generalization with Semantic IDs", RecSys 2024, arXiv:2306.08121; here they are the
outputs as well.

What is trained is what is decoded: no probability ever goes to tuples without an item. Items that come into
the catalog later share the vectors of the prefixes they have in common with known ones, and those of their
codes. Prefixes that lead to no item with a training event would only ever be negatives, and could never be
recommended: the loss leaves them out, and they too are what they share with others.

Axes: as in `backbone`; V prefixes of d codes, C children of one, P pairs of an event and a child,
M events whose prefix has several children, J beams that are looked at together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.attention.past import KeysAndValues, Past
from rayrec.models.base.made_of_weights import MadeOfWeights
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.decoding.children import (
    Children,
    is_uneven,
    log_probs_among_children,
    log_softmax_of_groups,
)
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.backbone import (
    GenerativeBackbone,
    VectorContext,
    weighted_sum,
)
from rayrec.models.generative.prefix_composer import PrefixComposer
from rayrec.models.generative.prefix_content import PrefixContent
from rayrec.models.sequence.backbones.history import contexts, last_contexts, read_on
from rayrec.models.sequence.backbones.transformer import INITIAL_STD, CausalTransformer
from rayrec.models.sequence.item_losses import ItemVectors
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.arrays import Int64Array
from rayrec.platform.code_tree import ids_of_nodes
from rayrec.platform.item_bags import ItemBags

GATHER_COST = 8
"""A vector that is fetched by itself costs as much as so many in a product of matrices."""
MAX_GATHERED = 1 << 24
"""Numbers of vectors that are fetched at once: 64 MiB of float32."""


@dataclass(frozen=True)
class PrefixContext(VectorContext):
    """What was read of histories, and the vectors that it was read by, which score what comes next."""

    own: Sequence[Tensor]
    """`PrefixDecoder.own_vectors` of every depth."""

    def some_rows(self, rows: slice) -> PrefixContext:
        return PrefixContext(self.vectors_BD[rows], self.own)


ContentSettings = tuple[ItemBags, int]
"""What is said of the items of the catalog, and the number of buckets."""


ContextT = TypeVar("ContextT", bound=VectorContext)


class PrefixBackbone(GenerativeBackbone[ContextT]):
    """History to one vector; that vector against those of prefixes, wherever these are."""

    tokens_per_event = 1
    codes_IL: Tensor

    def __init__(
        self,
        backbone: CausalTransformer,
        codes_IL: Tensor,
        level_sizes: Sequence[int],
        known_I: Tensor | None = None,
    ) -> None:
        """
        Args:
            codes_IL: [I, L] learned codes of the catalog; items may share all of them.
            level_sizes: K of each level.
            known_I: [I] bool, the items it is trained on, whose prefixes have vectors; None is all.
        """
        super().__init__()
        self.backbone = backbone
        self.dim = backbone.positions_TD.shape[1]
        known_codes = codes_IL if known_I is None else codes_IL[known_I]
        self._trie = CodeTrie.from_codes(known_codes, may_share=True)
        self.shared_KD = nn.ParameterList(_vectors(size, self.dim) for size in level_sizes)
        self.register_buffer("codes_IL", codes_IL, persistent=False)

    @property
    def trie(self) -> CodeTrie:
        """Of the catalog it is trained on."""
        return self._trie.to(self.codes_IL.device)

    def ids_of_level(self, depth: int) -> Int64Array:
        """[V] ids of the nodes below a depth."""
        levels = slice(0, depth + 1)
        arrays = (self._trie.child_offsets[levels], self._trie.child_codes[levels])
        offsets, codes = ([each.cpu().numpy() for each in of_depths] for of_depths in arrays)
        return ids_of_nodes(offsets, codes)

    @abstractmethod
    def embed_history(self, batch: TensorBatch) -> Tensor:
        """[N, D] input vector of every history event; only the vectors of these are looked at."""

    @abstractmethod
    def parts_of_loss(
        self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None
    ) -> tuple[Tensor, ItemVectors, Tensor]:
        """([N, D] what is known after each event, what items are scored by, `loss`).

        Args: as of `loss`.
        """

    @abstractmethod
    def own_products(self, context: ContextT, depth: int, children: Children) -> Tensor:
        """[B, R, S] inner products of each row's context with the own vectors of children of nodes of a
        depth; anything where there is no child."""

    @abstractmethod
    def node_products(self, context: ContextT, depth: int, nodes_BRS: Tensor) -> Tensor:
        """[B, R, S] the same of nodes below a depth."""

    def loss(self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None) -> Tensor:
        _, _, loss = self.parts_of_loss(batch, codes_NL, weights_N)
        return loss

    def item_products(self, context: ContextT, items_BW: Tensor) -> Tensor:
        """[B, W] inner products of each row's context with the sums of the vectors of some items'
        prefixes. Rows that a process does not hold are read again, once for each level."""
        codes_BWL = self.codes_IL[items_BW].long()
        nodes_BW, total_BW = torch.zeros_like(items_BW), context.vectors_BD.new_zeros(items_BW.shape)
        for depth, shared_KD in enumerate(self.shared_KD):
            codes_BW = codes_BWL[:, :, depth]
            nodes_BW = self.trie.child(depth, nodes_BW, codes_BW)
            own_BW = self.node_products(context, depth, nodes_BW.clamp(min=0)[:, :, None])[:, :, 0]
            shared_BW = (context.vectors_BD @ shared_KD.T).gather(1, codes_BW)
            total_BW = total_BW + shared_BW + own_BW.masked_fill(nodes_BW < 0, 0.0)
        return total_BW

    def step(self, context: ContextT, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        return self._logits(context, depth, self._nodes(codes_BWd))

    def sequence_logits(self, context: ContextT, codes_BWL: Tensor) -> list[Tensor]:
        return [
            self._logits(context, depth, self._nodes(codes_BWL[:, :, :depth]))
            for depth in range(codes_BWL.shape[2])
        ]

    def sequence_logprob(self, context: ContextT, codes_BWL: Tensor) -> Tensor:
        """[B, W, L] log-probability of each code among those that lead to an item of the catalog it is
        trained on; -inf for one that leads to none. No other distribution was trained."""
        # One level after the other: all of their logits at once take as many times the memory.
        logits = (
            self._logits(context, depth, self._nodes(codes_BWL[:, :, :depth]))
            for depth in range(codes_BWL.shape[2])
        )
        return log_probs_among_children(self.trie, logits, codes_BWL)

    def _nodes(self, codes: Tensor) -> Tensor:
        """[...] node of each prefix [..., d]; -1 for one of which training knew nothing."""
        nodes = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
        for depth in range(codes.shape[-1]):
            nodes = self.trie.child(depth, nodes, codes[..., depth])
        return nodes

    def _logits(self, context: ContextT, depth: int, node_BW: Tensor) -> Tensor:
        """[B, W, K]: of every code; those that no known item has there get what their code alone says."""
        shared_BK = context.vectors_BD @ self.shared_KD[depth].T
        logits_BWK = shared_BK[:, None, :].expand(-1, node_BW.shape[1], -1)
        children = Children.of(self.trie, depth, node_BW)
        own_BRS = self.own_products(context, depth, children)
        own_BRS = own_BRS.masked_fill(~children.is_child_BRS, 0.0)
        codes_BRS = children.codes_BRS
        if children.prefix_BR is None:
            return logits_BWK.scatter_add(2, codes_BRS, own_BRS)
        place_BN = (children.prefix_BR[:, :, None] * logits_BWK.shape[2] + codes_BRS).flatten(1)
        return logits_BWK.flatten(1).scatter_add(1, place_BN, own_BRS.flatten(1)).view_as(logits_BWK)


class PrefixDecoder(PrefixBackbone[PrefixContext]):
    """Vectors of prefixes are weights of the network."""

    nodes_IL: Tensor

    def __init__(
        self,
        backbone: CausalTransformer,
        codes_IL: Tensor,
        level_sizes: Sequence[int],
        known_I: Tensor | None = None,
        trained_I: Tensor | None = None,
        composer: PrefixComposer | None = None,
        content: ContentSettings | None = None,
    ) -> None:
        """
        Args:
            trained_I: [I] bool, the items that training has events of, to be given for training alone: the
                others are no negatives; None is all.
            composer: makes the own vectors of prefixes of their codes; None: each is a weight.
            content: what the catalog says of the items below a prefix, those of `known_I` alone, added to its
                vector; None: nothing is.
        """
        super().__init__(backbone, codes_IL, level_sizes, known_I)
        sizes = [self._trie.num_nodes(depth + 1) for depth in range(self._trie.depth)]
        self.own_VD = (
            nn.ParameterList() if composer else nn.ParameterList(_vectors(size, self.dim) for size in sizes)
        )
        self.composer = composer
        self._made_once = MadeOfWeights[list[Tensor]]() if composer or content is not None else None
        codes_IL = codes_IL.long()
        nodes_IL = torch.stack([self._nodes(codes_IL[:, : d + 1]) for d in range(len(level_sizes))], dim=1)
        self._knows_all = known_I is None or bool((nodes_IL >= 0).all())
        self.register_buffer("nodes_IL", nodes_IL, persistent=False)
        self.content = None
        if content is not None:
            bags, num_buckets = content
            described_IL = nodes_IL.cpu().numpy().copy()
            if known_I is not None:
                # Items that came later share the vectors of known prefixes, and must not change them.
                described_IL[~known_I.cpu().numpy()] = -1
            self.content = PrefixContent(bags, described_IL, sizes, num_buckets, self.dim)
        self._excludes = trained_I is not None and not bool(trained_I.all())
        for depth, size in enumerate(sizes):
            if composer is not None:
                codes_Vd = codes_IL.new_empty(size, depth + 1)
                is_known_I = nodes_IL[:, depth] >= 0
                codes_Vd[nodes_IL[is_known_I, depth]] = codes_IL[is_known_I, : depth + 1]
                self.register_buffer(f"_codes_{depth}", codes_Vd, persistent=False)
            if not self._excludes:
                continue
            assert trained_I is not None
            has_event_V = torch.zeros(size, dtype=torch.bool)
            has_event_V[nodes_IL[trained_I, depth]] = True
            codes_V = self._trie.child_codes[depth]
            # A code that no trained item has anywhere means nothing: its prefixes stay negatives.
            means_V = torch.isin(codes_V, codes_V[has_event_V])
            excluded_V = ~has_event_V & means_V
            if composer is None:
                with torch.no_grad():
                    self.own_VD[depth][excluded_V] = 0.0
            self.register_buffer(f"_excluded_{depth}", excluded_V, persistent=False)

    def row_ids(self) -> dict[str, Int64Array]:
        return {f"own_VD.{depth}": self.ids_of_level(depth) for depth in range(len(self.own_VD))}

    def own_vectors(self, depth: int) -> Tensor:
        """[V, D] what each prefix of `depth` + 1 codes has besides the vector of its last one."""
        if self.composer is None:
            own_VD: Tensor = self.own_VD[depth]
        else:
            own_VD = self.composer(getattr(self, f"_codes_{depth}"))
        return own_VD if self.content is None else own_VD + self.content(depth)

    def embed_history(self, batch: TensorBatch, own: Sequence[Tensor] | None = None) -> Tensor:
        return self.item_vectors(self.codes_IL[batch.items_N], self.nodes_IL[batch.items_N], own)

    def item_vectors(self, codes_NL: Tensor, nodes_NL: Tensor, own: Sequence[Tensor] | None = None) -> Tensor:
        """[N, D] sums of the vectors of the prefixes of items.

        Args:
            nodes_NL: of their prefixes; -1 for those of which training knew nothing.
            own: `own_vectors` of every depth, where they are at hand.
        """
        codes_NL = codes_NL.long()
        parts = []
        for depth, shared_KD in enumerate(self.shared_KD):
            own_VD = self.own_vectors(depth) if own is None else own[depth]
            own_ND = functional.embedding(nodes_NL[:, depth].clamp(min=0), own_VD)
            if not self._knows_all:
                own_ND = own_ND.masked_fill(nodes_NL[:, depth, None] < 0, 0.0)
            parts.append(functional.embedding(codes_NL[:, depth], shared_KD) + own_ND)
        return torch.stack(parts).sum(0)

    def parts_of_loss(
        self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None
    ) -> tuple[Tensor, PrefixSums, Tensor]:
        own = self.all_own_vectors()
        context_ND = self.event_contexts(batch, own)
        return context_ND, PrefixSums(self, own), self._levels_loss(context_ND, own, codes_NL, weights_N)

    def all_own_vectors(self) -> list[Tensor]:
        """`own_vectors` of every depth."""
        if self._made_once is None:
            return list(self.own_VD)
        return self._made_once(self.vector_weights(), self.make_own_vectors)

    def make_own_vectors(self) -> list[Tensor]:
        """`all_own_vectors`, which are not kept."""
        return [self.own_vectors(depth) for depth in range(self.trie.depth)]

    def vector_weights(self) -> list[Tensor]:
        """What vectors of prefixes are made of."""
        parts = (self.own_VD, self.shared_KD, self.composer, self.content)
        return [weight for part in parts if part is not None for weight in part.parameters()]

    def event_contexts(self, batch: TensorBatch, own: Sequence[Tensor]) -> Tensor:
        """[N, D] what is known after each event."""
        return contexts(self.backbone, self.embed_history(batch, own), batch)

    def _levels_loss(
        self, context_ND: Tensor, own: Sequence[Tensor], codes_NL: Tensor, weights_N: Tensor | None
    ) -> Tensor:
        """Scalar: `loss` where contexts are known, summed over events.

        Args:
            context_ND: `event_contexts`.
            own: [V, D] `own_vectors` of every depth.
            codes_NL, weights_N: as of `loss`.
        """
        parent_N = codes_NL.new_zeros(len(codes_NL))
        total = context_ND.new_zeros(())
        for depth, own_VD in enumerate(own):
            codes_V = self.trie.child_codes[depth]
            vectors_VD = functional.embedding(codes_V, self.shared_KD[depth]) + own_VD
            node_N = self.trie.child(depth, parent_N, codes_NL[:, depth])
            total = total + self._level_loss(depth, context_ND, vectors_VD, parent_N, node_N, weights_N)
            parent_N = node_N
        return total

    def _level_loss(
        self,
        depth: int,
        context_ND: Tensor,
        vectors_VD: Tensor,
        parent_N: Tensor,
        node_N: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        """Cross-entropy of each event's next prefix among the children of its present one."""
        excluded_V = getattr(self, f"_excluded_{depth}") if self._excludes else None
        if depth == 0:
            logits_NV = context_ND @ vectors_VD.T
            if excluded_V is not None:
                is_target_NV = functional.one_hot(node_N, len(vectors_VD)).bool()
                logits_NV = logits_NV.masked_fill(excluded_V & ~is_target_NV, -torch.inf)
            return _summed_cross_entropy(logits_NV, node_N, weights_N)
        offsets = self.trie.child_offsets[depth]
        first_N, count_N = offsets[parent_N], offsets[parent_N + 1] - offsets[parent_N]
        # An only child is certain.
        chosen_M = (count_N > 1).nonzero()[:, 0]
        first_M, count_M = first_N[chosen_M], count_N[chosen_M]
        event_P = torch.repeat_interleave(torch.arange(len(chosen_M), device=count_M.device), count_M)
        start_M = count_M.cumsum(0) - count_M
        place_P = torch.arange(len(event_P), device=count_M.device) - start_M[event_P]
        # Not index_select, whose gradient adds row by row.
        context_PD = functional.embedding(chosen_M[event_P], context_ND)
        child_P = first_M[event_P] + place_P
        child_PD = functional.embedding(child_P, vectors_VD)
        logits_P = (context_PD * child_PD).sum(1)
        if excluded_V is not None:
            is_target_P = child_P == node_N[chosen_M][event_P]
            logits_P = logits_P.masked_fill(excluded_V[child_P] & ~is_target_P, -torch.inf)
        weights_M = None if weights_N is None else weights_N[chosen_M]
        if is_uneven(self.trie, depth):
            (log_probs_P,) = log_softmax_of_groups(logits_P.float()[None], event_P[None])
            return weighted_sum(-log_probs_P[start_M + node_N[chosen_M] - first_M], weights_M)
        # As many columns as any prefix has children: the shape does not depend on the batch.
        logits_MC = logits_P.new_full((len(chosen_M), self.trie.max_children[depth]), -torch.inf)
        logits_MC = logits_MC.index_put((event_P, place_P), logits_P)
        return _summed_cross_entropy(logits_MC, node_N[chosen_M] - first_M, weights_M)

    def encode_context(self, batch: TensorBatch) -> PrefixContext:
        own = self.all_own_vectors()
        return PrefixContext(last_contexts(self.backbone, self.embed_history(batch, own), batch), own)

    def read_on(self, batch: TensorBatch, past: Past) -> tuple[PrefixContext, Sequence[KeysAndValues]]:
        """As `prefix_cache.ReadsOn` has it."""
        own = self.all_own_vectors()
        last_BD, layers = read_on(self.backbone, self.embed_history(batch, own), batch, past)
        return PrefixContext(last_BD, own), layers

    def own_products(self, context: PrefixContext, depth: int, children: Children) -> Tensor:
        return self.node_products(context, depth, children.nodes_BRS)

    def node_products(self, context: PrefixContext, depth: int, nodes_BRS: Tensor) -> Tensor:
        return products(context.vectors_BD, context.own[depth], nodes_BRS)


class PrefixSums:
    """Items by the sums of their prefixes' vectors; an `ItemVectors`."""

    def __init__(self, decoder: PrefixDecoder, own: Sequence[Tensor]) -> None:
        """`own`: `PrefixDecoder.own_vectors` of every depth."""
        self._decoder, self._own = decoder, own

    def inputs(self, batch: TensorBatch) -> Tensor:
        return self._of(batch.items_N)

    def targets(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        return self._of(batch.targets_N)

    def negatives(self, batch: TensorBatch) -> Tensor:
        assert batch.negatives_S is not None
        return self._of(batch.negatives_S)

    def catalog(self) -> Tensor:
        return self._decoder.item_vectors(self._decoder.codes_IL, self._decoder.nodes_IL, self._own)

    def _of(self, items: Tensor) -> Tensor:
        decoder = self._decoder
        return decoder.item_vectors(decoder.codes_IL[items], decoder.nodes_IL[items], self._own)


def products(context_BD: Tensor, vectors_VD: Tensor, index_BWC: Tensor) -> Tensor:
    """[B, W, C] inner products of each row's context with some of the vectors."""
    num_rows, num_beams, num_children = index_BWC.shape
    if len(vectors_VD) <= GATHER_COST * num_beams * num_children:
        return (context_BD @ vectors_VD.T).gather(1, index_BWC.flatten(1)).view_as(index_BWC)
    row_N = torch.arange(num_rows, device=index_BWC.device).repeat_interleave(num_beams)
    chunk = max(1, MAX_GATHERED // (num_children * vectors_VD.shape[1]))
    products = [
        (functional.embedding(index_JC, vectors_VD) @ context_BD[row_J, :, None])[:, :, 0]
        for index_JC, row_J in zip(index_BWC.flatten(0, 1).split(chunk), row_N.split(chunk), strict=True)
    ]
    return torch.cat(products).view_as(index_BWC)


def _vectors(count: int, dim: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, dim).normal_(std=INITIAL_STD))


def _summed_cross_entropy(logits_MC: Tensor, chosen_M: Tensor, weights_M: Tensor | None) -> Tensor:
    """Scalar: the cross-entropy of what was chosen, each as often as it counts."""
    reduction = "sum" if weights_M is None else "none"
    losses = functional.cross_entropy(logits_MC.float(), chosen_M, reduction=reduction)
    return losses if weights_M is None else weighted_sum(losses, weights_M)
