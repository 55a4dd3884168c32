"""The tables of items and users: what the source says of them, in an order that says nothing.

Axes: I items of the catalog, K distinct ids of the source.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import mix64
from rayrec.samples.base.config import option
from rayrec.samples.importers.tables import RawTable
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
    _refuse_no_title(described)
    chosen = [
        name
        for name, kind in kinds.items()
        if name in named or (name != "item_id" and _plain(name) in _TEXTUAL and _holds_text(kind))
    ]
    return tuple(sorted(chosen, key=lambda name: name != "title"))


def with_titles_of_log(
    log: RawTable, rows_E: Int64Array, times_E: Int64Array, items: RawTable | None
) -> tuple[RawTable | None, str]:
    """The table of items with the titles that a log has beside its events, for items that have none in it.

    In the log, an item's title is that of its latest event, see `latest_of`.

    Args:
        log: with columns item_id and title.
        rows_E: its rows that are events.

    Returns:
        The table, made of the log where there was none, and what became of the titles.

    Raises:
        InputError: titles are of a type that cannot be text.
    """
    return merge_titles(log, latest_titles(log, rows_E, times_E), items)


def latest_titles(log: RawTable, rows_E: Int64Array, times_E: Int64Array, first_row: int = 0) -> pd.DataFrame:
    """The latest title that a log, or some rows of it, has of each item: key, title, time and row.

    Args:
        rows_E: its rows that are events.
        first_row: where the rows begin in the whole log.

    Raises:
        InputError: titles are of a type that cannot be text.
    """
    _refuse_no_title(log)
    titled = log.table.select(["item_id", "title"]).take(pa.array(rows_E))
    of_log = pd.DataFrame(
        {
            "key": titled["item_id"].cast(pa.string()).to_pandas(),
            "title": _texts(titled["title"]).to_pandas(),
            "time": times_E,
            "row": first_row + rows_E,
        }
    )
    return latest_of(of_log.dropna())


def latest_of(titles: pd.DataFrame) -> pd.DataFrame:
    """The latest title of each item; of several at one time, the last in the alphabet."""
    titles = titles.sort_values(["time", "title", "row"])
    return titles.drop_duplicates("key", keep="last")


def merge_titles(log: RawTable, of_log: pd.DataFrame, items: RawTable | None) -> tuple[RawTable | None, str]:
    """`with_titles_of_log` of the latest titles of the whole log.

    Args:
        log: of which only its names and where its rows are is looked at.
        of_log: what `latest_titles` has found.
    """
    of_log = of_log.sort_values("row")
    if items is None:
        names = {name: log.names[name] for name in ("item_id", "title") if name in log.names}
        made = RawTable(_titles(of_log), log.file, log.where, names)
        return _traced(made, log, of_log["row"].to_numpy()), "title and text of the items"
    _refuse_no_title(items)
    table, file = items.table, Path(items.file).name
    keys = table["item_id"].cast(pa.string()).to_pandas()
    titles = pa.chunked_array([pa.nulls(len(table), pa.string())])
    if "title" in table.schema.names:
        titles = _texts(table["title"])
        table = table.drop_columns(["title"])
    filled = pa.Array.from_pandas(keys.map(of_log.set_index("key")["title"]), type=pa.string())
    missing = titles.null_count
    titles = pc.coalesce(titles, filled)
    further = of_log[~of_log["key"].isin(keys)]
    num_filled = missing - titles.null_count + len(further)
    if not num_filled:
        return items, f"ignored: its titles, since {file} has one for every item"
    table = table.append_column("title", titles)
    if len(further):
        at = table.schema.get_field_index("item_id")
        table = table.set_column(at, "item_id", table["item_id"].cast(pa.string()))
        table = pa.concat_tables([table, _titles(further)], promote_options="default")
    rows = np.concatenate([np.full(len(items.table), -1), further["row"].to_numpy()])
    return _traced(
        replace(items, table=table), log, rows
    ), f"title of {num_filled:,} items without one in {file}"


def _titles(of_log: pd.DataFrame) -> pa.Table:
    return pa.table(
        {"item_id": pa.array(of_log["key"], pa.string()), "title": pa.array(of_log["title"], pa.string())}
    )


def _traced(items: RawTable, log: RawTable, rows: Int64Array) -> RawTable:
    """A table of items some rows of which are rows of the log, -1 for the others."""
    where = items.where
    return replace(items, where=lambda row: log.where(int(rows[row])) if rows[row] >= 0 else where(row))


def _refuse_no_title(raw: RawTable) -> None:
    """Raise InputError if the titles of a table cannot be text."""
    if "title" in raw.table.schema.names:
        kind = raw.table.schema.field("title").type
        if _is_no_title(kind):
            raise InputError(f"{raw.file}: column title has the type {kind}; expected strings")


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
