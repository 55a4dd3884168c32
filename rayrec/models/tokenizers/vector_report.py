"""What item vectors are worth, judged by what users met next. Needs numpy alone.

Pairs are of an item and the one that some user met after it, held out from what vectors were made of.

Axes: I items, D dimensions, P pairs, K nearest items.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rayrec.platform.arrays import BoolArray, Float32Array, Float64Array, Int64Array

NEAREST = 10
_AT = (10, 50)
_MOST_PAIRS = 5_000
_MOST_PRODUCTS = 200_000_000
"""Of pairs and items: with more items, fewer pairs are looked at."""
_FEWEST_PAIRS = 200
_ROWS_AT_ONCE = 500


class NextPairs(NamedTuple):
    """Catalog positions; in no order that means anything, so that the first ones are a sample."""

    from_P: Int64Array
    to_P: Int64Array

    def sample(self, num_items: int) -> NextPairs:
        """As many as may be compared with so many items."""
        most = min(_MOST_PAIRS, max(_FEWEST_PAIRS, _MOST_PRODUCTS // max(num_items, 1)))
        return NextPairs(self.from_P[:most], self.to_P[:most])


def vectors_compared(
    blocks: Mapping[str, Float32Array],
    pairs: NextPairs,
    made_of_them: Mapping[str, Float32Array] | None = None,
) -> dict[str, Any]:
    """How near the next item is by each kind of vectors, and whether they agree; plain JSON values.

    `recall@K` is the share of pairs whose second item is among the K nearest of the first by cosine; one
    without a vector is far from everything, and `known_pairs` is the share without such. `overlap` is the
    share of the 10 nearest items that two kinds have in common, over the pairs whose first item both know.

    Args:
        blocks: by name, [I, D] with rows of NaN for unknown items.
        made_of_them: likewise; judged as well, and not compared with what they are made of.
    """
    num_items = len(next(iter(blocks.values())))
    pairs = pairs.sample(num_items)
    found = []
    nearest: dict[str, Int64Array] = {}
    known: dict[str, BoolArray] = {}
    for name, block_ID in {**blocks, **(made_of_them or {})}.items():
        known[name] = np.asarray(~np.isnan(block_ID).any(axis=1))
        unit_ID = _unit(block_ID)
        places_P, nearest[name] = _nearest(unit_ID, pairs)
        known_P = known[name][pairs.from_P] & known[name][pairs.to_P]
        places_P[~known_P] = np.inf
        found.append(
            {
                "name": name,
                "dim": block_ID.shape[1],
                "items": int(known[name].sum()),
                "known_pairs": _share(known_P),
                **{f"recall@{k}": _share(places_P < k) for k in _AT},
            }
        )
    overlap = {}
    for one, other in itertools.combinations(blocks, 2):
        both_P = known[one][pairs.from_P] & known[other][pairs.from_P]
        same_PKK = nearest[one][both_P][:, :, None] == nearest[other][both_P][:, None, :]
        overlap[f"{one}, {other}"] = _share(same_PKK.any(axis=2))
    return {"pairs": len(pairs.from_P), "blocks": found, "overlap": overlap}


def prefixes_in_common(
    codes_IL: np.ndarray[Any, Any], pairs: NextPairs, seed: int = 0
) -> list[dict[str, float | None]]:
    """Of how many pairs both items have the same first 1, 2, ... codes; plain JSON values.

    `by_chance` is the same with the second items dealt out again among the pairs.
    """
    dealt_P = np.random.default_rng(seed).permutation(pairs.to_P)
    levels = []
    same_P = np.ones(len(pairs.from_P), dtype=np.bool_)
    by_chance_P = same_P.copy()
    for level in range(codes_IL.shape[1]):
        codes_P = codes_IL[pairs.from_P, level]
        same_P &= codes_P == codes_IL[pairs.to_P, level]
        by_chance_P &= codes_P == codes_IL[dealt_P, level]
        levels.append({"same": _share(same_P), "by_chance": _share(by_chance_P)})
    return levels


def _unit(block_ID: Float32Array) -> Float32Array:
    block_ID = np.nan_to_num(block_ID)
    lengths_I1 = np.linalg.norm(block_ID, axis=1, keepdims=True)
    unit_ID: Float32Array = (block_ID / np.where(lengths_I1 > 0, lengths_I1, 1.0)).astype(np.float32)
    return unit_ID


def _nearest(unit_ID: Float32Array, pairs: NextPairs) -> tuple[Float64Array, Int64Array]:
    """([P] items nearer to the first of a pair than the second is, half of those that are as near; [P, K] the
    nearest items of the first)."""
    num_pairs, num_items = len(pairs.from_P), len(unit_ID)
    places_P, nearest_PK = np.zeros(num_pairs), np.zeros((num_pairs, min(NEAREST, num_items - 1)), np.int64)
    for start in range(0, num_pairs, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        from_R, to_R = pairs.from_P[rows], pairs.to_P[rows]
        cosines_RI = unit_ID[from_R] @ unit_ID.T
        index_R = np.arange(len(from_R))
        cosines_RI[index_R, from_R] = -np.inf
        own_R1 = cosines_RI[index_R, to_R][:, None]
        as_near_R = (cosines_RI == own_R1).sum(axis=1) - 1
        places_P[rows] = (cosines_RI > own_R1).sum(axis=1) + as_near_R / 2
        nearest_PK[rows] = np.argpartition(-cosines_RI, nearest_PK.shape[1] - 1, axis=1)[
            :, : nearest_PK.shape[1]
        ]
    return places_P, nearest_PK


def _share(is_so: np.ndarray[Any, Any]) -> float | None:
    return float(is_so.mean()) if is_so.size else None
