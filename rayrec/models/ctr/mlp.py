"""The feed-forward part that ranking networks have in common.

Axes: N vectors (of impressions, or of elements of lists), W width of the input, H of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

from rayrec.models.base.keyed_random import KeyedDropout

MakeActivation = Callable[[int], nn.Module]
"""From the width of a layer to what follows it."""


def relu(_: int) -> nn.Module:
    # In place: no gradient needs what a linear layer gave.
    return nn.ReLU(inplace=True)


class Mlp(nn.Module):
    """[N, W] to [N, H]: linear layers, each followed by an activation and dropout, the last one too."""

    compiled_methods = ("forward",)

    def __init__(
        self,
        in_dim: int,
        dims: Sequence[int],
        dropout: float = 0.0,
        dropout_index: int = 0,
        activation: MakeActivation = relu,
    ) -> None:
        """
        Args:
            dims: width of each layer; without any, the input is passed on.
            dropout_index: of the first layer's dropout; there is one for each layer.
        """
        super().__init__()
        self.out_dim = dims[-1] if dims else in_dim
        self.linears = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise((in_dim, *dims)))
        self.activations = nn.ModuleList(activation(dim) for dim in dims)
        self.dropouts = nn.ModuleList(
            KeyedDropout(dropout, dropout_index + layer) for layer in range(len(dims))
        )

    def forward(self, x_NW: Tensor, keys_N: Tensor) -> Tensor:
        """Apply all layers to each vector.

        Args:
            keys_N: for the dropout, one for each vector.
        """
        for linear, activation, dropout in zip(self.linears, self.activations, self.dropouts, strict=True):
            x_NW = dropout(activation(linear(x_NW)), keys_N)
        return x_NW
