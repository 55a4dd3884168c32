"""How far scores of items are from what came next: the losses of models that predict items one by one.

Axes: N events, I items of the catalog, S negatives of a batch, K negatives of an event, D width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.linear_cross_entropy import linear_cross_entropy
from rayrec.models.sequence.tensor_batch import TensorBatch


class ItemVectors(Protocol):
    """What items are scored by; a loss asks for those that it needs."""

    def targets(self, batch: TensorBatch) -> Tensor:
        """[N, D]"""

    def negatives(self, batch: TensorBatch) -> Tensor:
        """[S, D] or [N, K, D], whichever negatives the batch has."""

    def catalog(self) -> Tensor:
        """[I, D]"""


class ItemLoss(Protocol):
    """Scores are inner products of contexts and item vectors."""

    def __call__(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        """Scalar: the loss summed over the batch's targets."""


class CrossEntropy(nn.Module):
    """A softmax over the whole catalog.

    It explains more of the published differences between sequence models than the architecture does
    (Klenitskiy & Vasilev, RecSys 2023, arXiv:2309.07602).
    """

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        return linear_cross_entropy(context_ND, items.catalog(), batch.targets_N)


class SampledSoftmax(nn.Module):
    """A softmax over the target and S negatives shared by the batch.

    Each logit of a negative is corrected by the log of its sampling rate, which makes the sampled gradient
    estimate the full one (Bengio & Senécal, IEEE TNN 2008).
    """

    negative_log_rates_I: Tensor

    def __init__(self, negative_log_rates_I: Tensor) -> None:
        """`negative_log_rates_I`: log of the expected number of draws of each item per batch."""
        super().__init__()
        self.register_buffer("negative_log_rates_I", negative_log_rates_I, persistent=False)

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        assert batch.negatives_S is not None
        target_logit_N = (context_ND * items.targets(batch)).sum(1)
        negative_logits_NS = (
            context_ND @ items.negatives(batch).T - self.negative_log_rates_I[batch.negatives_S]
        )
        # A negative that is the target itself would be counted twice.
        hit_NS = batch.negatives_S[None, :] == batch.targets_N[:, None]
        negative_logits_NS = negative_logits_NS.masked_fill(hit_NS, -torch.inf)
        logits = torch.cat([target_logit_N[:, None], negative_logits_NS], dim=1)
        return (logits.logsumexp(1) - target_logit_N).sum()


class BinaryCrossEntropy(nn.Module):
    """The target apart from K negatives of its own, each by itself: the loss that SASRec was published with.

    -log σ(target) - Σ log(1 - σ(negative)). Source: Kang & McAuley, ICDM 2018, arXiv:1808.09781: K is 1.
    """

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.negatives_NK is not None
        target_logit_N = (context_ND * items.targets(batch)).sum(1)
        negative_logits_NK = (context_ND[:, None, :] * items.negatives(batch)).sum(2)
        return -functional.logsigmoid(target_logit_N).sum() - functional.logsigmoid(-negative_logits_NK).sum()
