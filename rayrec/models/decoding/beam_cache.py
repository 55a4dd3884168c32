"""Keys and values of the codes that each beam has decoded.

A beam has no more codes than an ID has levels, while the context that all beams of a row share is long. So
the two are kept apart: the context is held once per row and never moves; only this small cache is reordered
when beams are chosen.

Axes: B rows, W beams of a row, d codes of a beam, H heads, C channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BeamCache:
    """By layer, keys and values so far; empty at first."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reorder(self, parent_BW: Tensor) -> None:
        """Beams were chosen: each goes on with what its parent has."""
        row_B1 = torch.arange(len(parent_BW), device=parent_BW.device)[:, None]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[row_B1, parent_BW], values[row_B1, parent_BW]

    def flattened(self, parent_N: Tensor) -> None:
        """Beams were chosen that stand one after the other, as one row.

        Args:
            parent_N: among all beams before, row after row.
        """
        for layer, parts in self._layers.items():
            keys, values = (part.flatten(0, 1).index_select(0, parent_N)[None] for part in parts)
            self._layers[layer] = keys, values

    def append(self, layer: int, key_BW1HC: Tensor, value_BW1HC: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the newest code's key and value; ([B, W, d, H, C], [B, W, d, H, C]) of all codes."""
        if layer in self._layers:
            keys, values = self._layers[layer]
            key_BW1HC = torch.cat((keys, key_BW1HC), dim=2)
            value_BW1HC = torch.cat((values, value_BW1HC), dim=2)
        self._layers[layer] = key_BW1HC, value_BW1HC
        return key_BW1HC, value_BW1HC
