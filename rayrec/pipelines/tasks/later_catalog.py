"""What was learned of the items of one data set, for a later one that has others, too.

Axes: I items of a data set, V rows of a weight, D numbers of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import nn

from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import Entity

COMPARED = 10_000
"""Items whose titles are compared."""
logger = logging.getLogger(__name__)


def check_same_log(earlier: Dataset, later: Dataset, where: str, way_out: str) -> None:
    """Refuse a data set whose users or items are others, which ids alone do not always show.

    Args:
        where: what was made of the earlier one, for messages.
        way_out: what to do instead, likewise.

    Raises:
        InputError: ids are of another kind, or as `check_same_items`.
    """
    _check_same_kind("user", earlier, later, where, way_out)
    check_same_items(earlier, later, where, way_out)


def check_same_items(earlier: Dataset, later: Dataset, where: str, way_out: str) -> None:
    """Refuse a data set whose items are others; log how many are new. Arguments as of `check_same_log`.

    Raises:
        InputError: ids of items are of another kind, fewer than half of the earlier items are in the later
            data set, or more than half of some that both have are called something else.
    """
    _check_same_kind("item", earlier, later, where, way_out)
    theirs, path = earlier.items, later.root
    place_I = later.item_positions(theirs.ids_I)
    there = np.flatnonzero(place_I >= 0)
    if 2 * len(there) < len(theirs):
        raise InputError(
            f"{where}: its data set has {len(theirs):,} items, of which {path} has {len(there):,}: they are "
            f"not of the same log; {way_out}"
        )
    some = there[:COMPARED]  # the order is one of hashes
    before, now = theirs.titles.take(pa.array(some)), later.items.titles.take(pa.array(place_I[some]))
    is_other = pc.not_equal(before, now).drop_null()
    num_others = pc.sum(is_other).as_py() or 0
    if 2 * num_others > len(is_other):
        raise InputError(
            f"{where}: in its data set, {num_others:,} of {len(is_other):,} items have other titles than in "
            f"{path}: the same ids mean other items; give items the ids, or the titles, that they had, or "
            f"{way_out}"
        )
    logger.info(
        "%s: knows %s of the %s items of %s; %s of its own have gone",
        where,
        f"{len(there):,}",
        f"{len(later.items):,}",
        path,
        f"{len(theirs) - len(there):,}",
    )


def _check_same_kind(entity: Entity, earlier: Dataset, later: Dataset, where: str, way_out: str) -> None:
    theirs, ours = (dataset.manifest.id_kinds[entity] for dataset in (earlier, later))
    if theirs != ours:
        raise InputError(
            f"{where}: its data set has {entity} ids of the kind {theirs!r}, and {later.root} of the kind "
            f"{ours!r}, which are others; {way_out}"
        )


def warn_of_samples(config: RunConfig, where: str, later: Path) -> None:
    """Say it where a run was trained on rows beside its data set, which may be those that it is judged on."""
    if config.data.samples is not None:
        logger.warning(
            "%s: was trained on rows of %s, and nothing says whether events of %s are among them",
            where,
            config.data.samples,
            later,
        )


class EarlierItems(NamedTuple):
    """The items of a later data set that an earlier one had."""

    dataset_fingerprint: str
    """Of the earlier one."""
    known_I: BoolArray
    """By position in the later one."""


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
