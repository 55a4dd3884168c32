"""From a run's settings to the objects of its stages, wherever they will run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrec.embeddings.config import TableConfig
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.accepted_files import AcceptedFiles
from rayrec.pipelines.runs.snapshots import RunState, Snapshot
from rayrec.pipelines.tasks.impressions import ImpressionTask
from rayrec.pipelines.tasks.language import LanguageTask
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.tasks.task import Task
from rayrec.pipelines.tasks.training_rows import TrainingRows, compiled, training_rows
from rayrec.platform.devices import device_named
from rayrec.platform.errors import InputError
from rayrec.platform.processors import num_processors
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.base.batches import TrainingFeatures
from rayrec.samples.reading.followed_plan import FollowedPlan
from rayrec.samples.reading.read_plan import ReadPlan


@dataclass(frozen=True)
class Assembly:
    """A run's inputs, opened and checked against each other."""

    config: RunConfig
    task: Task
    columns: pa.Schema | None = None
    """Of the training rows, where they are known without the rows."""
    followed: dict[str, Any] | None = None
    """Files of a growing folder that were accepted, to go on with."""
    next_step: int = 0
    """The first one whose rows will be asked for."""

    @cached_property
    def rows(self) -> TrainingRows:
        """The training rows; footers are read when it is first asked for."""
        return training_rows(self.config, self.task.row_source, self.followed, self.next_step)

    @cached_property
    def features(self) -> TrainingFeatures:
        """The operations; training rows are not looked at where their columns are known."""
        if self.columns is None:
            return self.task.features(self.rows.program)
        return self.task.features(compiled(self.config, self.task.row_source.wanted_columns, self.columns))

    @property
    def plan(self) -> ReadPlan | FollowedPlan:
        """Which training rows make up which step."""
        return self.rows.plan

    @cached_property
    def total_steps(self) -> int | None:
        """Most steps that the run trains; None where it follows a folder that grows."""
        plan = self.plan
        return None if isinstance(plan, FollowedPlan) else plan.first_step(self.config.training.epochs)

    def epochs_at(self, step: int) -> float:
        """Passes over the data before a step; of a growing folder, the segments that were begun."""
        epoch, batch = self.plan.locate(step)
        if isinstance(self.plan, FollowedPlan) or not batch:
            return float(epoch)
        return epoch + batch / self.plan.epoch(epoch).num_steps

    def next_validation(self, step: int) -> int:
        """The first step after this many at which the model is validated, before it is trained."""
        evaluation = self.config.evaluation
        if evaluation.every_steps is not None:
            following = (step // evaluation.every_steps + 1) * evaluation.every_steps
        else:
            plan = self.plan
            assert isinstance(plan, ReadPlan), "settings are checked"
            epoch, _ = plan.locate(step)
            following = plan.first_step((epoch // evaluation.every_epochs + 1) * evaluation.every_epochs)
        return following if self.total_steps is None else min(following, self.total_steps)

    def learning_on(self, snapshot: Snapshot | None) -> Assembly:
        """The same inputs, read as in the run that a snapshot is of, be it another one; None: as they are."""
        task = self.task if snapshot is None else self.task.learning_on(snapshot.state)
        return self if task is self.task else replace(self, task=task)

    def going_on_from(self, snapshot: Snapshot | None, run: Path) -> Assembly:
        """The same inputs, read on from a snapshot of a run; None: from the start."""
        if self.config.data.follow is None:
            return self
        followed = AcceptedFiles(run).state_since(None if snapshot is None else snapshot.followed)
        if followed is None:
            return self  # nothing was accepted yet but by this
        next_step = 0 if snapshot is None else snapshot.committed_step + 1
        return replace(self, followed=followed, next_step=next_step)

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        return self.config.tables(self._schedule)

    def dense_optimizer(self) -> DenseOptimizerSettings:
        return self.config.dense_optimizer(self._schedule, device_named(self.config.device).fused_optimizer)

    @property
    def trainer_threads(self) -> int:
        pipeline = self.config.pipeline
        return pipeline.trainer_threads or max(1, num_processors() // pipeline.num_trainers)

    @property
    def _schedule(self) -> RateSchedule:
        return self.config.rate_schedule(lambda: self.total_steps)


def assemble(config: RunConfig, checksums: bool = True, columns: pa.Schema | None = None) -> Assembly:
    """Open what a run reads; every mistake in it shows here, before anything is started.

    Args:
        columns: those of the training rows; without them, features cannot be made without the rows.

    Raises:
        InputError: as the task of the run's model says of its data.
    """
    return Assembly(config, open_task(config, checksums), columns)


def open_task(config: RunConfig, checksums: bool = True) -> Task:
    """Open what a run reads, and check that it fits the model.

    Raises:
        InputError: what the run reads is missing, damaged, or not what the model needs.
    """
    if config.model.kind == "impressions":
        return ImpressionTask.open(config, config.model, checksums)
    if config.model.kind == "language":
        return LanguageTask.open(config, config.model, checksums)
    return NextItemTask.open(config, config.model, checksums)


def is_of(state: RunState, task: Task) -> bool:
    """Whether what was trained is of the task's data set and semantic IDs."""
    return (state.dataset_fingerprint, state.semantic_ids_version) == (
        task.fingerprint,
        task.semantic_ids_version,
    )


def open_earlier_task(config: RunConfig, state: RunState, why: str, way_out: str) -> Task:
    """Open what a run was trained on, for one that reads another data set.

    Args:
        config: of the run.
        state: of the run, which says what its data set was.
        why: it is needed, for messages.
        way_out: where it is not there, likewise.

    Raises:
        InputError: it is not there any more, or has changed.
    """
    try:
        task = open_task(config, checksums=False)
    except InputError as error:
        raise InputError(f"{why}, and its own cannot be opened ({error}); {way_out}") from error
    if not is_of(state, task):
        has = "has" if state.semantic_ids_version is None else "or its semantic IDs have"
        raise InputError(f"{why}; {config.data.path} {has} changed since: {way_out}")
    return task


def check_continues(snapshot: Snapshot, assembly: Assembly) -> None:
    """Refuse to train on from a snapshot with a plan that reads other rows than its own went on to.

    Raises:
        InputError: names the snapshot, and the data sets or both positions.
    """
    snapshot.cursor.check_belongs_to(assembly.rows.fingerprint, str(snapshot.path))
    ours = assembly.plan.position(snapshot.committed_step + 1)
    theirs = snapshot.state.read_position
    if theirs != ours:
        what = "in another order" if theirs.order != ours.order else "from another place"
        raise InputError(
            f"{snapshot.path}: its run goes on in epoch {theirs.epoch} after {theirs.rows} rows, and this "
            f"one would read {what} (epoch {ours.epoch}, {ours.rows} rows); "
            "continue it with the settings and the version of RayRec of its beginning, or train again"
        )
