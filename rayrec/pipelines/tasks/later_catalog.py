"""What was learned of the items of one data set, for a later one that has others, too.

Axes: I items of the earlier data set, V rows of a weight, D numbers of one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset

SHOWN = 10_000
"""Items whose texts are compared."""


def check_same_log(earlier: Dataset, later: Dataset, where: str) -> None:
    """Refuse a data set whose items are others, which ids that are numbers do not show.

    Args:
        where: what was trained on the earlier one, for messages.

    Raises:
        InputError: fewer than half of the earlier items are in the later one; or ids are numbers, and the
            later one says something else of more than half of some items that both have.
    """
    theirs, path = earlier.items, later.root
    place_I = later.item_positions(theirs.ids_I)
    there = np.flatnonzero(place_I >= 0)
    if 2 * len(there) < len(theirs):
        raise InputError(
            f"{where}: was trained on {len(theirs):,} items, of which {path} has {len(there):,}: it does not "
            "go on from the same log; begin without init_from"
        )
    if later.manifest.id_kinds["item"] != "integer":
        return
    some = there[:SHOWN]  # the order is one of hashes
    before, now = (
        [texts[place].as_py() for place in places.tolist()]
        for texts, places in ((theirs.texts, some), (later.items.texts, place_I[some]))
    )
    pairs = [(x, y) for x, y in zip(before, now, strict=True) if x is not None and y is not None]
    num_others = sum(x != y for x, y in pairs)
    if 2 * num_others > len(pairs):
        raise InputError(
            f"{where}: was trained on a catalog with other texts of {num_others:,} of {len(pairs):,} items "
            f"that {path} has, too: their ids mean other items here; begin without init_from"
        )


def carried_over(
    weights: Mapping[str, np.ndarray],
    their_rows: Mapping[str, Int64Array],
    network: nn.Module,
    our_rows: Mapping[str, Int64Array],
) -> dict[str, np.ndarray]:
    """Weights of a network, for one of a later catalog.

    Args:
        their_rows: whose rows they are, as `SequenceModel.catalog_rows` says.
        network: of the later catalog, with initial weights; rows of what came since are as in these.
        our_rows: whose rows those are.
    """
    fitted = dict(weights)
    for name, ids_V in our_rows.items():
        weight_VD = network.get_parameter(name).detach().cpu().numpy().copy()
        _, to_V, from_V = np.intersect1d(ids_V, their_rows[name], return_indices=True)
        weight_VD[to_V] = weights[name][from_V]
        fitted[name] = weight_VD
    return fitted
