"""Values as a source writes them become what files of prepared impressions hold.

Keys are hashed, and where a data set was prepared with `min_count`, those that training rows lack become the
id of the rare ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.arrays import Int64Array
from rayrec.samples.impressions.columns import Where, key_column, key_lists, number_column
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.ids import ids_of, rare_id


class KeyedColumns:
    """Columns of one data set, labels aside."""

    def __init__(self, impressions: ImpressionDataset) -> None:
        self._impressions, self._schema = impressions, impressions.schema

    @property
    def names(self) -> tuple[str, ...]:
        """Numbers, ids and lists of ids."""
        return (*self._schema.numbers, *self._schema.ids, *self._schema.lists)

    def column(self, name: str, values: pa.Array, where: Where) -> pa.Array:
        """A column checked and hashed as `rayrec impressions` does it.

        Raises:
            InputError: a value is no number, or can be no key.
        """
        if name in self._schema.numbers:
            return number_column(values, name, where)
        if name in self._schema.ids:
            return self.ids(self._schema.ids[name], key_column(values, name, where))
        if pa.types.is_null(values.type):
            values = values.cast(pa.list_(pa.string()))
        lists = key_lists(values, name, where, self._impressions.manifest.list_separator)
        return pa.ListArray.from_arrays(lists.offsets, self.ids(self._schema.lists[name], lists.values))

    def ids(self, space: str, keys: pa.Array) -> pa.Int64Array:
        """[R] ids of the keys of a space; null where there is none."""
        ids = ids_of(space, keys)
        if space not in self._trained:
            return ids
        missing_R = ids.is_null().to_numpy(zero_copy_only=False)
        ids_R = ids.fill_null(0).to_numpy()
        frequent_R = np.isin(ids_R, self._trained[space])
        return pa.array(np.where(frequent_R, ids_R, rare_id(space)), mask=missing_R)

    @cached_property
    def _trained(self) -> dict[str, Int64Array]:
        """By space, the ids of training rows, where others were replaced by that of the rare ones."""
        if self._impressions.manifest.min_count == 1:
            return {}
        spaces: dict[str, list[str]] = {}
        for column, space in [*self._schema.ids.items(), *self._schema.lists.items()]:
            spaces.setdefault(space, []).append(column)
        return {space: distinct_ids(self._impressions, columns) for space, columns in spaces.items()}


def distinct_ids(impressions: ImpressionDataset, columns: Sequence[str]) -> Int64Array:
    """Distinct ids of these columns of training rows, sorted."""
    found = [np.zeros(0, dtype=np.int64)]
    for name in impressions.train_files:
        table = pq.read_table(impressions.root / name, columns=list(columns))
        for column in columns:
            values = table[column].combine_chunks()
            flat = values.flatten() if pa.types.is_list(values.type) else values
            found.append(flat.drop_null().unique().to_numpy())
    return np.unique(np.concatenate(found))
