"""A feature batch as tensors on the training device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.keyed_random import token_keys


class _Lookup(Protocol):
    @property
    def ids_M(self) -> np.ndarray: ...
    @property
    def inverse(self) -> np.ndarray: ...


class Features(Protocol):
    """What the dense stage reads of `rayrec.samples.batches.FeatureBatch`."""

    @property
    def step(self) -> int: ...
    @property
    def row_keys_B(self) -> np.ndarray: ...
    @property
    def offsets_B1(self) -> np.ndarray: ...
    @property
    def items_N(self) -> np.ndarray: ...
    @property
    def targets_N(self) -> np.ndarray | None: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def lookups(self) -> Mapping[str, _Lookup]: ...
    @property
    def negatives_S(self) -> np.ndarray | None: ...
    @property
    def negatives_NK(self) -> np.ndarray | None: ...
    @property
    def times_N(self) -> np.ndarray | None: ...


@dataclass(frozen=True)
class TensorBatch:
    """Axes as in `rayrec.samples.batches`; `rows` are the looked-up table rows."""

    layout: JaggedLayout
    keys_N: Tensor
    items_N: Tensor
    targets_N: Tensor | None
    negatives_S: Tensor | None
    inverse: dict[str, Tensor]
    rows: dict[str, Tensor]
    """Table name to [M, D] leaf tensors; training reads their `.grad`."""
    negatives_NK: Tensor | None = None
    times_N: Tensor | None = None
    """UNIX seconds of the events that were read, never of what follows them; None unless the model needs
    them."""

    @staticmethod
    def build(
        features: Features,
        rows: Mapping[str, np.ndarray | Tensor],
        seed: int,
        device: torch.device,
        training: bool,
    ) -> TensorBatch:
        """
        Args:
            rows: [M, D] by table; tensors on the device are taken as they are, without a copy.
        """

        def tensor(values: np.ndarray) -> Tensor:
            return torch.tensor(values, device=device)  # copies: arrays from other processes are read-only

        def leaf(rows_MD: np.ndarray | Tensor) -> Tensor:
            on_device = rows_MD.detach().to(device) if isinstance(rows_MD, Tensor) else tensor(rows_MD)
            return on_device.requires_grad_(training)

        layout = JaggedLayout.from_offsets(features.offsets_B1, device)
        row_keys_N = tensor(features.row_keys_B).index_select(0, layout.row_N)
        return TensorBatch(
            layout=layout,
            keys_N=token_keys(seed, features.step, row_keys_N, layout.place_N),
            items_N=tensor(features.items_N),
            targets_N=None if features.targets_N is None else tensor(features.targets_N),
            negatives_S=None if features.negatives_S is None else tensor(features.negatives_S),
            inverse={name: tensor(lookup.inverse) for name, lookup in features.lookups.items()},
            rows={name: leaf(rows_MD) for name, rows_MD in rows.items()},
            negatives_NK=None if features.negatives_NK is None else tensor(features.negatives_NK),
            times_N=None if features.times_N is None else tensor(features.times_N),
        )

    def embed(self, table: str) -> Tensor:
        """Rows of `table` in the shape of its inverse: [..., D]."""
        return functional.embedding(self.inverse[table], self.rows[table])
