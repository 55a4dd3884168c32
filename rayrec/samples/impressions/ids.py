"""Ids of what impressions have: a 64-bit hash of a space and a key, so that no dictionary is needed.

    id = combine64(hash of the space's name, hash of the key as the source writes it)

which the operation `hash` computes of texts, too, with the space as its salt; integers, which have the id
of their text here, it hashes as numbers. Two spaces share no id, and the same key has the same id wherever it
is hashed: at preparation, in training, in serving.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.samples.operations.text_hash import hash_texts
from rayrec.samples.prepare.ids import hash_strings

_NULL = 0
_RARE = 1
"""Instead of a key's hash. A key that has this hash would be found at preparation, as any collision."""


def id_of(space: str, key: str | int | bool | None) -> int:
    """The id of one key; that of `null_id` without one."""
    texts = key_texts(pa.array([key]), space)
    return null_id(space) if texts.null_count else int(ids_of(space, texts)[0].as_py())


def null_id(space: str) -> int:
    """The id that stands for a missing value: a category of its own. Files have null there."""
    return int(_of_hashes(space, np.array([_NULL]))[0])


def rare_id(space: str) -> int:
    """The id of all keys that were seen too rarely in training (`min_count`)."""
    return int(_of_hashes(space, np.array([_RARE]))[0])


def ids_of(space: str, column: pa.Array | pa.ChunkedArray) -> pa.Int64Array:
    """Ids of a column of texts, integers or booleans; null stays null, and an empty text is missing too.

    Raises:
        InputError: the column is of another type.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    found = []
    for chunk in chunks:
        texts = key_texts(chunk, space)
        ids = _of_hashes(space, hash_texts(texts))
        found.append(pa.array(ids, mask=texts.is_null().to_numpy(zero_copy_only=False)))
    return pa.concat_arrays(found) if found else pa.array([], pa.int64())


def ids_and_checks(space: str, keys: pa.StringArray) -> tuple[Int64Array, Int64Array]:
    """[D] ids of distinct keys, and a second hash of each that has nothing to do with the first: two keys
    with one id are told apart by it."""
    checks_D = pd.util.hash_array(keys.to_numpy(zero_copy_only=False), categorize=False).view(np.int64)
    return _of_hashes(space, hash_texts(keys)), checks_D


def key_texts(column: pa.Array, name: str) -> pa.StringArray:
    """Keys as the source writes them, or as it would write its integers; null where there is none.

    Raises:
        InputError: the column is of another type than texts, integers or booleans.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise InputError(
            f"column {name} has the type {kind}; expected texts, integers or booleans as ids "
            "(name it a number, or write it as a text)"
        )
    texts = column.cast(pa.string())
    empty = pc.equal(texts, "")
    if pc.any(empty, min_count=0).as_py():
        texts = pc.if_else(empty, pa.scalar(None, pa.string()), texts)
    return texts


def _of_hashes(space: str, hashes_N: Int64Array) -> Int64Array:
    return combine64(hash_strings([space]), hashes_N).view(np.int64)
