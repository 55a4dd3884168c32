"""MMoE: tasks share experts, and each mixes them by a gate of its own.

    x ─┬─► expert 1 ... expert E ─► f_1 ... f_E ─┬─► Σ_e g_te f_e ─► tower of task t ─► logit of task t
       └─► gate of task t ─► g_t, a softmax ─────┘

x is all of an impression, one after the other: numbers as they are, rows of ids, means of lists. All experts
are computed for all impressions: nothing is chosen.

Source: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts",
KDD 2018, section 4.2.

Axes: B impressions, W width of x, E experts, H width of a layer of an expert, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.ctr.fields import concatenated
from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.ctr.mlp import Mlp
from rayrec.models.ctr.model import CtrModel
from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.platform.impression_schema import ImpressionSchema


class Mmoe(CtrModel):
    """See above."""

    def __init__(
        self,
        schema: ImpressionSchema,
        label_loss: LabelLoss,
        dim: int,
        num_experts: int,
        hidden_dims: Sequence[int],
        tower_dims: Sequence[int],
        dropout: float,
    ) -> None:
        """
        Args:
            hidden_dims: of each expert; at least one.
            tower_dims: hidden widths of each task's tower.
        """
        super().__init__(dim, label_loss)
        self._lists = tuple(schema.lists)
        num_tasks = label_loss.num_tasks
        width = len(schema.numbers) + (len(schema.ids) + len(schema.lists)) * dim
        self.experts = SharedExperts(width, num_experts, hidden_dims, dropout)
        # No bias: the paper's gates are linear maps.
        self.gates = nn.Linear(width, num_tasks * num_experts, bias=False)
        towers = [
            Mlp(hidden_dims[-1], tower_dims, dropout, len(hidden_dims) + task * len(tower_dims))
            for task in range(num_tasks)
        ]
        self.towers = nn.ModuleList(towers)
        self.heads = nn.ModuleList(nn.Linear(tower.out_dim, 1) for tower in towers)

    def logits(self, batch: ImpressionTensors) -> Tensor:
        x_BW, keys_B = concatenated(batch, self._lists), batch.keys_B
        gates_BTE = self.gates(x_BW).unflatten(1, (len(self.towers), -1)).softmax(2)
        mixed_BTH = torch.bmm(gates_BTE, self.experts(x_BW, keys_B))
        logits = [
            head(tower(mixed_BH, keys_B))
            for tower, head, mixed_BH in zip(self.towers, self.heads, mixed_BTH.unbind(1), strict=True)
        ]
        return torch.cat(logits, dim=1)


class SharedExperts(nn.Module):
    """[B, W] to [B, E, H]: E feed-forward networks of one shape, computed together."""

    compiled_methods = ("forward",)

    def __init__(self, in_dim: int, num_experts: int, dims: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        """[E, width of the layer, width of the one before] each."""
        self.biases = nn.ParameterList()
        for before, after in pairwise((in_dim, *dims)):
            bound = before**-0.5  # as nn.Linear begins
            self.weights.append(nn.Parameter(torch.empty(num_experts, after, before).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(num_experts, after).uniform_(-bound, bound)))
        self.dropouts = nn.ModuleList(KeyedDropout(dropout, layer) for layer in range(len(dims)))

    def forward(self, x_BW: Tensor, keys_B: Tensor) -> Tensor:
        # All experts read the same: the first layer is one product of matrices.
        hidden_BX = functional.linear(x_BW, self.weights[0].flatten(0, 1), self.biases[0].flatten())
        hidden_BX = self.dropouts[0](hidden_BX.relu(), keys_B)
        x_BEH = hidden_BX.unflatten(1, self.biases[0].shape)
        later = zip(self.weights, self.biases, self.dropouts, strict=True)
        for weight_EHI, bias_EH, dropout in islice(later, 1, None):
            x_BEH = torch.einsum("bei,ehi->beh", x_BEH, weight_EHI) + bias_EH
            x_BEH = dropout(x_BEH.relu().flatten(1), keys_B).unflatten(1, bias_EH.shape)
        return x_BEH
