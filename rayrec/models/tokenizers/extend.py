"""Codes for new items: a further version of a registry, in which the items of the old one keep theirs.

A model that was trained with the old version serves the new one: what it learned of codes holds, and no level
that it predicts grows. New items take free tuples only,

    extra_digit   the next digit of their tuple, as long as the level has one
    share         the next place of their tuple; the list of a tuple has no end, and no weights
    reassign      their tuple, if nobody has it

and where there is none, the nearest last code under their prefix whose tuple has room.

Axes: I items of the new catalog, N new items, L code levels, K codes of a level, D dimensions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from rayrec.models.tokenizers.collisions import policy_named
from rayrec.models.tokenizers.quantizer import Quantizer
from rayrec.models.tokenizers.registry import Ancestor, SemanticIdRegistry, smallest_code_dtype
from rayrec.models.tokenizers.report import collision_counts
from rayrec.platform.arrays import Int64Array


@dataclass(frozen=True)
class NewItems:
    """Items that a registry does not have yet."""

    ids_N: Int64Array
    vectors_ND: Tensor
    """Prepared as those that the quantizer was fitted on."""
    num_without_data: int = 0
    """Of them, items about which nothing was known."""


def extend_registry(
    registry: SemanticIdRegistry,
    quantizer: Quantizer,
    new: NewItems,
    item_ids_I: Int64Array,
    dataset_fingerprint: str,
) -> SemanticIdRegistry:
    """Give codes to new items.

    Args:
        quantizer: The one that made the codes of the registry.
        item_ids_I: Ids of the new catalog, in its order: those of the registry and the new ones.
        dataset_fingerprint: Of the data set that the new catalog belongs to.

    Raises:
        ValueError: an item of the registry is missing from the catalog, the new items are not the others of
            it, or every tuple under a prefix is taken.
    """
    missing = np.setdiff1d(registry.item_ids_I, item_ids_I)
    if len(missing):
        raise ValueError(
            f"{len(missing)} of the {registry.num_items} items that have semantic IDs are not in the new "
            f"catalog; an extension keeps every item, so prepare the data with "
            "all of them, or make the semantic IDs again"
        )
    if not np.array_equal(np.sort(new.ids_N), np.setdiff1d(item_ids_I, registry.item_ids_I)):
        raise ValueError(f"the {len(new.ids_N)} new items are not those that the registry lacks")
    placed_NL, num_moved = _placed(registry, quantizer, new)
    known_ids, known_codes = registry.item_ids_I, registry.codes_IL.astype(np.int64)
    level_sizes = registry.level_sizes
    if registry.uniform_digit and len(placed_NL):
        level_sizes = (*level_sizes[:-1], max(level_sizes[-1], int(placed_NL[:, -1].max()) + 1))
    ids = np.concatenate([known_ids, new.ids_N])
    codes = np.concatenate([known_codes, placed_NL])
    added_before = np.zeros(registry.num_items, np.int16) if registry.added_I is None else registry.added_I
    added_now = np.full(len(new.ids_N), len(registry.ancestors) + 1, np.int16)
    sorter = np.argsort(ids)
    place_I = sorter[np.searchsorted(ids, item_ids_I, sorter=sorter)]
    before = registry.fit_report.get("extension", {})
    extension = {
        "items": len(new.ids_N),
        "without_data": new.num_without_data,
        "moved_to_another_tuple": num_moved,
    }
    return replace(
        registry,
        item_ids_I=np.ascontiguousarray(item_ids_I, dtype=np.int64),
        codes_IL=codes[place_I].astype(smallest_code_dtype(level_sizes)),
        level_sizes=level_sizes,
        dataset_fingerprint=dataset_fingerprint,
        fit_report=registry.fit_report
        | {
            "collisions": collision_counts(codes[:, : registry.num_codebooks]),
            "extension": {name: before.get(name, 0) + count for name, count in extension.items()},
        },
        added_I=np.concatenate([added_before, added_now])[place_I],
        ancestors=(*registry.ancestors, Ancestor(registry.version, registry.dataset_fingerprint)),
    )


def _placed(registry: SemanticIdRegistry, quantizer: Quantizer, new: NewItems) -> tuple[Int64Array, int]:
    """[N, L] codes of the new items, and how many of them did not get the tuple of their vector."""
    policy = policy_named(registry.collision_policy)
    num_codebooks = registry.num_codebooks
    if not len(new.ids_N):
        return np.zeros((0, len(registry.level_sizes)), dtype=np.int64), 0
    taken = Counter(map(tuple, registry.codes_IL[:, :num_codebooks].tolist()))
    room: float = 1
    if policy.digit != "none":
        room = float("inf") if registry.uniform_digit else registry.level_sizes[-1]
    raw_codes_NC = quantizer.encode(new.vectors_ND)
    placed, num_moved = [], 0
    for row, codes in enumerate(map(tuple, raw_codes_NC.tolist())):
        if taken[codes] >= room:
            distances_1K = quantizer.last_level_distances(
                new.vectors_ND[row : row + 1], raw_codes_NC[row : row + 1]
            )
            nearest_first = distances_1K[0].argsort(stable=True).tolist()
            free = (c for last in nearest_first if taken[c := (*codes[:-1], last)] < room)
            moved = next(free, None)
            if moved is None:
                raise ValueError(
                    f"new item {new.ids_N[row]}: all {len(nearest_first)} tuples under its prefix "
                    f"{list(codes[:-1])} are taken, under the policy {registry.collision_policy}; make the "
                    "semantic IDs again, with more levels or the policy share"
                )
            codes, num_moved = moved, num_moved + 1
        placed.append(codes if policy.digit == "none" else (*codes, taken[codes]))
        taken[codes] += 1
    return np.array(placed, dtype=np.int64), num_moved
