"""What was learned of the items of one data set, for a later one that has others, too.

Axes: I items of the earlier data set, V rows of a weight, D numbers of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import nn

from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset

COMPARED = 10_000
"""Items whose titles are compared."""
logger = logging.getLogger(__name__)


def check_same_log(earlier: Dataset, later: Dataset, where: str, way_out: str) -> None:
    """Refuse a data set whose users or items are others, which ids alone do not always show; log how many
    items are new.

    Args:
        where: what was made of the earlier one, for messages.
        way_out: what to do instead, likewise.

    Raises:
        InputError: ids are of another kind, fewer than half of the earlier items are in the later one, or
            more than half of some that both have are called something else.
    """
    theirs, path = earlier.items, later.root
    if earlier.manifest.id_kinds != later.manifest.id_kinds:
        raise InputError(
            f"{where}: is of ids that are {earlier.manifest.id_kinds}, and those of {path} are "
            f"{later.manifest.id_kinds}, so that they are of others; {way_out}"
        )
    place_I = later.item_positions(theirs.ids_I)
    there = np.flatnonzero(place_I >= 0)
    if 2 * len(there) < len(theirs):
        raise InputError(
            f"{where}: is of {len(theirs):,} items, of which {path} has {len(there):,}: it does not go on "
            f"from the same log; {way_out}"
        )
    some = there[:COMPARED]  # the order is one of hashes
    before, now = theirs.titles.take(pa.array(some)), later.items.titles.take(pa.array(place_I[some]))
    is_other = pc.not_equal(before, now).drop_null()
    num_others = pc.sum(is_other).as_py() or 0
    if 2 * num_others > len(is_other):
        raise InputError(
            f"{where}: is of a catalog with other titles of {num_others:,} of {len(is_other):,} items that "
            f"{path} has, too: their ids mean other items here; give items the ids, or the titles, that they "
            f"had, or {way_out}"
        )
    logger.info(
        "%s: knows %s of the %s items of %s; %s of its own have gone",
        where,
        f"{len(there):,}",
        f"{len(later.items):,}",
        path,
        f"{len(theirs) - len(there):,}",
    )


class WeightRows(NamedTuple):
    """What a network of a catalog says of its weights."""

    model: str
    """Its class."""
    shapes: dict[str, tuple[int, ...]]
    """Of all weights, by name."""
    ids: dict[str, Int64Array] | None
    """As `SequenceModel.row_ids` gives them."""

    @classmethod
    def of(cls, network: SequenceModel, item_ids_I: Int64Array) -> WeightRows:
        """`item_ids_I`: of the catalog."""
        shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
        return cls(type(network).__name__, shapes, network.row_ids(item_ids_I))


def check_rows_are_known(earlier: WeightRows, later: WeightRows) -> None:
    """Refuse a model that does not say, or says wrong, which of its weights belong to which item.

    Raises:
        InputError: it says nothing, names no weight, gives another number of ids than there are rows, or
            leaves out a weight whose shape depends on the catalog.
    """
    for model, shapes, ids in (earlier, later):
        if ids is None:
            raise InputError(
                f"{model} does not say which of its weights belong to which item (SequenceModel.row_ids), "
                "and items are others than in training.init_from; let it say so, or begin without init_from"
            )
        for name, ids_V in ids.items():
            if shapes.get(name, ())[:1] != (len(ids_V),):
                found = f"has the shape {shapes[name]}" if name in shapes else "is no weight of it"
                raise InputError(
                    f"{model}.row_ids gives {len(ids_V):,} ids for {name!r}, which {found}; name weights as "
                    "named_parameters() does, with an id for each row"
                )
        for name, shape in later.shapes.items():
            if name not in ids and earlier.shapes.get(name) != shape:
                raise InputError(
                    f"{model}.row_ids does not name {name!r}, whose shape depends on the catalog; let it say "
                    "which item each row belongs to"
                )


def carried_over(
    weights: Mapping[str, np.ndarray],
    their_rows: Mapping[str, Int64Array],
    network: nn.Module,
    our_rows: Mapping[str, Int64Array],
) -> dict[str, np.ndarray]:
    """Weights of a network, for one of a later catalog.

    Args:
        their_rows: `SequenceModel.row_ids` of their network.
        network: of the later catalog, with initial weights; rows of what came since are as in these.
        our_rows: `row_ids` of that one.
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
