"""A trained ranking model in one process, without Ray: what evaluation, rewards and serving hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.models.keras.config import KerasModelConfig
from rayrec.models.keras.export import export_saved_model
from rayrec.models.keras.program import KerasProgram
from rayrec.models.keras.tensorflow_model import TensorFlowModel
from rayrec.models.program.program import ProgramPlacement, ScoringProgram
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.tasks.impressions import ImpressionTask
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.impressions.batches import ImpressionBatch
from rayrec.samples.impressions.features import ImpressionFeatures
from rayrec.samples.impressions.keyed_columns import KeyedColumns


class Scorer:
    """Says how likely each label of an impression is 1. Not thread-safe."""

    def __init__(self, model: TrainedModel) -> None:
        """
        Raises:
            InputError: the model recommends.
        """
        assembly = model.assembly
        task, config = assembly.task, assembly.config
        if not isinstance(task, ImpressionTask):
            raise InputError(
                f"{model.run}: {config.model.name!r} recommends items, and scores no impressions"
            )
        features = assembly.features
        assert isinstance(features, ImpressionFeatures), "those of the task"
        self.run = model.run
        self.committed_step = model.state.committed_step
        self.task, self.features = task, features
        self._keyed = KeyedColumns(task.dataset)
        program = task.program(assembly.dense_optimizer()).build(
            ProgramPlacement(get_device(config.device).torch, config.seed)
        )
        assert isinstance(program, ScoringProgram)
        self._program = program
        self._program.load(dict(model.weights), optimizer_state=None)
        self._tables = model.tables

    @classmethod
    def load(
        cls,
        run: str | Path,
        which: str = "best",
        device: str | None = None,
        data: str | Path | None = None,
    ) -> Scorer:
        """Load a run's `best` or `last` snapshot.

        Args:
            device: overrides the device that the run was trained on.
            data: where the run's data set lies now, if it was moved.

        Raises:
            InputError: no such run, one of a recommender, an incomplete or changed snapshot, or one of other
                data.
        """
        return cls(TrainedModel.load(run, which, device, data))

    @property
    def labels(self) -> tuple[str, ...]:
        """What is predicted, task by task."""
        return self.task.schema.labels

    def score(self, rows: RowBatch) -> np.ndarray:
        """[B, T] probabilities of rows as training rows are before `data.features`, labels aside."""
        return self._program.predict(*self.network_inputs(rows))

    def compile(self, row_counts: Sequence[int]) -> bool:
        """Score batches of at most so many rows by compiled functions from now on, where that is possible:
        for Keras models on TensorFlow, by XLA. Takes a while.

        Returns:
            Whether it is possible.
        """
        if isinstance(self._program, KerasProgram) and isinstance(self._program.model, TensorFlowModel):
            return self._program.model.compile_scoring(row_counts)
        return False

    def network_inputs(self, rows: RowBatch) -> tuple[ImpressionBatch, dict[str, np.ndarray]]:
        """What the network reads of such rows: their features, and by table the rows of their ids; a
        `SavedModelScorer` takes the same."""
        batch = self.features.scoring(0, rows)
        return batch, self._tables.read({name: lookup.ids_M for name, lookup in batch.lookups.items()})

    def score_rows(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The same of rows by field name, with keys as the source of the impressions writes them; a field
        that is left out is null. Of a run that trains on raw rows (`data.samples`), fields are as in those.

        Raises:
            InputError: a field is unknown or of the wrong type.
        """
        schema = self.features.scored_columns
        for place, row in enumerate(rows):
            if unknown := set(row) - set(schema.names):
                raise InputError(
                    f"row {place}: there is no field {min(unknown, key=str)!r}; known are "
                    f"{', '.join(schema.names)}"
                )
        columns = [self._column(field, [row.get(field.name) for row in rows]) for field in schema]
        return self.score(RowBatch(np.arange(len(rows)), pa.record_batch(columns, schema=schema)))

    def _column(self, field: pa.Field, values: list[Any]) -> pa.Array:
        is_keyed = self.task.config.data.samples is None and field.name in self._keyed.names
        try:
            if is_keyed:
                found = self._keyed.column(field.name, pa.array(values), lambda row: f"row {row}")
                return found.cast(field.type)
            if pa.types.is_timestamp(field.type) and any(isinstance(value, int) for value in values):
                raise InputError(
                    f"{field.name}: give a date and time (datetime); a number does not say its unit"
                )
            return pa.array(values, field.type)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise InputError(f"{field.name}: the values of the rows do not fit: {error}") from error

    def export(self, folder: Path) -> None:
        """Write the network, not the rows of the tables, as a SavedModel; see `rayrec.models.keras.export`.

        Args:
            folder: made here.

        Raises:
            InputError: the model is not of Keras on TensorFlow, or the folder is there already.
        """
        check_can_be_exported(self.run, self.task.config)
        assert isinstance(self._program, KerasProgram)
        assert isinstance(self._program.model, TensorFlowModel)
        export_saved_model(self._program.model, folder)


def check_can_be_exported(run: str, config: RunConfig) -> None:
    """Refuse to make a SavedModel of other models.

    Raises:
        InputError: the run is of one.
    """
    model = config.model
    if isinstance(model, KerasModelConfig) and model.backend == "tensorflow":
        return
    backend = f" on {model.backend!r}" if isinstance(model, KerasModelConfig) else ""
    raise InputError(
        f"{run}: {model.name!r}{backend} cannot be exported; a SavedModel is made of a ranking model of "
        "Keras on TensorFlow (model.name 'keras', model.backend 'tensorflow')"
    )
