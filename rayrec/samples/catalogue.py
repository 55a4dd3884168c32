"""The tables of items and users: what the source says of them, in an order that says nothing.

Axes: I items of the catalogue, K distinct ids of the source.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.errors import InputError
from rayrec.platform.hashing import mix64
from rayrec.samples.batches import Int64Array
from rayrec.samples.ids import IdTable
from rayrec.samples.importers.tables import RawTable

_NOT_TEXT = {"asin", "url", "imurl", "image", "image_url", "link", "href"}
"""Columns of strings that are for machines."""


def item_table(
    items: IdTable,
    kept_K: np.ndarray,
    train_counts_K: Int64Array,
    described: RawTable | None,
    described_ids: Int64Array | None,
) -> pa.Table:
    """One row per item that is kept, in order of `mix64(item_id)`.

    Columns: item_id, item_key, title, text, train_count, then the remaining ones of the source. An item
    that the source does not describe has nulls.

    Raises:
        InputError: the source has a column with the name of one of ours.
    """
    places_I = _shuffled(items, kept_K)
    attributes = _attributes(items, places_I, described, described_ids, "item_id")
    _refuse_own(attributes, ("item_key", "train_count"), described)
    nothing = pa.chunked_array([pa.nulls(len(places_I), pa.string())])
    titles = nothing
    if "title" in attributes.schema.names:
        titles = _texts(attributes["title"])
    table = pa.table(
        {
            "item_id": pa.array(items.ids_K[places_I]),
            "item_key": items.keys.take(pa.array(places_I)).cast(pa.string()),
            "title": titles,
            "text": _joined_text(attributes, nothing),
            "train_count": pa.array(train_counts_K[places_I]),
        }
    )
    for name in attributes.schema.names:
        if name not in ("title", "text"):  # both are in ours
            table = table.append_column(name, attributes[name])
    return table


def user_table(
    users: IdTable, kept_K: np.ndarray, described: RawTable | None, described_ids: Int64Array | None
) -> pa.Table:
    """One row per user that is kept, in order of `mix64(user_id)`: user_id, user_key, then the source's."""
    places_U = _shuffled(users, kept_K)
    attributes = _attributes(users, places_U, described, described_ids, "user_id")
    _refuse_own(attributes, ("user_key",), described)
    table = pa.table(
        {
            "user_id": pa.array(users.ids_K[places_U]),
            "user_key": users.keys.take(pa.array(places_U)).cast(pa.string()),
        }
    )
    for name in attributes.schema.names:
        table = table.append_column(name, attributes[name])
    return table


def _shuffled(table: IdTable, kept_K: np.ndarray) -> Int64Array:
    places = np.flatnonzero(kept_K)
    return places[np.argsort(mix64(table.ids_K[places]))]


def _attributes(
    ids: IdTable,
    places: Int64Array,
    described: RawTable | None,
    described_ids: Int64Array | None,
    key: str,
) -> pa.Table:
    """The source's columns but the key, for the ids at `places`; nulls where it has no row."""
    if described is None or described_ids is None:
        return pa.table({})
    row_of_K = np.full(len(ids.ids_K), -1)
    row_of_K[ids.places(described_ids)] = np.arange(len(described_ids))
    rows = row_of_K[places]
    return described.table.drop_columns([key]).take(pa.array(rows, mask=rows < 0))


def _joined_text(attributes: pa.Table, nothing: pa.ChunkedArray) -> pa.ChunkedArray:
    """Every textual column of an item, the title first, joined by ". "; null where all are."""
    names = [
        name
        for name, kind in zip(attributes.schema.names, attributes.schema.types, strict=True)
        if (pa.types.is_string(kind) or pa.types.is_large_string(kind)) and name.lower() not in _NOT_TEXT
    ]
    if not names:
        return nothing
    names.sort(key=lambda name: name != "title")
    # Not by null_handling="skip": Arrow then drops the rows in which every column is null.
    parts = [
        pc.fill_null(pc.binary_join_element_wise(". ", _texts(attributes[name]), ""), "") for name in names
    ]
    joined = pc.binary_join_element_wise(*parts, "")
    return _texts(pc.utf8_slice_codeunits(joined, start=len(". ")))


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings without surrounding blanks; null where nothing is left."""
    stripped = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.equal(stripped, ""), pa.scalar(None, pa.string()), stripped)


def _refuse_own(attributes: pa.Table, own: tuple[str, ...], described: RawTable | None) -> None:
    clash = [name for name in own if name in attributes.schema.names]
    if clash and described is not None:
        raise InputError(
            f"{described.file}: the column {clash[0]} has a name that the data set uses itself; rename it"
        )
