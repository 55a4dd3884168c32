"""A sparse-dense hybrid: codes are generated, and what the beams find is ranked by vectors of items too.

Both losses are trained on the weights of a prefix decoder: the hierarchical softmax along the codes, and one
softmax over all items, each scored by the sum of its prefixes' vectors (`FlatPrefixModel`):

    loss  = (levels + items) / 2
    score = log P(codes | history) + context . v(item)

Where vectors of prefixes are rows of servers, the loss of items is a sampled softmax: prefixes of its
negatives are looked up with the others.

The second term is log P(item | history) of the softmax over items but for a constant of the row. So a row's
items are ranked by the product of both distributions, and scores of different rows cannot be compared. Only
items that beams found have one.

Source: generating candidates and ranking them by dense vectors of the same network is LIGER (Yang et al.,
arXiv:2411.18814) and COBRA (Yang et al., arXiv:2503.02453); theirs have vectors of texts, ours those of
prefixes.

Axes: as in `prefix_decoder`; W items that were found.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.prefix_decoder import PrefixBackbone
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.item_losses import ItemLoss
from rayrec.models.sequence.sequence_model import TopItems
from rayrec.models.sequence.tensor_batch import TensorBatch


class HybridRecommender(GenerativeRecommender):
    """Generates items by one softmax, and ranks them by two.

    Its probabilities (`distribution`, `item_log_probs`) are those of the codes: what is generated.
    """

    backbone: PrefixBackbone[Any]
    ranks_as_it_generates = False

    def __init__(
        self,
        backbone: PrefixBackbone[Any],
        item_loss: ItemLoss,
        codes_IL: Tensor,
        beam_width: int,
        num_learned_levels: int,
        trie: CodeTrie | None = None,
    ) -> None:
        """`item_loss`: of the other softmax; all else as of `GenerativeRecommender`."""
        super().__init__(backbone, codes_IL, beam_width, num_learned_levels, trie=trie)
        self.item_loss = item_loss

    def loss(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        codes_NL = self._learned_codes(batch.targets_N)
        context_ND, vectors, levels = self.backbone.parts_of_loss(batch, codes_NL)
        return (levels + self.item_loss(context_ND, vectors, batch)) / 2

    def _ranked(self, context: Any, found: TopItems, k: int) -> TopItems:
        scores_BW = found.scores_BK + self.backbone.item_products(context, found.items_BK.clamp(min=0))
        # Stable: equal items keep the order in which beams found them.
        ranked = scores_BW.sort(dim=1, descending=True, stable=True)
        return TopItems(found.items_BK.gather(1, ranked.indices)[:, :k], ranked.values[:, :k])
