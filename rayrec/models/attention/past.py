"""Rows whose beginning was read before: what a network's layers have of it, and what comes behind.

    Past: keys and values of the first tokens of each row ─┐
    tokens behind them, with keys and values of their own ─┴─► Grown: rows as a whole, for causal attention

A causal network says of a token the same, whatever follows it; so the keys and values of a beginning are
those that it has in every longer row.

Axes: P tokens of the beginnings, N tokens behind them, M = P + N; G heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout


class KeysAndValues(NamedTuple):
    """Of one layer, rows one after the other."""

    keys: Tensor
    """[P, G, C]."""
    values: Tensor


@dataclass(frozen=True)
class Past:
    """What the layers have of the beginnings of rows."""

    lengths_B: np.ndarray
    """Tokens of each row that were read; 0 for none."""
    layers: Sequence[KeysAndValues]
    """None of them where nothing was read of any row."""


class Grown:
    """The layout of whole rows, and the keys and values of all layers, as far as they were read."""

    def __init__(self, past: Past, behind: JaggedLayout) -> None:
        """
        Args:
            behind: the tokens that are read now, at least one of each row that has any.
        """
        self._past, device = past, behind.device
        of_past_B1 = np.concatenate([[0], np.cumsum(past.lengths_B)])
        offsets_B1 = of_past_B1 + behind.offsets_B1
        self.behind = behind
        self.layout = JaggedLayout.from_offsets(offsets_B1, device)
        self._lengths_on_device_B = torch.from_numpy(past.lengths_B).to(device)
        starts_P = np.repeat(offsets_B1[:-1] - of_past_B1[:-1], past.lengths_B)
        self._slots_P = torch.from_numpy(starts_P + np.arange(of_past_B1[-1])).to(device)
        starts_N = np.repeat(offsets_B1[:-1] + past.lengths_B - behind.offsets_B1[:-1], behind.lengths_B)
        self._slots_N = torch.from_numpy(starts_N + np.arange(behind.num_tokens)).to(device)
        self.layers: list[KeysAndValues] = []
        """Of whole rows, of the layers that were read."""

    @property
    def places_N(self) -> Tensor:
        """Place of each token that is read now in its whole row."""
        return self.behind.place_N + self._lengths_on_device_B[self.behind.row_N]

    def grow(self, keys_NGC: Tensor, values_NGC: Tensor) -> KeysAndValues:
        """[M, G, C] those of whole rows; called by one layer after the other."""
        if len(self._slots_P):
            keys_PGC, values_PGC = self._past.layers[len(self.layers)]
            whole = KeysAndValues(self._joined(keys_PGC, keys_NGC), self._joined(values_PGC, values_NGC))
        else:
            whole = KeysAndValues(keys_NGC, values_NGC)
        self.layers.append(whole)
        return whole

    def _joined(self, past_PGC: Tensor, behind_NGC: Tensor) -> Tensor:
        whole_MGC = behind_NGC.new_empty(self.layout.num_tokens, *behind_NGC.shape[1:])
        whole_MGC.index_copy_(0, self._slots_P, past_PGC.to(behind_NGC.dtype))
        return whole_MGC.index_copy_(0, self._slots_N, behind_NGC)
