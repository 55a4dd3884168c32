"""Vectors of a data set's items, block by block: what a tokenizer starts from."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.models.tokenizers.item_vectors import interaction_vectors, text_vectors
from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset

Progress = Callable[[int, int], None]
"""Called with (texts encoded, texts)."""

INTERACTIONS, TEXT = "interactions", "text"


def interaction_block(dataset: Dataset, dim: int, window: int, seed: int) -> Float32Array:
    """[I, D] from the training sequences, and from nothing else.

    Raises:
        InputError: no two different items are neighbors in any of them.
    """
    tables = [pq.read_table(dataset.root / name, columns=["item_ids"]) for name in dataset.train_files]
    item_ids_N, offsets_B1 = list_values(pa.concat_tables(tables)["item_ids"])
    positions_N = dataset.item_positions(item_ids_N)
    try:
        return interaction_vectors(positions_N, offsets_B1, len(dataset.items), dim, window, seed=seed)
    except ValueError as error:
        raise InputError(f"{dataset.root}: {error}; use --vectors text") from error


def text_block(
    dataset: Dataset, progress: Progress | None = None, positions_N: Int64Array | None = None
) -> Float32Array:
    """[I, D] from the items' texts, of all items or of those at some positions.

    Raises:
        InputError: no item of the data set has a text, or the extra `text` is not installed.
    """
    texts = dataset.items.texts.to_pylist()
    if not any(texts):
        raise InputError(
            f"{dataset.root}: its items have no text; use --vectors interactions, "
            "or prepare the data with an items file that has titles or descriptions"
        )
    if positions_N is not None:
        texts = [texts[position] for position in positions_N.tolist()]
    return text_vectors(texts, progress)
