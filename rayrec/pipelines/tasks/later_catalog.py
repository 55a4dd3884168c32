"""What was learned of the items of one data set, for a later one that has others, too.

Axes: I items of the earlier data set, V rows of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import nn

from rayrec.models.sequence.sequence_model import catalog_rows
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset


def check_same_log(earlier: Dataset, later: Dataset, where: str) -> None:
    """Refuse a data set whose items are others, which ids that are numbers do not show.

    Args:
        where: what was trained on the earlier one, for messages.

    Raises:
        InputError: fewer than half of the earlier items are in the later one; or ids are numbers, and the
            later one says something else of more than half of the items that both have.
    """
    theirs, path = earlier.items, later.root
    place_I = later.item_positions(theirs.ids_I)
    is_there_I = place_I >= 0
    if 2 * is_there_I.sum() < len(theirs):
        raise InputError(
            f"{where}: was trained on {len(theirs):,} items, of which {path} has {is_there_I.sum():,}: it "
            "does not go on from the same log; begin without init_from"
        )
    if later.manifest.id_kinds["item"] != "integer":
        return
    before = theirs.texts.filter(pa.array(is_there_I))
    is_same = pc.equal(before, later.items.texts.take(pa.array(place_I[is_there_I]))).drop_null()
    num_same = pc.sum(is_same).as_py() or 0
    if 2 * num_same < len(is_same):
        raise InputError(
            f"{where}: was trained on a catalog with other texts of {len(is_same) - num_same:,} of the "
            f"{len(is_same):,} items that {path} has, too: their ids mean other items here; begin without "
            "init_from"
        )


def carried_over(
    weights: Mapping[str, np.ndarray], rows: Mapping[str, Int64Array], network: nn.Module, ids_I: Int64Array
) -> dict[str, np.ndarray]:
    """Weights of a network, for one of a later catalog.

    Args:
        rows: whose rows they are, as `catalog_rows` says of their network.
        network: of the later catalog, with initial weights; rows of what came since are as in these.
        ids_I: of the items of the later catalog.
    """
    fitted = dict(weights)
    for name, ids_V in catalog_rows(network, ids_I).items():
        weight_VD = network.get_parameter(name).detach().cpu().numpy().copy()
        _, to_V, from_V = np.intersect1d(ids_V, rows[name], return_indices=True)
        weight_VD[to_V] = weights[name][from_V]
        fitted[name] = weight_VD
    return fitted
