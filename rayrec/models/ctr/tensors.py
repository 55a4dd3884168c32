"""A batch of impressions as tensors on the training device.

Axes: B impressions, F columns of numbers, C columns of one id each, N elements of a column of lists (those of
all impressions, one after the other), M distinct ids, T tasks, D width of a row, 1 an extra element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.base.keyed_random import token_keys
from rayrec.platform.device_copies import OverlappedCopies
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

    @staticmethod
    def build(
        features: Impressions,
        rows: Mapping[str, np.ndarray | Tensor],
        seed: int,
        device: torch.device,
        training: bool,
    ) -> ImpressionTensors:
        """Put the features and looked-up rows of a batch on the device.

        Args:
            rows: [M, D] by table; tensors on the device are taken as they are, without a copy.
        """

        with OverlappedCopies(device) as copies:
            tensor = copies.copied
            inverse = tensor(features.lookups[FEATURE_TABLE].inverse)
            row_keys_B = tensor(features.row_keys_B)
            num_rows = len(features.row_keys_B)
            start = num_rows * features.num_id_columns
            inverse_BC = inverse[:start].view(num_rows, features.num_id_columns)
            lists: dict[str, IdLists] = {}
            for column, offsets_B1 in features.list_offsets_B1.items():
                stop = start + int(offsets_B1[-1])
                layout = JaggedLayout.from_offsets(offsets_B1, device, copies.moved)
                layout.derived("offsets", partial(tensor, layout.offsets_B1))  # which pooling asks for
                lists[column] = IdLists(inverse[start:stop], layout)
                start = stop
            batch = ImpressionTensors(
                keys_B=row_keys_B,
                numbers_BF=tensor(features.numbers_BF),
                inverse_BC=inverse_BC,
                lists=lists,
                labels_BT=tensor(features.labels_BT),
                rows={
                    name: rows_MD.detach() if isinstance(rows_MD, Tensor) else tensor(rows_MD)
                    for name, rows_MD in rows.items()
                },
            )
        # What is computed comes behind the copies.
        return replace(
            batch,
            keys_B=token_keys(seed, features.step, row_keys_B, torch.zeros_like(row_keys_B)),
            rows={name: rows_MD.to(device).requires_grad_(training) for name, rows_MD in batch.rows.items()},
        )

    @property
    def lengths_B(self) -> np.ndarray:
        """Every impression is as much work as any other."""
        return np.ones(len(self.keys_B), dtype=np.int64)

    def some_rows(self, rows: slice) -> ImpressionTensors:
        """Neighboring impressions alone, with the same leaves.

        Args:
            rows: start and stop are given.
        """
        lists: dict[str, IdLists] = {}
        for column, ids in self.lists.items():
            layout, elements = ids.layout.some_rows(rows)
            lists[column] = IdLists(ids.inverse_N[elements], layout)
        return ImpressionTensors(
            keys_B=self.keys_B[rows],
            numbers_BF=self.numbers_BF[rows],
            inverse_BC=self.inverse_BC[rows],
            lists=lists,
            labels_BT=self.labels_BT[rows],
            rows=self.rows,
        )

    def stand_in(self) -> ImpressionTensors:
        """One impression of no meaning, whose loss is to be counted zero times."""
        device = self.keys_B.device
        empty = IdLists(self.inverse_BC.new_zeros(0), JaggedLayout.even(1, 0, device))
        return ImpressionTensors(
            keys_B=self.keys_B.new_zeros(1),
            numbers_BF=self.numbers_BF.new_zeros(1, self.numbers_BF.shape[1]),
            inverse_BC=self.inverse_BC.new_zeros(1, self.inverse_BC.shape[1]),
            lists=dict.fromkeys(self.lists, empty),
            labels_BT=self.labels_BT.new_zeros(1, self.labels_BT.shape[1]),
            rows={
                name: rows_MD if len(rows_MD) else rows_MD.new_zeros(1, *rows_MD.shape[1:])
                for name, rows_MD in self.rows.items()
            },
        )

    @property
    def rows_MD(self) -> Tensor:
        return self.rows[FEATURE_TABLE]

    def embed_ids(self) -> Tensor:
        """[B, C, D] rows of the columns with one id each."""
        return rows_of_ids(self.rows_MD, self.inverse_BC)

    def embed_list(self, column: str) -> Tensor:
        """[N, D] rows of a column of lists, jagged as its layout says."""
        return rows_of_ids(self.rows_MD, self.lists[column].inverse_N)

    def pool_list(self, column: str, mode: str = "mean") -> Tensor:
        """[B, D] sum or mean of the rows of each list; 0 for an empty one, in either mode."""
        ids = self.lists[column]
        layout = ids.layout
        offsets_B1 = layout.derived("offsets", lambda: torch.from_numpy(layout.offsets_B1).to(layout.device))
        pooled_BD: Tensor = functional.embedding_bag(
            ids.inverse_N, self.rows_MD, offsets_B1, mode=mode, include_last_offset=True
        )
        return pooled_BD
