"""Rewards that depend on the item alone.

Axes: U users, G candidates of a user, I items of the catalog, R rows of a file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import absolute
from rayrec.rl.rewards.base import CandidateLists, RewardArray, RewardContext, RewardSettings
from rayrec.samples.importers.tables import RawTable, read_table

logger = logging.getLogger(__name__)


class NoveltyConfig(RewardSettings):
    """How few of the training events an item has, from 0 to 1."""

    kind: Literal["novelty"] = "novelty"

    def build(self, context: RewardContext) -> Novelty:
        return Novelty(context.train_counts_I)


class BusinessValueConfig(RewardSettings):
    """A number per item from a table; 0 for items that are not in it."""

    kind: Literal["business_value"] = "business_value"
    path: str = Field(min_length=1)
    """A Parquet, CSV or TSV file, or a folder of such files."""
    key_column: str = "item_id"
    """Column of item keys, as the source of the data writes them."""
    column: str
    """Column of numbers."""

    def build(self, context: RewardContext) -> BusinessValue:
        reward = BusinessValue.read(self.path, self.key_column, self.column, context.item_keys)
        if reward.num_unknown:
            logger.warning(
                "the reward %r is 0 for %d of %d items, which %s has no %s of",
                self.label,
                reward.num_unknown,
                len(context.item_keys),
                self.path,
                self.column,
            )
        return reward

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"path": absolute(self.path)})


class ItemValue:
    """A number per item of the catalog."""

    def __init__(self, value_I: RewardArray) -> None:
        self.value_I = value_I

    def __call__(self, lists: CandidateLists) -> RewardArray:
        return np.where(lists.is_item_UG, self.value_I[lists.items_UG], 0.0)


class Novelty(ItemValue):
    """-log2 of an item's share of training events, divided by the largest such number of the catalog.

    1 for the least popular items, near 0 for one that has most events. An item without events counts as one
    with a single event, which keeps it finite. Where one item has all events, all items have 0.

    Source: self-information, Zhou et al., PNAS 2010; Vargas and Castells, RecSys 2011.
    """

    def __init__(self, train_counts_I: Int64Array) -> None:
        """
        Args:
            train_counts_I: training events of each item.

        Raises:
            InputError: there are no training events.
        """
        num_events = int(train_counts_I.sum())
        if not num_events:
            raise InputError(
                "the reward novelty needs train_counts_I with training events, and all "
                f"{len(train_counts_I)} items have none: all items would have the same novelty"
            )
        # At most all events: log2(1) is 0, and never below.
        bits_I = np.log2(num_events / np.maximum(train_counts_I, 1))
        super().__init__(bits_I / (bits_I.max() or 1.0))


class BusinessValue(ItemValue):
    """A value per item from a table, such as margin, stock or editors' preference.

    Items of the catalog that the table does not have, or has no value for, have 0 and are counted.
    """

    def __init__(self, value_I: RewardArray, num_unknown: int = 0) -> None:
        """
        Args:
            num_unknown: items without a value.
        """
        super().__init__(value_I)
        self.num_unknown = num_unknown

    @classmethod
    def read(cls, path: str | Path, key_column: str, value_column: str, item_keys: pd.Index) -> BusinessValue:
        """Read a Parquet, CSV or TSV file, or a folder of such.

        Args:
            key_column: has the item's key as the source of the data writes it.
            value_column: has numbers; a missing one is unknown.
            item_keys: [I] keys of the catalog, strings.

        Raises:
            InputError: no such file or column, a value is no finite number, an item is there twice, or the
                table has no item of the catalog.
        """
        raw = read_table(Path(path), as_text=(key_column,))
        for column in (key_column, value_column):
            if column not in raw.table.schema.names:
                raise InputError(
                    f"{raw.file}: no column {column!r} for the reward business_value; found "
                    f"{', '.join(raw.table.schema.names)}"
                )
        keys_R = _keys(raw, key_column)
        value_R = _numbers(raw, value_column)
        if keys_R.has_duplicates:
            row = int(np.argmax(keys_R.duplicated()))
            raise InputError(
                f"{raw.where(row)}: the item {keys_R[row]!r} is there a second time; keep one of its rows, "
                "since only one value can count"
            )
        row_I = keys_R.get_indexer(item_keys)
        if not (row_I >= 0).any():
            raise InputError(
                f"{raw.file}: none of its {len(keys_R)} values in {key_column!r} is the key of an item of "
                "the catalog, so every item would be worth 0; name the column that has the keys"
            )
        # The last row is for items that have none: -1 finds it.
        value_I = np.append(value_R, np.nan)[row_I]
        is_unknown_I = np.isnan(value_I)
        return cls(np.where(is_unknown_I, 0.0, value_I), int(is_unknown_I.sum()))


def _keys(raw: RawTable, column: str) -> pd.Index:
    """[R] as strings."""
    keys = raw.table.column(column)
    if keys.null_count:
        row = int(np.argmax(keys.is_null().to_numpy()))
        raise InputError(f"{raw.where(row)}: no item in the column {column!r}; fill it, or leave out the row")
    try:
        return pd.Index(keys.cast(pa.string()).to_numpy(), dtype=object)
    except pa.ArrowException as error:
        raise InputError(
            f"{raw.file}: the column {column!r} has items as {keys.type}; give texts or integers"
        ) from error


def _numbers(raw: RawTable, column: str) -> RewardArray:
    """[R] NaN where there is none."""
    values = raw.table.column(column)
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        if values.null_count < len(values):
            raise InputError(f"{raw.file}: the column {column!r} has {kind}; a reward needs numbers")
        return np.full(len(values), np.nan)
    value_R = np.asarray(
        pc.fill_null(values.cast(pa.float64(), safe=False), np.nan).to_numpy(), dtype=np.float64
    )
    is_infinite_R = np.isinf(value_R)
    if is_infinite_R.any():
        row = int(np.argmax(is_infinite_R))
        raise InputError(f"{raw.where(row)}: {column} is {value_R[row]}; a reward needs finite numbers")
    return value_R
