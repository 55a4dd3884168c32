"""How far scores of items are from what came next: the losses of models that predict items one by one.

Axes: N events, I items of the catalog, S negatives of a batch, K negatives of an event, D width.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
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
    """A softmax over the target and the distinct ones of S negatives that the batch shares.

    An item that was drawn counts once, however often it was drawn, and its term of the softmax's sum is
    divided by the probability that it is drawn at all. The expected sum is that over the catalog (Horvitz &
    Thompson, JASA 1952), and popular items, which nearly every batch draws, add no noise to it; counted as
    often as they are drawn, they would (Bengio & Senécal, IEEE TNN 2008, correct by that expected number).
    """

    log_inclusion_I: Tensor

    def __init__(self, log_inclusion_I: Tensor) -> None:
        """`log_inclusion_I`: log of the probability that a batch's negatives have each item."""
        super().__init__()
        self.register_buffer("log_inclusion_I", log_inclusion_I, persistent=False)

    @staticmethod
    def of_draws(log_q_I: np.ndarray, num_negatives: int) -> SampledSoftmax:
        """For S independent draws with replacement, each of item i with the probability exp(log_q_I[i])."""
        with np.errstate(divide="ignore"):  # items that are never drawn, and one that always is
            inclusion_I = -np.expm1(num_negatives * np.log1p(-np.exp(log_q_I)))
            return SampledSoftmax(torch.tensor(np.log(inclusion_I), dtype=torch.float32))

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        assert batch.negatives_S is not None
        target_logit_N = (context_ND * items.targets(batch)).sum(1)
        correction_S = self.log_inclusion_I[batch.negatives_S]
        is_repeat_S = functional.pad(batch.negatives_S.diff() == 0, (1, 0))  # they are in ascending order
        correction_S = correction_S.masked_fill(is_repeat_S, torch.inf)
        negative_logits_NS = context_ND @ items.negatives(batch).T - correction_S
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
