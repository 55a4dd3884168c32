"""What a run learns, and how it is judged: all that differs between kinds of models.

The pipeline, its snapshots, recovery and memory plan know nothing else of the model:

    rows ─► wanted columns ─► features ─► one share per trainer ─► program ─► validate ─► figures
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from torch import nn

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.program.program import ProgramSpec
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.tasks.training_rows import RowSource
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import TrainingFeatures
from rayrec.samples.dataset.manifest import Entity, IdKind, Split
from rayrec.samples.operations.program import FeatureProgram

if TYPE_CHECKING:
    from rayrec.pipelines.runs.snapshots import RunState

GRAPH = "a graph"
"""Of the training events, which feature workers make where there is no saved one."""


class Validation(Protocol):
    """Questions to a run that is training, and what its answers amount to."""

    def batches(self) -> Iterable[Any]:
        """The samples, in batches."""

    def ask(self, worker: Any, trainer: Any, batch: Any) -> Any:
        """The promise of an answer; `worker` and `trainer` are handles of these actors."""

    def report(self, answers: Iterable[tuple[Any, Any]]) -> dict[str, Estimate]:
        """Metrics by name, from every batch with its answer, in order."""


class Task(ABC):
    """Inputs that were opened and checked against each other; nothing is started."""

    config: RunConfig

    @property
    @abstractmethod
    def row_source(self) -> RowSource:
        """The rows of the data set, and what the model reads of rows."""

    @property
    def fingerprint(self) -> str:
        """Of the data set."""
        return self.row_source.fingerprint

    @property
    def semantic_ids_version(self) -> str | None:
        """Of the semantic IDs that the model generates; None where it generates none."""
        return None

    @property
    def labels(self) -> dict[str, list[str]] | None:
        """Names of the codes that weights stand for; None where there are none."""
        return None

    @property
    def content_items(self) -> str | None:
        """Which items the words that the model reads are counted in, as `RunState` has it."""
        return None

    @property
    def id_kinds(self) -> Mapping[Entity, IdKind] | None:
        """How ids of users and items are stored, `integer` or `string`; None where rows have no such ids."""
        return None

    def check_validation(self) -> None:
        """Refuse settings with which validation could not choose a snapshot.

        Raises:
            InputError: validation could not say which snapshot is the best.
        """
        self.check_split("valid")

    @abstractmethod
    def check_split(self, split: Split) -> None:
        """Refuse to evaluate on nobody.

        Raises:
            InputError: the split has no rows.
        """

    def check_state(self, state: RunState, where: str) -> None:
        """Refuse to go on from a state of another task.

        Args:
            state: of a run, at a snapshot or version of it.
            where: that is, for messages.

        Raises:
            InputError: it is one of another data set; names it and what differs.
        """
        if state.dataset_fingerprint != self.fingerprint:
            raise InputError(
                f"{where}: was trained on another data set than {self.config.data.path} holds now; "
                "prepare the same data again, or train from the start"
            )

    @abstractmethod
    def check_goes_on_from(self, earlier: Task, where: str) -> None:
        """Refuse what was learned on a data set that this one does not go on from.

        Args:
            earlier: the task of the run, of the same kind and with a model of the same settings.
            where: that is, for messages.

        Raises:
            InputError: says what differs.
        """

    def reads_items_of(self, state: RunState) -> bool:
        """Whether a run is served with a later data set than its own, which it says the items of: then the
        task has to be `grown_from` that one."""
        return False

    def grown_from(self, earlier: Task, state: RunState, where: str) -> Self:
        """The same task, for what was learned on an earlier data set and goes on being served.

        Args:
            earlier: the task of the run, of the same kind and with the same model.
            state: of the run.
            where: that is, for messages.

        Raises:
            InputError: its items are not among these, or what is read of them is not there.
        """
        raise AssertionError(f"{type(self).__name__} reads no items of runs")

    def row_ids(self) -> dict[str, Int64Array]:
        """Weights of the network that have a row for each part of a catalog: whose rows they are, by name."""
        return {}

    def weights_from(
        self, weights: dict[str, np.ndarray], rows: Mapping[str, Int64Array]
    ) -> dict[str, np.ndarray]:
        """What a run on an earlier data set has learned, for the network of this one.

        Args:
            rows: `row_ids` of its task, which `check_goes_on_from` has passed.
        """
        return weights

    def learning_on(self, state: RunState) -> Self:
        """The same task, where what a run has learned is learned on.

        Args:
            state: of that run, which `check_state` has passed.
        """
        return self

    @abstractmethod
    def features(self, program: FeatureProgram) -> TrainingFeatures:
        """What feature workers do to rows, behind the run's operations."""

    @abstractmethod
    def program(self, optimizer: DenseOptimizerSettings) -> ProgramSpec:
        """What trainers build."""

    @property
    def catalog_ids_I(self) -> Int64Array | None:
        """Ids of all items, where the model may rank by their rows."""
        return None

    @abstractmethod
    def ids_of(self, table: str) -> Int64Array | int:
        """Distinct ids that training may create rows for, or how many there are."""

    @abstractmethod
    def most_batch_ids(self, table: str) -> int:
        """Bound of the distinct ids of a table in one trainer's share of a batch."""

    @abstractmethod
    def network(self) -> nn.Module:
        """As trainers will build it, if possible without memory for its weights."""

    def notes(self) -> list[str]:
        """Sentences for a run's log on what of its settings has no effect. For the driver, which says them
        once.

        Raises:
            InputError: a file that would say so cannot be read.
        """
        return []

    @property
    def worker_holds(self) -> dict[str, int]:
        """What every feature worker makes of the data set and holds, each its own: bytes by what it is."""
        return {}

    @property
    def catalog_bytes(self) -> int:
        """Rows of all items that every trainer holds while it ranks."""
        return 0

    @abstractmethod
    def validation(self, features: Any) -> Validation:
        """Questions about the split `valid`.

        Args:
            features: what `Task.features` made.

        Raises:
            InputError: its rows lack a column that these read.
        """

    @property
    @abstractmethod
    def metric(self) -> str:
        """The figure whose largest value makes a snapshot the best."""

    @property
    @abstractmethod
    def judged_by(self) -> Mapping[str, bool]:
        """Figures of a validation by which runs can be compared, by name: whether larger ones are better."""

    @property
    @abstractmethod
    def shown_metrics(self) -> tuple[str, ...]:
        """Figures that a run's log shows, of those that a validation gives."""
