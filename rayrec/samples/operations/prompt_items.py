"""Where the operation `prompt` reads of items: a Parquet file, and saved semantic IDs.

Axes: I items, L code levels that are learned.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.prompt_template import CATEGORY, CODES, TITLE
from rayrec.platform.saved_pair import SavedPair, checksum
from rayrec.samples.operations.columns import input_type, is_text
from rayrec.samples.text.item_facts import ItemFacts, text_column

SEMANTIC_IDS = SavedPair(
    "registry.json", "codes.safetensors", "semantic ID registry", readable_formats=(1, 2), written_format=2
)
"""The files of `rayrec.models.tokenizers.registry`, of which prompts need the codes alone."""
ARRAYS = ("item_ids_I", "codes_IL", "codebooks_CKD", "added_I")
"""Their arrays, in the order of the checksum."""


class ItemFile(Config):
    """Items in a Parquet file such as `items.parquet` of a prepared data set."""

    path: str
    column: str = "item_id"
    """Their ids: integers, each once."""
    title: str | None = "title"
    """Column of their titles: texts."""
    category: str | None = None
    """Column of their categories: texts, or lists of them."""


def facts_of_file(file: ItemFile, semantic_ids: str | None, slots: tuple[str, ...]) -> ItemFacts:
    """Read what templates say of items.

    Args:
        semantic_ids: folder that `rayrec tokenize` wrote.
        slots: of the templates; nothing else is read.

    Raises:
        InputError: a file is missing or damaged, has no such column, or lacks codes of an item.
    """
    path = Path(file.path)
    named = {TITLE: file.title, CATEGORY: file.category}
    columns = {slot: name for slot, name in named.items() if name is not None and slot in slots}
    try:
        schema = pq.read_schema(path)
        input_type(schema, file.column, pt.is_integer, "integers")
        for name in columns.values():
            input_type(schema, name, _is_text, "texts")
        table = pq.read_table(path, columns=[file.column, *columns.values()])
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a readable Parquet file of items ({error})") from error
    if table[file.column].null_count:
        raise InputError(f"{path}: column {file.column!r} has nulls; every item needs an id")
    ids_I = table[file.column].to_numpy().astype(np.int64)
    if not len(ids_I) or len(np.unique(ids_I)) < len(ids_I):
        raise InputError(f"{path}: expected items, each once; there are {len(ids_I)} rows")
    texts = {slot: text_column(table[name]) for slot, name in columns.items()}
    facts = ItemFacts(ids_I, texts=texts)
    if CODES in slots and semantic_ids is not None:
        facts = ItemFacts(ids_I, *codes_of(semantic_ids, ids_I), texts)
    facts.check(slots, str(path))
    return facts


def codes_of(folder: str | Path, ids_I: Int64Array) -> tuple[NDArray[np.integer], tuple[int, ...], str]:
    """([I, L] codes of items, number of codes of each level, version) of saved semantic IDs.

    A level that only numbers the items of a tuple says nothing of an item, and is left out.

    Raises:
        InputError: there are none, they are damaged, or an item has none.
    """
    manifest, arrays = SEMANTIC_IDS.read(folder)
    settings = {name: value for name, value in manifest.items() if name not in ("format_version", "version")}
    ordered = {name: arrays[name] for name in ARRAYS if name in arrays}
    SEMANTIC_IDS.check_version(folder, manifest["version"], checksum(settings, ordered))
    sizes = tuple(settings["level_sizes"])
    if settings.get("uniform_digit"):
        sizes = sizes[: settings["num_codebooks"]]
    places_I = pd.Index(ordered["item_ids_I"]).get_indexer(pd.Index(ids_I))
    if (places_I < 0).any():
        raise InputError(
            f"{folder}: item {ids_I[places_I < 0][0]} has no semantic ID; take those of the same data set"
        )
    return ordered["codes_IL"][places_I, : len(sizes)], sizes, manifest["version"]


def _is_text(dtype: pa.DataType) -> bool:
    return is_text(dtype) or pt.is_dictionary(dtype)
