"""Logistic regression on the ids and numbers of an impression."""

from typing import Literal

import torch
from torch import Tensor, nn

from rayrec.models import CtrModel, ImpressionModelConfig, ImpressionSchema, ImpressionTensors, LabelLoss


class WideConfig(ImpressionModelConfig):
    """`label_weights` and `positive_weights` are inherited, and `dim`, the width of an id's embedding."""

    name: Literal["wide"]
    dim: Literal[1] = 1
    """The weight of an id."""

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> "WideModel":
        return WideModel(schema, loss)


class WideModel(CtrModel):
    def __init__(self, schema: ImpressionSchema, loss: LabelLoss) -> None:
        super().__init__(row_dim=1, label_loss=loss)
        self.numbers = nn.Linear(len(schema.numbers), len(schema.labels))
        self.scale_T = nn.Parameter(torch.ones(len(schema.labels)))

    def logits(self, batch: ImpressionTensors) -> Tensor:
        ids_B1 = batch.embed_ids().sum(dim=1)  # [B, columns of ids, 1] to [B, 1]
        return ids_B1 * self.scale_T + self.numbers(batch.numbers_BF)
