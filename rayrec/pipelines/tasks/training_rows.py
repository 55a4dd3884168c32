"""The rows of a run: where they are read, in which order, and what operations make of them.

Parquet ─► ReadPlan, or FollowedPlan of a folder that grows ─► readers
                                    FeatureProgram ─► columns `user_id`, `item_ids` (`timestamps`, labels)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.wanted_columns import WantedColumn, check_columns
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.reading.decoding import Preparation, ReadSpec
from rayrec.samples.reading.followed_plan import FollowedPlan
from rayrec.samples.reading.read_plan import (
    FIRST_WINDOW_ROWS,
    Batching,
    ReadPlan,
    ReadSettings,
    read_spec,
    warn_of_unreadable,
)
from rayrec.samples.reading.sources import ParquetSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRows:
    """What a run trains on."""

    plan: ReadPlan | FollowedPlan
    program: FeatureProgram
    columns: pa.Schema
    """All that there are, with their plain types: what the program was bound to."""
    fingerprint: str
    """Of the data that the cursor counts rows of."""

    def state(self, first_segment: int = 0) -> dict[str, Any] | None:
        """What a snapshot has to know to read the same rows: the files of a growing folder.

        Args:
            first_segment: those before it were read to their end, and the snapshot knows them otherwise.
        """
        return self.plan.to_json(first_segment) if isinstance(self.plan, FollowedPlan) else None


class RowSource(Protocol):
    """A data set, as far as its rows go."""

    @property
    def fingerprint(self) -> str:
        """Another one has other rows, or in another order."""

    @property
    def wanted_columns(self) -> Mapping[str, WantedColumn]:
        """Columns that a row has to have when its operations are done, here as in rows from elsewhere."""

    def own_rows(self) -> ReadPlan:
        """The training rows of the data set.

        Raises:
            InputError: there are none, or their files are not as they were written.
        """


def training_rows(
    config: RunConfig, data_set: RowSource, followed: dict[str, Any] | None = None, next_step: int = 0
) -> TrainingRows:
    """The rows that training reads, from where a run goes on.

    Args:
        followed: `TrainingRows.state`, whole, of the snapshot that a run goes on from.
        next_step: the step it goes on with.

    Raises:
        InputError: files cannot be read, differ in a column, or have changed since they were accepted; or
            operations do not fit the columns, or do not make the columns that the model needs.
    """
    data = config.data
    if data.follow is not None:
        return _followed(config, data_set.wanted_columns, followed, next_step)
    if data.samples is not None:
        source = ParquetSource.open(data.samples, data.on_corrupt)
        if source.unreadable:
            logger.warning(
                "%s: left out, since they are not readable Parquet: %s",
                data.samples,
                ", ".join(source.unreadable),
            )
        return _planned(config, data_set.wanted_columns, source, source.fingerprint, _settings(config))
    plan = data_set.own_rows()
    # In the order in which the data set alone would be read.
    settings = _settings(config, plan.settings.first_window_rows)
    return _planned(config, data_set.wanted_columns, plan.source, data_set.fingerprint, settings)


def _planned(
    config: RunConfig,
    wanted: Mapping[str, WantedColumn],
    source: ParquetSource,
    fingerprint: str,
    settings: ReadSettings,
) -> TrainingRows:
    data = config.data
    program = compiled(config, wanted, source.schema, name_unused=True)
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


def compiled(
    config: RunConfig, wanted: Mapping[str, WantedColumn], schema: pa.Schema, name_unused: bool = False
) -> FeatureProgram:
    """The operations, bound to the columns of a source, as far as the model reads what they make.

    Args:
        name_unused: log which operations make nothing that the model reads; they are not run.

    Raises:
        InputError: they do not fit, or do not make what the model needs.
    """
    program = FeatureProgram.compile(config.data.features, schema)
    check_columns(program, wanted)
    if name_unused and (unused := program.unused(wanted)):
        logger.warning("%s: the model reads nothing of what they make; not run", ", ".join(unused))
    return program.narrowed(tuple(wanted))


def _followed(
    config: RunConfig,
    wanted: Mapping[str, WantedColumn],
    state: dict[str, Any] | None,
    next_step: int,
) -> TrainingRows:
    data, settings = config.data, _settings(config)
    assert data.samples is not None, "settings are checked: a followed folder is named"
    # The columns that there are decide which of them operations need.
    schema = FollowedPlan(data.samples, settings, on_corrupt=data.on_corrupt).spec.all_columns
    program = compiled(config, wanted, schema, name_unused=True)
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
