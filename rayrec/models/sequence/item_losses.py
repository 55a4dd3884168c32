"""How far scores of items are from what came next: the losses of models that predict items one by one.

Axes: B rows, N events, I items of the catalog, E items of a row, S negatives of a batch, K negatives of an
event, D width.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.base.linear_cross_entropy import linear_cross_entropy
from rayrec.models.sequence.tensor_batch import TensorBatch

MOST_CERTAIN = 64
"""Items read in a row that a sampled softmax has for certain, the newest; of longer rows it would not pay."""


class ItemVectors(Protocol):
    """What items are scored by; a loss asks for those that it needs."""

    def inputs(self, batch: TensorBatch) -> Tensor:
        """[N, D] of the items of the events themselves."""

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

    compared_I: Tensor | None
    place_I: Tensor | None

    def __init__(self, competing_I: Tensor | None = None) -> None:
        """
        Args:
            competing_I: [I] bool, the items that targets are compared with, all targets among them; None: the
                whole catalog.
        """
        super().__init__()
        some = None if competing_I is None or bool(competing_I.all()) else competing_I
        self.register_buffer("compared_I", None if some is None else some.nonzero()[:, 0], persistent=False)
        place_I = None if some is None else torch.where(some, some.cumsum(0) - 1, -1)  # -1 fails as a target
        self.register_buffer("place_I", place_I, persistent=False)

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        items_ID, targets_N = items.catalog(), batch.targets_N
        if self.compared_I is not None and self.place_I is not None:
            items_ID, targets_N = items_ID[self.compared_I], self.place_I[targets_N]
        return linear_cross_entropy(context_ND, items_ID, targets_N)


class SampledSoftmax(nn.Module):
    """A softmax over the target, the newest other items of its row, and S negatives that the batch shares.

    An item that was drawn counts once, however often it was drawn: its term of the softmax's sum is divided
    by the probability that it is drawn at all. Items of the row are there for certain, drawn or not. So the
    expected sum is that over the catalog (Horvitz & Thompson, JASA 1952). A trained model takes items of the
    row for probable, and they add no noise then; no row is read for it that the batch does not have.
    """

    log_inclusion_I: Tensor

    def __init__(self, log_inclusion_I: Tensor) -> None:
        """`log_inclusion_I`: log of the probability that a batch's negatives have each item."""
        super().__init__()
        self.register_buffer("log_inclusion_I", log_inclusion_I, persistent=False)

    @staticmethod
    def of_draws(log_q_I: np.ndarray, num_negatives: int) -> SampledSoftmax:
        """For so many independent draws with replacement, each of item i with the probability
        exp(log_q_I[i])."""
        with np.errstate(divide="ignore"):  # items that are never drawn, and one that always is
            inclusion_I = -np.expm1(num_negatives * np.log1p(-np.exp(log_q_I)))
            return SampledSoftmax(torch.tensor(np.log(inclusion_I), dtype=torch.float32))

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        assert batch.negatives_S is not None
        targets_ND = items.targets(batch)
        target_logit_N = (context_ND * targets_ND).sum(1)
        layout = batch.layout
        own_BE, vectors_BED = _items_of_rows(items.inputs(batch), targets_ND, batch)
        own_logits_NE = layout.unpad(layout.pad(context_ND) @ vectors_BED.transpose(1, 2))
        own_of_N = own_BE[layout.row_N]
        is_another_NE = (own_of_N >= 0) & (own_of_N != batch.targets_N[:, None])
        own_logits_NE = own_logits_NE.masked_fill(~is_another_NE, -torch.inf)
        certain_logits = torch.cat([target_logit_N[:, None], own_logits_NE], dim=1)
        # The only large ones: what can be done in place is.
        drawn_logits_NS = torch.addmm(
            -self.log_inclusion_I[batch.negatives_S], context_ND, items.negatives(batch).T
        )
        is_out_NS = _are_among(batch.negatives_S, own_BE)[layout.row_N]
        is_out_NS |= batch.negatives_S == batch.targets_N[:, None]
        # Not minus infinity, whose sum has no gradient where all of a row are out.
        drawn_logits_NS.masked_fill_(is_out_NS, torch.finfo(drawn_logits_NS.dtype).min)
        log_sum_N = torch.logaddexp(certain_logits.logsumexp(1), drawn_logits_NS.logsumexp(1))
        return (log_sum_N - target_logit_N).sum()


def _items_of_rows(inputs_ND: Tensor, targets_ND: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """([B, E] the newest distinct items of each row, -1 where there is none; [B, E, D] their vectors).

    They are the last target and the newest `MOST_CERTAIN` items that were read; every target but the last is
    an item that is read next.
    """
    assert batch.targets_N is not None
    layout = batch.layout
    ago_E = torch.arange(min(layout.longest, MOST_CERTAIN), device=layout.device)
    is_there_BE = layout.lengths_on_device_B()[:, None] > ago_E
    at_BE = (layout.last_B[:, None] - ago_E).clamp(min=0)
    last_B = layout.last(batch.targets_N + 1) - 1
    ids_BE = torch.cat([last_B[:, None], batch.items_N[at_BE].masked_fill(~is_there_BE, -1)], dim=1)
    vectors_BED = torch.cat([layout.last(targets_ND)[:, None], rows_of_ids(inputs_ND, at_BE)], dim=1)
    sorted_BE, order_BE = ids_BE.sort(dim=1, stable=True)
    is_repeat_BE = functional.pad(sorted_BE.diff(dim=1) == 0, (1, 0))
    is_repeat_BE = torch.zeros_like(is_repeat_BE).scatter(1, order_BE, is_repeat_BE)
    return ids_BE.masked_fill(is_repeat_BE, -1), vectors_BED


def _are_among(ascending_S: Tensor, ids_BE: Tensor) -> Tensor:
    """[B, S] whether each number is an id of the row."""
    at_BE = torch.searchsorted(ascending_S, ids_BE).clamp(max=len(ascending_S) - 1)
    found_BE = ascending_S[at_BE] == ids_BE
    found_BS = torch.zeros(len(ids_BE), len(ascending_S), dtype=torch.int32, device=ids_BE.device)
    return found_BS.scatter_add(1, at_BE, found_BE.int()) > 0


class BinaryCrossEntropy(nn.Module):
    """The target apart from K negatives of its own, each by itself: the loss that SASRec was published with.

    -log σ(target) - Σ log(1 - σ(negative)). Source: Kang & McAuley, ICDM 2018, arXiv:1808.09781: K is 1.
    """

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.negatives_NK is not None
        target_logit_N = (context_ND * items.targets(batch)).sum(1)
        negative_logits_NK = (context_ND[:, None, :] * items.negatives(batch)).sum(2)
        return -functional.logsigmoid(target_logit_N).sum() - functional.logsigmoid(-negative_logits_NK).sum()
