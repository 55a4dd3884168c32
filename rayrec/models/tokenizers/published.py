"""Semantic IDs that others published, as a registry of ours. Needs numpy alone.

One JSON object from item to tuple, in any of

    LETTER, MiniOneRec    {"0": ["<a_183>", "<b_70>", "<c_232>"], ...}
    tiger-cf              {"1": [228, 220, 159, 91], ...}

Keys are the items' keys in our data set, or whole numbers that differ from them by a constant: LETTER counts
from 0 what others count from 1.

Axes: I items, L code levels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayrec.models.tokenizers.code_tokens import read_token
from rayrec.models.tokenizers.code_tuples import IntArray, tuple_groups
from rayrec.models.tokenizers.collisions import Evidence, policy_named
from rayrec.models.tokenizers.registry import SemanticIdRegistry, smallest_code_dtype
from rayrec.models.tokenizers.report import collision_counts
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError


def published_registry(
    file: str | Path,
    item_keys: Sequence[str],
    item_ids_I: Int64Array,
    dataset_fingerprint: str,
    collision_policy: str = "extra_digit",
    key_offset: int = 0,
    codebook_size: int | None = None,
    popularity_I: Int64Array | None = None,
) -> SemanticIdRegistry:
    """Read a file of published codes for the items of a catalog.

    Args:
        item_keys: The items' ids as the source of the data writes them, in catalog order.
        item_ids_I: Ids in the same order.
        collision_policy: A name of `COLLISION_POLICIES`; acts only where items share a tuple.
        key_offset: Added to the keys of the file, which are whole numbers then.
        codebook_size: Of every level; the largest code of the level and one unless given.
        popularity_I: Training events of each item, for the policy `share`.

    Raises:
        InputError: the file cannot be read or is in none of the formats, its items are not those of the
            catalog, a code is outside the codebook, or collisions that the policy cannot resolve.
    """
    file = Path(file)
    codes_IL: IntArray = _in_catalog_order(file, _read(file), item_keys, key_offset)
    sizes = [int(column.max()) + 1 for column in codes_IL.T]
    if codebook_size is not None:
        if max(sizes) > codebook_size:
            raise InputError(f"{file}: has the code {max(sizes) - 1}, outside a codebook of {codebook_size}")
        sizes = [codebook_size] * len(sizes)
    num_codebooks = len(sizes)
    policy = policy_named(collision_policy)
    collisions = collision_counts(codes_IL)
    uniform_digit = False
    if len(tuple_groups(codes_IL)[1]) < len(codes_IL):
        try:
            codes_IL = policy.resolve(codes_IL, Evidence(sizes[-1], None, popularity_I))
        except ValueError as error:
            raise InputError(f"{file}: {error}") from error
        uniform_digit = policy.digit == "uniform"
        sizes.append(int(codes_IL[:, -1].max()) + 1)
    level_sizes = tuple(sizes)
    return SemanticIdRegistry(
        item_ids_I=np.ascontiguousarray(item_ids_I, dtype=np.int64),
        codes_IL=codes_IL.astype(smallest_code_dtype(level_sizes)),
        level_sizes=level_sizes,
        num_codebooks=num_codebooks,
        collision_policy=collision_policy,
        method=f"published, read from {file.name}",
        dataset_fingerprint=dataset_fingerprint,
        fit_report={"collisions": collisions},
        uniform_digit=uniform_digit,
    )


def _read(file: Path) -> dict[str, list[Any]]:
    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{file}: the item {twice!r} stands there twice; which codes are its own?")
        return values

    try:
        values = json.loads(file.read_bytes(), object_pairs_hook=without_repetition)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON ({error}); expected {{item: [code, ...]}}") from error
    if not isinstance(values, dict) or not values:
        raise InputError(f"{file}: expected a JSON object {{item: [code, ...]}}")
    return values


def _in_catalog_order(
    file: Path, published: dict[str, list[Any]], item_keys: Sequence[str], key_offset: int
) -> Int64Array:
    codes_of: dict[str, tuple[str, list[Any]]] = {}
    for key, values in published.items():
        shifted = _shifted(file, key, key_offset)
        if shifted in codes_of:
            raise InputError(
                f"{file}: the items {codes_of[shifted][0]!r} and {key!r} are both {shifted!r} with "
                f"key_offset {key_offset}; which codes are its own?"
            )
        codes_of[shifted] = key, values
    missing = [key for key in item_keys if key not in codes_of]
    unknown = sorted(set(codes_of) - set(item_keys))
    if missing or unknown:
        found = []
        if missing:
            found.append(
                f"{len(missing)} of the catalog's {len(item_keys)} items have no codes there, the first is "
                f"{missing[0]!r}"
            )
        if unknown:
            found.append(f"{len(unknown)} of its items are not in the catalog, the first is {unknown[0]!r}")
        raise InputError(f"{file}: {' and '.join(found)}{_hint(set(codes_of), set(item_keys))}")
    rows = [_codes(file, *codes_of[key]) for key in item_keys]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1 or not lengths[0]:
        raise InputError(f"{file}: tuples have {' and '.join(map(str, lengths))} codes; expected one length")
    return np.array(rows, dtype=np.int64)


def _hint(found: set[str], wanted: set[str]) -> str:
    """What to do if the items are the same and merely counted from another number."""
    if not all(key.lstrip("-").isdecimal() for key in found | wanted):
        return "; the keys of the file must be the ids of the items as the source of the data writes them"
    offset = min(map(int, wanted)) - min(map(int, found))
    if {str(int(key) + offset) for key in found} == wanted:
        return f"; its keys seem to count from another number: --key-offset {offset} makes them fit"
    return "; prepare the data set that the codes were published for"


def _shifted(file: Path, key: str, offset: int) -> str:
    if not offset:
        return key
    try:
        return str(int(key) + offset)
    except ValueError as error:
        raise InputError(
            f"{file}: the key {key!r} is no whole number, so that {offset} cannot be added to it "
            "(--key-offset)"
        ) from error


def _codes(file: Path, key: str, values: Any) -> list[int]:
    if isinstance(values, list):
        codes = [_code(level, value) for level, value in enumerate(values)]
        found = [code for code in codes if code is not None]
        if len(found) == len(values):
            return found
    raise InputError(
        f"{file}: the item {key!r} has {values!r}; expected codes such as [228, 220, 159] or "
        '["<a_228>", "<b_220>", "<c_159>"], from 0'
    )


def _code(level: int, value: Any) -> int | None:
    """The number of a code of this level; None for anything else."""
    if isinstance(value, str):
        return read_token(level, value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value >= 0 else None
