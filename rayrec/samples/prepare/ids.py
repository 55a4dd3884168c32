"""64-bit ids for users and items, whatever the source calls them.

Integers stay what they are; anything else is hashed, and two strings with one hash are refused here,
once, so that nothing later has to ask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.manifest import IdKind

# Only spellings that str(int) gives back: "007" and "7" are different strings, so neither is a number.
_INTEGER = r"^(0|-?[1-9][0-9]*)$"


@dataclass(frozen=True)
class IdTable:
    """Every distinct user or item: the key of the source and its 64-bit id."""

    kind: IdKind
    keys: pa.Array
    """[K] distinct strings, in order of first appearance."""
    ids_K: Int64Array

    def positions(self, ids: Int64Array) -> Int64Array:
        """Row of each id in this table."""
        return self._index.get_indexer(pd.Index(ids)).astype(np.int64, copy=False)

    @cached_property
    def _index(self) -> pd.Index:
        return pd.Index(self.ids_K)


def assign_ids(columns: Sequence[pa.ChunkedArray], entity: str) -> tuple[IdTable, list[Int64Array]]:
    """Ids for columns that name the same kind of thing in several tables.

    Args:
        columns: integers or strings, without nulls.
        entity: "user" or "item", for messages.

    Returns:
        The distinct ids, and the ids of each column.

    Raises:
        InputError: integers outside 64 bits, or two strings with the same hash.
    """
    encoded = [_dictionary(column) for column in columns]
    joint = pa.concat_arrays([keys for keys, _ in encoded]).dictionary_encode()
    keys = joint.dictionary
    kind: IdKind = "integer" if pc.all(pc.match_substring_regex(keys, _INTEGER)).as_py() else "string"
    ids_K = _parse_integers(keys, entity) if kind == "integer" else hash_strings(keys)
    refuse_collisions(keys, ids_K, entity)
    ids = ids_K[joint.indices.to_numpy()]
    stops = np.cumsum([len(keys) for keys, _ in encoded])
    ids_of_columns = [
        part[codes_R] for part, (_, codes_R) in zip(np.split(ids, stops[:-1]), encoded, strict=True)
    ]
    return IdTable(kind, keys, ids_K), ids_of_columns


def ids_of_kind(
    column: pa.ChunkedArray | pa.Array,
    kind: IdKind,
    entity: str,
    where: Callable[[int], str] | None = None,
) -> Int64Array:
    """Ids of a column as `assign_ids` gave them when it found this kind.

    Args:
        column: integers or strings, without nulls.
        where: where a row is in its source, for messages.

    Raises:
        InputError: a text instead of an integer, or an integer outside 64 bits.
    """
    if kind == "integer" and pa.types.is_integer(column.type):
        if pa.types.is_uint64(column.type):
            return column.to_numpy().view(np.int64)
        return column.cast(pa.int64()).to_numpy()
    keys, codes_R = _dictionary(column)
    if kind == "string":
        return hash_strings(keys)[codes_R]
    is_integer_K = pc.match_substring_regex(keys, _INTEGER)
    if not pc.all(is_integer_K, min_count=0).as_py():
        row = int(np.argmax(~is_integer_K.to_numpy(zero_copy_only=False)[codes_R]))
        place, text = "" if where is None else f"{where(row)}: ", keys[codes_R[row]].as_py()
        raise InputError(
            f"{place}{entity} id {text!r} is no integer, but all {entity} ids were integers when ids were "
            "assigned; a log with such ids needs new ones for all of them: build from the whole log again"
        )
    try:
        return _parse_integers(keys, entity)[codes_R]
    except InputError as error:
        if where is None:
            raise
        outside_K = np.array([not -(2**63) <= int(key) < 2**64 for key in keys.to_pylist()])
        raise InputError(f"{where(int(np.argmax(outside_K[codes_R])))}: {error}") from error


def is_integer_id(column: pa.ChunkedArray | pa.Array) -> bool:
    """Whether every id of a column is an integer; nulls aside."""
    keys, _ = _dictionary(column.drop_null())
    return bool(pc.all(pc.match_substring_regex(keys, _INTEGER), min_count=0).as_py())


def distinct_keys(column: pa.ChunkedArray) -> tuple[pa.Array, Int64Array, Int64Array]:
    """Distinct values as strings, the index of each value among them, and the first row of each of them."""
    keys, codes_R = _dictionary(column)
    first_K = np.zeros(len(keys), dtype=np.int64)
    # Backwards, so that the first row is written last.
    first_K[codes_R[::-1]] = np.arange(len(codes_R) - 1, -1, -1)
    return keys, codes_R, first_K


def plain_spelling(keys: pa.Array) -> pa.Array:
    """Keys without what differs between exports of one system: leading zeros, `.0`, upper case."""
    keys = pc.replace_substring_regex(keys, r"^([0-9]+)\.0+$", r"\1")
    return pc.utf8_lower(pc.replace_substring_regex(keys, r"^0+([0-9])", r"\1"))


def hash_strings(strings: pa.Array | pa.ChunkedArray | Sequence[str]) -> Int64Array:
    """Signed 64-bit blake2b of each string (UTF-8, little endian); each distinct one is hashed once."""
    if not isinstance(strings, pa.Array | pa.ChunkedArray):
        strings = pa.array(strings, pa.string())
    distinct, codes_R = _dictionary(strings)
    ids = [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        for text in distinct.to_pylist()
    ]
    return np.array(ids, dtype=np.int64)[codes_R]


def refuse_collisions(keys: pa.Array, ids_K: Int64Array, entity: str) -> None:
    """Raise InputError if two keys share an id."""
    found = collision_of(keys, ids_K)
    if found is not None:
        raise collision_error(found, entity)


@dataclass(frozen=True)
class Collision:
    """Two keys with one id."""

    position: int
    """Of the second key, among those that were looked at."""
    first: str
    second: str
    id: int


def collision_of(keys: pa.Array, ids_K: Int64Array) -> Collision | None:
    """The first of the keys that has the id of one before it; None: there is none."""
    repeated_K = pd.Series(ids_K).duplicated().to_numpy()
    if not repeated_K.any():
        return None
    second = int(np.flatnonzero(repeated_K)[0])
    first = int(np.flatnonzero(ids_K == ids_K[second])[0])
    return Collision(second, keys[first].as_py(), keys[second].as_py(), int(ids_K[second]))


def collision_error(found: Collision, entity: str) -> InputError:
    """The refusal of two keys with one id."""
    return InputError(
        f"{entity} ids {found.first!r} and {found.second!r} have the same 64-bit id "
        f"{found.id}; rename one of them in the source"
    )


def _dictionary(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, Int64Array]:
    """Distinct values as strings, and the index of each value among them."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    encoded = column.dictionary_encode()
    # Large strings: 32-bit offsets overflow at two gigabytes of keys.
    return encoded.dictionary.cast(pa.large_string()), encoded.indices.to_numpy()


def integer_range(column: pa.ChunkedArray) -> tuple[int, int]:
    """The lowest and the highest of integers, which may be texts, of any length.

    Args:
        column: without nulls, not empty.
    """
    keys = column if pa.types.is_integer(column.type) else _dictionary(column)[0]
    try:
        found = pc.min_max(keys if pa.types.is_integer(keys.type) else keys.cast(pa.int64())).as_py()
    except pa.ArrowInvalid:
        numbers = [int(key) for key in keys.to_pylist()]
        return min(numbers), max(numbers)
    return found["min"], found["max"]


def is_outside(lowest: int, highest: int) -> bool:
    """Whether integers are neither all signed nor all unsigned ones of 64 bits."""
    return lowest < -(2**63) or highest >= (2**63 if lowest < 0 else 2**64)


def refuse_outside(lowest: int, highest: int, entity: str) -> None:
    """Refuse integers that are neither all signed nor all unsigned ones of 64 bits.

    Raises:
        InputError: naming the one that is largest without its sign.
    """
    if not is_outside(lowest, highest):
        return
    raise InputError(
        f"{entity} id {max(lowest, highest, key=abs)} is outside 64 bits; expected an integer of 64 bits or "
        "a text, so write it with a letter in front"
    )


def keys_of_integers(ids: Int64Array, are_unsigned: bool) -> pa.Array:
    """The texts that integers are in the source."""
    return pa.array(ids.view(np.uint64) if are_unsigned else ids).cast(pa.large_string())


def _parse_integers(keys: pa.Array, entity: str) -> Int64Array:
    try:
        return keys.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        pass
    try:
        # Unsigned ids above 2**63, as some logs have them: the same bits, read as signed.
        return keys.cast(pa.uint64()).to_numpy().view(np.int64)
    except pa.ArrowInvalid:
        numbers = [int(key) for key in keys.to_pylist()]
        refuse_outside(min(numbers), max(numbers), entity)
        raise
