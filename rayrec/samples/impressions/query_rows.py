"""Rows to be scored: items that may be shown to those who ask, as impressions are that a model learned from.

What is known of the users and items of a data set of histories is made columns once; of a query only its past
and its time are left to do. All of it is made by the functions that the layout made its impressions by.

Axes: U users, I items of the catalog, B queries, N events of their histories, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.jagged import list_rows
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.ids import ids_of
from rayrec.samples.impressions.keyed_columns import KeyedColumns, distinct_ids
from rayrec.samples.impressions.layouts import query_columns_of
from rayrec.samples.impressions.layouts.histories import histories_now


class QueryRows:
    """Makes rows of an impression data set of queries to a recommender."""

    def __init__(self, impressions: ImpressionDataset, dataset: Dataset, wanted: Sequence[str]) -> None:
        """
        Args:
            dataset: that of the recommender.
            wanted: columns of the impressions that are read.

        Raises:
            InputError: queries do not tell a column, or the data sets have no item in common.
        """
        schema = impressions.schema
        made = query_columns_of(impressions.manifest)
        if made is None:
            raise InputError(
                f"{impressions.root}: nothing says what its columns are of a user and an item that may be "
                "shown; prepare it with the layout movielens or deskdrop, or with the layout table and "
                "origins (--origin COLUMN=ORIGIN)"
            )
        self._made, self._wanted = made, tuple(wanted)
        self._keyed = KeyedColumns(impressions)
        users, items = dataset.users, dataset.item_table
        user_keys, item_keys = _whole(users["user_key"]), _whole(items["item_key"])
        of_users = dict.fromkeys(made.user, user_keys) | made.of_users(users)
        of_items = dict.fromkeys(made.item, item_keys) | made.of_items(items)
        rows_or_null = pa.array([*range(len(users)), None], pa.int64())
        self._of_users = {
            name: self._keyed.column(name, column, _of_data_set).take(rows_or_null)
            for name, column in of_users.items()
            if name in wanted
        }
        """[U + 1] the last for those who are no user of the data set."""
        self._of_items = {
            name: self._keyed.column(name, column, _of_data_set)
            for name, column in of_items.items()
            if name in wanted
        }
        self._history_ids = {
            name: self._keyed.ids(schema.lists[name], item_keys) for name in made.history if name in wanted
        }
        """[I] ids of the items in a column of lists."""
        empty = histories_now(made.rule, pa.array([], pa.int64()), np.zeros(1, dtype=np.int64))
        self._of_pasts = tuple(name for name in made.of_pasts(empty) if name in wanted)
        of_times = made.of_times(pa.array([], pa.timestamp("us")))
        self._of_times = tuple(name for name in of_times if name in wanted)
        self._check_all_are_told(impressions, dataset, made.unknown)
        self._check_items_are_known(impressions, dataset, item_keys)

    @property
    def needs_times(self) -> bool:
        """Whether rows depend on the time of a request."""
        return bool(self._of_times)

    def rows(
        self,
        users_B: Int64Array,
        history_N: Int64Array,
        offsets_B1: Int64Array,
        times_B: Int64Array,
        queries_R: Int64Array,
        items_R: Int64Array,
    ) -> RowBatch:
        """Rows of impressions for candidate items of requests.

        Args:
            users_B: rows of the table of users; -1: not in it.
            history_N: catalog positions, oldest first within each query; -1 for what is in no catalog.
            times_B: UNIX seconds of the requests; read only if `needs_times`.
            queries_R: of each row its query.
            items_R: of each row the catalog position of the item that may be shown.
        """
        known_N = history_N >= 0
        known_offsets_B1 = np.concatenate([[0], np.cumsum(known_N)])[offsets_B1]
        histories = histories_now(self._made.rule, pa.array(history_N[known_N]), known_offsets_B1)
        queries, items = pa.array(queries_R), pa.array(items_R)
        columns = {}
        for name, values in self._of_users.items():
            rows_B = np.where(users_B < 0, len(values) - 1, users_B)
            columns[name] = values.take(pa.array(rows_B[queries_R]))
        columns |= {name: values.take(items) for name, values in self._of_items.items()}
        # A request is an event without an item, and in no history.
        kept = histories.items.fill_null(0)
        for name, ids in self._history_ids.items():
            columns[name] = list_rows(
                ids.take(kept), histories.starts_E[queries_R], histories.lengths_E[queries_R]
            )
        of_pasts = self._made.of_pasts(histories) if self._of_pasts else {}
        of_times = self._made.of_times(pa.array(times_B * 1_000_000).cast(pa.timestamp("us")))
        for name in (*self._of_pasts, *self._of_times):
            made = (of_pasts | of_times)[name]
            columns[name] = self._keyed.column(name, made, _of_data_set).take(queries)
        rows = pa.record_batch({name: columns[name] for name in self._wanted})
        return RowBatch(np.arange(len(items_R)), rows)

    def _check_all_are_told(
        self, impressions: ImpressionDataset, dataset: Dataset, unknown: Mapping[str, str]
    ) -> None:
        told = {*self._of_users, *self._of_items, *self._history_ids, *self._of_pasts, *self._of_times}
        missing = [name for name in self._wanted if name not in told]
        if not missing:
            return
        name = missing[0]
        reason = unknown.get(
            name,
            f"is not told by {dataset.root}, whose users have {_names(dataset.users.column_names)} and whose "
            f"items have {_names(dataset.item_table.column_names)}; prepare both of one source, or the "
            "impressions without the column",
        )
        others = f" (the same holds for {', '.join(missing[1:])})" if missing[1:] else ""
        raise InputError(
            f"{impressions.root}: the column {name}, which the ranking model reads, {reason}{others}"
        )

    def _check_items_are_known(
        self, impressions: ImpressionDataset, dataset: Dataset, item_keys: pa.Array
    ) -> None:
        """A ranking model of other items would give an opinion on each, and none would mean anything."""
        column = next((name for name in self._made.item if name in self._of_items), None)
        if column is None:
            return
        space = impressions.schema.ids[column]
        if not np.isin(ids_of(space, item_keys).to_numpy(), distinct_ids(impressions, [column])).any():
            raise InputError(
                f"{impressions.root}: its training rows have no item of {dataset.root}; prepare both of one "
                "source"
            )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _of_data_set(row: int) -> str:
    return f"row {row} of the recommender's data set"


def _names(columns: Sequence[str]) -> str:
    return ", ".join(columns)
