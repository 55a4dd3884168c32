"""SASRec (Kang & McAuley, ICDM 2018) trained with cross-entropy instead of its pairwise loss.

With a softmax over the catalogue it is the honest baseline of sequential
recommendation: the loss explains more of the published differences than the
architecture does (Klenitskiy & Vasilev, RecSys 2023, arXiv:2309.07602).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.backbones.history import contexts, last_contexts
from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.linear_cross_entropy import linear_cross_entropy
from rayrec.models.sequence_model import Ranking, SequenceModel, rank_by_scores
from rayrec.models.tensor_batch import TensorBatch


class FullSoftmaxSasRec(SequenceModel):
    """Item matrix held as dense weights, tied between input and softmax: small catalogues."""

    def __init__(self, backbone: CausalTransformer, num_items: int, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.items_ID = nn.Parameter(torch.empty(num_items, dim).normal_(std=0.02))

    def loss(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        context_ND = contexts(self.backbone, self.embed_history(batch), batch)
        return linear_cross_entropy(context_ND, self.items_ID, batch.targets_N)

    def rank(self, batch: TensorBatch, k: int, excluded_BE: Tensor | None) -> Ranking:
        context_BD = last_contexts(self.backbone, self.embed_history(batch), batch)
        return rank_by_scores(context_BD @ self.items_ID.T, k, excluded_BE)

    def embed_history(self, batch: TensorBatch) -> Tensor:
        """[N, D] input vector of every history event."""
        return functional.embedding(batch.items_N, self.items_ID)


class SampledSoftmaxSasRec(SequenceModel):
    """Item rows come from the sparse stage, tied between input and output: any catalogue.

    The softmax runs over the target and S negatives shared by the batch, each
    logit corrected by the log of its sampling rate, which makes the sampled
    gradient estimate the full one (Bengio & Senécal, IEEE TNN 2008). The item
    table's inverse holds the N inputs, the N targets, then the S negatives.
    """

    table_of_catalogue = "item"
    negative_log_rates_I: Tensor
    catalogue_ID: Tensor | None = None

    def __init__(self, backbone: CausalTransformer, negative_log_rates_I: Tensor) -> None:
        """`negative_log_rates_I`: log of the expected number of draws of each item per batch."""
        super().__init__()
        self.backbone = backbone
        self.register_buffer("negative_log_rates_I", negative_log_rates_I, persistent=False)

    def loss(self, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        assert batch.negatives_S is not None
        num_tokens = len(batch.items_N)
        inverse = batch.inverse["item"]
        target_ND = functional.embedding(inverse[num_tokens : 2 * num_tokens], batch.rows["item"])
        negative_SD = functional.embedding(inverse[2 * num_tokens :], batch.rows["item"])
        context_ND = contexts(self.backbone, self.embed_history(batch), batch)
        target_logit_N = (context_ND * target_ND).sum(1)
        negative_logits_NS = context_ND @ negative_SD.T - self.negative_log_rates_I[batch.negatives_S]
        # A negative that is the target itself would be counted twice.
        hit_NS = batch.negatives_S[None, :] == batch.targets_N[:, None]
        negative_logits_NS = negative_logits_NS.masked_fill(hit_NS, -torch.inf)
        logits = torch.cat([target_logit_N[:, None], negative_logits_NS], dim=1)
        return (logits.logsumexp(1) - target_logit_N).sum()

    def set_catalogue(self, rows_ID: Tensor) -> None:
        self.catalogue_ID = rows_ID

    def rank(self, batch: TensorBatch, k: int, excluded_BE: Tensor | None) -> Ranking:
        assert self.catalogue_ID is not None, "set_catalogue() comes before rank()"
        context_BD = last_contexts(self.backbone, self.embed_history(batch), batch)
        return rank_by_scores(context_BD @ self.catalogue_ID.T, k, excluded_BE)

    def embed_history(self, batch: TensorBatch) -> Tensor:
        """[N, D] input vector of every history event."""
        return functional.embedding(batch.inverse["item"][: len(batch.items_N)], batch.rows["item"])
