"""The layout `lists`: `NAME.inter.json` maps each user to a list of items, oldest first, without times.

LC-Rec, LETTER and MiniOneRec publish such files. `NAME.item.json`, which may be packed, describes the items.
The order of a list is believed, and the data set says so. Semantic IDs beside them (`NAME.index.json`) are
read by `rayrec tokenize --published`.

Source: Wang et al., "Learnable Item Tokenization for Generative Recommendation", CIKM 2024,
https://github.com/HonghuiBao2000/LETTER
"""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.tables import RawTable, RawTables, files_of, parse_json, read_text, visible

_LISTS = ".inter.json"
_ITEMS = (".item.json", ".item.json.gz")


class ListsImporter(Importer):
    """Reads lists of items by user."""

    EXPECTS = f"one NAME{_LISTS}"
    NAMES_COLUMNS = False

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return bool(_ending_in(source, _LISTS))

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        found = _ending_in(source, _LISTS)
        if len(found) != 1:
            raise InputError(
                f"{source}: expected exactly one NAME{_LISTS}, found {len(found)} among {files_of(source)}"
            )
        items = [
            path
            for path in (found[0].with_name(found[0].name.removesuffix(_LISTS) + ending) for ending in _ITEMS)
            if path.is_file()
        ]
        if len(items) > 1:
            raise InputError(
                f"{source}: {' and '.join(path.name for path in items)} are both there; keep one"
            )
        read = {found[0], *items}
        beside = visible(source) if source.is_dir() else []
        return RawTables(
            name=found[0].name.removesuffix(_LISTS),
            interactions=_events(found[0]),
            items=described_items(items[0]) if items else None,
            ignored=tuple(
                (path.name, "only lists and descriptions of items are read")
                for path in beside
                if path not in read
            ),
            order_is_time=True,
        )


def _ending_in(source: Path, ending: str) -> list[Path]:
    files = [source] if source.is_file() else visible(source) if source.is_dir() else []
    return [file for file in files if file.name.endswith(ending)]


def _events(file: Path) -> RawTable:
    lists = _object(file, "{user: [item, ...]}")
    users = list(lists)
    for user, items in lists.items():
        if not isinstance(items, list) or not all(_is_id(item) for item in items):
            raise InputError(f"{file}: user {user!r} has {_shown(items)}; expected a list of items")
    lengths_U = np.array([len(lists[user]) for user in users], dtype=np.int64)
    stops_U = list(accumulate(lengths_U.tolist()))
    table = pa.table(
        {
            "user_id": pa.array([user for user in users for _ in lists[user]], pa.string()),
            "item_id": pa.array([str(item) for user in users for item in lists[user]], pa.string()),
            "timestamp": pa.array([at for user in users for at in range(len(lists[user]))], pa.int64()),
        }
    )

    def where(row: int) -> str:
        at = int(np.searchsorted(stops_U, row, side="right"))
        return f"{file} user {users[at]!r} entry {row - (stops_U[at] - int(lengths_U[at])) + 1}"

    return RawTable(table, str(file), where)


def described_items(file: Path) -> RawTable:
    """The table of items of a file `{item: {name: text, ...}}`; empty texts are none.

    Raises:
        InputError: it is no such file.
    """
    described = _object(file, "{item: {title: text, ...}}")
    for item, values in described.items():
        if not isinstance(values, dict):
            raise InputError(f"{file}: item {item!r} has {_shown(values)}; expected {{title: text, ...}}")
    names = dict.fromkeys(name for values in described.values() for name in values)
    names.pop("item_id", None)
    columns = {
        name: pa.array([_text(values.get(name)) for values in described.values()], pa.string())
        for name in names
    }
    keys = list(described)
    table = pa.table({"item_id": pa.array(keys, pa.string()), **columns})
    return RawTable(table, str(file), lambda row: f"{file} item {keys[row]!r}")


def _text(value: Any) -> str | None:
    """As it is, or several joined by commas; None where nothing is said."""
    if isinstance(value, list):
        value = ", ".join(str(one) for one in value)
    return None if value is None or not str(value).strip() else str(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."


def _object(file: Path, expected: str) -> dict[str, Any]:
    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise InputError(f"{file}: {twice!r} stands there twice; keep one of the two")
        return values

    try:
        text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else read_text(file)
        values = parse_json(text, object_pairs_hook=without_repetition)
    except InputError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{file}: not JSON ({error}); expected {expected}") from error
    if not isinstance(values, dict) or not values:
        raise InputError(f"{file}: expected a JSON object {expected}")
    return values
