"""Models that score every item by an inner product with what is known of a history.

SASRec is one of them (Kang & McAuley, ICDM 2018, arXiv:1808.09781), HSTU and BSARec are others; which it is
depends on the network that reads the history (`backbones`), and how it learns on the loss (`item_losses`).
Item vectors are tied: those that histories are read by are those that items are scored by.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.base.made_of_weights import MadeOfWeights
from rayrec.models.sequence.backbones.history import HistoryReader, contexts, last_contexts
from rayrec.models.sequence.item_content import ItemContent
from rayrec.models.sequence.item_losses import ItemLoss
from rayrec.models.sequence.neighbor_pooling import NeighborPooling
from rayrec.models.sequence.sequence_model import ItemScorer
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.arrays import Int64Array


class NextItemModel(ItemScorer):
    """What is the same wherever the item matrix is."""

    def __init__(
        self,
        backbone: HistoryReader,
        item_loss: ItemLoss,
        temperature: float | None = None,
        pooling: NeighborPooling | None = None,
    ) -> None:
        """
        Args:
            temperature: None for inner products as scores; otherwise of vectors of length 1, over this.
            pooling: joins each event with its neighbors before the history is read; None: they are not read.
        """
        super().__init__()
        self.backbone = backbone
        self.item_loss = item_loss
        self.temperature = temperature
        self.pooling = pooling

    def loss(self, batch: TensorBatch) -> Tensor:
        context_ND = self._over_temperature(contexts(self.backbone, self._events(batch), batch))
        return self.item_loss(context_ND, self, batch)

    def _scores(self, batch: TensorBatch) -> Tensor:
        """[B, I] of every item."""
        context_BD = self._over_temperature(last_contexts(self.backbone, self._events(batch), batch))
        return context_BD @ self.catalog().T

    def inputs(self, batch: TensorBatch) -> Tensor:
        """[N, D] what the items of the events are scored by."""
        return self._directed(self.embed_history(batch))

    def targets(self, batch: TensorBatch) -> Tensor:
        """[N, D] what the items that follow are scored by."""
        return self._directed(self._target_rows(batch))

    def negatives(self, batch: TensorBatch) -> Tensor:
        """[S, D] or [N, K, D] what the batch's negatives are scored by."""
        return self._directed(self._negative_rows(batch))

    def item_vectors(self) -> Tensor:
        return self.catalog()

    def catalog(self) -> Tensor:
        """[I, D] what every item is scored by."""
        return self._directed(self._catalog_rows())

    def _events(self, batch: TensorBatch) -> Tensor:
        """[N, D] what the backbone reads."""
        own_ND = self.embed_history(batch)
        if self.pooling is None:
            return own_ND
        assert batch.neighbor_weights_NJ is not None, "a model with neighbors is given them"
        return self.pooling(own_ND, *self._neighbor_rows(batch), batch.neighbor_weights_NJ)

    @abstractmethod
    def embed_history(self, batch: TensorBatch) -> Tensor:
        """[N, D] row of the item of every history event."""

    @abstractmethod
    def _neighbor_rows(self, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """([M, D] rows, [N, J] which of them are each event's neighbors)."""

    @abstractmethod
    def _target_rows(self, batch: TensorBatch) -> Tensor: ...

    @abstractmethod
    def _negative_rows(self, batch: TensorBatch) -> Tensor: ...

    @abstractmethod
    def _catalog_rows(self) -> Tensor: ...

    def _over_temperature(self, context_ND: Tensor) -> Tensor:
        if self.temperature is None:
            return context_ND
        return functional.normalize(context_ND, dim=-1) / self.temperature

    def _directed(self, vectors: Tensor) -> Tensor:
        return vectors if self.temperature is None else functional.normalize(vectors, dim=-1)


class DenseNextItemModel(NextItemModel):
    """Item matrix held as dense weights: small catalogs."""

    known_K: Tensor | None
    """Positions of the items that have rows; None: all have."""
    is_nothing_I: Tensor | None
    """[I] bool, items of which nothing is known; None: something is known of all."""

    def __init__(
        self,
        backbone: HistoryReader,
        item_loss: ItemLoss,
        num_items: int,
        dim: int,
        temperature: float | None = None,
        pooling: NeighborPooling | None = None,
        content: ItemContent | None = None,
        known_I: Tensor | None = None,
    ) -> None:
        """
        Args:
            content: added to the rows of items; None: they stand alone.
            known_I: [I] bool, the items it was trained on, which have rows; others are what is said of them,
                and not recommended where that is nothing. None is all.
        """
        super().__init__(backbone, item_loss, temperature, pooling)
        self.content = content
        self._made_once = None if content is None else MadeOfWeights[Tensor]()
        known_K = is_nothing_I = None
        if known_I is not None:
            assert content is not None, "what else would be known of items that came later"
            known_K, is_nothing_I = known_I.nonzero().squeeze(1), ~known_I & ~content.sums.has_features_I
            num_items = len(known_K)
        self.register_buffer("known_K", known_K, persistent=False)
        self.register_buffer("is_nothing_I", is_nothing_I, persistent=False)
        self.items_ID = nn.Parameter(torch.empty(num_items, dim).normal_(std=0.02))

    def row_ids(self, item_ids_I: Int64Array) -> dict[str, Int64Array]:
        return {"items_ID": item_ids_I if self.known_K is None else item_ids_I[self.known_K.cpu().numpy()]}

    def embed_history(self, batch: TensorBatch) -> Tensor:
        return self._rows_of(batch.items_N)

    def _rows_of(self, items: Tensor) -> Tensor:
        """[..., D] of catalog positions [...]."""
        if self.content is None or self.known_K is not None or not torch.is_grad_enabled():
            return functional.embedding(items, self._catalog_rows())
        return functional.embedding(items, self.items_ID) + self.content(items)

    def _neighbor_rows(self, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        assert batch.neighbors_NJ is not None
        return self._catalog_rows(), batch.neighbors_NJ

    def _target_rows(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        return self._rows_of(batch.targets_N)

    def _negative_rows(self, batch: TensorBatch) -> Tensor:
        negatives = batch.negatives_S if batch.negatives_NK is None else batch.negatives_NK
        assert negatives is not None
        return self._rows_of(negatives)

    def _catalog_rows(self) -> Tensor:
        """[I, D]; without gradients, what is made of weights is kept."""
        content = self.content
        if content is None or self._made_once is None:
            return self.items_ID
        weights = (self.items_ID, content.rows_VD)
        return self._made_once(weights, lambda: content.added_to(self.items_ID, self.known_K))

    def _scores(self, batch: TensorBatch) -> Tensor:
        scores_BI = super()._scores(batch)
        return (
            scores_BI if self.is_nothing_I is None else scores_BI.masked_fill(self.is_nothing_I, -torch.inf)
        )


class SparseNextItemModel(NextItemModel):
    """Item rows come from the sparse stage: any catalog, and no loss that needs all of it."""

    table_of_catalog = "item"

    def row_ids(self, item_ids_I: Int64Array) -> dict[str, Int64Array]:
        return {}

    def embed_history(self, batch: TensorBatch) -> Tensor:
        return self._rows(batch, "inputs")

    def set_catalog(self, rows_ID: Tensor) -> None:
        self.catalog_ID = rows_ID

    def _neighbor_rows(self, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        assert batch.neighbors_NJ is not None
        return batch.rows["item"], batch.item_inverse().neighbors.view(batch.neighbors_NJ.shape)

    def _target_rows(self, batch: TensorBatch) -> Tensor:
        return self._rows(batch, "targets")

    def _negative_rows(self, batch: TensorBatch) -> Tensor:
        rows = self._rows(batch, "negatives")
        return rows if batch.negatives_NK is None else rows.view(*batch.negatives_NK.shape, -1)

    def _catalog_rows(self) -> Tensor:
        assert self.catalog_ID is not None, "set_catalog() comes before recommend()"
        return self.catalog_ID

    @staticmethod
    def _rows(batch: TensorBatch, part: Literal["inputs", "targets", "negatives"]) -> Tensor:
        return rows_of_ids(batch.rows["item"], getattr(batch.item_inverse(), part))
