"""DIN: what a user did before counts by how it bears on what is shown now.

    list of a history ─► rows e_1 ... e_n ─┬───────────────────────────► Σ_j a(e_j, v) e_j ─┐
    id of what is shown ─► row v ──────────┴─► a(e_j, v), one number ─────────┘             ├─► MLP ─► logits
    numbers, rows of ids, means of the other lists ─────────────────────────────────────────┘

The weights a(e_j, v) are not normalized: their sum says how much of the history there is on the subject
(section 4.3). Everything is computed on the elements that there are; nothing is padded.

Each list has a unit of its own. a() is an MLP over e, v and their product. The paper's code gives it their
difference, too, which adds nothing to what a linear layer of e and v can say.

Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, arXiv:1706.06978,
equation 3 and figure 2.

Axes: B impressions, N elements of a column of lists, D width of a row, H of a layer, T tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.ctr.fields import concatenated, weighted_sum
from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.ctr.mlp import MakeActivation, Mlp
from rayrec.models.ctr.model import CtrModel
from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.platform.impression_schema import ImpressionSchema


class Dice(nn.Module):
    """Lets a unit's values through by how they stand to what is usual for it; [N, H] to [N, H].

        f(s) = p(s) s + (1 - p(s)) α s        p(s) = sigmoid((s - c) k)

    In the paper c and 1 / k are mean and standard deviation of s: of the mini-batch in training, of moving
    averages in serving. Here both are learned, like α, so that the served function is the trained one, and
    neither the number of trainers nor the size of a batch changes it. They begin at 0 and 1: the SiLU.

    Source: Zhou et al., "Deep Interest Network", KDD 2018, arXiv:1706.06978, section 5.2.
    """

    compiled_methods = ("forward",)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.center_H = nn.Parameter(torch.zeros(dim))
        self.slope_H = nn.Parameter(torch.ones(dim))
        self.alpha_H = nn.Parameter(torch.zeros(dim))

    def forward(self, x_NH: Tensor) -> Tensor:
        share_NH = ((x_NH - self.center_H) * self.slope_H).sigmoid()
        return x_NH * torch.lerp(self.alpha_H, torch.ones_like(self.alpha_H), share_NH)


Activation = Literal["dice", "prelu"]


class PRelu(nn.PReLU):
    """Under autocast, too: whether that shortens the weight is for a device to say, and types must agree."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.prelu(x, self.weight.to(x.dtype))


_ACTIVATIONS: dict[Activation, MakeActivation] = {"dice": Dice, "prelu": PRelu}


class Din(CtrModel):
    """See above."""

    def __init__(
        self,
        schema: ImpressionSchema,
        label_loss: LabelLoss,
        dim: int,
        attention: Mapping[str, str],
        attention_dims: Sequence[int],
        activation: Activation,
        hidden_dims: Sequence[int],
        dropout: float,
    ) -> None:
        """
        Args:
            attention: column of lists, to the column of ids by which its elements are weighed.
            attention_dims: hidden widths of the units that weigh; at least one.
            dropout: of the MLP.
        """
        super().__init__(dim, label_loss)
        make = _ACTIVATIONS[activation]
        places = {column: place for place, column in enumerate(schema.ids)}
        self._targets = {column: places[target] for column, target in attention.items()}
        """Column of lists, to the place of its target among the columns of ids."""
        self._pooled = tuple(column for column in schema.lists if column not in attention)
        # In a list: names of columns may have dots, which names of modules may not.
        self.units = nn.ModuleList(LocalActivation(dim, attention_dims, make) for _ in attention)
        width = len(schema.numbers) + (len(schema.ids) + len(schema.lists)) * dim
        self.mlp = Mlp(width, hidden_dims, dropout, activation=make)
        self.head = nn.Linear(self.mlp.out_dim, label_loss.num_tasks)

    def logits(self, batch: ImpressionTensors) -> Tensor:
        interests = []
        for unit, (column, place) in zip(self.units, self._targets.items(), strict=True):
            target_BD = rows_of_ids(batch.rows_MD, batch.inverse_BC[:, place])
            row_N = batch.lists[column].layout.row_N
            weights_N = unit(batch.embed_list(column), target_BD, row_N)
            interests.append(weighted_sum(batch, column, weights_N))
        x_BW = concatenated(batch, self._pooled, interests)
        logits_BT: Tensor = self.head(self.mlp(x_BW, batch.keys_B))
        return logits_BT


class LocalActivation(nn.Module):
    """How much each element of a list counts for its row's target: any number, also a negative one."""

    compiled_methods = ("forward",)

    def __init__(self, dim: int, dims: Sequence[int], activation: MakeActivation) -> None:
        super().__init__()
        first_dim, *other_dims = dims
        self.first = nn.Linear(3 * dim, first_dim)
        """Of (e, e ⊙ v, v), in this order."""
        self.first_activation = activation(first_dim)
        self.others = nn.ModuleList()
        for other_dim in other_dims:
            self.others += [nn.Linear(first_dim, other_dim), activation(other_dim)]
            first_dim = other_dim
        self.head = nn.Linear(first_dim, 1)

    def forward(self, elements_ND: Tensor, target_BD: Tensor, row_N: Tensor) -> Tensor:
        """Weigh each element of a history by how it relates to the target.

        Args:
            row_N: whose each element is.

        Returns:
            [N] weights.
        """
        dim = elements_ND.shape[1]
        element_HD, target_HD = self.first.weight.split([2 * dim, dim], dim=1)
        # A target is the same for all elements of a row: its part of the layer is computed once.
        from_target_BH = functional.linear(target_BD, target_HD, self.first.bias)
        products_ND = elements_ND * functional.embedding(row_N, target_BD)
        from_elements_NH = functional.linear(torch.cat([elements_ND, products_ND], dim=1), element_HD)
        x_NH = self.first_activation(from_elements_NH + functional.embedding(row_N, from_target_BH))
        for layer in self.others:
            x_NH = layer(x_NH)
        weights_N: Tensor = self.head(x_NH).squeeze(1)
        return weights_N
