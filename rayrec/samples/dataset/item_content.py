"""What the catalog says of each item, as weighted numbers of buckets: words of its text, values of columns.

    text ──────► words ─┐
    columns ──► values ─┴─► a bucket each, by a hash ─► weights: rare ones count more, length 1 per column

No vocabulary is kept: a word's bucket depends on the word alone. Words that share a bucket share their vector
(Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009, arXiv:0902.2206). Which
features are kept and how much they weigh depends on the items that they are counted in. A run counts those
that its training had events of, and says in its state which they were: in a catalog that has grown, the same
items are counted, so the features of old items keep their bits, and items of the future are never counted.
Texts are read as they are now: one that was changed since the training changes the counts.

Axes: I items, P pairs of an item and a feature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from rayrec.platform.arrays import BoolArray, Float32Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.item_bags import ItemBags
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.item_labels import USUAL_COLUMNS

TEXT = "text"
"""The column of which words are taken, and not values."""


def content_columns(dataset: Dataset, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Columns of the catalog that are read: these; None: the text, and those that usually say what kind of
    thing an item is."""
    if columns is None:
        return tuple(name for name in (TEXT, *USUAL_COLUMNS) if name in dataset.item_table.column_names)
    return tuple(columns)


def item_content(
    dataset: Dataset,
    columns: Sequence[str] | None,
    num_buckets: int,
    min_items: int,
    fitted_I: BoolArray | None = None,
) -> ItemBags:
    """The features of all items, item after item.

    Args:
        columns: as `content_columns` takes them.
        min_items: a word or value that fewer items have is left out: it would be a vector of theirs alone.
        fitted_I: the items that have a say in which features are kept and what they weigh; None: all.

    Raises:
        InputError: there is no such column, or its values cannot be compared.
    """
    table, where = dataset.item_table, str(dataset.root)
    if fitted_I is None:
        fitted_I = np.ones(len(table), dtype=np.bool_)
    parts = []
    for name in content_columns(dataset, columns):
        if name not in table.column_names:
            raise InputError(
                f"{where}: its items have no column {name!r}; they have {', '.join(table.column_names)}"
            )
        parts.append(_bags_of_column(table[name], name, fitted_I, num_buckets, min_items, where))
    return ItemBags.joined(parts, len(table))


def _bags_of_column(
    column: pa.ChunkedArray, name: str, fitted_I: BoolArray, num_buckets: int, min_items: int, where: str
) -> tuple[Int64Array, Int64Array, Float32Array]:
    """([P] items, [P] buckets, [P] weights), each pair of an item and a value once."""
    num_items = len(fitted_I)
    values = column.combine_chunks()
    if name == TEXT:
        values = pc.split_pattern_regex(pc.utf8_lower(values.cast(pa.string())), r"[^\p{L}\p{N}]+")
    items = pa.array(np.arange(num_items))
    if pt.is_list(values.type) or pt.is_large_list(values.type):
        items, values = pc.list_parent_indices(values), pc.list_flatten(values)
    try:
        values = values.cast(pa.string())
    except pa.ArrowException as error:
        raise InputError(f"{where}: the column {name!r} ({column.type}) holds no labels: {error}") from error
    is_known = pc.and_kleene(pc.is_valid(values), pc.not_equal(values, ""))
    items, values = pc.filter(items, is_known), pc.filter(values, is_known)
    encoded = values.dictionary_encode()
    # By name, not by first appearance: other items must not change the order in which an item's are added up.
    encoded_names = encoded.dictionary.to_pylist()
    names = sorted(encoded_names)
    rank = {value: number for number, value in enumerate(names)}
    ranks = np.array([rank[value] for value in encoded_names], dtype=np.int64)
    numbers_P = ranks[encoded.indices.to_numpy(zero_copy_only=False)]
    items_P = items.to_numpy(zero_copy_only=False).astype(np.int64)
    pairs_P = np.unique(items_P * max(len(names), 1) + numbers_P)
    items_P, numbers_P = pairs_P // max(len(names), 1), pairs_P % max(len(names), 1)
    num_with = np.bincount(numbers_P[fitted_I[items_P]], minlength=len(names))
    kept_P = num_with[numbers_P] >= max(min_items, 1)
    items_P, numbers_P = items_P[kept_P], numbers_P[kept_P]
    # One more: a value that all items have weighs little, and not nothing.
    weights_P = np.log((fitted_I.sum() + 1) / num_with[numbers_P])
    lengths_I = np.sqrt(np.bincount(items_P, np.square(weights_P), minlength=num_items))
    buckets = np.array([_bucket(name, value, num_buckets) for value in names], dtype=np.int64)
    weights_P = (weights_P / lengths_I[items_P]).astype(np.float32)
    return items_P, buckets[numbers_P], weights_P


def _bucket(column: str, value: str, num_buckets: int) -> int:
    digest = hashlib.blake2b(f"{column}\0{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_buckets
