"""What kind of thing each item is, where the data says so.

Axes: P pairs of an item and a label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import ITEMS_FILE

USUAL_COLUMNS = ("category", "categories", "genres", "genre", "class", "topic", "tags", "attributes", "brand")
"""In the order in which they are taken."""


@dataclass(frozen=True)
class ItemLabels:
    """Pairs of an item and a label, each once; an item may have several labels, or none."""

    column: str
    items_P: Int64Array
    """Catalog positions."""
    labels_P: Int64Array
    """Labels by number, from 0."""


def item_labels(dataset: Dataset, column: str | None = None) -> ItemLabels | None:
    """The values of a column of the items; those of a list are labels each.

    Args:
        column: one of the data set's; the first of `USUAL_COLUMNS` that it has if None.

    Returns:
        None if no column was named and there is none of the usual ones.

    Raises:
        InputError: there is no such column, or its values cannot be compared.
    """
    names = pq.read_schema(dataset.root / ITEMS_FILE).names
    if column is None:
        usual = [name for name in USUAL_COLUMNS if name in names]
        if not usual:
            return None
        column = usual[0]
    elif column not in names:
        raise InputError(f"{dataset.root}: its items have no column {column!r}; they have {', '.join(names)}")
    values = dataset.read(ITEMS_FILE, [column])[column].combine_chunks()
    positions = pa.array(np.arange(len(values)))
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        positions, values = pc.list_parent_indices(values), pc.list_flatten(values)
    is_known = pc.is_valid(values)
    positions, values = pc.filter(positions, is_known), pc.filter(values, is_known)
    try:
        numbers = pc.dictionary_encode(values).indices.to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise InputError(
            f"{dataset.root}: the column {column!r} ({kind}) holds no labels: {error}"
        ) from error
    num_labels = int(numbers.max(initial=0)) + 1
    pairs = np.unique(positions.to_numpy(zero_copy_only=False).astype(np.int64) * num_labels + numbers)
    return ItemLabels(column, pairs // num_labels, pairs % num_labels)
