"""What codes look like: how evenly they are used, and whether a prefix means anything. Needs numpy alone.

Axes: I items, L levels, K codes of a level, P pairs of an item and a label.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rayrec.models.tokenizers.code_tuples import IntArray, tuple_groups
from rayrec.platform.arrays import Int64Array


def collision_counts(codes_IL: IntArray) -> dict[str, int]:
    """Items that these codes cannot tell from another: what a collision policy has to deal with."""
    _, sizes = tuple_groups(codes_IL)
    shared = sizes[sizes > 1]
    return {"items": int(shared.sum()), "groups": len(shared), "largest_group": int(sizes.max())}


def level_statistics(codes_IL: IntArray, level_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Use of the codes, level by level; plain JSON values.

    `perplexity` is of the level's codes: as many codes, used equally, would have the same entropy.
    `prefixes`, `prefix_entropy` (in bits) and `largest_prefix` (in items) are of the prefixes up to and with
    the level; the entropy of prefixes that tell all items apart is log2 of their number.
    """
    levels = []
    for level, size in enumerate(level_sizes):
        counts_K = np.bincount(codes_IL[:, level], minlength=size)
        _, prefix_sizes = tuple_groups(codes_IL[:, : level + 1])
        levels.append(
            {
                "size": size,
                "used": int((counts_K > 0).sum()),
                "perplexity": float(np.exp(_entropy(counts_K))),
                "prefixes": len(prefix_sizes),
                "prefix_entropy": float(_entropy(prefix_sizes) / np.log(2.0)),
                "largest_prefix": int(prefix_sizes.max()),
            }
        )
    return levels


def prefix_purity(
    codes_IL: IntArray,
    label_items_P: Int64Array,
    labels_P: Int64Array,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Whether items of a prefix are of one kind, for prefixes of 1, 2, ... codes; plain JSON values.

    Purity of a prefix is the share of its items that have its commonest label; the figure is the mean over
    items. An item alone under its prefix would count as pure whatever the codes are, so prefixes of a single
    item are left out, as are items without a label; `items` says how many are left. `by_chance` is the same
    figure with the labels dealt out again among the items: small prefixes look pure by accident.

    Args:
        label_items_P: Position of the item of each pair; an item may have several labels, each once.
        labels_P: Label of each pair, from 0.
    """
    labeled = np.unique(label_items_P)
    if not len(labeled):
        return []
    owner_P = np.searchsorted(labeled, label_items_P)
    dealt_P = np.random.default_rng(seed).permutation(len(labeled))[owner_P]
    depths = []
    for depth in range(1, codes_IL.shape[1] + 1):
        group_I, sizes = tuple_groups(codes_IL[labeled, :depth])
        depths.append(
            {
                "items": int(sizes[sizes > 1].sum()),
                "purity": _purity(group_I[owner_P], labels_P, sizes),
                "by_chance": _purity(group_I[dealt_P], labels_P, sizes),
            }
        )
    return depths


def _purity(group_P: Int64Array, labels_P: Int64Array, sizes: Int64Array) -> float | None:
    shared = sizes > 1
    if not shared.any():
        return None
    num_labels = int(labels_P.max()) + 1
    pairs, counts = np.unique(group_P * num_labels + labels_P, return_counts=True)
    commonest = np.zeros(len(sizes), dtype=np.int64)
    np.maximum.at(commonest, pairs // num_labels, counts)
    return float(commonest[shared].sum() / sizes[shared].sum())


def _entropy(counts: Int64Array) -> float:
    """In nats."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
