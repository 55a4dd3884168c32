"""The task of ranking models: what comes of what is shown, judged by AUC and calibration."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.ctr.config import ImpressionModelConfig
from rayrec.models.program.program import ProgramSpec
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.response_metrics import IS_LARGER_BETTER, summarize
from rayrec.pipelines.tasks.impression_rows import ImpressionRows, impression_features, schema_of
from rayrec.pipelines.tasks.later_catalog import warn_of_samples
from rayrec.pipelines.tasks.task import Task
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import device_named
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.keys import row_keys
from rayrec.samples.dataset.manifest import EVALUATION_FILES, Split
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.features import ImpressionFeatures
from rayrec.samples.operations.program import FeatureProgram

logger = logging.getLogger(__name__)


class LabeledRows(NamedTuple):
    """Rows to be scored, and what came of them."""

    step: int
    rows: RowBatch
    labels_BT: np.ndarray
    """0, 1, or NaN where it is not known."""
    groups: pa.ChunkedArray | None
    """Whose they are, where the data says it; null of nobody known."""


@dataclass(frozen=True)
class ImpressionTask(Task):
    """A data set of impressions."""

    config: RunConfig
    model: ImpressionModelConfig
    dataset: ImpressionDataset
    schema: ImpressionSchema

    @classmethod
    def open(cls, config: RunConfig, model: ImpressionModelConfig, checksums: bool = True) -> ImpressionTask:
        """Open the data set of impressions and check it against the config.

        Raises:
            InputError: the data set is missing or damaged, or lacks a column that the settings name.
        """
        dataset = ImpressionDataset.open(config.data.path, checksums)
        task = cls(config, model, dataset, schema_of(config, dataset))
        task.network()  # which refuses settings that do not fit the columns
        return task

    @property
    def row_source(self) -> ImpressionRows:
        return ImpressionRows(self.config, self.dataset, self.schema)

    def check_goes_on_from(self, earlier: Task, where: str) -> None:
        assert isinstance(earlier, ImpressionTask), "its model is of the same kind"
        way_out = "prepare the same ones, in the same order, or begin without init_from"
        _check_same_columns(earlier.schema, self.schema, self.config.data.path, where, way_out)

    def with_rows_of(self, later: ImpressionDataset, split: Split, where: str) -> ImpressionTask:
        """The same task for a split of a later data set, that what was trained here can be judged on.

        Args:
            where: what was trained, for messages.

        Raises:
            InputError: it has other columns, or rows of the time that was trained on.
        """
        if later.fingerprint == self.fingerprint:
            return self
        schema = schema_of(self.config, later)
        way_out = "prepare the same ones, in the same order"
        _check_same_columns(self.schema, schema, later.root, where, way_out)
        # What is before has trained the model, or has chosen its best snapshot.
        known_until = self.dataset.manifest.split.test_start
        begins = later.manifest.split.start_of(split)
        if known_until is None or begins is None:
            logger.warning(
                "%s: %s and %s are not both divided by time, so nothing says whether the model was trained "
                "on rows that it is judged on",
                where,
                self.dataset.root,
                later.root,
            )
        elif begins < known_until:
            until, since = (datetime.fromtimestamp(each, UTC).isoformat() for each in (known_until, begins))
            raise InputError(
                f"{where}: was trained and validated on rows until {until}, and the {split} rows of "
                f"{later.root} begin at {since}, so it may know what it is judged on; prepare the later log "
                f"with --split time, and --valid-start and --test-start of {until} or later"
            )
        warn_of_samples(self.config, where, later.root)
        return replace(self, dataset=later, schema=schema)

    def check_split(self, split: Split) -> None:
        if not self.dataset.manifest.rows[split]:
            raise InputError(
                f"{self.dataset.root}: there are no impressions in the split {split!r}; prepare the data set "
                "with another split"
            )

    def check_validation(self) -> None:
        super().check_validation()
        evaluation, label, group = self.config.evaluation, self.schema.labels[0], self.schema.group
        if evaluation.response_metric == "gauc" and group is None:
            raise InputError(
                f"evaluation.response_metric is 'gauc', and nothing says whose impressions those of "
                f"{self.dataset.root} are; prepare them with --group, or set it to auc"
            )
        groups = [] if group is None else [group]
        table = self.dataset.split_table("valid", [label, *groups]).slice(0, evaluation.max_users)
        labels_U = table[label].to_numpy().astype(np.float32)
        groups_U = None if group is None else _group_numbers(table[group])
        found = summarize(labels_U, np.full(len(table), 0.5), groups_U, num_resamples=1)
        if np.isnan(found[evaluation.response_metric].value):
            of_whom, way_out = "no group has", "set evaluation.response_metric to auc"
            if evaluation.response_metric == "auc":
                of_whom, way_out = "there are not", "hold out more rows"
            raise InputError(
                f"{self.dataset.root}: in {len(table):,} validation rows {of_whom} both values of {label}, "
                f"so there is no {evaluation.response_metric} to choose a snapshot by; {way_out}"
            )

    def features(self, program: FeatureProgram) -> ImpressionFeatures:
        return impression_features(self.config, self.schema, program)

    def program(self, optimizer: DenseOptimizerSettings) -> ProgramSpec:
        return self.model.program(self.schema, optimizer)

    def ids_of(self, table: str) -> int:
        """Of all splits, and one more per space for what is missing."""
        assert table == FEATURE_TABLE, f"no rule for the ids of table {table!r}"
        num_ids = self.dataset.num_ids
        spaces = {*self.schema.ids.values(), *self.schema.lists.values()}
        return sum(num_ids[space] for space in spaces) + len(spaces)

    def most_batch_ids(self, table: str) -> int:
        """Of columns of lists it is not known how long they are, so this is no bound of theirs."""
        num_trainers = self.config.pipeline.num_trainers
        num_rows = -(-self.config.training.batch_size // num_trainers)
        columns = len(self.schema.ids) + LIST_ELEMENTS * len(self.schema.lists)
        return num_rows * columns

    def network(self) -> nn.Module:
        config = self.config
        return self.model.network(
            self.schema, config.seed, device_named(config.device), config.training.compute
        )

    def validation(self, features: ImpressionFeatures) -> ImpressionValidation:
        check_columns_of(self.dataset, features, "valid")
        return ImpressionValidation(self, features)

    @property
    def metric(self) -> str:
        return _named(self.config.evaluation.response_metric, self.schema.labels[0], self.schema.labels)

    @property
    def judged_by(self) -> dict[str, bool]:
        labels, has_groups = self.schema.labels, self.schema.group is not None
        return {
            _named(figure, label, labels): is_larger_better
            for label in labels
            for figure, is_larger_better in IS_LARGER_BETTER.items()
            if has_groups or figure != "gauc"
        }

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        labels = self.schema.labels
        return tuple(_named(figure, label, labels) for label in labels for figure in ("auc", "log_loss"))


def _check_same_columns(
    theirs: ImpressionSchema, ours: ImpressionSchema, data: str | Path, where: str, way_out: str
) -> None:
    """Refuse a data set whose columns are others than those that a model has learned."""
    for part in ("labels", "numbers", "ids", "lists"):
        before, now = _columns(theirs, part), _columns(ours, part)
        if before != now:
            raise InputError(
                f"{where}: was trained on the {part} {before}, and {data} has {now}: its weights stand for "
                f"other columns; {way_out}"
            )


def _columns(schema: ImpressionSchema, part: str) -> str:
    """Names of columns in the order of batches, and of the spaces of their ids."""
    named = getattr(schema, part)
    if isinstance(named, Mapping):
        named = [f"{name} (of {space})" if space != name else name for name, space in named.items()]
    return ", ".join(named) or "none"


@dataclass(frozen=True)
class ImpressionValidation:
    """Predict the labels of impressions of `valid`."""

    task: ImpressionTask
    features: ImpressionFeatures

    def batches(self) -> Iterator[LabeledRows]:
        """The first `max_users` impressions, in the order of the file."""
        task, evaluation = self.task, self.task.config.evaluation
        return labeled_rows(
            task.dataset, task.schema, self.features, "valid", evaluation.batch_size, evaluation.max_users
        )

    def ask(self, worker: Any, trainer: Any, batch: LabeledRows) -> Any:
        return trainer.predict.remote(worker.scoring.remote(batch.step, batch.rows))

    def report(self, answers: Iterable[tuple[LabeledRows, np.ndarray]]) -> dict[str, Estimate]:
        scored = Scored(self.task.schema.labels)
        for labeled, predicted_BT in answers:
            scored.add(labeled, predicted_BT)
        return scored.figures()


def check_columns_of(dataset: ImpressionDataset, features: ImpressionFeatures, split: Split) -> None:
    """Refuse rows to be scored that lack what operations read.

    Raises:
        InputError: names the column.
    """
    there = dataset.split_columns(split)
    if missing := [name for name in features.scored_columns.names if name not in there]:
        raise InputError(
            f"{dataset.root / EVALUATION_FILES[split]}: there is no column {missing[0]!r}, which an "
            f"operation of data.features reads; there are {', '.join(there)}; prepare the data set with "
            f"--keep {missing[0]}"
        )


LIST_ELEMENTS = 50
"""Of a list of a row, for memory plans."""


def labeled_rows(
    dataset: ImpressionDataset,
    schema: ImpressionSchema,
    features: ImpressionFeatures,
    split: Split,
    batch_size: int,
    max_rows: int | None = None,
) -> Iterator[LabeledRows]:
    """The rows of a split in batches, with all that operations read; the last may be short."""
    check_columns_of(dataset, features, split)
    read = features.scored_columns.names
    further = [*schema.labels, *([schema.group] if schema.group is not None else [])]
    table = dataset.split_table(split, list(dict.fromkeys([*read, *further])))
    num_rows = len(table) if max_rows is None else min(max_rows, len(table))
    file_number = len(dataset.train_files) + list(EVALUATION_FILES).index(split)
    for step, start in enumerate(range(0, num_rows, batch_size)):
        part = table.slice(start, min(batch_size, num_rows - start)).combine_chunks()
        (rows,) = part.select(read).to_batches(max_chunksize=None) or [None]
        places_B = np.arange(start, start + len(part))
        labels = [part[label].to_numpy().astype(np.float32) for label in schema.labels]
        yield LabeledRows(
            step,
            RowBatch(row_keys(np.full(len(part), file_number), places_B), rows),
            np.stack(labels, axis=1),
            None if schema.group is None else part[schema.group],
        )


class Scored:
    """Predictions and what came of them, of all batches of a split."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._predicted: list[np.ndarray] = []
        self._rows: list[LabeledRows] = []

    def add(self, rows: LabeledRows, predicted_BT: np.ndarray) -> None:
        self._rows.append(rows._replace(rows=None))  # type: ignore[arg-type]  # which may be large
        self._predicted.append(predicted_BT)

    def figures(self) -> dict[str, Estimate]:
        """By name: `auc`, of several labels `auc of click`, ..."""
        return {
            _named(name, label, self._labels): estimate
            for label, figures in self.by_label().items()
            for name, estimate in figures.items()
        }

    def by_label(self) -> dict[str, dict[str, Estimate]]:
        """The figures of each label by name."""
        predicted_UT = np.concatenate(self._predicted)
        labels_UT = np.concatenate([rows.labels_BT for rows in self._rows])
        groups = [chunk for rows in self._rows if rows.groups is not None for chunk in rows.groups.chunks]
        groups_U = _group_numbers(pa.chunked_array(groups)) if groups else None
        return {
            label: summarize(labels_UT[:, place], predicted_UT[:, place], groups_U)
            for place, label in enumerate(self._labels)
        }


def _group_numbers(groups: pa.ChunkedArray) -> Int64Array:
    """[U] of each impression; one of nobody known is a group of its own, with nothing to put in order."""
    codes = groups.combine_chunks().dictionary_encode().indices
    numbers_U: Int64Array = codes.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False).copy()
    nobody_U = numbers_U < 0
    numbers_U[nobody_U] = len(numbers_U) + np.flatnonzero(nobody_U)
    return numbers_U


def _named(figure: str, label: str, labels: tuple[str, ...]) -> str:
    return figure if len(labels) == 1 else f"{figure} of {label}"
