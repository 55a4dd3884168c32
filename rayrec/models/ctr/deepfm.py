"""DeepFM: a factorization machine and an MLP over the same embeddings, whose logits are added.

    y = w0 + Σ_k w_k x_k + Σ_{k<l} <v_k, v_l> x_k x_l + MLP(v_1 x_1, ..., v_K x_K)

A row of the table is [v_k, w_k]: the weight of the first order is its last column. x is 1 for an id; for a
list, v and w are the means of its elements'. A number has an embedding and a weight of its own, among the
dense weights, and x is its value. So it takes part in all three terms, as in the paper; some implementations
leave it out of the second, or give it to the MLP as it is.

The pairs are those of the sum-square trick, (|Σ v|² - Σ |v|²) / 2 (Rendle, "Factorization Machines", ICDM
2010, lemma 3.1). w0 is the bias of the MLP's last layer. With several tasks, each has a learned factor for
the factorization machine, which they share.

Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017,
arXiv:1703.04247, equations 1 to 4.

Axes: B impressions, F columns of numbers, K fields, D width of the embeddings, E = D + 1 of a row, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayrec.models.ctr.fields import stacked
from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.ctr.mlp import Mlp
from rayrec.models.ctr.model import CtrModel
from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.platform.impression_schema import ImpressionSchema

NUMBER_STD = 0.01
"""Of the initial embeddings of numbers: small, as rows of the table begin."""


class DeepFm(CtrModel):
    """See above."""

    def __init__(
        self,
        schema: ImpressionSchema,
        label_loss: LabelLoss,
        dim: int,
        hidden_dims: Sequence[int],
        dropout: float,
    ) -> None:
        super().__init__(dim + 1, label_loss)
        self._lists = tuple(schema.lists)
        self.numbers_FE: nn.Parameter | None = None
        if schema.numbers:
            self.numbers_FE = nn.Parameter(torch.empty(len(schema.numbers), dim + 1).normal_(std=NUMBER_STD))
        self.mlp = Mlp(len(schema.features) * dim, hidden_dims, dropout)
        self.head = nn.Linear(self.mlp.out_dim, label_loss.num_tasks)
        self.factors_T: nn.Parameter | None = None
        if label_loss.num_tasks > 1:
            self.factors_T = nn.Parameter(torch.ones(label_loss.num_tasks))

    def logits(self, batch: ImpressionTensors) -> Tensor:
        numbers = [] if self.numbers_FE is None else [batch.numbers_BF.unsqueeze(2) * self.numbers_FE]
        fields_BKE = stacked(batch, self._lists, numbers)
        vectors_BKD = fields_BKE[..., :-1]
        machine_B1 = _factorization_machine(fields_BKE.sum(1), vectors_BKD).unsqueeze(1)
        if self.factors_T is not None:
            machine_B1 = machine_B1 * self.factors_T
        deep_BT: Tensor = self.head(self.mlp(vectors_BKD.flatten(1), batch.keys_B))
        return deep_BT + machine_B1


def _factorization_machine(sums_BE: Tensor, vectors_BKD: Tensor) -> Tensor:
    """[B] first and second order, from the sums of the fields and their vectors."""
    first_B = sums_BE[:, -1]
    second_B = (sums_BE[:, :-1].square().sum(1) - vectors_BKD.square().sum((1, 2))) / 2
    return first_B + second_B
