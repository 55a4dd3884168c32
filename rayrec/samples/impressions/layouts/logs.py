"""What layouts have in common that make impressions of a log of events.

Axes: E events, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.base.config import option
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.held_out import split_codes_like
from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.source import SPLITS, ImpressionSource, rows_as_part
from rayrec.samples.prepare.time_split import time_boundaries
from rayrec.samples.prepare.times import parse_times
from rayrec.samples.prepare.validation import check_ids, trimmed_ids


def checked_log(raw: RawTable, config: ImpressionsConfig) -> tuple[pa.Array, pa.Array, Int64Array]:
    """Users and items of all events, as texts without blanks around, and their times in microseconds.

    Raises:
        InputError: there are no events, or an id or time is missing or is none.
    """
    if not len(raw.table):
        raise InputError(f"{raw.file}: no events in it; expected one row per interaction")
    for name in ("user_id", "item_id"):
        raw, _ = trimmed_ids(raw, name)  # as `rayrec prepare` does: else its users are strangers here
        check_ids(raw, name)
    users, items = (raw.table[name].cast(pa.string()).combine_chunks() for name in ("user_id", "item_id"))
    return users, items, parse_times(raw, config.time_unit)


@dataclass(frozen=True)
class EventSplit:
    """Which events train, validate and are tested."""

    codes_E: Int64Array
    """Indices in `SPLITS`."""
    boundaries: tuple[float, float] | None = None
    """UNIX seconds, where time divides."""
    held_out_of: str | None = None
    """Fingerprint of the data set of histories that divides."""


def split_of_events(
    users: pa.Array, items: pa.Array, times_E: Int64Array, events_R: Int64Array, config: ImpressionsConfig
) -> EventSplit:
    """The split of each event of a log.

    Args:
        users, items: [E] keys.
        events_R: those that are impressions, of which fractions are.

    Raises:
        InputError: another split than by time or by a data set is asked for, nothing would be left to train
            or test on, or there is no such data set.
    """
    if config.held_out_of is not None:
        dataset = Dataset.open(config.held_out_of)
        codes_E = split_codes_like(dataset, users, items, times_E)
        return EventSplit(codes_E, held_out_of=dataset.fingerprint)
    boundaries = _boundaries_of(times_E[events_R], config)
    starts = np.rint(np.array(boundaries) * 1_000_000).astype(np.int64)
    return EventSplit(np.searchsorted(starts, times_E, side="right"), boundaries)


def _boundaries_of(times_R: Int64Array, config: ImpressionsConfig) -> tuple[float, float]:
    """UNIX seconds from which impressions validate and are tested."""
    if config.split not in ("auto", "time"):
        raise InputError(
            f"the layout {config.layout} is divided by time, since histories and labels depend on it; leave "
            f"{option('split')} out"
        )
    starts = None
    if config.valid_start is not None and config.test_start is not None:
        starts = (config.valid_start, config.test_start)
    times_T, counts_T = np.unique(times_R, return_counts=True)
    fractions = (config.valid_fraction, config.test_fraction)
    return time_boundaries(times_T, counts_T, starts, fractions, "impression")


def source_of_events(
    name: str,
    schema: ImpressionSchema,
    raw: RawTable,
    times_E: Int64Array,
    events_R: Int64Array,
    split: EventSplit,
    history: HistoryRule,
    take: Callable[[Int64Array], dict[str, pa.Array]],
) -> ImpressionSource:
    """Rows of each split by time.

    Args:
        events_R: which event is a row, in an order that says nothing within one time.
        take: events -> their columns.
    """
    ordered_R = events_R[np.argsort(times_E[events_R], kind="stable")]
    parts = []
    for code, name_of_split in enumerate(SPLITS):
        own_R = ordered_R[split.codes_E[ordered_R] == code]

        def take_some(first: int, last: int, own_R: Int64Array = own_R) -> dict[str, pa.Array]:
            return take(own_R[first:last])

        def where(row: int, own_R: Int64Array = own_R) -> str:
            return raw.where(int(own_R[row]))

        parts.append(rows_as_part(take_some, len(own_R), where, name_of_split))
    return ImpressionSource(
        name,
        schema,
        tuple(parts),
        boundaries=split.boundaries,
        held_out_of=split.held_out_of,
        history=history,
    )


def described(raw: RawTable | None, key: str, keys: pa.Array) -> tuple[pa.Table, pa.Array] | None:
    """A table of users or items, and its row for each key, null where it has none; the first of several.

    Returns:
        None without a table.
    """
    if raw is None:
        return None
    table = trimmed_ids(raw, key)[0].table.combine_chunks()
    index = pd.Index(table[key].cast(pa.string()).to_pandas())
    first = ~index.duplicated()
    indices = np.flatnonzero(first)
    found = index[first].get_indexer(pd.Index(keys.to_pandas()))
    rows = np.where(found < 0, 0, indices[np.maximum(found, 0)]) if len(indices) else np.zeros(len(keys), int)
    return table, pa.array(rows, pa.int64(), mask=found < 0)


def by_event(
    columns_of: Callable[[pa.Table], Mapping[str, pa.Array]], found: tuple[pa.Table, pa.Array] | None
) -> dict[str, pa.Array]:
    """[E] columns that are made of what `described` found, for each of its keys."""
    if found is None:
        return {}
    table, rows = found
    return {name: column.take(rows) for name, column in columns_of(table).items()}


def column_of(table: pa.Table, *names: str) -> pa.Array | None:
    """The first of these columns that there is."""
    name = next((name for name in names if name in table.schema.names), None)
    if name is None:
        return None
    chunks = table[name].chunks
    return pa.concat_arrays(chunks) if chunks else pa.array([], table[name].type)
