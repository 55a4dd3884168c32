"""What was learned of the items of one data set, for a later one that has others, too.

Axes: I items of the earlier data set, V rows of a weight, D numbers of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import nn

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset

COMPARED = 10_000
"""Items whose titles are compared."""
logger = logging.getLogger(__name__)


def check_same_log(earlier: Dataset, later: Dataset, where: str) -> None:
    """Refuse a data set whose items are others, which ids alone do not always show; log how many are new.

    Args:
        where: what was trained on the earlier one, for messages.

    Raises:
        InputError: fewer than half of the earlier items are in the later one, or more than half of some that
            both have are called something else.
    """
    theirs, path = earlier.items, later.root
    place_I = later.item_positions(theirs.ids_I)
    there = np.flatnonzero(place_I >= 0)
    if 2 * len(there) < len(theirs):
        raise InputError(
            f"{where}: was trained on {len(theirs):,} items, of which {path} has {len(there):,}: it does not "
            "go on from the same log; begin without init_from"
        )
    some = there[:COMPARED]  # the order is one of hashes
    before, now = theirs.titles.take(pa.array(some)), later.items.titles.take(pa.array(place_I[some]))
    is_other = pc.not_equal(before, now).drop_null()
    num_others = pc.sum(is_other).as_py() or 0
    if 2 * num_others > len(is_other):
        raise InputError(
            f"{where}: was trained on a catalog with other titles of {num_others:,} of {len(is_other):,} "
            f"items that {path} has, too: their ids mean other items here; give items the ids, or "
            "the titles, that they had, or begin without init_from"
        )
    logger.info(
        "%s: knows %s of the %s items of %s; %s of its own have gone",
        where,
        f"{len(there):,}",
        f"{len(later.items):,}",
        path,
        f"{len(theirs) - len(there):,}",
    )


def check_row_ids(
    network: nn.Module, rows: Mapping[str, Int64Array], other: nn.Module, other_rows: Mapping[str, Int64Array]
) -> None:
    """Refuse a model that says less or something else than the truth of whose rows its weights have.

    Args:
        rows: `SequenceModel.row_ids` of the network.
        other: the same model of another catalog.

    Raises:
        InputError: it names no weight, another number of rows, or misses a weight that the catalog gives a
            shape.
    """
    for each, said in ((network, rows), (other, other_rows)):
        shapes = {name: weight.shape for name, weight in each.named_parameters()}
        for name, ids_V in said.items():
            if name not in shapes or len(ids_V) != shapes[name][0]:
                found = f"has {shapes[name][0]:,} rows" if name in shapes else "is no weight of it"
                raise InputError(
                    f"{type(each).__name__}.row_ids gives {len(ids_V):,} ids for {name!r}, which "
                    f"{found}; name weights as named_parameters() does, with an id for each row"
                )
    others = {name: weight.shape for name, weight in other.named_parameters()}
    for name, weight in network.named_parameters():
        if name not in rows and others.get(name) != weight.shape:
            raise InputError(
                f"{type(network).__name__}.row_ids does not name {name!r}, whose shape depends on the "
                "catalog; let it say whose its rows are"
            )


def carried_over(
    weights: Mapping[str, np.ndarray],
    their_rows: Mapping[str, Int64Array],
    network: nn.Module,
    our_rows: Mapping[str, Int64Array],
) -> dict[str, np.ndarray]:
    """Weights of a network, for one of a later catalog.

    Args:
        their_rows: whose rows they are, as `SequenceModel.row_ids` says.
        network: of the later catalog, with initial weights; rows of what came since are as in these.
        our_rows: whose rows those are.
    """
    fitted = dict(weights)
    for name, ids_V in our_rows.items():
        if name not in weights:
            continue  # it is frozen, and not in snapshots
        weight_VD = network.get_parameter(name).detach().cpu().numpy().copy()
        _, to_V, from_V = np.intersect1d(ids_V, their_rows[name], return_indices=True)
        weight_VD[to_V] = weights[name][from_V]
        fitted[name] = weight_VD
    return fitted
