"""A batch of impressions as tensors on the training device.

Axes: B impressions, F columns of numbers, C columns of one id each, N elements of a column of lists (those of
all impressions, one after the other), M distinct ids, T tasks, D width of a row, 1 an extra element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.platform.impression_schema import FEATURE_TABLE


class _Lookup(Protocol):
    @property
    def ids_M(self) -> np.ndarray: ...
    @property
    def inverse(self) -> np.ndarray: ...


class Impressions(Protocol):
    """What the dense stage reads of `rayrec.samples.impressions.ImpressionBatch`."""

    @property
    def step(self) -> int: ...
    @property
    def row_keys_B(self) -> np.ndarray: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def numbers_BF(self) -> np.ndarray: ...
    @property
    def labels_BT(self) -> np.ndarray: ...
    @property
    def list_offsets_B1(self) -> Mapping[str, np.ndarray]: ...
    @property
    def num_id_columns(self) -> int: ...
    @property
    def lookups(self) -> Mapping[str, _Lookup]: ...


@dataclass(frozen=True)
class IdLists:
    """A column of lists: element n is the row `inverse_N[n]` of the table."""

    inverse_N: Tensor
    layout: JaggedLayout


@dataclass(frozen=True)
class ImpressionTensors:
    """One trainer's share of a batch, or a part of it."""

    keys_B: Tensor
    """Identity of each row in this step: dropout is keyed by it."""
    numbers_BF: Tensor
    inverse_BC: Tensor
    """Which row of the table each id is."""
    lists: dict[str, IdLists]
    labels_BT: Tensor
    """0, 1, or NaN where it is not known; without rows to predict for, there is nothing in it."""
    rows: dict[str, Tensor]
    """Table name to [M, D] leaf tensors; training reads their `.grad`."""

    @property
    def rows_MD(self) -> Tensor:
        return self.rows[FEATURE_TABLE]

    def embed_ids(self) -> Tensor:
        """[B, C, D] rows of the columns with one id each."""
        return functional.embedding(self.inverse_BC, self.rows_MD)

    def embed_list(self, column: str) -> Tensor:
        """[N, D] rows of a column of lists, jagged as its layout says."""
        return functional.embedding(self.lists[column].inverse_N, self.rows_MD)

    def pool_list(self, column: str, mode: str = "mean") -> Tensor:
        """[B, D] sum or mean of the rows of each list; 0 for an empty one, in either mode."""
        ids = self.lists[column]
        layout = ids.layout
        offsets_B1 = layout.derived("offsets", lambda: torch.from_numpy(layout.offsets_B1).to(layout.device))
        pooled_BD: Tensor = functional.embedding_bag(
            ids.inverse_N, self.rows_MD, offsets_B1, mode=mode, include_last_offset=True
        )
        return pooled_BD
