"""From settings to what allocates computing power: curves, values, and costs measured on the service."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rayrec.platform.errors import InputError
from rayrec.samples.importers.tables import read_table
from rayrec.serve.config.actions import ActionConfig
from rayrec.serve.config.allocation import AllocateConfig
from rayrec.serve.engine.allocation import Allocator, Curves, level_of
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.value_curves import ActionKey, ValueCurves
from rayrec.serve.wire.schemas import ModelInfo, RecommendAnswer, RecommendRequest


def make_allocator(
    config: AllocateConfig,
    service: RecommendationService,
    batcher: Batcher[RecommendRequest, RecommendAnswer],
    max_batch: int,
    clock: Callable[[], float] = time.monotonic,
) -> Allocator:
    """Measure what the actions take, and read the curves and values.

    Args:
        service: that answers first; the costs of versions after it change as those of batches do.
        max_batch: size of the batches that actions are measured in.

    Raises:
        InputError: a file cannot be read, or says of an action nothing, or of a value no number from 0 on.
    """
    curves, users, items = read_files(config)
    levels = [replace(level_of(action), takes_cached=False) for action in config.actions]
    measured = [service.request_seconds(level, max_batch) for level in levels]
    usual = batcher.costs.measured_width
    at_start_s = batcher.costs.at(usual).least_s

    def costs() -> list[float]:
        """As they were measured, times what batches of full effort have become since."""
        times = batcher.costs.at(usual).least_s / at_start_s
        return [times * seconds for seconds in measured]

    def backlog_s() -> float:
        # A batch that is computed and one that waits for it are no backlog.
        return max(batcher.wait_s() - 2 * max_batch * batcher.costs.at(usual).least_s, 0.0)

    return Allocator(config, curves, costs, backlog_s, clock, users, items)


def read_files(
    config: AllocateConfig,
) -> tuple[Curves, Mapping[str, float] | None, Mapping[str, float] | None]:
    """(Curves, values by user, values by item) that the settings name.

    Raises:
        InputError: a file cannot be read, or says of an action nothing, or of a value no number from 0 on.
    """
    values = config.value
    return (
        shares_by(ValueCurves.load(config.curves), config.actions, config.curves),
        None if values.segments is None else values_of(values.segments, "user_key"),
        None if values.items is None else values_of(values.items, "item_key"),
    )


def shares_by(curves: ValueCurves, actions: Sequence[ActionConfig], where: str) -> Curves:
    """The shares of actions, by the model that answers: of its run, of whatever step.

    Args:
        where: the file of the curves, for messages.

    Raises:
        InputError: an action was not measured.
    """
    keys = [ActionKey(each.max_beams, each.max_events, each.rank, each.near_line) for each in actions]
    for action, key in zip(actions, keys, strict=True):
        if not action.popular and not action.is_full and curves.of(0, key) is None:
            raise InputError(
                f"{where}: says nothing of the action {action.name!r}; measure it with "
                "`rayrec value-curves`, or leave it out"
            )
    run = curves.version.rpartition("@")[0]

    def shares(model: ModelInfo, num_events: int) -> list[float] | None:
        if Path(model.run).name != run:
            return None
        found = []
        for action, key in zip(actions, keys, strict=True):
            share = 0.0 if action.popular else 1.0 if action.is_full else curves.of(num_events, key)
            assert share is not None, "checked above"
            found.append(share)
        return found

    return shares


def values_of(path: str, key_column: str) -> Mapping[str, float]:
    """Values by key, of a table.

    Raises:
        InputError: there is none, it lacks a column, or a value is no number from 0 on.
    """
    raw = read_table(Path(path), as_text=(key_column,))
    for column in (key_column, "value"):
        if column not in raw.table.schema.names:
            raise InputError(
                f"{raw.file}: no column {column!r}; found {', '.join(raw.table.schema.names)}; give it "
                f"the columns {key_column} and value"
            )
    keys = [str(key) for key in raw.table[key_column].to_pylist()]
    values = raw.table["value"].to_pylist()
    for row, value in enumerate(values):
        if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise InputError(f"{raw.where(row)}: value is {value!r}, expected a number from 0 on")
    return dict(zip(keys, np.asarray(values, dtype=np.float64).tolist(), strict=True))
