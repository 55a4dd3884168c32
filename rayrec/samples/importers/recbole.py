"""The layout `recbole`: atomic files, tab-separated, with `name:type` in the header.

Source: https://recbole.io/docs/user_guide/data/atomic_files.html
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.delimited import line_of, not_utf8
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.roles import REQUIRED, under_roles
from rayrec.samples.importers.tables import RawTable, RawTables, files_of, visible

_TYPES = ("token", "token_seq", "float", "float_seq")


class RecBoleImporter(Importer):
    """Reads RecBole's atomic files."""

    EXPECTS = "RecBole's *.inter"

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return source.is_dir() and any(source.glob("*.inter"))

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        interactions = _only(source, ".inter")
        if interactions is None:
            raise InputError(f"{source}: no .inter file in it; found {files_of(source)}")
        items, users = _only(source, ".item"), _only(source, ".user")
        return RawTables(
            name=interactions.stem,
            interactions=under_roles(_read(interactions, config), config, REQUIRED),
            items=None if items is None else under_roles(_read(items, config), config, ("item_id",)),
            users=None if users is None else under_roles(_read(users, config), config, ("user_id",)),
            ignored=tuple(
                (entry.name, "only .inter, .item and .user are read")
                for entry in visible(source)
                if entry not in (interactions, items, users)
            ),
        )


def _only(source: Path, suffix: str) -> Path | None:
    found = visible(source, f"*{suffix}") if source.is_dir() else []
    if len(found) > 1:
        raise InputError(
            f"{source}: {' and '.join(path.name for path in found)} are both there; keep one {suffix}"
        )
    return found[0] if found else None


def _read(path: Path, config: PrepareConfig) -> RawTable:
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected a header such as user_id:token")
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline().rstrip("\n").split("\t")
            has_rows = bool(file.read(1))
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    names, types = [], []
    for field in header:
        name, _, kind = field.partition(":")
        if kind not in _TYPES:
            raise InputError(
                f"{path} line 1: {field!r} is not a typed column; expected name:type with one of "
                f"{', '.join(_TYPES)}"
            )
        names.append(name)
        types.append(kind)
    if len(set(names)) < len(names):
        raise InputError(f"{path} line 1: a column is there twice in {', '.join(names)}; rename one")
    times = {"timestamp", config.columns.get("timestamp")}  # read as text, exactly
    # Everything as text first: a number that is none is then reported with its row.
    schema = pa.schema([(name, pa.string()) for name in names])
    table = _rows(path, schema) if has_rows else schema.empty_table()
    for name, kind in zip(names, types, strict=True):
        if kind == "float" and name not in times:
            table = table.set_column(names.index(name), name, _floats(path, name, table[name]))
    return RawTable(table, str(path), lambda row: f"{path} line {line_of(path, row, quoted=False)}")


def _rows(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        return pa_csv.read_csv(
            path,
            read_options=pa_csv.ReadOptions(column_names=schema.names, skip_rows=1),
            parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pa_csv.ConvertOptions(
                column_types=schema, null_values=[""], strings_can_be_null=True
            ),
        )
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as a tab-separated table: {error}") from error


def _floats(path: Path, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return pc.cast(column, pa.float64())
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: column {name} is declared float, but {error}") from error
