"""A feature batch as tensors on the training device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.base.keyed_random import token_keys
from rayrec.platform.device_copies import OverlappedCopies


class _Lookup(Protocol):
    @property
    def ids_M(self) -> np.ndarray: ...
    @property
    def inverse(self) -> np.ndarray: ...


class Features(Protocol):
    """What the dense stage reads of `rayrec.samples.base.batches.FeatureBatch`."""

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
    @property
    def labels(self) -> Mapping[Any, np.ndarray]: ...
    @property
    def target_labels(self) -> Mapping[Any, np.ndarray]: ...
    @property
    def instruction(self) -> Mapping[Any, np.ndarray]: ...
    @property
    def neighbors_NJ(self) -> np.ndarray | None: ...
    @property
    def neighbor_weights_NJ(self) -> np.ndarray | None: ...


class ItemInverse(NamedTuple):
    """The inverse of the table `item`, by what its ids are; parts that were not looked up are empty."""

    inputs: Tensor
    targets: Tensor
    negatives: Tensor
    """[S] or [N K]."""
    neighbors: Tensor
    """[N J]."""


@dataclass(frozen=True)
class TensorBatch:
    """Axes as in `rayrec.samples.base.batches`; `rows` are the looked-up table rows."""

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
    labels: dict[str, Tensor] = field(default_factory=dict)
    """[N] codes of the events that were read, -1 where unknown, by label; of those that the model needs."""
    target_labels: dict[str, Tensor] = field(default_factory=dict)
    """[N] those of the events that follow, which only losses and instructions may know."""
    instruction: dict[str, Tensor] = field(default_factory=dict)
    """[B] what is wanted when ranking, by part: codes of labels, the trigger's catalog position; -1 for
    nothing, as are parts that are missing."""
    neighbors_NJ: Tensor | None = None
    """Catalog positions of each event's neighbors, of models that read them."""
    neighbor_weights_NJ: Tensor | None = None
    """Their shares of an event, 0 where there is none."""

    @staticmethod
    def build(
        features: Features,
        rows: Mapping[str, np.ndarray | Tensor],
        seed: int,
        device: torch.device,
        training: bool,
    ) -> TensorBatch:
        """Put the histories and looked-up rows of a batch on the device.

        Args:
            rows: [M, D] by table; tensors on the device are taken as they are, without a copy.
        """

        with OverlappedCopies(device) as copies:
            tensor = copies.copied
            row_keys_B = tensor(features.row_keys_B)
            batch = TensorBatch(
                layout=JaggedLayout.from_offsets(features.offsets_B1, device, copies.moved),
                keys_N=row_keys_B,
                items_N=tensor(features.items_N),
                targets_N=None if features.targets_N is None else tensor(features.targets_N),
                negatives_S=None if features.negatives_S is None else tensor(features.negatives_S),
                inverse={name: tensor(lookup.inverse) for name, lookup in features.lookups.items()},
                rows={
                    name: rows_MD.detach() if isinstance(rows_MD, Tensor) else tensor(rows_MD)
                    for name, rows_MD in rows.items()
                },
                negatives_NK=None if features.negatives_NK is None else tensor(features.negatives_NK),
                times_N=None if features.times_N is None else tensor(features.times_N),
                labels={name: tensor(codes_N) for name, codes_N in features.labels.items()},
                target_labels={name: tensor(codes_N) for name, codes_N in features.target_labels.items()},
                instruction={name: tensor(codes_B) for name, codes_B in features.instruction.items()},
                neighbors_NJ=None if features.neighbors_NJ is None else tensor(features.neighbors_NJ),
                neighbor_weights_NJ=(
                    None if features.neighbor_weights_NJ is None else tensor(features.neighbor_weights_NJ)
                ),
            )
        # What is computed comes behind the copies.
        layout = batch.layout
        row_keys_N = row_keys_B.index_select(0, layout.row_N)
        return replace(
            batch,
            keys_N=token_keys(seed, features.step, row_keys_N, layout.place_N),
            rows={name: rows_MD.to(device).requires_grad_(training) for name, rows_MD in batch.rows.items()},
        )

    @property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each row, in the host's memory."""
        return self.layout.lengths_B

    def some_rows(self, rows: slice) -> TensorBatch:
        """Neighboring rows alone, with tokens keyed as in the whole batch.

        The looked-up rows stay whole: gradients of all parts add up in the same leaves.

        Args:
            rows: start and stop are given.

        Raises:
            ValueError: a table of whose inverse it is not known which part belongs to which row.
        """
        layout, tokens = self.layout.some_rows(rows)
        return TensorBatch(
            layout=layout,
            keys_N=self.keys_N[tokens],
            items_N=self.items_N[tokens],
            targets_N=None if self.targets_N is None else self.targets_N[tokens],
            negatives_S=self.negatives_S,
            inverse={name: self._part_of(name, rows, tokens) for name in self.inverse},
            rows=self.rows,
            negatives_NK=None if self.negatives_NK is None else self.negatives_NK[tokens],
            times_N=None if self.times_N is None else self.times_N[tokens],
            labels={name: codes_N[tokens] for name, codes_N in self.labels.items()},
            target_labels={name: codes_N[tokens] for name, codes_N in self.target_labels.items()},
            instruction={name: codes_B[rows] for name, codes_B in self.instruction.items()},
            neighbors_NJ=None if self.neighbors_NJ is None else self.neighbors_NJ[tokens],
            neighbor_weights_NJ=None
            if self.neighbor_weights_NJ is None
            else self.neighbor_weights_NJ[tokens],
        )

    def item_inverse(self) -> ItemInverse:
        """Which rows of the table `item` are whose."""
        num_tokens, inverse = len(self.items_N), self.inverse["item"]
        num_neighbors = 0 if self.neighbors_NJ is None else self.neighbors_NJ.numel()
        num_others = len(inverse) - num_tokens - num_neighbors
        num_targets = num_tokens if num_others else 0
        sizes = (num_tokens, num_targets, num_others - num_targets, num_neighbors)
        return ItemInverse(*inverse.split(sizes))

    def _part_of(self, table: str, rows: slice, tokens: slice) -> Tensor:
        """The part of an inverse that belongs to some rows; shapes as in `SequenceFeatures`."""
        inverse = self.inverse[table]
        match table:
            case "user":  # [B]
                return inverse[rows]
            case "code":  # [N, L]
                return inverse[tokens]
            case "item":
                inputs, targets, negatives, neighbors = self.item_inverse()
                if self.negatives_NK is not None:
                    negatives = negatives.view(self.negatives_NK.shape)[tokens].flatten()
                if self.neighbors_NJ is not None:
                    neighbors = neighbors.view(self.neighbors_NJ.shape)[tokens].flatten()
                return torch.cat([inputs[tokens], targets[tokens], negatives, neighbors])
        raise ValueError(
            f"the inverse of table {table!r} cannot be cut by rows: nothing says how it is laid out; "
            "set training.micro_batches to 1"
        )

    def stand_in(self) -> TensorBatch:
        """One row of one token of no meaning, for a trainer without tokens that must take part.

        It reads the same leaves as the batch, where they have a row; its loss is to be counted zero times.
        """

        num_negatives = 0 if self.negatives_S is None else len(self.negatives_S)
        if self.negatives_NK is not None:
            num_negatives = self.negatives_NK.shape[1]
        neighbors_NJ, weights_NJ = self.neighbors_NJ, self.neighbor_weights_NJ
        num_neighbors = 0 if neighbors_NJ is None else neighbors_NJ.shape[1]
        num_items = 1 + (1 + num_negatives if num_negatives else 0) + num_neighbors
        shapes = {"user": (1,), "item": (num_items,)}
        return TensorBatch(
            layout=JaggedLayout.even(1, 1, self.layout.device),
            keys_N=self.keys_N.new_zeros(1),
            items_N=self.items_N.new_zeros(1),
            targets_N=None if self.targets_N is None else self.targets_N.new_zeros(1),
            negatives_S=self.negatives_S,
            inverse={
                name: inverse.new_zeros(shapes.get(name, (1, *inverse.shape[1:])))
                for name, inverse in self.inverse.items()
            },
            rows={
                name: rows_MD if len(rows_MD) else rows_MD.new_zeros(1, *rows_MD.shape[1:])
                for name, rows_MD in self.rows.items()
            },
            negatives_NK=None if self.negatives_NK is None else self.negatives_NK.new_zeros(1, num_negatives),
            times_N=None if self.times_N is None else self.times_N.new_zeros(1),
            labels={name: codes_N.new_zeros(1) for name, codes_N in self.labels.items()},
            target_labels={name: codes_N.new_zeros(1) for name, codes_N in self.target_labels.items()},
            instruction={name: codes_B.new_zeros(1) for name, codes_B in self.instruction.items()},
            neighbors_NJ=None if neighbors_NJ is None else neighbors_NJ.new_zeros(1, num_neighbors),
            neighbor_weights_NJ=None if weights_NJ is None else weights_NJ.new_zeros(1, num_neighbors),
        )

    def users_of(self, rows_N: Tensor) -> Tensor:
        """[N, D] the user's row of each row of the batch.

        In one lookup: the gradient of an indexed copy would add up in any order.
        """
        return rows_of_ids(self.rows["user"], self.inverse["user"][rows_N])

    def embed(self, table: str) -> Tensor:
        """Rows of `table` in the shape of its inverse: [..., D]."""
        return rows_of_ids(self.rows[table], self.inverse[table])
