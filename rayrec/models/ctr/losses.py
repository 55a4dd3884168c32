"""The loss of ranking models: binary cross-entropy of the labels that are known.

Axes: B impressions, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema


class LabelLoss(nn.Module):
    """Σ_bt v_t (- w_t y_bt log p_bt - (1 - y_bt) log(1 - p_bt)) over known labels y, with p the sigmoid of
    the logits, v_t how much a task counts, and w_t how much its positives do.

    It is a sum, which adds up however a batch is cut; a task with few known labels is a small part of it.
    """

    label_weights_T: Tensor
    positive_weights_T: Tensor

    def __init__(self, label_weights_T: Sequence[float], positive_weights_T: Sequence[float]) -> None:
        super().__init__()
        # They follow from the settings, so snapshots do not have them.
        self.register_buffer("label_weights_T", torch.tensor(list(label_weights_T)), persistent=False)
        self.register_buffer("positive_weights_T", torch.tensor(list(positive_weights_T)), persistent=False)

    @property
    def num_tasks(self) -> int:
        return len(self.label_weights_T)

    def forward(self, logits_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Sum of the losses of all known labels.

        Args:
            labels_BT: 0, 1, or NaN where it is not known; those add 0, and have no gradient.

        Returns:
            Scalar, in float32 or wider.
        """
        assert logits_BT.shape == labels_BT.shape, "rows to be scored have no labels to learn from"
        # Sums of many losses need more digits than what autocast makes of logits.
        logits_BT = logits_BT.to(torch.promote_types(logits_BT.dtype, torch.float32))
        labels_BT = labels_BT.to(logits_BT.dtype)
        known_BT = labels_BT.isnan().logical_not()
        return functional.binary_cross_entropy_with_logits(
            logits_BT,
            labels_BT.nan_to_num(0.0),
            weight=known_BT * self.label_weights_T,
            pos_weight=self.positive_weights_T,
            reduction="sum",
        )


class LabelWeights(Protocol):
    """Settings of how often the loss of each label counts; those that are not named count once."""

    @property
    def label_weights(self) -> Mapping[str, float]: ...
    @property
    def positive_weights(self) -> Mapping[str, float]: ...


def label_loss(settings: LabelWeights, schema: ImpressionSchema) -> LabelLoss:
    """Build the loss of the schema's labels, weighted as the settings say.

    Raises:
        InputError: settings name a label that the data does not have, or nothing could be learned.
    """
    if not schema.labels or not schema.features:
        what = "column of labels" if not schema.labels else "column of numbers, ids or lists"
        raise InputError(f"a ranking model needs at least one {what}; name those of the data")
    for name, weights in (
        ("label_weights", settings.label_weights),
        ("positive_weights", settings.positive_weights),
    ):
        check_names(f"model.{name}", weights, schema.labels, "column of labels")
    if not any(settings.label_weights.get(label, 1.0) for label in schema.labels):
        raise InputError("model.label_weights is 0 for every label; leave out those that are to be learned")
    return LabelLoss(
        [settings.label_weights.get(label, 1.0) for label in schema.labels],
        [settings.positive_weights.get(label, 1.0) for label in schema.labels],
    )


def check_names(setting: str, named: Iterable[str], known: Iterable[str], what: str) -> None:
    """Check that a setting names columns that are there.

    Raises:
        InputError: it names another.
    """
    missing = [name for name in named if name not in known]
    if missing:
        there_are = ", ".join(map(repr, known)) or "none"
        raise InputError(f"{setting} names {missing[0]!r}, which is no {what}; there are: {there_are}")
