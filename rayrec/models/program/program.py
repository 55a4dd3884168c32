"""The dense stage behind small interfaces, so that nothing above it knows the framework.

ProgramSpec ─ build(ProgramPlacement), in a trainer's process ─► DenseProgram
                                                           ├─ RecommendingProgram    which item comes next
                                                           ├─ ScoringProgram    the labels of impressions
                                                           └─ WritingProgram    how a text goes on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.platform.arrays import Float32Array, Int64Array

Rows = Mapping[str, np.ndarray | Tensor]
"""Table name to [M, D] float32 rows, in the order of the batch's distinct ids; tensors where they are on the
device already."""

PendingSum = Callable[[], None]
"""Waits until a sum is there."""
SumOverTrainers = Callable[[Tensor], PendingSum]
"""Begins to replace a flat tensor by its sum over all trainers, in place. All trainers begin the same sums in
the same order, and leave the tensors alone until they are there."""


class DenseGradients(NamedTuple):
    """What one batch asks of the sparse stage, and how good the model was on it."""

    loss_sum: float
    """Summed over this trainer's targets, not divided by their number."""
    row_grads: dict[str, np.ndarray | Tensor]
    """Table name to [M, D] gradients of the loss divided by the global number of targets; tensors on the
    device of tables whose rows were tensors."""


class DivergedError(FloatingPointError):
    """The loss or a gradient of a step is not finite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])

    def with_note(self, note: str) -> DivergedError:
        """The same error with more to say."""
        return DivergedError(f"{self}. {note}", self.step)


class DenseProgram(Protocol):
    """A dense network with its optimizer, whatever framework it is written in: what training asks of it."""

    def backward(self, features: Any, rows: Rows) -> DenseGradients:
        """Loss and gradients; dense gradients are kept for `update`.

        Args:
            features: one trainer's share of a batch, of the kind that the program was made for.

        Raises:
            DivergedError: the loss or a gradient is not finite; names the step, and the parameter, or
                the table and an id. Nothing has changed then.
        """

    def update(self) -> None:
        """Sum the kept gradients over the trainers and take one optimizer step.

        Raises:
            DivergedError: the sum is not finite; names step and parameter. No weight has changed.
        """

    def flops(self, features: Any, dims: Mapping[str, int]) -> float:
        """Model FLOPs of forward and backward of a share; 0 where they are not counted.

        Args:
            dims: width of the rows of each table that the share looks up.
        """

    def join(self) -> None:
        """The trainers have met: weights that they shall hold in parts are split now."""

    def begin_inference(self) -> None:
        """Prepare for `recommend` or `predict`, which trainers need not call equally often.

        All trainers call this at once. Ends with `backward`.
        """

    def weights(self) -> dict[str, np.ndarray]:
        """Every dense weight by name, whole, as copies.

        Of weights that are split among trainers, asked of all of them at once; so is the optimizer's state.
        """

    def optimizer_state(self) -> dict[str, np.ndarray]:
        """Everything but the weights that the next `update` depends on, as copies."""

    def load(
        self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray] | None
    ) -> None:
        """Take over saved values; names and shapes have to match.

        Raises:
            ValueError: a weight is missing, unknown or of another shape.
        """


class AllowedItems(NamedTuple):
    """Which items each row may be given; see `models.decoding.leaf_filter.ItemSets`."""

    mask_SI: np.ndarray
    """[S, I] bool, by set and catalog position."""
    set_B: np.ndarray
    """[B] int64 the set of each row."""


class RankedItems(NamedTuple):
    """Best items of each row, best first; see `models.sequence_model.TopItems`."""

    items_BK: np.ndarray
    scores_BK: np.ndarray


@runtime_checkable
class RecommendingProgram(DenseProgram, Protocol):
    """One that says which item comes next."""

    table_of_catalog: str | None
    """Sparse table whose rows of every item, or of their prefixes, `recommend` needs, if any."""

    def recommend(self, features: Any, rows: Rows, k: int, excluded_BE: np.ndarray | None) -> RankedItems:
        """The k best next items of each row, none of them in `excluded_BE` (padded with -1).

        A row without history gives nothing to go by and gets no items.
        """

    def take_catalog(self, item_ids_I: Int64Array, read_rows: Callable[[Int64Array], Float32Array]) -> None:
        """Read what `recommend` needs of the `table_of_catalog`, of programs with one.

        Args:
            item_ids_I: of every item, by catalog position.
            read_rows: [M] distinct ids of that table to [M, D] rows; kept where more are read while
                recommending.
        """


@runtime_checkable
class ScoringProgram(DenseProgram, Protocol):
    """One that says what comes of what is shown."""

    def predict(self, features: Any, rows: Rows) -> np.ndarray:
        """[B, T] float32 probabilities, task by task."""


@runtime_checkable
class WritingProgram(DenseProgram, Protocol):
    """One that says how a text goes on."""

    def log_likelihoods(self, features: Any, rows: Rows) -> np.ndarray:
        """[B] float32 sum over each row's targets of the logarithm of their probability."""

    def generate(self, features: Any, rows: Rows, max_new_tokens: int) -> list[np.ndarray]:
        """What each row is most probably continued by, token by token, up to the end of the text."""


@dataclass(frozen=True)
class ProgramPlacement:
    """Where and how a program runs."""

    device: torch.device
    seed: int
    compute: ComputeSettings = PLAIN
    sum_over_trainers: SumOverTrainers | None = None
    """None: there is one trainer."""
    attention_file: Path | None = None
    """Where measured choices of attention backends are kept; need not exist yet."""


class ProgramSpec(Protocol):
    """What a trainer has to know to build its program. Travels between processes."""

    def build(self, placement: ProgramPlacement) -> DenseProgram:
        """With initial weights that depend on the seed and the shapes alone."""
