"""Which items may be recommended: said by ids, by named lists, and by columns of the catalog.

allow, deny (ids) ─┐
named lists ───────┼─► ItemFilter ─► mask over the catalog ─► `Query.allowed_I`
columns = values ──┘

An item may be recommended if every part of the filter lets it: in-stock items of a region are two lists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset

KEPT_MASKS = 64
"""Of lists and filters that came last; each takes a byte per item."""
_FEW_KEYS = 256
_SHOWN = 10
"""Values of a column that an error names."""


@dataclass(frozen=True)
class NamedList:
    """Items under a name, as they were at one time."""

    name: str
    version: str
    """Another one whenever the items change."""
    keys: Collection[str]


@dataclass(frozen=True)
class ItemFilter:
    """What may be recommended."""

    allow: tuple[str, ...] | None = None
    """Ids of items: nothing else. None: all."""
    deny: tuple[str, ...] = ()
    """Ids of items: none of these."""
    allow_lists: tuple[NamedList, ...] = ()
    """Nothing but what is in every one of these."""
    deny_lists: tuple[NamedList, ...] = ()
    """Nothing that is in any of these."""
    where: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Column of the catalog -> values, one of which an item has there (or in its list of values)."""


@dataclass(frozen=True)
class AllowedByFilter:
    """What a filter leaves of one catalog."""

    allowed_I: BoolArray
    """[I] whether each item may be recommended."""
    num_unknown: int
    """Ids of the filter and of each of its lists, and values of columns, that are not in the catalog."""
    unknown_value: str | None = None
    """A sentence about the first value that no item has. It may have been there in a version before."""


class FilterMasks:
    """Masks over one catalog, which remember what came last. Not thread-safe."""

    def __init__(self, dataset: Dataset, item_keys: pd.Index | None = None) -> None:
        """
        Args:
            item_keys: of the catalog, where somebody has them already.
        """
        self._dataset = dataset
        self._item_keys = pd.Index(dataset.items.keys.to_pandas()) if item_keys is None else item_keys
        self._kept: OrderedDict[Any, AllowedByFilter] = OrderedDict()
        self._values: dict[str, pa.Array] = {}
        """Of columns, each once."""

    def allowed(self, wanted: ItemFilter) -> AllowedByFilter:
        """The items that may be recommended; the same array for the same filter.

        Raises:
            InputError: the catalog has no such column, or values of another type there.
        """
        lists = [
            [(each.name, each.version) for each in some] for some in (wanted.allow_lists, wanted.deny_lists)
        ]
        key = repr((wanted.allow, wanted.deny, lists, sorted(wanted.where.items())))
        return self._remembered(key, lambda: self._made(wanted))

    def _made(self, wanted: ItemFilter) -> AllowedByFilter:
        mask_I = np.ones(len(self._item_keys), dtype=np.bool_)
        allow = [] if wanted.allow is None else [self._among(wanted.allow)]
        allow += [self._of_list(each) for each in wanted.allow_lists]
        deny = [
            *([self._among(wanted.deny)] if wanted.deny else []),
            *(self._of_list(each) for each in wanted.deny_lists),
        ]
        for each in allow:
            mask_I &= each.allowed_I
        for each in deny:
            mask_I &= ~each.allowed_I
        where = [self._where(column, values) for column, values in sorted(wanted.where.items())]
        for each in where:
            mask_I &= each.allowed_I
        sentences = [each.unknown_value for each in where if each.unknown_value is not None]
        num_unknown = sum(each.num_unknown for each in (*allow, *deny, *where))
        return AllowedByFilter(mask_I, num_unknown, sentences[0] if sentences else None)

    def _of_list(self, wanted: NamedList) -> AllowedByFilter:
        return self._remembered((wanted.name, wanted.version), lambda: self._among(wanted.keys))

    def _among(self, keys: Collection[str]) -> AllowedByFilter:
        positions = self._positions_of(set(keys))
        is_known = positions >= 0
        mask_I = np.zeros(len(self._item_keys), dtype=np.bool_)
        mask_I[positions[is_known]] = True
        return AllowedByFilter(mask_I, int(np.count_nonzero(~is_known)))

    def _positions_of(self, keys: Collection[str]) -> Int64Array:
        """Catalog positions of keys; -1 of one that is not there."""
        if len(keys) > _FEW_KEYS:
            with suppress(UnicodeEncodeError):  # one by one, what is no text is not there
                return self._item_keys.get_indexer(list(keys)).astype(np.int64)
        # An index of the keys takes longer to make than so many take to be looked up.
        return np.array([self._position_of(key) for key in keys], dtype=np.int64)

    def _position_of(self, key: str) -> int:
        try:
            return int(self._item_keys.get_loc(key))
        except KeyError:
            return -1

    def _where(self, column: str, values: Sequence[Any]) -> AllowedByFilter:
        table = self._dataset.item_table
        if column not in table.column_names:
            raise InputError(
                f"where: the catalog has no column {column!r}; it has {', '.join(table.column_names)}"
            )
        found = table[column].combine_chunks()
        if pa.types.is_dictionary(found.type):
            found = found.dictionary_decode()
        is_list = pa.types.is_list(found.type) or pa.types.is_large_list(found.type)
        dtype = found.type.value_type if is_list else found.type
        try:
            wanted = pa.array(values).cast(dtype)
        # The latter of a number of more than 64 bits, and of half a surrogate pair, which JSON may have.
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise InputError(f"where: {column!r} has values of type {dtype}, not {list(values)!r}") from error
        if column not in self._values:
            self._values[column] = pc.unique(pc.list_flatten(found) if is_list else found).drop_null()
        there = self._values[column]
        unknown = wanted.filter(pc.invert(pc.is_in(wanted, value_set=there))).drop_null().to_pylist()
        sentence = None
        if unknown:
            known = [str(value) for value in there.slice(0, _SHOWN).to_pylist()]
            more = ", ..." if len(there) > _SHOWN else ""
            sentence = (
                f"where: no item of the catalog has {unknown[0]!r} in {column!r}; there are "
                f"{', '.join(known) or 'no values'}{more}"
            )
        if is_list:
            is_wanted = pc.is_in(pc.list_flatten(found), value_set=wanted).to_numpy(zero_copy_only=False)
            mask_I = np.zeros(len(self._item_keys), dtype=np.bool_)
            mask_I[pc.list_parent_indices(found).to_numpy(zero_copy_only=False)[is_wanted]] = True
        else:
            is_in = pc.is_in(found, value_set=wanted).to_numpy(zero_copy_only=False)
            mask_I = np.asarray(is_in, dtype=np.bool_)
        return AllowedByFilter(mask_I, len(unknown), sentence)

    def _remembered(self, key: Any, make: Callable[[], AllowedByFilter]) -> AllowedByFilter:
        found = self._kept.pop(key, None)
        if found is None:
            found = make()
        self._kept[key] = found
        while len(self._kept) > KEPT_MASKS:
            self._kept.popitem(last=False)
        return found
