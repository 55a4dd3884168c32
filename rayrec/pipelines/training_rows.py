"""The rows of a run: where they are read, in which order, and what operations make of them.

Parquet ─► ReadPlan, or FollowedPlan of a folder that grows ─► readers
                                    FeatureProgram ─► columns `user_id`, `item_ids` (`timestamps`, labels)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from rayrec.pipelines.config import RunConfig
from rayrec.platform.errors import InputError
from rayrec.samples.dataset import Dataset
from rayrec.samples.decoding import Preparation, ReadSpec
from rayrec.samples.event_labels import LABEL_COLUMNS, are_event_labels
from rayrec.samples.event_times import TIMES, are_event_times
from rayrec.samples.followed_plan import FollowedPlan
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.read_plan import (
    FIRST_WINDOW_ROWS,
    Batching,
    ReadPlan,
    ReadSettings,
    read_spec,
    warn_of_unreadable,
)
from rayrec.samples.sources import ParquetSource

logger = logging.getLogger(__name__)


def _is_list_of_integers(dtype: pa.DataType) -> bool:
    return (pt.is_list(dtype) or pt.is_large_list(dtype)) and pt.is_integer(dtype.value_type)


_WANTED = {
    "user_id": (pt.is_integer, "integers"),
    "item_ids": (_is_list_of_integers, "lists of integers"),
    TIMES: (are_event_times, "lists of seconds, or of dates and times"),
    **dict.fromkeys(LABEL_COLUMNS.values(), (are_event_labels, "lists of codes")),
}
"""Columns that a row has when its operations are done: whose it is, that user's items, oldest first, and for
models that need them their times and labels."""


@dataclass(frozen=True)
class TrainingRows:
    """What a run trains on."""

    plan: ReadPlan | FollowedPlan
    program: FeatureProgram
    columns: pa.Schema
    """All that there are, with their plain types: what the program was bound to."""
    fingerprint: str
    """Of the data that the cursor counts rows of."""

    @property
    def state(self) -> dict[str, Any] | None:
        """What a snapshot has to know to read the same rows: the files of a growing folder."""
        return self.plan.to_json() if isinstance(self.plan, FollowedPlan) else None


def training_rows(
    config: RunConfig, dataset: Dataset, followed: dict[str, Any] | None = None, next_step: int = 0
) -> TrainingRows:
    """
    Args:
        followed: `TrainingRows.state` of the snapshot that a run goes on from.
        next_step: the step it goes on with.

    Raises:
        InputError: files cannot be read, differ in a column, or have changed since they were accepted; or
            operations do not fit the columns, or do not make the columns that the model needs.
    """
    data = config.data
    if data.follow is not None:
        return _followed(config, followed, next_step)
    if data.samples is not None:
        source = ParquetSource.open(data.samples, data.on_corrupt)
        if source.unreadable:
            logger.warning(
                "%s: left out, since they are not readable Parquet: %s",
                data.samples,
                ", ".join(source.unreadable),
            )
        return _planned(config, source, source.fingerprint, _settings(config))
    plan = ReadPlan.of(dataset, config.training.batch_size, config.seed, data.window_rows)
    # In the order in which the data set alone would be read.
    settings = _settings(config, plan.settings.first_window_rows)
    return _planned(config, plan.source, dataset.fingerprint, settings)


def _planned(
    config: RunConfig, source: ParquetSource, fingerprint: str, settings: ReadSettings
) -> TrainingRows:
    data = config.data
    program = compiled(config, source.schema, name_unused=True)
    spec = read_spec(source, program.input_schema.names, data.filters, data.on_corrupt)
    plan = ReadPlan(source, _prepared(spec, program, config), settings)
    warn_of_unreadable(source.folder.url, plan.groups.unreadable)
    return TrainingRows(plan, program, source.schema, fingerprint)


def _prepared(spec: ReadSpec, program: FeatureProgram, config: RunConfig) -> ReadSpec:
    """With what readers do to row groups, if the result is kept."""
    cache = config.data.cache
    if cache is None:
        return spec
    return replace(spec, preparation=Preparation(program, config.seed, cache.folder, int(cache.max_bytes)))


def compiled(config: RunConfig, schema: pa.Schema, name_unused: bool = False) -> FeatureProgram:
    """The operations, bound to the columns of a source, as far as the model reads what they make.

    Args:
        name_unused: log which operations make nothing that the model reads; they are not run.

    Raises:
        InputError: they do not fit, or do not make what the model needs.
    """
    program = FeatureProgram.compile(config.data.features, schema)
    reasons = {TIMES: "when events were"} if config.model.needs_times else {}
    reasons |= {LABEL_COLUMNS[label]: f"the {label} of events" for label in config.model.needs_labels}
    names = ("user_id", "item_ids", *reasons)
    wanted = {name: check for name, check in _WANTED.items() if name in names}
    for name, (is_right, expected) in wanted.items():
        found = program.schema.field(name).type if name in program.schema.names else None
        if found is None or not is_right(found):
            raise InputError(
                f"data.features: rows need a column {name!r} of {expected}"
                + (f", since the model reads {reasons[name]}, and " if name in reasons else ", and ")
                + (f"it is {found}" if found is not None else f"there are {', '.join(program.schema.names)}")
                + "; add an operation that makes it"
            )
    if name_unused and (unused := program.unused(wanted)):
        logger.warning("%s: the model reads nothing of what they make; not run", ", ".join(unused))
    return program.narrowed(tuple(wanted))


def _followed(config: RunConfig, state: dict[str, Any] | None, next_step: int) -> TrainingRows:
    data, settings = config.data, _settings(config)
    assert data.samples is not None, "settings are checked: a followed folder is named"
    # The columns that there are decide which of them operations need.
    schema = FollowedPlan(data.samples, settings, on_corrupt=data.on_corrupt).spec.all_columns
    program = compiled(config, schema, name_unused=True)
    columns = program.input_schema.names
    if state is None:
        plan = FollowedPlan(data.samples, settings, columns, data.filters, data.on_corrupt)
        plan.refresh()
    else:
        plan = FollowedPlan.restore(
            state, data.samples, settings, next_step, columns, data.filters, data.on_corrupt
        )
    plan.spec = _prepared(plan.spec, program, config)
    return TrainingRows(plan, program, schema, plan.fingerprint)


def _settings(config: RunConfig, first_window_rows: int = FIRST_WINDOW_ROWS) -> ReadSettings:
    training = config.training
    length_of = None if training.batch_tokens is None else training.length_of
    batching = Batching(training.batch_size, training.batch_tokens, length_of, training.min_steps_per_epoch)
    return ReadSettings(batching, config.seed, config.data.window_rows, first_window_rows)
