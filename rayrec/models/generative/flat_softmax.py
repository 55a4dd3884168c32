"""One softmax over all items with the parameters of `PrefixDecoder`, to compare its hierarchical one with.

An item is scored by the sum of the vectors of its prefixes, which is also what its events enter as:

    logit(item) = context · Σ_d v(c1..cd)

Nothing is normalized at a level, and nothing is generated: every item is scored, as in `DenseNextItemModel`,
whose item matrix is tied in the same way. The weights and their names are those of the decoder, so the two
begin with the same bits and have the same size: a difference in quality is one of the loss and of the beams.

Axes: as in `prefix_decoder`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from rayrec.models.base.made_of_weights import MadeOfWeights
from rayrec.models.generative.prefix_decoder import PrefixDecoder, PrefixSums
from rayrec.models.sequence.backbones.history import last_contexts
from rayrec.models.sequence.item_losses import ItemLoss
from rayrec.models.sequence.sequence_model import ItemScorer
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.arrays import Int64Array


class FlatPrefixModel(ItemScorer):
    """Scores every item by the vectors of its prefixes."""

    def __init__(self, backbone: PrefixDecoder, item_loss: ItemLoss) -> None:
        super().__init__()
        self.backbone = backbone
        self.item_loss = item_loss
        self._made_once = MadeOfWeights[Tensor]()

    def loss(self, batch: TensorBatch) -> Tensor:
        own = self.backbone.all_own_vectors()
        vectors = PrefixSums(self.backbone, own)
        return self.item_loss(self.backbone.event_contexts(batch, own), vectors, batch)

    def row_ids(self, item_ids_I: Int64Array) -> dict[str, Int64Array]:
        return {f"backbone.{name}": ids_V for name, ids_V in self.backbone.row_ids().items()}

    def item_vectors(self) -> Tensor:
        return PrefixSums(self.backbone, self.backbone.make_own_vectors()).catalog()

    def _scores(self, batch: TensorBatch) -> Tensor:
        """[B, I] of every item."""
        items_ID = self._made_once(self.backbone.vector_weights(), self.item_vectors)
        events_ND = functional.embedding(batch.items_N, items_ID)
        return last_contexts(self.backbone.backbone, events_ND, batch) @ items_ID.T
