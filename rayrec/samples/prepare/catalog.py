"""The tables of items and users: what the source says of them, in an order that says nothing.

Axes: I items of the catalog, K distinct ids of the source.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import mix64
from rayrec.samples.base.config import option
from rayrec.samples.importers.tables import RawTable, RawTables
from rayrec.samples.prepare.ids import IdTable

# An item's number must never reach a model, and a column of strings may well be one (a SKU, a code, a link).
# So a column is text because its name says so or because the caller does, not because it holds strings.
_TEXTUAL = frozenset(
    {
        *("title", "subtitle", "name", "headline", "movietitle", "itemname", "productname"),
        *("description", "text", "summary", "abstract", "overview", "plot", "synopsis", "features"),
        *("category", "categories", "subcategory", "genre", "genres", "topic", "topics", "tags", "keywords"),
        *("brand", "author", "authors", "artist", "director", "publisher", "maker"),
        "textualid",  # IDGenRec's: keywords that a language model wrote of title and description
        "class",  # RecBole's MovieLens: the genres
        *("year", "releaseyear"),
    }
)
"""Usual names of columns that describe an item in words, in lower case and without signs."""


def text_columns(described: RawTable | None, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Columns of the source's table of items that make up the items' texts, the title first.

    Args:
        named: columns to take whatever they are called.

    Raises:
        InputError: a named column that is not there, that is the item's id, or that holds no words.
    """
    setting = option("text_columns", "--text-column")
    if described is None:
        if named:
            raise InputError(
                f"{setting} names {named[0]!r}, but the source has no table of items; leave it out"
            )
        return ()
    kinds = dict(zip(described.table.schema.names, described.table.schema.types, strict=True))
    for name in named:
        if name == "item_id":
            raise InputError(f"{setting} names item_id, but an item's number is not text; leave it out")
        if name not in kinds:
            known = [other for other in kinds if other != "item_id"]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"found {', '.join(known) or 'none but item_id'}"
            )
            raise InputError(
                f"{described.file}: {setting} names {name!r}, but there is no such column; {hint}"
            )
        if not (_holds_text(kinds[name]) or pa.types.is_integer(kinds[name])):
            raise InputError(
                f"{described.file}: {setting} names {name!r}, which has the type {kinds[name]}; "
                "expected strings, lists of strings or integers"
            )
    if (kind := kinds.get("title")) is not None and _is_no_title(kind):
        raise InputError(f"{described.file}: column title has the type {kind}; expected strings")
    chosen = [
        name
        for name, kind in kinds.items()
        if name in named or (name != "item_id" and _plain(name) in _TEXTUAL and _holds_text(kind))
    ]
    return tuple(sorted(chosen, key=lambda name: name != "title"))


def with_titles_of_log(raw: RawTables) -> RawTables:
    """A source whose log has a title beside every event, as a source with a table of items.

    An item's title is the last one in the log. Where a table describes the items, the log's are left out.

    Raises:
        InputError: titles are of a type that cannot be text.
    """
    log = raw.interactions
    if "title" not in log.table.schema.names:
        return raw
    table = log.table.drop_columns(["title"])
    items, ignored = raw.items, raw.ignored
    if items is not None:
        why = f"its title, since {Path(items.file).name} describes the items"
        ignored = (*ignored, (Path(log.file).name, why))
    else:
        rows = log.table.select(["item_id", "title"]).to_pandas()
        rows_I = rows.dropna().drop_duplicates("item_id", keep="last").index.to_numpy()
        titles = log.table.select(["item_id", "title"]).take(pa.array(rows_I))
        names = {name: log.names[name] for name in ("item_id", "title") if name in log.names}
        items = RawTable(titles, log.file, lambda row: log.where(int(rows_I[row])), names)
    return replace(raw, interactions=replace(log, table=table), items=items, ignored=ignored)


def _is_no_title(kind: pa.DataType) -> bool:
    return (pa.types.is_nested(kind) and not _holds_text(kind)) or pa.types.is_binary(kind)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def item_table(
    items: IdTable,
    kept_K: np.ndarray,
    train_counts_K: Int64Array,
    described: RawTable | None,
    described_ids: Int64Array | None,
    textual: Sequence[str] = (),
) -> pa.Table:
    """One row per item that is kept, in order of `mix64(item_id)`.

    Columns: item_id, item_key, title, text, train_count, then the remaining ones of the source. An item
    that the source does not describe has nulls.

    Args:
        textual: what `text_columns` chose.
    """
    indices_I = _shuffled(items, kept_K)
    attributes = _attributes(items, indices_I, described, described_ids, "item_id")
    nothing = pa.chunked_array([pa.nulls(len(indices_I), pa.string())])
    titles = nothing
    if "title" in attributes.schema.names:
        titles = _texts(attributes["title"])
    table = pa.table(
        {
            "item_id": pa.array(items.ids_K[indices_I]),
            "item_key": items.keys.take(pa.array(indices_I)).cast(pa.string()),
            "title": titles,
            "text": _joined_text(attributes, textual, nothing),
            "train_count": pa.array(train_counts_K[indices_I]),
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
    indices_U = _shuffled(users, kept_K)
    attributes = _attributes(users, indices_U, described, described_ids, "user_id")
    table = pa.table(
        {
            "user_id": pa.array(users.ids_K[indices_U]),
            "user_key": users.keys.take(pa.array(indices_U)).cast(pa.string()),
        }
    )
    for name in attributes.schema.names:
        table = table.append_column(name, attributes[name])
    return table


def _shuffled(table: IdTable, kept_K: np.ndarray) -> Int64Array:
    indices = np.flatnonzero(kept_K)
    return indices[np.argsort(mix64(table.ids_K[indices]))]


def _attributes(
    ids: IdTable,
    indices: Int64Array,
    described: RawTable | None,
    described_ids: Int64Array | None,
    key: str,
) -> pa.Table:
    """The source's columns but the key, for the ids at `indices`; nulls where it has no row."""
    if described is None or described_ids is None:
        return pa.table({})
    row_of_K = np.full(len(ids.ids_K), -1)
    row_of_K[ids.positions(described_ids)] = np.arange(len(described_ids))
    rows = row_of_K[indices]
    return described.table.drop_columns([key]).take(pa.array(rows, mask=rows < 0))


def _joined_text(attributes: pa.Table, textual: Sequence[str], nothing: pa.ChunkedArray) -> pa.ChunkedArray:
    """The textual columns of an item, joined by ". "; null where all are."""
    if not textual:
        return nothing
    # Not by null_handling="skip": Arrow then drops the rows in which every column is null.
    parts = [
        pc.fill_null(pc.binary_join_element_wise(". ", _texts(attributes[name]), ""), "") for name in textual
    ]
    joined = pc.binary_join_element_wise(*parts, "")
    return _texts(pc.utf8_slice_codeunits(joined, start=len(". ")))


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings without surrounding blanks, lists joined by blanks; null where nothing is left."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        rows = column.to_pylist()
        column = pa.chunked_array(
            [[None if words is None else " ".join(filter(None, words)) for words in rows]]
        )
    stripped = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.equal(stripped, ""), pa.scalar(None, pa.string()), stripped)
