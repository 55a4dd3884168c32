"""A feature batch as tensors on the training device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.distinct_rows import rows_of_ids
from rayrec.models.base.keyed_random import token_keys
from rayrec.models.language.text_tensors import RowsOfTokens, TextTensors
from rayrec.platform.device_copies import OverlappedCopies


class _Lookup(Protocol):
    @property
    def ids_M(self) -> np.ndarray: ...
    @property
    def inverse(self) -> np.ndarray: ...


class _Chunks(Protocol):
    @property
    def offsets_B1(self) -> np.ndarray: ...
    @property
    def items_XC(self) -> np.ndarray: ...
    @property
    def labels(self) -> Mapping[Any, np.ndarray]: ...
    @property
    def ages_X(self) -> np.ndarray: ...
    @property
    def is_known_X(self) -> np.ndarray | None: ...
    @property
    def known_XKD(self) -> np.ndarray | None: ...


class _PathLevel(Protocol):
    @property
    def codes_C(self) -> np.ndarray: ...
    @property
    def offsets_P1(self) -> np.ndarray: ...
    @property
    def log_shares_P(self) -> np.ndarray: ...
    @property
    def parents_N(self) -> np.ndarray: ...
    @property
    def targets_N(self) -> np.ndarray: ...


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
    @property
    def old_chunks(self) -> _Chunks | None: ...
    @property
    def paths(self) -> Sequence[_PathLevel]: ...
    @property
    def prompts(self) -> RowsOfTokens | None: ...


class ItemInverse(NamedTuple):
    """The inverse of the table `item`, by what its ids are; parts that were not looked up are empty."""

    inputs: Tensor
    targets: Tensor
    negatives: Tensor
    """[S] or [N K]."""
    neighbors: Tensor
    """[N J]."""


class PrefixInverse(NamedTuple):
    """The inverse of the table `prefix`; L levels."""

    inputs_NL: Tensor
    negatives_SL: Tensor
    """Of the batch's negatives; none where it has none."""
    candidates: tuple[Tensor, ...]
    """[C] of each level; none where items are ranked."""


@dataclass(frozen=True)
class ChunkBatch:
    """Chunks of old events, as `rayrec.samples.base.batches.OldChunks`; E = X * C events of all chunks."""

    layout: JaggedLayout
    """Of B rows, with X chunks in all."""
    size: int
    """C."""
    items_E: Tensor
    labels: dict[str, Tensor]
    keys_E: Tensor
    """Of dropout; without meaning where nothing is trained."""
    ages_X: Tensor
    is_known_X: np.ndarray | None = None
    """In the host's memory."""
    known_XKD: Tensor | None = None

    @staticmethod
    def build(chunks: _Chunks, device: torch.device, copies: OverlappedCopies) -> ChunkBatch:
        """Put chunks on the device, without the keys of their events (`keyed`), which training needs."""
        items_E = copies.copied(chunks.items_XC.reshape(-1))
        return ChunkBatch(
            JaggedLayout.from_offsets(chunks.offsets_B1, device, copies.moved),
            chunks.items_XC.shape[1],
            items_E,
            {label: copies.copied(codes_XC.reshape(-1)) for label, codes_XC in chunks.labels.items()},
            items_E,
            copies.copied(chunks.ages_X),
            chunks.is_known_X,
            None if chunks.known_XKD is None else copies.copied(chunks.known_XKD),
        )

    def keyed(self, row_keys_B: Tensor, seed: int, step: int) -> ChunkBatch:
        """With a key for every event.

        Args:
            row_keys_B: of the batch's rows.
        """
        # Events of a window have places from 0 on; these count back from it.
        places_C = torch.arange(self.size, device=row_keys_B.device)
        places_XC = places_C - self.size * (1 + self.ages_X[:, None])
        row_keys_X1 = row_keys_B.index_select(0, self.layout.row_N)[:, None]
        row_keys_E = row_keys_X1.expand(-1, self.size).flatten()
        return replace(self, keys_E=token_keys(seed, step, row_keys_E, places_XC.flatten()))

    def some_rows(self, rows: slice) -> ChunkBatch:
        """Those of neighboring rows; start and stop are given."""
        layout, chosen = self.layout.some_rows(rows)
        return replace(self._some(chosen), layout=layout)

    def unknown(self) -> tuple[ChunkBatch, Tensor | None]:
        """The chunks whose summaries are not known, as rows, and their indices; None: all of them."""
        if self.is_known_X is None:
            return self, None
        chosen = torch.from_numpy(np.flatnonzero(~self.is_known_X)).to(self.ages_X.device)
        layout = JaggedLayout.even(len(chosen), 1, chosen.device)
        return replace(self._some(chosen), layout=layout), chosen

    def _some(self, chosen: slice | Tensor) -> ChunkBatch:
        def of_events(values_E: Tensor) -> Tensor:
            return values_E.view(-1, self.size)[chosen].flatten()

        known_X = self.is_known_X
        return replace(
            self,
            items_E=of_events(self.items_E),
            labels={label: of_events(codes_E) for label, codes_E in self.labels.items()},
            keys_E=of_events(self.keys_E),
            ages_X=self.ages_X[chosen],
            is_known_X=known_X[chosen] if known_X is not None and isinstance(chosen, slice) else None,
            known_XKD=None if self.known_XKD is None else self.known_XKD[chosen],
        )

    def stand_in(self) -> ChunkBatch:
        """One chunk of one row, of no meaning."""
        zeros_C = self.items_E.new_zeros(self.size)
        return ChunkBatch(
            JaggedLayout.even(1, 1, zeros_C.device),
            self.size,
            zeros_C,
            dict.fromkeys(self.labels, zeros_C),
            zeros_C,
            zeros_C[:1],
        )


@dataclass(frozen=True)
class PathBatch:
    """One level of the paths of targets, as `rayrec.samples.base.batches.PathLevel`."""

    codes_C: Tensor
    offsets_P1: Tensor
    log_shares_P: Tensor
    parents_N: Tensor
    targets_N: Tensor
    num_alternatives: int
    most_alternatives: int
    """Of one parent."""

    @staticmethod
    def build(level: _PathLevel, copies: OverlappedCopies) -> PathBatch:
        return PathBatch(
            copies.copied(level.codes_C),
            copies.copied(level.offsets_P1),
            copies.copied(level.log_shares_P),
            copies.copied(level.parents_N),
            copies.copied(level.targets_N),
            int(level.offsets_P1[-1]),
            int(np.diff(level.offsets_P1).max(initial=0)),
        )

    def some_tokens(self, tokens: slice) -> PathBatch:
        """Of some targets; the candidates stay whole."""
        return replace(self, parents_N=self.parents_N[tokens], targets_N=self.targets_N[tokens])

    def stand_in(self) -> PathBatch:
        """One target, the only child of its parent."""
        zeros_1 = self.parents_N.new_zeros(1)
        return PathBatch(
            zeros_1,
            torch.arange(2, device=zeros_1.device),
            self.log_shares_P.new_zeros(1),
            zeros_1,
            zeros_1,
            num_alternatives=1,
            most_alternatives=1,
        )


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
    old_chunks: ChunkBatch | None = None
    """What rows have before these events, of models that read summaries of it."""
    paths: tuple[PathBatch, ...] = ()
    """Of the targets, level after level, of models whose vectors of prefixes are rows of a table."""
    prompts: TextTensors | None = None
    """The rows, of models that read prompts; lookups are of their places then."""

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

        Raises:
            ValueError: the batch's negatives are not distinct and in ascending order, as losses expect them.
        """
        if features.negatives_S is not None and (np.diff(features.negatives_S) <= 0).any():
            raise ValueError("negatives_S of a batch have to be distinct and in ascending order")
        with OverlappedCopies(device) as copies:
            tensor = copies.copied
            row_keys_B = tensor(features.row_keys_B)
            batch = TensorBatch(
                layout=JaggedLayout.from_offsets(features.offsets_B1, device, copies.moved),
                keys_N=row_keys_B,
                items_N=tensor(features.items_N),
                targets_N=None if features.targets_N is None else tensor(features.targets_N),
                negatives_S=None if features.negatives_S is None else tensor(features.negatives_S),
                inverse={
                    name: tensor(lookup.inverse)
                    for name, lookup in features.lookups.items()
                    if features.prompts is None
                },
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
                paths=tuple(PathBatch.build(level, copies) for level in features.paths),
            )
            prompts = None
            if features.prompts is not None:
                prompts = TextTensors.copied(features.prompts, features.lookups, batch.rows, device, copies)
            chunks = None
            if features.old_chunks is not None:
                chunks = ChunkBatch.build(features.old_chunks, device, copies)
        # What is computed comes behind the copies.
        layout = batch.layout
        row_keys_N = row_keys_B.index_select(0, layout.row_N)
        rows_of = {name: rows_MD.to(device).requires_grad_(training) for name, rows_MD in batch.rows.items()}
        if prompts is not None:
            prompts = replace(prompts, rows=rows_of)
            if training:
                prompts = prompts.keyed(row_keys_B, seed, features.step)
        return replace(
            batch,
            keys_N=token_keys(seed, features.step, row_keys_N, layout.place_N),
            old_chunks=chunks.keyed(row_keys_B, seed, features.step) if chunks and training else chunks,
            rows=rows_of,
            prompts=prompts,
        )

    @property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each row, in the host's memory."""
        return self.layout.lengths_B if self.prompts is None else self.prompts.lengths_B

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
            old_chunks=None if self.old_chunks is None else self.old_chunks.some_rows(rows),
            paths=tuple(level.some_tokens(tokens) for level in self.paths),
            prompts=None if self.prompts is None else self.prompts.some_rows(rows),
        )

    def item_inverse(self) -> ItemInverse:
        """Which rows of the table `item` are whose."""
        num_tokens, inverse = len(self.items_N), self.inverse["item"]
        num_neighbors = 0 if self.neighbors_NJ is None else self.neighbors_NJ.numel()
        num_others = len(inverse) - num_tokens - num_neighbors
        num_targets = num_tokens if num_others else 0
        sizes = (num_tokens, num_targets, num_others - num_targets, num_neighbors)
        return ItemInverse(*inverse.split(sizes))

    def prefix_inverse(self) -> PrefixInverse:
        """Which rows of the table `prefix` are whose."""
        inverse, sizes = self.inverse["prefix"], [len(level.codes_C) for level in self.paths]
        of_items, *candidates = inverse.split((len(inverse) - sum(sizes), *sizes))
        num_each = (len(self.items_N), 0 if self.negatives_S is None else len(self.negatives_S))
        num_levels = len(of_items) // max(sum(num_each), 1)
        inputs_NL, negatives_SL = of_items.view(sum(num_each), num_levels).split(num_each)
        return PrefixInverse(inputs_NL, negatives_SL, tuple(candidates))

    def _part_of(self, table: str, rows: slice, tokens: slice) -> Tensor:
        """The part of an inverse that belongs to some rows; shapes as in `SequenceFeatures`."""
        inverse = self.inverse[table]
        match table:
            case "user":  # [B]
                return inverse[rows]
            case "code":  # [N, L]
                return inverse[tokens]
            case "prefix":
                prefixes_NL, negatives_SL, candidates = self.prefix_inverse()
                return torch.cat([prefixes_NL[tokens].flatten(), negatives_SL.flatten(), *candidates])
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

        prompts = None if self.prompts is None else self.prompts.stand_in()
        num_negatives = 0 if self.negatives_S is None else len(self.negatives_S)
        if self.negatives_NK is not None:
            num_negatives = self.negatives_NK.shape[1]
        neighbors_NJ, weights_NJ = self.neighbors_NJ, self.neighbor_weights_NJ
        num_neighbors = 0 if neighbors_NJ is None else neighbors_NJ.shape[1]
        num_items = 1 + (1 + num_negatives if num_negatives else 0) + num_neighbors
        shapes = {"user": (1,), "item": (num_items,)}
        if self.paths:  # those of the item and of negatives, and one candidate of each level
            shapes["prefix"] = ((2 + num_negatives) * len(self.paths),)
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
            prompts=prompts,
            negatives_NK=None if self.negatives_NK is None else self.negatives_NK.new_zeros(1, num_negatives),
            times_N=None if self.times_N is None else self.times_N.new_zeros(1),
            labels={name: codes_N.new_zeros(1) for name, codes_N in self.labels.items()},
            target_labels={name: codes_N.new_zeros(1) for name, codes_N in self.target_labels.items()},
            instruction={name: codes_B.new_zeros(1) for name, codes_B in self.instruction.items()},
            neighbors_NJ=None if neighbors_NJ is None else neighbors_NJ.new_zeros(1, num_neighbors),
            neighbor_weights_NJ=None if weights_NJ is None else weights_NJ.new_zeros(1, num_neighbors),
            old_chunks=None if self.old_chunks is None else self.old_chunks.stand_in(),
            paths=tuple(level.stand_in() for level in self.paths),
        )

    def users_of(self, rows_N: Tensor) -> Tensor:
        """[N, D] the user's row of each row of the batch.

        In one lookup: the gradient of an indexed copy would add up in any order.
        """
        return rows_of_ids(self.rows["user"], self.inverse["user"][rows_N])

    def embed(self, table: str) -> Tensor:
        """Rows of `table` in the shape of its inverse: [..., D]."""
        return rows_of_ids(self.rows[table], self.inverse[table])
