"""What a sequence recommender has to offer to training, evaluation and serving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.decoding.beam_policy import Beams
from rayrec.models.decoding.leaf_filter import ItemSets
from rayrec.models.sequence.tensor_batch import ChunkBatch, TensorBatch
from rayrec.platform.arrays import Float32Array, Int64Array

ReadRows = Callable[[Int64Array], Float32Array]
"""[M] distinct ids of a table to their [M, D] rows."""


class TopItems(NamedTuple):
    """The best items of each row, best first."""

    items_BK: Tensor
    """Catalog positions; -1 where there are fewer than K items."""
    scores_BK: Tensor
    """Log-probabilities of generative models, inner products of others, of a hybrid their sum; -inf at -1."""


class CacheMetrics(Protocol):
    """A prefix cache, as metrics see it."""

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""


class SequenceModel(nn.Module, ABC):
    """A network that learns which item follows a history, and recommends items for one."""

    table_of_catalog: str | None = None
    """Sparse table whose rows for every item `recommend` needs; see `set_catalog`."""
    catalog_ID: Tensor | None = None
    """Those rows, as they were last set."""
    prefix_cache: CacheMetrics | None = None
    """What `use_prefix_cache` has made."""

    @abstractmethod
    def loss(self, batch: TensorBatch) -> Tensor:
        """Scalar: the loss summed over the batch's targets."""

    @abstractmethod
    def recommend(
        self,
        batch: TensorBatch,
        k: int,
        excluded_BE: Tensor | None,
        beams_B: Sequence[Beams] | None = None,
        allowed: ItemSets | None = None,
    ) -> TopItems:
        """The k best next items of each row.

        Args:
            excluded_BE: [B, E] catalog positions never to return, padded with -1.
            beams_B: beams of each row, so many at every level, or as a policy has it; a row finds no more
                items than it has beams at the last one. None: as many as k takes (`num_beams`). Of no effect
                on a model without.
            allowed: what may be returned; None: the catalog.
        """

    def item_log_probs(self, batch: TensorBatch, items_BW: Tensor) -> Tensor | None:
        """[B, W] log-probability that each item is next; None of a model whose scores are something else.

        Args:
            items_BW: catalog positions; -1 has -inf.
        """
        return None

    def first_log_probs(self, batch: TensorBatch) -> Tensor | None:
        """[B, K] log-probability of each choice that the model makes first: a code, or an item where it
        scores every item; None of a model that does not say."""
        return None

    def row_ids(self, item_ids_I: Int64Array) -> dict[str, Int64Array] | None:
        """Weights that have a row for each item or prefix of the catalog, by name: [V] ids of what the rows
        stand for, which mean the same in every catalog. None: not known, so nothing goes on with another one.

        Args:
            item_ids_I: of the items, by catalog position.
        """
        return None

    def item_vectors(self) -> Tensor:
        """[I, D] what items are scored by: the inner product with what was read of a history; of models whose
        settings have `has_item_vectors`."""
        raise AssertionError(f"{type(self).__name__} scores items by no vectors")

    def use_prefix_cache(self, sizes: CacheSizes) -> CacheMetrics | None:
        """Let `recommend` cache what it reads of histories; None where a model cannot continue a prefix."""
        return None

    def summarize(self, chunks: ChunkBatch) -> Tensor:
        """[X, K, D] the vectors that stand for chunks of old events; of models that read them."""
        raise AssertionError(f"{type(self).__name__} reads no summaries")

    def num_beams(self, k: int, max_beams: int | None = None) -> int:
        """Beams of such a `recommend`; 0 of a model that scores every item."""
        return 0

    def catalog_ids(self, item_ids_I: Int64Array) -> Int64Array:
        """Ids of the rows that `set_catalog` takes, in its order; of models with a `table_of_catalog`.

        Args:
            item_ids_I: of every item, by catalog position.
        """
        return item_ids_I

    def set_catalog(self, rows_ID: Tensor) -> None:
        """Take the rows of `catalog_ids`; only models with a `table_of_catalog` need them."""
        raise AssertionError(f"{type(self).__name__} recommends without the rows of the catalog")

    def set_row_reader(self, read_rows: ReadRows) -> None:
        """Take what reads other rows of that table, for models that ask for some while they recommend."""

    @property
    def reads_rows(self) -> bool:
        """Whether `recommend` reads rows of tables by itself."""
        return False


class ItemScorer(SequenceModel):
    """A model that scores every item for every row, and recommends the best."""

    def recommend(
        self,
        batch: TensorBatch,
        k: int,
        excluded_BE: Tensor | None,
        beams_B: Sequence[Beams] | None = None,
        allowed: ItemSets | None = None,
    ) -> TopItems:
        return top_items(self._scores(batch), k, excluded_BE, allowed)

    def first_log_probs(self, batch: TensorBatch) -> Tensor:
        return self._scores(batch).log_softmax(1)

    @abstractmethod
    def _scores(self, batch: TensorBatch) -> Tensor:
        """[B, I] of every item."""


def top_items(
    scores_BI: Tensor, k: int, excluded_BE: Tensor | None, allowed: ItemSets | None = None
) -> TopItems:
    """Take the k best of a score for every item; k columns, also where there are fewer items."""
    if allowed is not None:
        scores_BI = scores_BI.masked_fill(~allowed.mask_BI, -torch.inf)
    if excluded_BE is not None:
        # Padding goes to an extra column that is cut off again.
        mask_BI = torch.zeros(
            len(scores_BI), scores_BI.shape[1] + 1, dtype=torch.bool, device=scores_BI.device
        )
        columns_BE = torch.where(excluded_BE < 0, scores_BI.shape[1], excluded_BE)
        mask_BI.scatter_(1, columns_BE, True)
        scores_BI = scores_BI.masked_fill(mask_BI[:, :-1], -torch.inf)
    scores_BK, items_BK = scores_BI.topk(min(k, scores_BI.shape[1]), dim=1)
    missing = (0, k - scores_BK.shape[1])
    return TopItems(
        functional.pad(items_BK.masked_fill(scores_BK == -torch.inf, -1), missing, value=-1),
        functional.pad(scores_BK, missing, value=-torch.inf),
    )
